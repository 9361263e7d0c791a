"""Readers of published tables: Adult and wine quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raysim.base.untrusted import regular_file
from raysim.data.reader_api import Contents, Request, need
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.readers.table_files import NO_SPLIT, csv_frame, one_table, table_contents
from raysim.data.rows import damaged

_ADULT = """
age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain capital-loss
hours-per-week native-country income
"""


_WINE = """
fixed acidity, volatile acidity, citric acid, residual sugar, chlorides, free sulfur dioxide, total sulfur dioxide, density, pH,
sulphates, alcohol, quality
"""


def read_adult(request: Request) -> Contents:
    """Read Adult (census income) from adult.data and adult.test as published, or adult-train.csv and adult-test.csv.

    `?` is read as a word. The column `occupation` gives the domains and is also an input.
    """
    names = (("adult.data", "adult-train.csv"), ("adult.test", "adult-test.csv"))
    files, frames = [_first(request, *pair) for pair in names], {}
    for path in files:
        with damaged(path):  # the first line of adult.test is a comment
            how = {"index_col": False, "comment": "|", "keep_default_na": False}
            frame = csv_frame(regular_file(path), names=_ADULT.split(), **how)
        frames[path] = frame.assign(income=frame["income"].astype(str).str.removesuffix("."))
    options = ReaderOptions(task="classes", domains="occupation")
    return replace(table_contents(one_table(frames, [0, 2]), ["income"], options, keeps_domain=True), files=files)


def read_wine_quality(request: Request) -> Contents:
    """Read wine quality, a regression target, from winequality-red.csv and winequality-white.csv; a header is optional.

    The two colours are the domains.
    """
    columns = [name.strip() for name in _WINE.split(",")]
    colours, frames = ("red", "white"), {}
    files = [need(request.root / f"winequality-{colour}.csv", request.origin) for colour in colours]
    for path, colour in zip(files, colours, strict=True):
        with damaged(path), open(regular_file(path), encoding="utf-8") as file:
            has_header = "acidity" in file.readline()
            frame = csv_frame(path, names=columns, skiprows=int(has_header), index_col=False)
        frames[path] = frame.assign(colour=colour)
    options = ReaderOptions(task="regression", domains="colour")
    return replace(table_contents(one_table(frames, [NO_SPLIT, NO_SPLIT]), ["quality"], options), files=files)


def _first(request: Request, *names: str) -> Path:
    """Return the first existing file; if none exists, raise a DataError that names the first file."""
    paths = [request.root / name for name in names]
    return need(next((path for path in paths if path.is_file()), paths[0]), request.origin)
