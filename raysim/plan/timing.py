"""Simulated time of a run, built from the group `time` of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raysim.base.errors import ConfigError, Fault
from raysim.base.settings import Spec
from raysim.config import Config
from raysim.core.method import Method
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.core.stack import Stack
from raysim.core.timetable import Speeds, Timetable

#: Keys of the group `time` with a number for each client -> the number without a value.
SPEEDS = {"step_s": 0.0, "down_mbps": np.inf, "up_mbps": np.inf, "latency_s": 0.0}


def speeds_of(config: Config) -> Speeds | None:
    """Return the speeds of all clients: numbers, draws by the run's seed, or columns of `time.traces`; None without `time`.

    Raises:
      ConfigError: an unknown distribution, a speed out of range, or a file of traces that does not fit the clients.
    """
    if config.time is None:
        return None
    columns, faults = {}, []
    traces = _traces(config.time.traces, config.num_clients) if config.time.traces else {}
    for name, default in SPEEDS.items():
        key, value = f"time.{name}", getattr(config.time, name)
        seed, value = derive_seed(config.seed, key), default if value is None else value
        try:
            speeds = traces[name] if name in traces else _speeds(value, config.num_clients, seed)
            columns[name] = _in_range(name, speeds)
        except ValueError as error:
            faults.append(Fault("time.traces" if name in traces else key, str(error)))
    if faults:
        raise ConfigError(faults, "the configuration")
    return Speeds(**columns)


def _speeds(value: float | Spec, count: int, seed: int) -> np.ndarray:
    """Return (count,) float64: one number for all clients, or draws from a distribution of scipy.stats."""
    if not isinstance(value, Spec):
        return np.full(count, value)
    from scipy import stats

    name = value.name
    if not isinstance(law := getattr(stats, name, None), stats.rv_continuous):
        raise ValueError(
            f"unknown distribution {name!r}: write a continuous one of scipy.stats, such as lognorm or uniform"
        )
    try:
        draws: np.ndarray = law(**value.options).rvs(count, random_state=numpy_generator(seed))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has other options ({error}); see scipy.stats.{name}") from error
    return draws


def _in_range(name: str, speeds: np.ndarray) -> np.ndarray:
    """Return the speeds of one key; raise ValueError if one is out of range."""
    is_rate = name.endswith("_mbps")
    is_bad = ~(speeds > 0) if is_rate else ~((speeds >= 0) & np.isfinite(speeds))
    if is_bad.any():
        client = int(np.flatnonzero(is_bad)[0])
        raise ValueError(f"{name} of client {client} is {speeds[client]:g}; it must be {'> 0' if is_rate else '>= 0'}")
    return speeds


def _traces(path: str, num_clients: int) -> Mapping[str, np.ndarray]:
    """Return name -> (num_clients,) float64 for each column of a file of traces."""
    from pyarrow import ArrowException
    from pyarrow.csv import read_csv

    try:
        table = read_csv(path)
        columns = {name: table[name].to_numpy().astype(float) for name in table.column_names}
    except (OSError, ValueError, ArrowException) as error:
        raise ConfigError([Fault("time.traces", f"cannot be read ({error})")], path) from error
    text = ""
    if unknown := sorted(columns.keys() - {"client", *SPEEDS}):
        text = f"has a column {unknown[0]!r}; its columns are client and some of {', '.join(SPEEDS)}"
    elif "client" not in columns or sorted(columns["client"].tolist()) != list(range(num_clients)):
        text = f"needs a column client with each of 0, ..., {num_clients - 1} once"
    if text:
        raise ConfigError([Fault("time.traces", text)], path)
    order = np.argsort(columns.pop("client"))
    return {name: column[order] for name, column in columns.items()}


def timetable_of(config: Config, speeds: Speeds | None) -> Timetable | None:
    """Return the timetable at the start of a run; None without `time`."""
    group = config.time
    if group is None or speeds is None:
        return None
    deadline_s = np.inf if group.deadline_s is None else group.deadline_s
    return Timetable(speeds, config.seed, deadline_s, group.over_selection, tuple(group.available))


def time_faults(config: Config, methods: Sequence[Method]) -> Iterator[Fault]:
    """Yield faults of the group `time`, and of a cohort that does not fit an asynchronous method."""
    try:
        speeds_of(config)
    except ConfigError as error:
        yield from error.faults
    if config.time is None:
        return
    asynchronous = [method.name for method in methods if method.arrivals]
    if any(method.name == "dp" for method in methods):
        text = "changes how often a client takes part, and dp computes epsilon from cohort.size"
        for key in ("over_selection", "available"):
            if key in config.time.model_fields_set:
                yield Fault(f"time.{key}", f"{text}; remove the key")
        yield from (Fault("methods", f"{name} {text}; remove one of the two") for name in asynchronous)
    arrivals = Stack(methods).arrivals
    if arrivals is None:
        return
    name = asynchronous[0]
    for key in ("deadline_s", "over_selection"):
        if key in config.time.model_fields_set:
            yield Fault(f"time.{key}", f"has no effect with {name}: updates end its rounds; remove the key")
    if config.cohort.sampling == "poisson":
        yield Fault("cohort.sampling", f"poisson draws cohorts, and {name} draws clients one by one; remove the key")
    if arrivals > config.cohort_size:
        text = f"{name} waits for {arrivals} updates, and {config.cohort_size} clients are at work at a time"
        yield Fault("cohort", f"{text}; raise cohort.size, or lower the number of updates")
