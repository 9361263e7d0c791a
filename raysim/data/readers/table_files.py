"""Readers of tables (CSV, Parquet, pandas): `raysim prepare table`, `raysim.table`, and the base of published tables.

Numbers become float32 without scaling; a run's `data.normalise: standard` scales them. A column of words becomes one
column a word (one-hot), or with `--codes` a column of word numbers. With `--dates`, dates become days since 1970-01-01.
Words, means and medians are fitted on the training rows.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.base.errors import DataError, did_you_mean, explained
from raysim.base.texts import number
from raysim.base.untrusted import regular_file
from raysim.data.reader_api import MOST_CLASSES, PARTS, Contents, Request, split_codes
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.rows import in_batches

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Pattern of numbers that pandas reads as words -> (description, remedy).
WRITTEN_NUMBERS = {
    re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?|[-+]?\d+,\d*|[-+]?,\d+|[-+]?\d{1,3}(\.\d{3}){2,}(,\d*)?"): (
        "a number with a comma or several points",
        "write decimal points, and nothing between thousands",
    ),
    re.compile(r"[-+]?[\d.,]+\s*%"): ("a percentage", "write the number without the sign"),
}
DATES = {
    re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ].*)?"): (
        "a date",
        "give --dates ymd, dmy or mdy, the order of year, month and day, or --drop COLUMN",
    )
}

#: Split code of a table without an official split.
NO_SPLIT = -1

#: A target of whole numbers with at most FEW different values is a class; an input column with more than FEW different
#: numbers must not contain words.
FEW = 20
#: Maximum number of different words in a one-hot column.
MOST_WORDS = 1000


def one_table(frames: Mapping[Path, DataFrame], splits: Sequence[int]) -> DataFrame:
    """Return the tables joined into one, with an index (file, official split, row in the file).

    Args:
      splits: split code of each file as in `SetRows`, or NO_SPLIT for all files.
    """
    import pandas as pd

    keys = list(zip(map(str, frames), splits, strict=True))
    return pd.concat(list(frames.values()), keys=keys, names=["file", "split", "row"])


def _place(table: DataFrame, column: str, is_wrong: np.ndarray | Series) -> str:
    """Return the place of the first wrong row, counted from 1 below the header. is_wrong: (n,) bool."""
    file, _, row = table.index[int(np.argmax(np.asarray(is_wrong, bool)))]
    return f"{file}, column {column!r}, row {row + 1}"


def _file(table: DataFrame) -> str:
    """Return the path of the first file of a table."""
    return str(table.index[0][0])


def _splits(table: DataFrame) -> np.ndarray | None:
    """Return (n,) int8 split codes, see `SetRows`; None without an official split."""
    codes = table.index.get_level_values("split")
    return None if codes[0] == NO_SPLIT else codes.to_numpy(np.int8)


def read_table_files(request: Request) -> Contents:
    """Read a CSV or Parquet file with a header, or a folder with such files of an official split.

    The files of a split are train.csv, test.csv and optionally val.csv, or .parquet.
    """
    if not request.options.target:
        raise DataError("a table needs a target", str(request.root), "give --target COLUMN, or --target A,B,C")
    files = _files(request.root)
    splits = split_codes([path.stem for path in files]).tolist() if len(files) > 1 else [NO_SPLIT]
    table = one_table(_frames(files), splits)
    return replace(table_contents(table, _column_names(request.options.target, table), request.options), files=files)


def _column_names(names: str | Sequence[str], table: DataFrame) -> list[str]:
    """Return names of columns from a list, or from a text with commas; a single name may contain a comma."""
    if not isinstance(names, str):
        return list(names)
    return [names] if names in table else [name.strip() for name in names.split(",")]


def frame_contents(frame: DataFrame, targets: Sequence[str], options: ReaderOptions) -> Contents:
    """Return contents of a pandas DataFrame; the index is ignored. Raises DataError: as `table_contents`."""
    where = Path("the frame")
    checked = _checked(frame.reset_index(drop=True), where).convert_dtypes()
    return table_contents(one_table({where: checked}, [NO_SPLIT]), targets, options)


def _files(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(path for path in root.iterdir() if path.suffix in (".csv", ".parquet"))
    if not files:
        raise DataError("no .csv or .parquet file", str(root), "give a table, or a folder with train.csv and test.csv")
    if len(files) == 1:
        return files
    if others := [path.name for path in files if path.stem not in PARTS]:
        what = f"{len(files)} tables, among them {others[0]}"
        raise DataError(what, str(root), "give one file, or train.csv and test.csv")
    return sorted(files, key=lambda path: PARTS[path.stem])


def _frames(files: Sequence[Path]) -> dict[Path, DataFrame]:
    frames = {path: _frame(path) for path in files}
    for path, frame in frames.items():
        if differing := set(frames[files[0]]).symmetric_difference(frame):
            what = f"the column {min(differing)!r} is in one of {files[0].name} and {path.name} alone"
            raise DataError(what, str(path.parent), "give all files the same columns")
    return frames


def _frame(path: Path) -> DataFrame:
    """Read a file with pandas, with nullable types."""
    import pandas as pd

    if not path.stat().st_size:
        raise DataError("an empty file", str(path), "give a table with a header and rows")
    mend = "give a table as UTF-8 text with a header and rows of its length, or as Parquet"
    with explained("not a readable table", path, mend, OSError, ValueError, pd.errors.ParserWarning):
        file = regular_file(path)
        if path.suffix == ".parquet":
            frame = pd.read_parquet(file, dtype_backend="numpy_nullable")
        else:
            frame = csv_frame(file, index_col=False)
    return _checked(frame, path)


def _checked(frame: DataFrame, path: Path) -> DataFrame:
    """Return the table with names of type str; raise DataError for a missing or repeated name, or without rows."""
    frame.columns = [str(name).strip() for name in frame.columns]
    if twice := [name for name, count in Counter(frame.columns).items() if count > 1]:
        mend = "rename or remove one column"
        raise DataError(f"the column {twice[0]!r} appears twice in the header", str(path), mend)
    if unnamed := [place for place, name in enumerate(frame.columns, 1) if not name or name.startswith("Unnamed: ")]:
        mend = "name or remove the column; pandas writes an unnamed column for its index, unless to_csv has index=False"
        raise DataError(f"column {unnamed[0]} has no name", str(path), mend)
    if not len(frame):
        raise DataError("no row below the header", str(path), "give a table with rows")
    return frame


def csv_frame(path: Path, **how: Any) -> DataFrame:
    """Read a CSV file; the delimiter is the most frequent of comma, semicolon and tab in the first line.

    Raises:
      ValueError, ParserWarning: no text, or rows that are longer than the header.
    """
    import pandas as pd

    with open(path, encoding="utf-8-sig") as file:
        delimiter = max(",;\t", key=file.readline().count)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame = pd.read_csv(path, sep=delimiter, skipinitialspace=True, dtype_backend="numpy_nullable", **how)
    if "names" not in how:  # restore repeated names, which pandas renames
        with open(path, encoding="utf-8-sig", newline="") as file:
            frame.columns = next(csv.reader(file, delimiter=delimiter, skipinitialspace=True))
    return frame


def table_contents(
    table: DataFrame, targets: Sequence[str], options: ReaderOptions, *, keeps_domain: bool = False
) -> Contents:
    """Return contents of a table.

    Args:
      targets: columns to be predicted.
      options: options of a table; `target` is ignored in favour of `targets`.
      keeps_domain: whether the column of domains is also an input.
    Raises:
      DataError: missing columns, missing values without `options.missing`, numbers that are not finite, or targets that
        do not fit the task.
    """
    domain = None if options.domains is None else str(options.domains)
    dropped = _column_names(options.drop, table) if options.drop else []
    names = [*targets] if domain is None else [*targets, domain]
    _check_names(table, [*names, *dropped])
    inputs = [name for name in table if name not in (*names, *dropped) or (keeps_domain and name == domain)]
    if not inputs:
        raise DataError("no column is left for the inputs", _file(table), "give a table with further columns")
    table, days = _with_days(table, inputs, options.dates) if options.dates else (table, [])
    table, left_out = _without_missing(table, inputs, names, options)
    task, classes, values = _target(table, targets, options.task)
    rows, columns, reading = _inputs(table, inputs, days, options)
    if domain is not None and not _is_numeric(table[domain]):
        _refuse_written_numbers(table, domain, {})
    domains, owners = ((), None) if domain is None else _named(table, domain)
    reading["target"] = [f"{', '.join(targets)} ({task})"]
    reading["domains"] = [f"{domain} ({len(domains)})"] * (domain is not None)
    reading["dropped"] = dropped
    text = "; ".join(f"{kind}: {', '.join(named)}" for kind, named in reading.items() if named)
    batches = in_batches(rows, values, domains=owners, splits=_splits(table))
    return Contents(classes, batches, (), len(rows), domains, task, columns=columns, reading=text, left_out=left_out)


def _with_days(table: DataFrame, inputs: Sequence[str], order: str) -> tuple[DataFrame, list[str]]:
    """Return (table with input columns of dates as float64 days since 1970-01-01, names of these columns)."""
    import pandas as pd
    from pandas.api.types import is_datetime64_any_dtype

    table, names = table.copy(), []
    for name in inputs:
        column = table[name]
        if not is_datetime64_any_dtype(column.dtype):
            words = column.astype(object).map(str, na_action="ignore")
            parts = words.str.extract(r"^(\d+)[-/.](\d+)[-/.](\d+)(?:[T ](.+))?$")
            if _is_numeric(column) or not parts[0].notna().any():
                continue
            of = {letter: parts[place].str.zfill(2) for place, letter in enumerate(order)}
            text = of["y"] + "-" + of["m"] + "-" + of["d"] + ("T" + parts[3]).fillna("")
            column = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
            if (is_wrong := words.notna() & (column.isna() | (of["y"].str.len() != 4))).any():
                what = f"{words[is_wrong].iloc[0]!r} is not a date in the order {order}"
                mend = "give another --dates, correct the date, or --drop the column"
                raise DataError(what, _place(table, name, is_wrong), mend)
        days = (column - pd.Timestamp(0, tz=column.dt.tz)) / pd.Timedelta(days=1)
        table[name] = days.astype("Float64")
        names.append(name)
    return table, names


def _check_names(table: DataFrame, names: Sequence[str]) -> None:
    """Raise DataError for a target or domain without a column, or named twice."""
    columns, where = list(table), _file(table)
    for name in names:
        if name not in columns:
            if numbers := [column for column in columns if number(column) is not None]:
                what = f"no column {name!r}, and the first line holds {numbers[0]}"
                raise DataError(what, where, "write a header, a first line with the names of the columns")
            mend = f"{did_you_mean(name, columns)}its columns: {', '.join(columns[:20])}"
            raise DataError(f"no column {name!r}", where, mend)
        if names.count(name) > 1:
            mend = "give different columns as --target, --domains and --drop"
            raise DataError(f"the column {name!r} is named twice", where, mend)


def _without_missing(
    table: DataFrame, inputs: Sequence[str], names: Sequence[str], options: ReaderOptions
) -> tuple[DataFrame, str]:
    """Return (table without the rows that the options drop, text on the dropped rows).

    Raises:
      DataError: a missing value for which no option is given.
    """
    gaps = table[list(dict.fromkeys([*inputs, *names]))].isna()
    drops_all, drops_targets = options.missing == "drop", options.missing_target == "drop"
    for name in gaps.columns[gaps.any()]:
        what = "a missing value"
        if name in names and not drops_all and not drops_targets:
            raise DataError(what, _place(table, name, gaps[name]), "give --missing-target drop, which removes the rows")
        if name not in names and options.missing is None:
            mend = "give --missing drop, which removes rows with a missing value, or mean, median or word, which fill in a value"
            raise DataError(what, _place(table, name, gaps[name]), mend)
    is_left_out = (gaps if drops_all else gaps[list(names) if drops_targets else []]).any(axis=1).to_numpy(bool)
    if not is_left_out.any():
        return table, ""
    if is_left_out.all():
        mend = "give --missing mean, or --drop empty columns"
        raise DataError("a missing value in every row", _file(table), mend)
    lacking = "value" if drops_all else "target or domain"
    return table[~is_left_out], f"{is_left_out.sum():,} of {len(gaps):,} rows, with a missing {lacking}"


def _inputs(
    table: DataFrame, inputs: Sequence[str], days: Sequence[str], options: ReaderOptions
) -> tuple[np.ndarray, tuple[str, ...], dict[str, list[str]]]:
    """Return ((n, entries) float32 inputs, names of the entries, kind of reading -> columns), in order of columns."""
    splits = _splits(table)
    is_training = np.ones(len(table), bool) if splits is None else splits == 0
    if not is_training.any():
        raise DataError("no training row", _file(table), "give a train.csv with rows")
    parts: list[np.ndarray] = []
    names: list[str] = []
    reading: dict[str, list[str]] = defaultdict(list)
    for name in inputs:
        column = _numbers(table, name) if _is_numeric(table[name]) else _words(table, name)
        if column.dtype != np.float64:
            _refuse_written_numbers(table, name, WRITTEN_NUMBERS | DATES)
        if options.missing not in (None, "drop") and column.isna().to_numpy()[is_training].all():
            what = f"no value in the training rows of column {name!r}"
            raise DataError(what, _file(table), "remove the column")
        if column.dtype != np.float64:
            _refuse_stray_word(table, name, column)
        transform = _transform(table, name, column[is_training], options)
        frame = column.to_frame()
        parts.append(transform.fit(frame[is_training]).transform(frame).astype(np.float32))
        entries = list(map(str, transform.get_feature_names_out([name])))
        names += entries
        if column.dtype == np.float64:
            reading["dates, in days" if name in days else "numbers"].append(name)
        else:
            count = column[is_training].nunique() if options.codes else len(entries)
            reading["words, numbered" if options.codes else "words, one-hot"].append(f"{name} ({count})")
    return np.hstack(parts), tuple(names), reading


def _is_numeric(column: Series) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(column.dtype))


def _numbers(table: DataFrame, name: str) -> Series:
    """Return a column of numbers as float64 with NaN for gaps; raise DataError for values beyond float32."""
    column = table[name].astype("Float64").astype(np.float64)
    with np.errstate(over="ignore"):
        is_wrong = np.isinf(column.astype(np.float32))
    if is_wrong.any():
        what = f"{column[is_wrong].iloc[0]:g}, no number that float32 holds,"
        raise DataError(what, _place(table, name, is_wrong), "correct the cell, or leave it empty")
    return column


def _words(table: DataFrame, name: str) -> Series:
    """Return a column of words as str, NaN for missing words; raise DataError for other types, such as dates."""
    from pandas.api.types import is_object_dtype, is_string_dtype

    column = table[name]
    dtype = column.dtype.categories.dtype if column.dtype == "category" else column.dtype
    if not (is_string_dtype(dtype) or is_object_dtype(dtype)):
        raise DataError(f"a column {name!r} of type {dtype}", _file(table), "give numbers or words")
    return column.astype(object).map(str, na_action="ignore").where(column.notna(), np.nan)


def _refuse_written_numbers(
    table: DataFrame, name: str, kinds: Mapping[re.Pattern[str], tuple[str, str]] = WRITTEN_NUMBERS
) -> None:
    """Raise DataError for a column of words with values of `kinds`, or with words that differ only by blanks."""
    words = table[name].astype(object).map(str, na_action="ignore").fillna("")
    for pattern, (kind, mend) in kinds.items():
        is_one = words.str.fullmatch(pattern).to_numpy(bool)
        if is_one.any():
            where = _place(table, name, is_one)
            raise DataError(f"{words[is_one].iloc[0]!r} is {kind}, and would be read as a word,", where, mend)
    bare = words.str.strip()
    is_padded = ((words != bare) & (words.groupby(bare).transform("nunique") > 1)).to_numpy(bool)
    if is_padded.any():
        what = f"the word {words[is_padded].iloc[0]!r} differs by blanks from another one"
        raise DataError(what, _place(table, name, is_padded), "remove the blanks")


def _refuse_stray_word(table: DataFrame, name: str, column: Series) -> None:
    """Raise DataError for a column with more than FEW different numbers and at least one word."""
    words = column.dropna().unique()
    are_numbers = np.array([number(word) is not None for word in words], bool)
    if FEW < are_numbers.sum() < len(words):
        stray = words[~are_numbers][0]
        where = _place(table, name, table[name].astype(str) == stray)
        raise DataError(f"the word {stray!r} in a column of numbers", where, "correct the cell, or leave it empty")


def _transform(table: DataFrame, name: str, training: Series, options: ReaderOptions) -> Any:
    """Return the unfitted transformer of a column, which fills in missing values and turns words into numbers."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

    if training.dtype == np.float64:
        return SimpleImputer(strategy="median" if options.missing in ("median", "word") else "mean")
    filler = SimpleImputer(strategy="constant" if options.missing == "word" else "most_frequent", fill_value="missing")
    if options.codes:
        return make_pipeline(filler, OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1))
    if (count := training.nunique()) > MOST_WORDS:
        what = f"{count:,} different words in column {name!r}, more than {MOST_WORDS:,}"
        raise DataError(what, _file(table), "give --drop COLUMN, or --codes")
    encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore", dtype=np.float32)
    return make_pipeline(filler, encoder)


