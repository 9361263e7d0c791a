"""Outcomes of a sweep's trials, read from their run directories.

A trial is a run like any other: `<storage>/<sweep>/<trial>` is exactly the run directory of `raysim run`. So the state
of a sweep is the state of its run directories, and the same command runs unfinished trials, whatever ended the sweep
before.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from raysim.base.direction import column_of, main_of
from raysim.base.errors import Fault, RaysimError, RunExists, explained, refuse
from raysim.base.texts import cells
from raysim.config import Config
from raysim.folders.files import write_file
from raysim.folders.run_folder import Mark, RunFolder, changes
from raysim.folders.storage import Copy
from raysim.running.record import headlines, judged
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial: score by the sweep's metric, best round, seconds and message.

    Attributes:
      labels: the trial's own. best_round: its index.
      main: the main metric of the trial's task; last, best: values of the main metric on the test set, as in
        summary.json.
      headlines: see `raysim.running.record`.
    """

    status: Literal["completed", "stopped", "failed", "unfinished"]
    labels: Mapping[str, str | int | float]
    score: float | None = None
    best_round: int | None = None
    seconds: float | None = None
    message: str = ""
    last: float | None = None
    best: float | None = None
    headlines: Mapping[str, float] = field(default_factory=dict)
    main: str = "accuracy"

    @property
    def is_finished(self) -> bool:
        return self.status in ("completed", "stopped")


def start_sweep(sweep: Sweep) -> dict[str, Outcome]:
    """Return trial -> earlier outcome; write `sweep.yaml`, from which the sweep can be repeated.

    Raises:
      RunExists: the name belongs to a run. ConfigError: a finished trial of the same name has another configuration.
    """
    folder = sweep.folder
    if (folder / "config.yaml").exists():
        raise RunExists(f"{folder.name!r} is a run, not a sweep", str(folder), "choose another name")
    before = {trial.name: outcome(sweep, trial) for trial in sweep.trials}
    finished = [trial for trial in sweep.trials if before[trial.name].is_finished]
    refuse(_changed(sweep, finished), f"resuming {folder.name!r}")
    for trial in finished:  # labels are for tables, and may have been corrected
        run_folder = RunFolder(folder / trial.name)
        if (config := run_folder.read_config()).get("labels") != trial.config.labels:
            run_folder.write_config({**config, "labels": trial.config.labels})
    write_file(folder / "sweep.yaml", yaml.safe_dump(dict(sweep.raw), sort_keys=False).encode())
    return before


def _changed(sweep: Sweep, trials: Sequence[SweepTrial]) -> Iterator[Fault]:
    """Return faults for finished trials whose stored configuration differs from the planned one, each change once."""
    trials_of: dict[tuple[str, str, str], list[str]] = {}
    for trial in trials:
        before, what = RunFolder(sweep.folder / trial.name), "config.yaml or partition.json is damaged"
        kinds = (OSError, ValueError, TypeError, KeyError, yaml.YAMLError)
        with explained(what, before.path, "delete the folder to repeat the trial", *kinds, to=RaysimError):
            saved = Config.model_validate(before.read_config())
            partition = before.read_json(before.partition)["checksum"] if before.partition.is_file() else None
        if partition not in (None, trial.partition_sha256):
            place = "data" if trial.config.partition.file is None else "partition.file"
            trials_of.setdefault((place, "the one before", "changed"), []).append(trial.name)
        for key, old, new in changes(saved.model_dump(mode="json"), trial.config.model_dump(mode="json")):
            trials_of.setdefault((key, repr(old), repr(new)), []).append(trial.name)
    for (key, old, new), names in trials_of.items():
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        remedy = f"restore the old value, choose another name, or delete the trials' folders in {sweep.folder}"
        yield Fault(key, f"is {new}, but finished trial {names[0]}{more} has {old}; {remedy}")


