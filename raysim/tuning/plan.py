"""Plan of a sweep: trials drawn and checked before the start; a search adds more later."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.base.errors import ConfigError, Fault, SettingIgnored, refuse
from raysim.config import (
    Config,
    ReportGroup,
    TuneGroup,
    folder_of,
    located,
    parse_config,
    parse_overrides,
    parse_report,
    read_config,
    sound_config,
    sweep,
)
from raysim.config.effects import sets
from raysim.config.overlays import choices_of, layered
from raysim.config.yaml_text import flow_parts
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.folders.storage import run_place, storage_faults
from raysim.plan.build import main_metric
from raysim.training.tasks import CLASSES, TASKS
from raysim.tuning.planner import Planner, SweepTrial, refusals
from raysim.tuning.ranking import metric_fault, report_faults, scores_of_mains

if TYPE_CHECKING:
    from raysim.tuning.ranges import Range
    from raysim.tuning.search import Search

#: Trials of a sweep: all are drawn and checked before the first one starts.
MOST_TRIALS = 10_000


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
      folder: `<storage>/<name>`; if the storage is a URI, the local copy.
      base: the keys of the sweep itself, above all the group `tune`.
      place: `<storage>/<name>`, a path or a URI.
      trials: all trials; with a search that learns, the trials chosen so far.
      refused: trial -> faults, for trials left out by `tune.skip_refused` or chosen by a search.
      search: the search that chooses further trials, if any.
    """

    folder: Path
    base: Config
    trials: tuple[SweepTrial, ...]
    raw: sweep.Raw
    refused: Mapping[str, tuple[Fault, ...]]
    place: str
    search: Search | None = None

    @property
    def checked(self) -> tuple[SweepTrial, ...]:
        """Return representative trials: planned trials, and the ends of a search's ranges."""
        return (*self.trials, *(self.search.ends if self.search else ()))

    @property
    def num_trials(self) -> int:
        """Number of trials, if none is refused."""
        return len(self.trials) + (self.search.num_left if self.search else 0)

    def grown(self, scores: Mapping[str, float | None]) -> Sweep:
        """Return the sweep with the search's next trial, which may be refused. scores: see `Search.choose`."""
        assert self.search is not None
        trials, refused = self.search.choose(scores)
        return replace(self, trials=(*self.trials, *trials), refused={**self.refused, **refused})


