"""Trials that would repeat another one: their run directories are filled from that one's when it is finished."""

from __future__ import annotations

import os
import shutil

from raysim.run_folder import Mark, RunFolder
from raysim.tuning.plan import Sweep, SweepTrial


def fill_twins(sweep: Sweep) -> None:
    """Give every trial that repeats a finished one that one's results, under its own labels."""
    for trial in sweep.trials:
        if not trial.same_as:
            continue
        first, own = RunFolder(sweep.folder / trial.same_as), RunFolder(sweep.folder / trial.name)
        if first.status.is_finished and not own.status.is_finished:
            _fill(first, own, trial)


def _fill(first: RunFolder, own: RunFolder, trial: SweepTrial) -> None:
    shutil.rmtree(own.path, ignore_errors=True)
    own.path.mkdir()
    for path in first.results():
        target = own.path / path.name
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link)
        else:
            _link(str(path), str(target))
    own.write_config(trial.config.model_dump(mode="json"))
    mark: Mark = "COMPLETED" if first.status.name == "completed" else "STOPPED"
    own.mark(mark, f"the same run as {trial.same_as}\n")  # last: it makes the run whole


def _link(source: str, target: str) -> None:
    """One file in two folders; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
