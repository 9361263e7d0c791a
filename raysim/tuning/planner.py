"""Trials of a sweep: naming, checking, and detection of duplicates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.base.errors import ConfigError, Fault
from raysim.config import Config, sweep
from raysim.config.effects import value_at
from raysim.core.seeding import derive_seed
from raysim.folders.run_folder import FREE_KEYS
from raysim.plan.build import Plan
from raysim.plan.check import check
from raysim.plan.cost import RunCost, cost_of
from raysim.plan.find import MAPPINGS
from raysim.plan.splitting import uses_validation

#: Longer trial names are cut: file systems allow 255 bytes.
LONGEST_NAME = 160


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep.

    Attributes:
      values: axis -> chosen or drawn value.
      raw: the trial's configuration as in the file; config: the complete configuration with absolute paths and
        the place in the sweep.
      same_as: an earlier trial with the same effect, whose results are copied; empty for a trial that runs.
    """

    name: str
    values: Mapping[str, object]
    raw: sweep.Raw
    config: Config
    num_rounds: int
    partition_sha256: str
    cost: RunCost
    same_as: str = ""


def trial_of(name: str, values: Mapping[str, object], raw: sweep.Raw, plan: Plan, same_as: str = "") -> SweepTrial:
    """Return the trial of a plan."""
    return SweepTrial(name, values, raw, plan.config, plan.num_rounds, plan.manifest.checksum, cost_of(plan), same_as)


class Planner:
    """Planner of a sweep's trials from values of the axes; remembers names and configurations.

    Args:
      raw: the sweep's whole configuration; source: its file.
      storage, name: where the sweep is; reads_weights: see `check`.
    """

    def __init__(self, raw: sweep.Raw, source: str, storage: str, name: str, reads_weights: bool = True):
        self._raw, self._source, self._reads_weights = raw, source, reads_weights
        self._storage, self._name = storage, name
        self._axes = sweep.axes(raw, source)
        self._taken: set[str] = set()
        self._first: dict[str, str] = {}
        self._texts: dict[str, sweep.Trial] = {}
        self._unused: dict[str, str] = {}
        self._validates = uses_validation(raw)  # the same rows for all trials, so that methods are comparable

    def free_name(self, values: Mapping[str, object]) -> str:
        """Return an unused trial name for the values, with drawn numbers shortened."""
        drawn = {axis: value for axis, value in values.items() if "grid_search" not in self._axes[axis]}
        brief = {axis: f"{value:.4g}" for axis, value in drawn.items() if isinstance(value, float)}
        name = _short_name(sweep.trial_name({**values, **brief}, self._axes))
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(free for free in names if free not in self._taken)

    def plan(self, name: str, values: Mapping[str, object]) -> SweepTrial:
        """Return the checked trial of a name. Raises ConfigError with all faults; the name stays reserved."""
        self._taken.add(name)
        single = sweep.trial(self._raw, values, self._source)
        self._unused |= single.unused
        like = self._texts.setdefault(single.text, single)
        if like.values != single.values:
            raise ConfigError([sweep.same_settings(self._raw, like, single, self._source)], self._source)
        place = {"storage": self._storage, "name": f"{self._name}/{name}"}
        raw = {**single.raw, **place}
        plan = with_whole_files(check(raw, self._source, validates=self._validates, reads_weights=self._reads_weights))
        original = self._first.setdefault(identity(plan), name)
        return trial_of(name, dict(values), single.raw, plan, "" if original == name else original)

    def unused(self, trials: Sequence[SweepTrial]) -> dict[str, str]:
        """Return key -> reason of settings without effect in any trial."""
        used = {key for key in self._unused for trial in trials if value_at(trial.raw, key) is not None}
        return {key: reason for key, reason in self._unused.items() if key not in used}

    def plan_all(
        self, points: Iterable[tuple[str, Mapping[str, object]]]
    ) -> tuple[list[SweepTrial], dict[str, tuple[Fault, ...]]]:
        """Return (trials, trial -> its faults) for (name, values) pairs; a name may be empty."""
        trials, refused = [], {}
        for given, values in points:
            name = given or self.free_name(values)
            try:
                trials.append(self.plan(name, values))
            except ConfigError as error:
                refused[name] = error.faults
        return trials, refused


def _short_name(name: str) -> str:
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{derive_seed(0, name):016x}"


def with_whole_files(plan: Plan) -> Plan:
    """Return the plan with absolute paths of files, for workers in other folders; `check` does so for folders."""
    if plan.config.model.pretrained is None and plan.config.data.validation_set.external.mapping is None:
        return plan
    whole = plan.config.model_dump(mode="json")
    external = whole["data"]["validation_set"]["external"]
    is_shipped = (MAPPINGS / f"{external['mapping']}.yaml").is_file()
    for group, key in ((whole["model"], "pretrained"), *([] if is_shipped else [(external, "mapping")])):
        if group[key] is not None and Path(group[key]).is_file():
            group[key] = str(Path(group[key]).absolute())
    return replace(plan, config=Config.model_validate(whole))


#: Keys of `data` and whole groups that act only through the partition's rows, which the manifest holds.
IN_MANIFEST = ("name", "root", "fraction", "split", "split_within_clients", "test", "validation", "validation_set")


def backend_of(config: Config) -> str:
    """Return the backend of a trial, "serial" or "ray"."""
    return "serial" if config.is_serial(in_sweep=True) else "ray"


def identity(plan: Plan) -> str:
    """Return a text that is equal for two runs with the same results and times.

    The text leaves out labels and names. It has the resources, since times depend on resources, and bits on the kind of
    device; the rows of the partition, not the keys that give the rows (alpha has no effect in joint training); the size
    of the cohort; the share of work only if clients straggle; and the classes, since equal rows of two sets may have
    other numbers of classes, and a model has an output for each class.
    """
    config = plan.config
    dumped = config.model_dump(mode="json")
    counts = {key: value for key, value in dumped.items() if key not in (*FREE_KEYS, "partition")}
    counts["resources"] = {**dumped["resources"], "backend": backend_of(config)}
    counts["stop"] = dumped["stop"]  # a resumed run may change it, but runs that differ in it are different runs
    counts["data"] = {key: value for key, value in dumped["data"].items() if key not in IN_MANIFEST}
    cohort = counts.pop("cohort")
    if not config.is_joint:
        ineffective = {"size", "fraction"} | (set() if cohort["stragglers"] else {"straggler_work"})
        counts["cohort"] = {key: value for key, value in cohort.items() if key not in ineffective}
        counts["cohort_size"] = config.cohort_size
    return json.dumps([counts, plan.manifest.checksum, len(plan.info.classes), plan.info.vocabulary], sort_keys=True)


def refusals(refused: Mapping[str, Sequence[Fault]], count: int) -> Iterator[Fault]:
    """Return each fault once, with the affected trials unless all are; and the trials that could be skipped."""
    trials_of: dict[Fault, list[str]] = {}
    for name, refusal in refused.items():
        for fault in refusal:
            trials_of.setdefault(fault, []).append(name)
    for fault, names in trials_of.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = "" if len(names) == count else f" (trial {names[0]}{more})"
        yield Fault(fault.key, f"{fault.message}{where}")
    if len(refused) < count:
        text = f"set true to start the remaining {count - len(refused)} of {count} trials"
        yield Fault("tune.skip_refused", f"{text}; refused: {', '.join(refused)}")