def _named(table: DataFrame, name: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (sorted names of a column's values, (n,) int64 index of each row's value), for classes or domains."""
    column = table[name]
    kind = _kind(column)
    if kind in ("bool", "int"):
        cells = column.to_numpy(bool if kind == "bool" else np.int64)
    else:
        cells = np.array([str(cell) for cell in column], object)
    values, codes = np.unique(cells, return_inverse=True)
    if len(values) > MOST_CLASSES:
        what = f"{len(values):,} different values in column {name!r}, more than {MOST_CLASSES:,}"
        raise DataError(what, _file(table), "choose another column")
    return tuple(map(str, values)), codes.reshape(-1).astype(np.int64)


def _kind(column: Series) -> str:
    """Return the kind of a column: "bool", "int", "float" or "words"; whole-number floats are "int"."""
    letter = column.dtype.kind
    if letter == "f" and (column.dropna() % 1 == 0).all():  # a gap turns whole numbers into floats
        letter = "i"
    return {"b": "bool", "i": "int", "u": "int", "f": "float"}.get(letter, "words")


def _target(table: DataFrame, targets: Sequence[str], asked: str | None) -> tuple[str, tuple[str, ...], np.ndarray]:
    """Return (task, names of the outputs, targets in the type of the task)."""
    for name in targets:
        if not _is_numeric(table[name]):
            _refuse_written_numbers(table, name)
    kinds = {name: _kind(table[name]) for name in targets}
    task = asked or _task_of(table, kinds)
    where = f"{_file(table)}, --target {','.join(targets)}"
    if task == "classes":
        if len(targets) > 1:
            mend = "give one --target, or --task labels or regression"
            raise DataError(f"{len(targets)} targets, and a row has one class", where, mend)
        numbers = table[targets[0]]
        if kinds[targets[0]] == "float" and (is_wrong := (numbers != numbers.round()).to_numpy(bool)).any():
            what = f"{numbers.to_numpy()[is_wrong][0]:g} is not a class"
            mend = "give words or whole numbers, or --task regression"
            raise DataError(what, _place(table, targets[0], is_wrong), mend)
        classes, values = _named(table, targets[0])
        if len(classes) == 1:
            raise DataError(f"every row has the class {classes[0]!r}", where, "choose another target")
        return task, classes, values
    for name, kind in kinds.items():
        column = table[name]
        if kind == "words":
            what = f"the word {str(column.iloc[0])!r} for the task {task}"
            raise DataError(what, _place(table, name, np.ones(1)), "give numbers, or --task classes with one target")
        if task == "labels" and (is_wrong := ~column.isin([0, 1]).to_numpy(bool)).any():
            what = f"the label {column.to_numpy()[is_wrong][0]}"
            raise DataError(what, _place(table, name, is_wrong), "give 0 or 1, or --task regression")
    values = np.stack([_numbers(table, name).to_numpy() for name in targets], axis=1)
    if task == "labels":
        return task, tuple(targets), values.astype(np.uint8)
    return task, tuple(targets), (values[:, 0] if len(targets) == 1 else values).astype(np.float32)


def _task_of(table: DataFrame, kinds: Mapping[str, str]) -> str:
    """Return the task inferred from the target columns; raise DataError if it is ambiguous. kinds: see `_kind`."""
    where = f"{_file(table)}, --target {','.join(kinds)}"
    if len(kinds) > 1:
        if "words" in kinds.values():
            raise DataError("several targets, including words", where, "choose columns of numbers")
        return "labels" if table[list(kinds)].isin([0, 1]).all(axis=None) else "regression"
    ((name, kind),) = kinds.items()
    count = table[name].nunique()
    if kind == "int" and count > FEW:
        mend = "give --task classes or --task regression"
        raise DataError(f"{count:,} different whole numbers, classes or regression", where, mend)
    return "regression" if kind == "float" else "classes"
