"""Trials that would repeat another one: their run directories are filled from that one's when it is finished."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import yaml

from raysim.engine.checkpoint import write_file
from raysim.run import MODEL_FILE
from raysim.tuning.outcome import is_finished
from raysim.tuning.plan import Sweep, SweepTrial

#: What a run directory holds of results; TensorBoard's events stay with the run that wrote them.
RESULTS = (
    "env.json",
    "partition.json",
    "partition.csv",
    "partition.png",
    "validation.png",
    "progress.csv",
    "confusion.csv",
    "confusion.png",
    "clients.parquet",
    "summary.json",
    "arrays",
    MODEL_FILE,
)


def fill_twins(sweep: Sweep) -> None:
    """Give every trial that repeats a finished one that one's results, under its own labels."""
    for trial in sweep.trials:
        if trial.same_as and is_finished(sweep.folder / trial.same_as) and not is_finished(sweep.folder / trial.name):
            _fill(sweep.folder, trial)


def _fill(folder: Path, trial: SweepTrial) -> None:
    source, target = folder / trial.same_as, folder / trial.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in RESULTS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=_link)
        elif (source / name).is_file():
            _link(str(source / name), str(target / name))
    write_file(target / "config.yaml", yaml.safe_dump(trial.config.model_dump(mode="json"), sort_keys=False).encode())
    for mark in ("STOPPED", "COMPLETED"):  # last: they make it whole
        if (source / mark).is_file():
            (target / mark).write_text(f"the same run as {trial.same_as}\n")


def _link(source: str, target: str) -> None:
    """One file in two folders; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
