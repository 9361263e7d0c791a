"""`raysim status`: what it shows of a storage's files."""

from __future__ import annotations

import os
import time

import pytest

from raysim.base.errors import DataError
from raysim.cli.overview import show_places
from raysim.folders.run_folder import RunFolder


def a_run(path, *, rounds, scores, mark=None, age_s=30):
    """A run directory with some rounds; scores: of each, None for a round that was not evaluated."""
    path.mkdir(parents=True)
    files = RunFolder(path)
    files.write_config({"rounds": rounds, "methods": []})
    columns = ["round", "server/accuracy", "system/round_s"]
    rows = [
        {"round": str(number), "server/accuracy": "" if score is None else str(score), "system/round_s": "1.0"}
        for number, score in enumerate(scores)
    ]
    files.write_progress(rows, columns)
    if mark:
        files.mark(mark, "a word")
    for file in path.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)


@pytest.fixture
def storage(tmp_path):
    """A finished run, one that goes on, one that is damaged, and a sweep."""
    folder = tmp_path / "runs"
    a_run(folder / "done", rounds=2, scores=[0.25, 0.5], mark="COMPLETED", age_s=3 * 86400)
    a_run(folder / "going", rounds=10, scores=[0.125, 0.375, None], age_s=30)
    a_run(folder / "odd", rounds=2, scores=[0.5])
    (folder / "odd" / "config.yaml").write_text("rounds: [")
    for number, mark in enumerate(("COMPLETED", "COMPLETED", "FAILED", None)):
        a_run(folder / "s" / f"seed={number}", rounds=4, scores=[0.5] * (4 if mark == "COMPLETED" else 1), mark=mark)
    (folder / "s" / "sweep.yaml").write_text("tune: {}")
    os.utime(folder / "s" / "sweep.yaml", (time.time() - 400,) * 2)
    return folder


def table(capsys):
    """Cells of each row that was printed."""
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in lines if "│" in line]


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_runs_and_sweeps_are_shown_with_state_rounds_score_and_age(form, storage, capsys):
    """At a URI, too; nothing is written there."""
    before = {path: path.stat().st_mtime_ns for path in storage.rglob("*")}
    show_places([form.format(storage)])
    rows = table(capsys)
    assert rows[0][:4] == ["done", "completed", "2 of 2", "accuracy 0.5000"]
    assert rows[0][4] == "3.0 d ago"
    assert rows[1][:4] == ["going", "unfinished", "3 of 10", "accuracy 0.3750"]
    assert rows[1][4].endswith(" s ago")
    assert rows[2][:3] == ["odd", "damaged", "0 of 0"]
    assert rows[3][:4] == ["s", "2 completed, 1 failed, 1 unfinished", "10 of 16", ""]
    assert len(rows) == 4
    assert before == {path: path.stat().st_mtime_ns for path in storage.rglob("*")}


def test_a_sweep_by_itself_is_shown_trial_by_trial_and_a_run_alone(storage, capsys):
    show_places([str(storage / "s"), str(storage / "going")])
    rows = table(capsys)
    assert [row[:2] for row in rows] == [
        ["seed=0", "completed"],
        ["seed=1", "completed"],
        ["seed=2", "failed"],
        ["seed=3", "unfinished"],
        ["going", "unfinished"],
    ]


def test_places_without_runs_are_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"no such folder in .*nowhere"):
        show_places([str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match="no run in"):
        show_places([str(tmp_path)])
    with pytest.raises(DataError, match="no run in file://"):
        show_places([f"file://{tmp_path}/nowhere"])
