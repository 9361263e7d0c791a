"""What became of the trials of a sweep, read from their run directories, and what is kept of it.

A trial is a run like any other: `<storage>/<sweep>/<trial>` is exactly the run directory of `raysim run`. So the state of
a sweep is the state of its run directories, and starting it again runs what is not finished, whatever stopped it before.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from raysim.config import Config
from raysim.core.errors import ConfigError, Fault, RunExists
from raysim.files import write_file
from raysim.record import judged
from raysim.run_folder import RunFolder
from raysim.runner import changes
from raysim.tuning.plan import Sweep, SweepTrial

#: Metrics of a whole run that a sweep may be judged by, besides the columns of progress.csv. The last one chooses a round
#: without a look at the test set.
SUMMARY_METRICS = ("accuracy", "best_accuracy", "mean_last_10pct_accuracy", "accuracy_at_best_validation")

#: Which column says what the best round is, for metrics of a whole run.
COLUMNS = dict.fromkeys(SUMMARY_METRICS, "server/accuracy") | {
    "accuracy_at_best_validation": "server/validation_accuracy"
}


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: its score by the sweep's metric, the best round by it, seconds, and a message.

    Attributes:
      labels: the trial's own.
    """

    status: Literal["completed", "stopped", "failed", "unfinished"]
    labels: Mapping[str, Any]
    score: float | None = None
    best_round: int | None = None
    seconds: float | None = None
    message: str = ""

    @property
    def is_finished(self) -> bool:
        return self.status in ("completed", "stopped")


def start_sweep(sweep_: Sweep) -> dict[str, Outcome]:
    """Trial -> what became of it before; writes `sweep.yaml`, from which the sweep can be started again.

    Raises:
      RunExists: something else has that name, or resume is never and there are trials. ConfigError: a finished trial of
      that name had another configuration.
    """
    folder = sweep_.folder
    if (folder / "config.yaml").exists():
        raise RunExists(f"{folder.name!r} is a run, not a sweep", str(folder), "choose another name")
    before = {trial.name: outcome(sweep_, trial) for trial in sweep_.trials}
    if sweep_.base.resume == "never" and any((folder / trial.name).exists() for trial in sweep_.trials):
        raise RunExists(
            f"sweep {folder.name!r} exists and resume is never",
            str(folder),
            "set resume=auto, choose another name, or delete that folder",
        )
    if faults := _changed(sweep_, [trial for trial in sweep_.trials if before[trial.name].is_finished]):
        raise ConfigError(faults, f"going on with {folder.name!r}")
    write_file(folder / "sweep.yaml", yaml.safe_dump(dict(sweep_.raw), sort_keys=False).encode())
    return before


def _changed(sweep_: Sweep, trials: Sequence[SweepTrial]) -> list[Fault]:
    """Where finished trials' configurations are not those they would have now: each change once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for trial in trials:
        now = trial.config.model_dump(mode="json")
        saved = RunFolder(sweep_.folder / trial.name).read_config()
        before = Config.model_validate(saved).model_dump(mode="json")
        for key, old, new in changes(before, now):
            found.setdefault((key, repr(old), repr(new)), []).append(trial.name)
    faults = []
    for (key, old, new), names in found.items():
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        remedy = f"set it back, choose another name, or delete their folders in {sweep_.folder}"
        faults.append(Fault(key, f"is {new}, but finished trial {names[0]}{more} has {old}; {remedy}"))
    return faults


def outcome(sweep_: Sweep, trial: SweepTrial) -> Outcome:
    """What its run directory says of a trial."""
    folder, settings = RunFolder(sweep_.folder / trial.name), sweep_.base.tune
    rows = folder.progress_rows()
    column = COLUMNS.get(settings.metric, settings.metric)
    values = [(float(row[column]), int(row["round"])) for row in rows if row.get(column)]
    sign = 1 if settings.mode == "max" else -1
    finite = [(sign * value, -number) for value, number in values if math.isfinite(value)]
    best_round = -max(finite)[1] if finite else None
    seconds = sum(float(row["system/round_s"]) for row in rows)
    labels = dict(trial.config.labels)
    score = values[-1][0] if values else None
    if settings.metric in SUMMARY_METRICS:
        score = judged(rows, trial.num_rounds)[settings.metric]
    status = folder.status
    if status.name == "completed":
        summary = folder.read_json(folder.summary)
        score = summary[settings.metric] if settings.metric in SUMMARY_METRICS else score
        return Outcome("completed", labels, score, best_round, seconds)
    message = f"the same run as {trial.same_as}" if trial.same_as and status.name == "unfinished" else status.message
    return Outcome(status.name, labels, score, best_round, seconds, message)


def ranked(sweep_: Sweep, outcomes: Mapping[str, Outcome]) -> list[SweepTrial]:
    """Trials with a score, best first: those that ran to their end before those that were stopped."""
    sign = -1 if sweep_.base.tune.mode == "max" else 1

    def rank(trial: SweepTrial) -> tuple[bool, float]:
        found = outcomes[trial.name]
        score = found.score if found.score is not None and math.isfinite(found.score) else -sign * math.inf
        return found.status != "completed", sign * score

    return sorted((t for t in sweep_.trials if outcomes[t.name].score is not None), key=rank)


def write_results(sweep_: Sweep, outcomes: Mapping[str, Outcome]) -> None:
    """`results.csv`, a row per trial, and `best.yaml`, the best trial's configuration as `raysim run` takes it."""
    names = list(dict.fromkeys(key for trial in sweep_.trials for key in trial.config.labels))
    metric = sweep_.base.tune.metric
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(["trial", *names, "status", metric, "best_round", "seconds", "message"])
    for trial in sweep_.trials:
        found = outcomes[trial.name]
        told = [found.status, found.score, found.best_round, found.seconds, found.message]
        writer.writerow([trial.name, *(found.labels.get(name) for name in names), *told])
    for trial_name, faults in sweep_.refused.items():
        writer.writerow([trial_name, *("" for _ in names), "refused", "", "", "", "; ".join(map(str, faults))])
    write_file(sweep_.folder / "results.csv", lines.getvalue().encode())
    best = next((t for t in ranked(sweep_, outcomes) if outcomes[t.name].status == "completed"), None)
    if best is not None:
        head = f"# Trial {best.name} of {sweep_.folder.name}: {metric} {outcomes[best.name].score}\n"
        text = yaml.safe_dump(_as_run(sweep_, best), sort_keys=False)
        write_file(sweep_.folder / "best.yaml", (head + text).encode())


def _as_run(sweep_: Sweep, trial: SweepTrial) -> dict[str, Any]:
    """The complete configuration of a trial for a run of its own: no name, no labels, paths as the file had them."""
    config = Config.model_validate(dict(trial.raw)).model_dump(mode="json")
    if config["local"]["steps"] is not None:
        del config["local"]["epochs"]  # one or the other
    return {key: value for key, value in config.items() if key not in ("name", "labels", "tune", "scale")}
