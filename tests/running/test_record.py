"""What the recorder leaves: the board's tags, steps and pictures."""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from methods import METHODS
from raysim.engine.round_metrics import RoundRecord
from raysim.folders.run_folder import RunFolder
from raysim.running.board import FIRST
from raysim.running.record import COLUMNS, Recorder, headlines

ROUNDS = 20
RNG = np.random.default_rng(0)
RECORDS = [
    RoundRecord(
        index,
        {"server/accuracy": index / 7, "train/loss": math.nan if index == 3 else -index / 3, "system/round_s": 0.1}
        | ({"late/one": 2.0 if index < 12 else 3.0} if index > 4 else {}),
        {"client": np.arange(5), "is_dropped": np.arange(5) == 2},
        RNG.random((4, 2)),
        {
            "toy.norms": RNG.random((4, 3)),
            "toy.norms:columns": np.array(["x", "y", "z"]),
            "toy.norms:clients": np.array([0, 1, 3, 4]),
            "toy.flat": RNG.random(3),
            "toy.cube": RNG.random((2, 2, 2)),
        },
        RNG.integers(0, 9, (2, 2)),
    )
    for index in range(ROUNDS)
]


def recorded(path, records=RECORDS, **settings) -> EventAccumulator:
    folder = RunFolder(path)
    recorder = Recorder(folder, first_round=0, blocks=["p", "q"], classes=["a", "b"], **settings)
    for record in records:
        recorder.write(record)
    recorder.flush()
    recorder.draw(np.eye(5, 2, dtype=int), np.array([1, 2]))
    recorder.close()
    return EventAccumulator(str(path), size_guidance={"images": 0, "scalars": 0, "histograms": 0}).Reload()


@pytest.mark.slow
@pytest.mark.usefixtures("painted")
def test_board_has_the_pictures_of_the_last_round(tmp_path):
    board = recorded(tmp_path)
    pictures = {tag: [event.step for event in board.Images(tag)] for tag in board.Tags()["images"]}
    assert pictures == {
        "partition/classes": [0],
        "partition/validation": [0],
        "weights/client_by_block": [19],
        "toy/norms": [19],
        "toy/flat": [19],
        "server/confusion": [19],
    }
    for tag, name in (("server/confusion", "confusion"), ("partition/classes", "partition")):
        (event,) = board.Images(tag)
        assert (tmp_path / f"{name}.png").read_bytes() == event.encoded_image_string
        size = event.encoded_image_string[16:24]  # of the PNG's header
        assert (event.width, event.height) == (int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big"))


def test_every_metric_has_a_curve_with_a_point_for_every_round_that_has_it(tmp_path):
    board = recorded(tmp_path)
    main = {"server/accuracy", "train/loss"}
    names = set().union(*(record.metrics for record in RECORDS))  # among them constant ones
    assert set(board.Tags()["scalars"]) == {*names, *(f"{FIRST}/{tag}" for tag in main)}
    for tag in names:
        points = {event.step: event.value for event in board.Scalars(tag)}
        expected = {record.round_index: record.metrics[tag] for record in RECORDS if tag in record.metrics}
        assert list(points) == list(expected)
        assert np.allclose(list(points.values()), list(expected.values()), equal_nan=True)
        if tag in main:
            assert [event.step for event in board.Scalars(f"{FIRST}/{tag}")] == list(points)
    assert [event.step for event in board.Histograms("weights/all")] == list(range(ROUNDS))
    assert board.Histograms("weights/all")[0].histogram_value.num == 8


@pytest.mark.parametrize("cut", [3, 8, 14])
def test_a_resumed_board_has_the_points_of_one_run_through(tmp_path, cut):
    for first, last in ((0, cut), (cut, ROUNDS)):
        folder = RunFolder(tmp_path)
        recorder = Recorder(folder, first_round=first, blocks=["p", "q"], classes=["a", "b"])
        for record in RECORDS[first:last]:
            recorder.write(record)
        recorder.close()
    board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert [(event.step, event.value) for event in board.Scalars("late/one")] == [
        (record.round_index, record.metrics["late/one"]) for record in RECORDS[5:]
    ]


def test_accuracy_and_loss_are_the_first_group_that_tensorboard_shows():
    """It sorts groups of curves by name, and opens the first two (read in its source, 2.21)."""
    groups = {*(name.partition("/")[0] for name in COLUMNS), *METHODS, "hparam"}
    assert min({FIRST, *groups}) == FIRST


def test_files_hold_the_rounds_so_far_after_a_flush(tmp_path):
    recorder = Recorder(RunFolder(tmp_path), first_round=0, blocks=["p", "q"], classes=["a", "b"])
    for record in RECORDS[:6]:
        recorder.write(record)
        with open(tmp_path / "progress.csv") as file:
            *_, row = csv.DictReader(file)
        known = {name: float(text) for name, text in row.items() if text}
        metrics = {name: value for name, value in record.metrics.items() if not math.isnan(value)}
        assert known.items() >= {"round": record.round_index, **metrics}.items()
    recorder.flush()
    with open(tmp_path / "confusion.csv") as file:
        assert [row[1:] for row in csv.reader(file)][1:] == RECORDS[5].confusion.astype(str).tolist()
    assert len(RunFolder(tmp_path).client_rows()) == 6 * 5
    recorder.close()


def test_headlines_are_the_last_numbers_that_methods_are_for_and_all_megabytes_up():
    rows = [
        {"round": "0", "dp/epsilon": "1.5", "krum/chosen": "2.0", "comm/up_mb": "3.0", "x/y": "7"},
        {"round": "1", "dp/epsilon": "2.5", "attack/success": "0.0", "comm/up_mb": "4.0", "x/y": ""},
    ]
    found = headlines(rows)
    assert found == {"epsilon": 2.5, "krum/chosen": 2.0, "attack success": 0.0, "megabytes up": 7.0}
    assert list(found)[-1] == "megabytes up"


def test_closing_says_nothing_of_a_directory_that_is_gone_for_that_is_said_elsewhere(tmp_path, monkeypatch):
    def gone():
        raise FileNotFoundError("events.out.tfevents")

    for left in ("nothing", "a part", "all"):
        folder = RunFolder(tmp_path / left)
        recorder = Recorder(folder, first_round=0, blocks=["p"], classes=["a", "b"])
        recorder._board.flush()  # so that its thread makes no file while the directory is deleted
        monkeypatch.setattr(recorder._board, "flush", gone)  # as TensorBoard's thread says it, sooner or later
        if left == "all":
            folder.config.write_text("{}")
            with pytest.raises(FileNotFoundError):
                recorder.close()
        else:
            if left == "nothing":
                shutil.rmtree(folder.path)
            recorder.close()


def test_client_rows_are_those_that_arrow_makes_of_the_columns():
    columns = {"a": RNG.random(9)[::2], "b": np.arange(5, dtype=np.int32), "c": np.arange(5) % 2 == 0}
    table = RunFolder.client_table(3, columns)
    assert table.equals(pa.table({"round": np.full(5, 3), **columns}))


@pytest.mark.slow
def test_a_short_run_imports_no_compiler_and_neither_matplotlib_nor_pandas_before_its_end(settings, tmp_path):
    code = (
        f"import sys, raysim; seen = set();"
        f"raysim.run({settings!r}, name='a', methods=['fedvg'], quiet=True,"
        "on_round=lambda record: seen.update({'matplotlib', 'pandas'} & set(sys.modules)) or None);"
        "sys.exit(seen | {'torch._dynamo'} & set(sys.modules) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "a" / "partition.png").is_file()