def read_sweep(path: Path | None, overrides: Sequence[str] = (), *, is_scaled: bool = False) -> dict[str, Any]:
    """Return the raw configuration of a sweep; in overrides `a.b=1,2` is an axis and `a.b=[1,2]` one list.

    An override of an axis of the file replaces the values of the axis, by values or by some labels of the axis.

    Raises:
      ConfigError: as read_config and layered.
    """
    raw, source = read_config(path), str(path) if path else "the command line"
    labels = choices_of(raw, source, is_scaled=is_scaled)
    plain: list[str] = []
    axes: dict[str, list[Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        parts = _parts(text, labels.get(key, []))
        if not equals or key.startswith(f"{sweep.SPACE}.") or (key not in labels and len(parts) < 2):
            plain.append(override)
        else:
            axes[key] = [choice for part in parts for choice in _chosen(key, part, labels.get(key) or [])]
    return layered(raw, parse_overrides(plain), source, axes=axes, is_scaled=is_scaled)


def _parts(text: str, choices: Sequence[object]) -> list[str]:
    """Split a text at YAML's commas, unless the whole text is one of the choices."""
    return [text.strip()] if text.strip() in map(str, choices) else flow_parts(text)


def _chosen(key: str, part: str, labels: Sequence[object]) -> list[object]:
    """Return the choices of a part of an override: a value, a label (also in quotes), or a list of labels."""
    if part in map(str, labels):
        return [part]
    (value,) = parse_overrides([f"{key.rpartition('.')[2]}={part}"]).values()  # a fault names the last part of the key
    return value if labels and isinstance(value, list) else [value]


def plan_sweep(raw: sweep.Raw, source: str, *, reads_weights: bool = True) -> Sweep:
    """Return a sweep with all trials, checked completely; nothing is started or written.

    The whole list is drawn up front from the sweep's seed, so one file always has the same trials, also after a
    restart. A search that learns waits for results: its earlier choices are planned again, and the ends of its ranges
    are checked.

    Args:
      source: the file, which also names a sweep without a name; reads_weights: see `check`.
    Raises:
      ConfigError: every fault of the sweep and of all its trials.
    """
    whole = dict(raw)
    base = _base(whole, source)
    name = base.name or Path(source).stem
    storage = located(base).storage
    refuse(storage_faults(storage), source)
    place = run_place(storage, name)
    folder = folder_of(place, "copies")
    lists, ranges = _axes(whole, base.tune, source)
    planner, probe = (Planner(whole, source, storage, name, reads_weights) for _ in range(2))
    search = None
    if base.tune.search == "optuna":
        from raysim.tuning.search import Search, end_points  # loads Optuna

        ends, refused_ends = probe.plan_all(end_points(whole, ranges))
        _refuse(refused_ends, len(ends), base.tune, source)
        base = _with_metric(base, ends)
        search = Search(place, whole, base, ranges, planner, tuple(ends))
        trials, refused = planner.plan_all(search.points.items())
    else:
        trials, refused = planner.plan_all(("", values) for values in _points(whole, base, lists, ranges, source))
        _refuse(refused, len(trials), base.tune, source)
        unused, fixed = planner.unused(trials), whole["tune"].get("fixed") or {}
        refuse((Fault(key, f"{unused[key]}, in every trial; remove it") for key in unused if sets(fixed, key)), source)
        if unused:
            texts = (f"{key} {reason}" for key, reason in unused.items())
            warnings.warn(f"left out of every trial: {'; '.join(texts)}", SettingIgnored, stacklevel=2)
        base = _with_metric(base, trials)
    planned = Sweep(folder, base, tuple(trials), whole, refused, place, search)
    refuse(_tune_faults(base.tune, parse_report(whole.get("report"), source), planned.checked), source)
    return planned


def _with_metric(base: Config, trials: Sequence[SweepTrial]) -> Config:
    """Set the main metric of the trials' task, unless a metric is set, the task is classes, or tasks differ."""
    tasks = {each.config.task and each.config.task.name for each in trials}
    if "metric" in base.tune.model_fields_set or len(tasks) != 1 or None in tasks:
        return base
    metric = f"server/{main_metric(trials[0].config)}"
    return base.model_copy(update={"tune": base.tune.model_copy(update={"metric": metric})})


def _refuse(refused: Mapping[str, Sequence[Fault]], num_sound: int, settings: TuneGroup, source: str) -> None:
    """Raise ConfigError with the faults of refused trials, unless all other trials start without them."""
    if refused and not (settings.skip_refused and num_sound):
        refuse(refusals(refused, num_sound + len(refused)), source)


def _base(raw: sweep.Raw, source: str) -> Config:
    """Return the sweep-level configuration; other groups apply trial by trial."""
    settings = {key: raw[key] for key in ("name", "storage", "seed", "tune") if key in raw}
    base = sound_config(settings, source)
    if base.name is None and parse_config({"name": Path(source).stem})[0] is None:
        text = f"is missing, and {Path(source).stem!r} is not a valid name; set a name"
        raise ConfigError([Fault("name", text)], source)
    return base


def _axes(raw: sweep.Raw, settings: TuneGroup, source: str) -> tuple[dict[str, list[Any]], dict[str, Range]]:
    """Return (axis -> values of a list, axis -> range), checked against the kind of search."""
    lists, ranges, faults = {}, {}, []
    for axis, domain in sweep.axes(raw, source).items():
        ((name, arguments),) = domain.items()
        text = ""
        if name == "grid_search":
            lists[axis] = sweep.options(domain)
            if settings.search == "optuna":
                text = "is a list, and the search optuna chooses among values itself; write choice"
        elif settings.search == "grid":
            text = "is a range, and a grid has lists only; set tune.search to random, or write grid_search"
        else:
            from raysim.tuning.ranges import draws  # loads Optuna

            try:
                ranges[axis] = draws(name, sweep.options(domain) if name == "choice" else arguments)
            except (ValueError, TypeError) as error:
                text = str(error)
        if text:
            faults.append(Fault(sweep.key_of(axis), text))
    if not ranges and settings.num_samples > 1 and not faults:
        faults.append(Fault("tune.num_samples", "repeats identical trials; make seed an axis, or leave it at 1"))
    if not ranges and settings.search in ("sobol", "optuna") and not faults:
        faults.append(Fault("tune.search", f"{settings.search} draws from ranges, and tune.param_space has none"))
    count = settings.num_samples * math.prod(map(len, lists.values()))
    if count > MOST_TRIALS:
        text = f"makes {count:,} trials, and a sweep has at most {MOST_TRIALS:,}; shorten the lists, or lower tune.num_samples"
        faults.append(Fault("tune.param_space", text))
    refuse(faults, source)
    return lists, ranges


def _points(
    raw: sweep.Raw, base: Config, lists: Mapping[str, list[Any]], ranges: Mapping[str, Range], source: str
) -> Iterator[dict[str, object]]:
    """Yield axis -> value for each trial: the grid once per sample, with values of ranges drawn for each trial.

    Drawn at random, every axis has a generator of its own: more samples, more values of a list or another range leave
    the draws of the other axes as they were. Sobol's points fill the space of all ranges together.
    """
    order, settings = list(sweep.axes(raw, source)), base.tune
    grid = sweep.combinations(raw, {axis: lists.get(axis, [None]) for axis in order})
    if settings.search == "sobol":
        from scipy.stats.qmc import Sobol

        engine = Sobol(len(ranges), rng=numpy_generator(derive_seed(base.seed, "tune.sobol")))
        shares = iter(engine.random_base2(math.ceil(math.log2(settings.num_samples * len(grid)))))
    generators = {axis: numpy_generator(derive_seed(base.seed, f"tune.{axis}")) for axis in ranges}
    for _ in range(settings.num_samples):
        for values in grid:
            if settings.search == "sobol":
                drawn = {axis: ranges[axis].at(float(share)) for axis, share in zip(ranges, next(shares), strict=True)}
            else:
                drawn = {axis: ranges[axis].at(generators[axis].random()) for axis in ranges if axis in values}
            yield {axis: drawn.get(axis, value) for axis, value in values.items()}


def _tune_faults(settings: TuneGroup, report: ReportGroup, trials: Sequence[SweepTrial]) -> Iterator[Fault]:
    """Yield faults of the metrics for the trials."""
    if text := metric_fault(settings.metric, [trial.config for trial in trials]):
        yield Fault("tune.metric", text)
    else:
        try:
            assert settings.direction
        except ConfigError as error:  # a metric without a direction
            yield from error.faults
    for trial in trials:
        task = TASKS.get(trial.config.task.name if trial.config.task else CLASSES.name)
        further = [f"server/{name.rpartition(':')[2]}" for name in trial.config.evaluation.metrics]
        if task is not None and settings.metric in scores_of_mains() - scores_of_mains(task.main) - {*further}:
            text = f"trial {trial.name} predicts {task.name} and records no {settings.metric}; the main metric is {task.main}"
            yield Fault("tune.metric", f"{text}. Compare sets of one task in a sweep")
            break
    yield from report_faults(report, [trial.config for trial in trials])
    if "validation" in settings.metric:
        bare = [t.name for t in trials if not (t.config.data.validation or t.config.data.validation_set.external.name)]
        if bare:
            text = f"{settings.metric} needs a validation set, and trial {bare[0]} has none; raise data.validation"
            yield Fault("tune.metric", text)
