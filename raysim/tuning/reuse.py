"""Trials that equal a finished run elsewhere in the storage: its results are taken over, nothing is trained again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import yaml

from raysim.base.errors import DataError, RunExists
from raysim.base.uri import is_uri
from raysim.config import Config
from raysim.engine.simulation import ENDED_BY_CALL
from raysim.folders.environment import gpu_names, sources
from raysim.folders.run_folder import RunFolder
from raysim.models.pretrained import weights_sha256
from raysim.tuning.outcome import TAKEN_OVER, fill
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial, identity

#: Reads a configuration in 2 ms where Python's own takes 14: a storage may hold a thousand.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: Of partition.json; its rows, which may be many, are not read.
_CHECKSUM = '{"checksum": "'


def finished_elsewhere(sweep: Sweep, trials: Sequence[SweepTrial]) -> dict[str, RunFolder]:
    """Trial -> a completed run of the same storage that it would repeat; the sweep's settings may forbid it.

    Only local folders are looked at. A run counts if this code of raysim, this version of PyTorch and the same GPUs, if
    any, recorded it, no call from Python ended it early, and its files are as they were sealed.
    """
    wanted = {trial.identity: trial for trial in trials if trial.identity}
    if not wanted or is_uri(sweep.place) or not sweep.base.tune.reuse:
        return {}
    checksums = {trial.partition_sha256 for trial in wanted.values()}
    finished: dict[str, RunFolder] = {}
    for folder in RunFolder.below(Path(trials[0].config.storage)):
        checksum = _checksum(folder)
        if checksum not in checksums or folder.status.name != "completed":
            continue
        text = _identity(folder, checksum)
        if text in wanted and text not in finished and _is_sound(folder, wanted[text].config):
            finished[text] = folder
    return {trial.name: finished[trial.identity] for trial in trials if trial.identity in finished}


def take_over(sweep: Sweep, elsewhere: Mapping[str, RunFolder]) -> dict[str, RunFolder]:
    """Give trials the results of finished runs, under their own labels, and say where they come from.

    Returns:
      Those that were: a run that another process has gone on with since, or deleted, is passed over.
    """
    taken = {}
    for trial in sweep.trials:
        if trial.name not in elsewhere:
            continue
        first, own = elsewhere[trial.name], RunFolder(sweep.folder / trial.name)
        place = os.path.relpath(first.path, trial.config.storage)
        try:
            with first.locked():
                is_still = _identity(first, _checksum(first)) == trial.identity and first.status.name == "completed"
                if is_still and _is_sound(first, trial.config):
                    fill(first, own, trial, f"{TAKEN_OVER} {place}", links=False)
                    taken[trial.name] = first
        except (RunExists, OSError):
            shutil.rmtree(own.path, ignore_errors=True)
    return taken


def sources_of(sweep: Sweep, elsewhere: Mapping[str, RunFolder], count: int) -> str:
    """In a line, how many trials are finished runs of other sweeps, and of which."""
    places = {os.path.relpath(folder.path.parent, sweep.folder.parent) for folder in elsewhere.values()}
    named = sorted("single runs" if place == "." else place for place in places)
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    text = f"{len(elsewhere)} of {count} trials are finished runs: taken over from {', '.join(named[:5])}{more}"
    return f"{text}; tune.reuse=false trains them"


def _checksum(folder: RunFolder) -> str:
    with suppress(OSError, ValueError), open(folder.partition) as file:
        head = file.read(len(_CHECKSUM) + 64)
        return head.removeprefix(_CHECKSUM) if head.startswith(_CHECKSUM) else ""
    return ""


def _identity(folder: RunFolder, checksum: str) -> str:
    """Of a finished run; empty for one that cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        ran_on = json.loads(folder.environment.read_text())["resources"]["backend"]
        facts = json.loads(folder.summary.read_text())
        outputs = facts["num_classes"], facts["vocabulary"]
        return identity(Config.model_validate(folder.read_config(LOADER)), ran_on, checksum, *outputs)
    return ""


def _is_sound(folder: RunFolder, config: Config) -> bool:
    """Whether a run was recorded by this code, with these weights, and holds what it wrote."""
    try:
        if folder.status.message == ENDED_BY_CALL:
            return False
        files = [path for result in folder.results() for path in (result.rglob("*") if result.is_dir() else [result])]
        folder.check_unchanged(*files)
        facts = json.loads(folder.environment.read_text())
        made_by = facts["sources"], facts["packages"]["torch"], facts["machine"]["gpus"]
        is_whole = all(path.is_file() for path in (folder.progress, folder.summary, folder.model))
        same_weights = folder.weights.read_text() == weights_sha256(config.model.pretrained, config.model.name)
    except (DataError, OSError, ValueError, TypeError, KeyError):
        return False
    *code, gpus = made_by
    # A trial sees the one GPU that it was given, this process all of the machine.
    return is_whole and same_weights and (*code, set(gpus)) == (sources(), version("torch"), set(gpu_names()))
