"""Arrow and Parquet files of others are read back as they were."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.base.errors import DataError
from raysim.data.sources import prepare
from tests.support.image_sets import pixels, png, prepared, same


def write_ipc(table, path):
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("encoding", ["bytes", "hub"])
def test_files_are_read_in_order_of_their_names(encoding, kind, tmp_path):
    images, labels, files = pixels(9, 6, 7, 3), np.arange(9) % 4, tmp_path / "files"
    files.mkdir()
    for name, rows in (("train-00000-of-00002", [0, 1, 2]), ("train-00001-of-00002", [3, 4]), ("test-0", range(5, 9))):
        rows = list(rows)
        if encoding == "bytes":
            column = pa.array([png(images[i]) for i in rows])
        else:
            column = pa.array([{"bytes": png(images[i]), "path": f"{i}.png"} for i in rows])
        table = pa.table({"image": column, "label": pa.array(labels[rows])})
        if encoding == "hub":
            features = {"label": {"names": ["n", "e", "s", "w"], "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        (write_ipc if kind == "arrow" else pq.write_table)(table, files / f"{name}.{kind}")
    source, _, _ = prepared(kind, files, tmp_path / "out")
    order = [5, 6, 7, 8, 0, 1, 2, 3, 4]
    same(source, images[order], labels[order], [2] * 4 + [0] * 5)
    assert source.info.classes == (("n", "e", "s", "w") if encoding == "hub" else ("0", "1", "2", "3"))


def test_parquet_names_the_row_of_an_unreadable_image_and_a_missing_column(tmp_path):
    cells = [png(pixels(4, 4, 3)), b"", png(pixels(4, 4, 3))]
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"unreadable image .*a.parquet, row 1"):
        prepare("parquet", tmp_path / "out", tmp_path)
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'label' in .*a.parquet"):
        prepare("parquet", tmp_path / "out", tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"not readable .*a.parquet"):
        prepare("parquet", tmp_path / "out", tmp_path)


def _table(path, **columns):
    cells = [png(pixels(4, 4, 3))] * 3
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 0]} | columns), path)


def test_files_of_which_one_names_no_split_have_none(tmp_path):
    (files := tmp_path / "files").mkdir()
    _table(files / "train-0.parquet")
    _table(files / "more.parquet")
    source, _, _ = prepared("parquet", files, tmp_path / "out")
    assert source.splits is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0.0, 1.5, 2.0]}, "a column 'label' of type double"),
        ({"label": [True, False, True]}, "a column 'label' of type bool"),
        ({"label": ["a", "b", "c"]}, "a column 'label' of type string"),
        ({"label": [0, None, 1]}, r"no label \(null\) in .*a.parquet, row 1"),
        ({"label": [0, 1, 2**31]}, "label 2147483648 would make 2,147,483,649 of them"),
        ({"domain": [0, 1, 0.5]}, "a column 'domain' of type double"),
        ({"image": ["/etc/hostname"] * 3}, "a column 'image' of type string"),
    ],
)
def test_columns_that_would_be_cut_or_guessed_are_refused(tmp_path, columns, words):
    _table(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError, match=words):
        prepare("parquet", tmp_path / "out", tmp_path)
