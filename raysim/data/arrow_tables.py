"""The reader of Arrow and Parquet files, with pixels or encoded images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysim.core.errors import DataError
from raysim.data.arrow import Batch, batch_rows, check_range, describe
from raysim.data.reader_api import PARTS, Contents, Request, damaged, split_codes
from raysim.data.trees import decode


def read_table(request: Request, *, kind: str) -> Contents:
    """Arrow IPC or Parquet files with columns `label` and `image`: pixels as a fixed-shape tensor, or encoded images
    (bytes, or the {bytes, path} of the Hugging Face hub). `domain` and `split` columns are kept.

    Several files are read in the order of their names; if these begin with train, validation or test, so do the splits.
    """
    import pyarrow.dataset as ds

    suffix = f".{kind}"
    files = [request.root] if request.root.is_file() else sorted(request.root.rglob(f"*{suffix}"))
    if not files:
        raise DataError(f"no {suffix} file", str(request.root), "give a file, or the folder that has them")
    parts = [next((part for part in PARTS if path.name.startswith(part)), "") for path in files]
    codes = split_codes(parts) if all(parts) else None
    opened = []
    for path in files:
        with damaged(path):
            opened.append(ds.dataset(path, format="ipc" if kind == "arrow" else "parquet"))
            missing = {"image", "label"} - set(opened[-1].schema.names)
            if missing:
                raise DataError(f"no column {sorted(missing)[0]!r}", str(path), "name the columns `image` and `label`")
    classes, domains = _names(opened, files)
    count = sum(data.count_rows() for data in opened)
    batches = (
        batch
        for i, (path, data) in enumerate(zip(files, opened, strict=True))
        for batch in _table_batches(request, path, data, len(classes), None if codes is None else int(codes[i]))
    )
    return Contents(classes, batches, files, count, domains)


def _names(opened: Sequence[Any], files: Sequence[Path]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Class and domain names: of a set of ours, of the hub's metadata, or else numbers up to the largest label."""
    if describe(files[0]).is_file():
        with damaged(describe(files[0])):
            fields = json.loads(describe(files[0]).read_text())
            return tuple(fields["classes"]), tuple(fields.get("domains", ()))
    hub = json.loads((opened[0].schema.metadata or {}).get(b"huggingface", b"{}"))
    names = hub.get("info", {}).get("features", {}).get("label", {}).get("names")

    def numbers(column: str) -> tuple[str, ...]:
        if column not in opened[0].schema.names:
            return ()
        tops = [b[column].to_numpy().max(initial=-1) for data in opened for b in data.to_batches(columns=[column])]
        return tuple(str(i) for i in range(int(max(tops, default=-1)) + 1))

    with damaged(files[0]):
        return tuple(names) if names else numbers("label"), numbers("domain")


def _table_batches(request: Request, path: Path, data: Any, num_classes: int, split: int | None) -> Iterator[Batch]:
    import pyarrow as pa

    columns = [name for name in ("image", "label", "domain", "split") if name in data.schema.names]
    kind, size = data.schema.field("image").type, request.options.size
    is_pixels = isinstance(kind, pa.FixedShapeTensorType)
    # Encoded images are small in the file and large in memory: few at a time.
    rows = batch_rows(tuple(kind.shape)) if is_pixels else batch_rows((size, size, 3)) if size else 128
    first, shape = 0, (size, size, 3) if size else ()
    with damaged(path):
        for record in data.to_batches(columns=columns, batch_size=rows):
            if not len(record):
                continue
            if is_pixels:
                pixels = record["image"].to_numpy_ndarray()
            else:
                cells = record["image"].field("bytes") if pa.types.is_struct(kind) else record["image"]
                names = [f"{path}, row {first + i}" for i in range(len(record))]
                pixels = decode([cell or b"" for cell in cells.to_pylist()], names=names, size=size, shape=shape)
                shape = pixels.shape[1:]
            others = {name: record[name].to_numpy(zero_copy_only=False) for name in columns[1:]}
            splits = others.get("split", None if split is None else np.full(len(record), split, np.int8))
            check_range(others["label"], num_classes, f"{path}, row", first=first)
            yield Batch(pixels, others["label"], others.get("domain"), splits)
            first += len(record)
