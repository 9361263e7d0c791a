"""The reader of Arrow and Parquet files, with pixels or encoded images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.core.errors import DataError
from raysim.core.reading import regular_file
from raysim.data.arrow import KINDS, SetInfo, SetRows, batch_rows, describe
from raysim.data.faults import check_range, damaged
from raysim.data.reader_api import PARTS, Contents, Request, numbered, split_codes
from raysim.data.trees import decode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.dataset import Dataset


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
    codes = split_codes(parts).tolist() if all(parts) else [None] * len(files)
    tables = []
    for path in files:
        with damaged(path):
            tables.append(ds.dataset(regular_file(path), format="ipc" if kind == "arrow" else "parquet"))
        missing = {"image", "label"} - set(tables[-1].schema.names)
        if missing:
            raise DataError(f"no column {sorted(missing)[0]!r}", str(path), "name the columns `image` and `label`")
        _check_types(tables[-1].schema, path)
    classes, domains = _names(tables, files[0])
    batches = chain.from_iterable(
        _table_batches(request, path, table, len(classes), code)
        for path, table, code in zip(files, tables, codes, strict=True)
    )
    return Contents(classes, batches, files, sum(table.count_rows() for table in tables), domains)


def _check_types(schema: pa.Schema, path: Path) -> None:
    """DataError for columns that would be cut, or read as something else than they are."""
    import pyarrow as pa

    for name in sorted((KINDS.keys() - {"image"}) & set(schema.names)):
        kind = schema.field(name).type
        if not pa.types.is_integer(kind):
            mend = "give whole numbers; those of the classes in the order of their names, from 0"
            raise DataError(f"a column {name!r} of type {kind}", str(path), mend)
    kind = schema.field("image").type
    cell = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    is_encoded = pa.types.is_binary(cell) or pa.types.is_large_binary(cell)
    if not is_encoded and not isinstance(kind, pa.FixedShapeTensorType):
        mend = "give pixels as a fixed-shape tensor, encoded images as bytes, or the hub's {bytes, path}; for paths, use `folder`"
        raise DataError(f"a column 'image' of type {kind}", str(path), mend)


def _names(tables: Sequence[Dataset], first: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Class and domain names: of a set of ours, of the hub's metadata, or else numbers up to the largest label."""
    if describe(first).is_file():
        with damaged(describe(first)):
            info = SetInfo.read(first)
            return info.classes, info.domains
    hub = json.loads((tables[0].schema.metadata or {}).get(b"huggingface", b"{}"))
    names = hub.get("info", {}).get("features", {}).get("label", {}).get("names")
    with damaged(first):
        return tuple(names or _numbers(tables, "label", first)), _numbers(tables, "domain", first)


def _numbers(tables: Sequence[Dataset], column: str, path: Path) -> tuple[str, ...]:
    """0 to the largest value of a column, in words; none without the column."""
    import pyarrow.compute as pc

    if column not in tables[0].schema.names:
        return ()
    largest = [pc.max(table.to_table([column])[column]).as_py() for table in tables]
    return numbered(max((value for value in largest if value is not None), default=-1), path, column)


def _table_batches(
    request: Request, path: Path, table: Dataset, num_classes: int, split: int | None
) -> Iterator[SetRows]:
    import pyarrow as pa

    names = [name for name in KINDS if name in table.schema.names]
    kind, resize = table.schema.field("image").type, request.options.image_resize
    is_pixels = isinstance(kind, pa.FixedShapeTensorType)
    if is_pixels and resize:
        mend = "drop --size, and let data.resize do it in every batch"
        raise DataError("--size is for encoded images, and these are pixels", str(path), mend)
    first, shape = 0, (resize.size, resize.size, 3) if resize else ()
    # Encoded images are small in the file and large in memory: few at a time.
    rows = batch_rows(tuple(kind.shape)) if is_pixels else batch_rows(shape) if shape else 128
    with damaged(path):
        for record in table.to_batches(columns=names, batch_size=rows):
            if not len(record):
                continue
            if is_pixels:
                pixels = record["image"].to_numpy_ndarray()
            else:
                cells = record["image"].field("bytes") if pa.types.is_struct(kind) else record["image"]
                places = [f"{path}, row {first + i}" for i in range(len(record))]
                pixels = decode([cell or b"" for cell in cells.to_pylist()], names=places, resize=resize, shape=shape)
                shape = pixels.shape[1:]
            for name in names[1:]:
                if record[name].null_count:
                    row = first + record[name].is_null().index(True).as_py()
                    raise DataError(f"no {name} (null)", f"{path}, row {row}", f"give every row a {name}")
            columns = {name: record[name].to_numpy(zero_copy_only=False) for name in names[1:]}
            if split is not None:
                columns.setdefault("split", np.full(len(record), split, np.int8))
            check_range(columns["label"], num_classes, f"{path}, row", first=first)
            yield SetRows.of({"image": pixels, **columns})
            first += len(record)