def outcome(sweep: Sweep, trial: SweepTrial) -> Outcome:
    """Return a trial's outcome from its run directory."""
    folder, settings = RunFolder(sweep.folder / trial.name), sweep.base.tune
    rows = folder.progress_rows()
    status, column = folder.status, column_of(settings.metric)
    values = {int(row["round"]): float(row[column]) for row in rows if row.get(column)}
    finite = [number for number, value in values.items() if math.isfinite(value)]
    best_round = (max if settings.direction == "max" else min)(finite, key=values.__getitem__, default=None)
    is_early = status.name == "completed" and rows  # by a condition of `stop`, perhaps
    num_rounds = int(rows[-1]["round"]) + 1 if is_early else trial.num_rounds
    scores = judged(rows, num_rounds, every=trial.config.evaluation.every)
    score = [None, *values.values()][-1] if settings.metric == column else scores.get(settings.metric)
    message = "" if status.name == "completed" else status.message
    if trial.same_as and status.name == "unfinished":
        message = f"the same run as {trial.same_as}"
    seconds = sum(float(row["system/round_s"]) for row in rows)
    main = main_of(rows[0] if rows else ())
    last, best = scores[main], scores[f"best_{main}"]
    shown = headlines(rows) if rows else {}
    return Outcome(status.name, dict(trial.config.labels), score, best_round, seconds, message, last, best, shown, main)


def known_score(end: Outcome) -> float | None:
    """Return a trial's score for a search: NaN if failed or without score, None if unfinished."""
    if end.status == "unfinished":
        return None
    return end.score if end.is_finished and end.score is not None else math.nan


def ranked(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> list[SweepTrial]:
    """Return the scored trials, best first; completed trials before stopped ones."""
    sign = -1 if sweep.base.tune.direction == "max" else 1

    def rank(trial: SweepTrial) -> tuple[bool, float]:
        end = outcomes[trial.name]
        score = math.inf if end.score is None or not math.isfinite(end.score) else sign * end.score
        return end.status != "completed", score

    return sorted((trial for trial in sweep.trials if outcomes[trial.name].score is not None), key=rank)


def best_trial(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> SweepTrial | None:
    """Return the best completed trial."""
    return next((trial for trial in ranked(sweep, outcomes) if outcomes[trial.name].status == "completed"), None)


def write_results(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> None:
    """Write `results.csv`, with a row per trial, and `best.yaml`, the best trial's configuration for `raysim run`."""
    metric = sweep.base.tune.metric
    labels = dict.fromkeys(name for trial in sweep.trials for name in trial.config.labels)
    rows: list[list[object]] = [["trial", *labels, "status", metric, "best_round", "seconds", "message"]]
    for trial in sweep.trials:
        end = outcomes[trial.name]
        values = (end.labels.get(name) for name in labels)
        rows.append([trial.name, *values, end.status, end.score, end.best_round, end.seconds, end.message])
    for name, faults in sweep.refused.items():
        rows.append([name, *("" for _ in labels), "refused", "", "", "", "; ".join(map(str, faults))])
    text = io.StringIO()
    csv.writer(text).writerows(map(cells, rows))
    write_file(sweep.folder / "results.csv", text.getvalue().encode())
    best = best_trial(sweep, outcomes)
    if best is None:
        (sweep.folder / "best.yaml").unlink(missing_ok=True)  # an earlier metric's
    else:
        head = f"# Trial {best.name} of {sweep.folder.name}: {metric} {outcomes[best.name].score}\n"
        write_file(sweep.folder / "best.yaml", (head + yaml.safe_dump(_as_run(best), sort_keys=False)).encode())
    Copy(sweep.place).send()


def _as_run(trial: SweepTrial) -> dict[str, object]:
    """Return a trial's complete configuration for a separate run: no name, no labels, paths as in the file."""
    config = Config.model_validate(dict(trial.raw)).model_dump(mode="json")
    # A separate run would decide anew which rows are held out.
    config["data"] |= {key: getattr(trial.config.data, key) for key in ("split", "test", "validation")}
    return {key: value for key, value in config.items() if key not in ("name", "labels", "tune", "scale")}


def fill_twins(sweep: Sweep) -> None:
    """Copy a finished trial's results to its duplicates, under their own labels; files are linked if possible."""
    for trial in sweep.trials:
        if not trial.same_as:
            continue
        first, twin = RunFolder(sweep.folder / trial.same_as), RunFolder(sweep.folder / trial.name)
        if twin.status.is_finished or not first.status.is_finished:
            continue
        shutil.rmtree(twin.path, ignore_errors=True)
        twin.path.mkdir(parents=True)
        for path in first.results():
            if path.is_dir():
                shutil.copytree(path, twin.path / path.name, copy_function=_link)
            else:
                _link(path, twin.path / path.name)
        twin.write_config(trial.config.model_dump(mode="json"))
        mark: Mark = "COMPLETED" if first.status.name == "completed" else "STOPPED"
        twin.mark(mark, f"the same run as {trial.same_as}\n")  # last: the mark completes the run


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file into a second folder; copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
