"""`raysim run --plan` and `raysim tune --plan`: cost estimates before a start."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.markup import escape
from rich.table import Table

from raysim.base.settings import Raw, Settings
from raysim.cli.terminal import MOST_ROWS, LiveLine, command_began, duration, first_of, out, print_table
from raysim.config import Config, methods_label
from raysim.engine.device import num_accelerators
from raysim.engine.schedule import fitting
from raysim.folders.storage import Copy
from raysim.launch import checked_run, checked_sweep
from raysim.plan.build import Plan
from raysim.plan.check import check
from raysim.plan.cost import Rates, RunCost, cost_of, measure_all, seconds_of
from raysim.plan.resources import resolve_resources, share_of
from raysim.tuning.outcome import outcome
from raysim.tuning.planner import SweepTrial

#: Numbers of process starts, each estimated by the start time of this command. A sweep starts the command, Ray and the
#: first process of trials; a run on Ray also starts trainers.
STARTS_OF_SWEEP, STARTS_ON_RAY = 3.0, 1.0


@dataclass(frozen=True)
class Priced:
    """A run with an estimated cost: `seconds` of the run; `at_once`, the number of runs that share the machine."""

    config: Config
    cost: RunCost
    rates: Sequence[Rates]
    seconds: float
    at_once: int = 1

    def mb(self, way: str) -> float:
        """Return the MB of all rounds; `way` is "up" or "down"."""
        pairs = zip(self.cost.work, self.rates, strict=True)
        late = int(way == "down")  # late clients receive the model as well
        return sum((work.clients + late * work.late) * float(getattr(rate, f"{way}_mb")) for work, rate in pairs)


def print_run_cost(raw: Settings, source: str, line: LiveLine) -> None:
    """Print the estimated cost of a run. Raises the errors of `raysim.launch.checked_run`."""
    with line:
        plan = checked_run(raw, source, line.listener(), reads_weights=False)
        start_s = time.monotonic() - command_began()
        cost = cost_of(plan)
        rates, _ = measure_all([(cost, lambda: plan)], line.step)
    is_serial = plan.config.is_serial()
    trainers = 1 if is_serial else _trainers(plan.config)
    starts = 1 + (0 if is_serial else 1 + STARTS_ON_RAY)
    seconds = seconds_of(cost, rates[cost.pair], trainers)
    _print([Priced(plan.config, cost, rates[cost.pair], seconds)], seconds + starts * start_s, source)


def print_sweep_cost(raw: Raw, source: str, line: LiveLine) -> None:
    """Print the estimated cost of a sweep's unfinished trials. Raises the errors of `raysim.launch.checked_sweep`."""
    with line:
        sweep = checked_sweep(raw, source, line.listener(), reads_weights=False)
        Copy(sweep.place).fetch()  # if the place is a URI: results of trials on other machines
        start_s = time.monotonic() - command_began()
        firsts = [trial for trial in sweep.trials if not trial.same_as]
        waiting = [trial for trial in firsts if not outcome(sweep, trial).is_finished]
        trials = list(waiting)
        if sweep.search:  # future trials are estimated by the ends of the ranges
            ends = sweep.search.ends
            trials += [ends[index % len(ends)] for index in range(sweep.search.num_left)]
        rates, num_unmeasured = measure_all([(trial.cost, partial(_plan, trial)) for trial in trials], line.step)
    priced = [_priced(trial, rates[trial.cost.pair], sweep.base.tune.max_concurrent, start_s) for trial in trials]
    longest = max((each.seconds for each in priced), default=0.0)
    seconds = max(longest, sum(each.seconds / min(each.at_once, len(priced)) for each in priced))
    counts = {
        "to run": len(trials),
        "finished": len(firsts) - len(waiting),
        "repeat another trial": len(sweep.trials) - len(firsts),
        "refused": len(sweep.refused),
    }
    total = sweep.num_trials + len(sweep.refused)
    listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    out.print(f"{total} trials: {listed}", markup=False)
    for refused in first_of([f"{name}: {'; '.join(map(str, faults))}" for name, faults in sweep.refused.items()]):
        out.print(f"refused: {refused}", markup=False)
    if priced:
        _print(priced, seconds + STARTS_OF_SWEEP * start_s, source)
    if num_unmeasured:
        text = "pairs of network and methods have the mean of their network: measuring took too long"
        out.print(f"{num_unmeasured} {text}")
    if sweep.base.tune.scheduler:
        out.print(f"{sweep.base.tune.scheduler} may stop trials early: the figures are upper bounds")


def _plan(trial: SweepTrial) -> Plan:
    return check(trial.config.model_dump(mode="json"), f"trial {trial.name}", reads_weights=False)


def _machine() -> dict[str, float]:
    """Return this machine's resources by Ray's names."""
    return {"CPU": float(os.cpu_count() or 1), "GPU": float(num_accelerators())}


def _trainers(config: Config) -> int:
    """Return the number of trainers that fit on this machine at once, ignoring custom resources."""
    room = _machine() | dict.fromkeys(config.resources.custom, 1e6)
    taken = resolve_resources(config, [room], may_grow=True)
    share = {name: each for name, each in share_of(taken, config).items() if room[name]}
    return max(1, min(taken.trainers, fitting(room, share)))


def _priced(trial: SweepTrial, rates: Sequence[Rates], most: int | None, start_s: float) -> Priced:
    from raysim.tuning.for_tune import bundles_of  # loads Ray

    machine = _machine()
    bundles = [bundle for bundle in bundles_of(trial.config, machine["GPU"]) if bundle]
    fits = fitting(machine, {name: each for name, each in bundles[0].items() if name in machine}) // len(bundles)
    trainers, starts = (1, 0.0) if trial.config.is_serial(in_sweep=True) else (len(bundles), STARTS_ON_RAY)
    seconds = seconds_of(trial.cost, rates, trainers) + starts * start_s
    return Priced(trial.config, trial.cost, rates, seconds, max(1, min(fits, most or fits)))


def _print(priced: Sequence[Priced], seconds: float, source: str) -> None:
    """Print a row for each pair of network and methods, most expensive first, and a row for all runs."""
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for each in priced:
        groups[each.config.model.name, methods_label(each.config.methods)].append(each)
    table = Table(title=escape(f"{source}: {duration(seconds)} on this machine"))
    columns = ["runs", "rounds", "local steps", "images trained", "images scored", "MB up", "MB down", "time of runs"]
    if any(each.cost.simulated_s for each in priced):
        columns.append("simulated time")
    for column in ("network", "methods", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    order = sorted(groups.items(), key=lambda group: -sum(each.seconds for each in group[1]))
    for (network, methods), some in order[:MOST_ROWS]:
        table.add_row(escape(network), escape(methods), *_cells(some))
    if len(order) > 1:
        more = f"{len(order) - MOST_ROWS} more above" if len(order) > MOST_ROWS else ""
        table.add_row("all", more, *_cells(priced))
    print_table(table)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    out.print(
        f"times are CPU seconds, as on an unloaded machine; the load is {load:.1f} on {cores} cores now", markup=False
    )


def _cells(some: Sequence[Priced]) -> list[str]:
    totals = [each.cost.total for each in some]
    counts = [len(some), *(sum(getattr(t, name) for t in totals) for name in ("rounds", "steps", "images"))]
    counts.append(sum(each.cost.scored for each in some))
    sent = (f"{sum(each.mb(way) for each in some):,.1f}" for way in ("up", "down"))
    times = [duration(sum(each.seconds for each in some))]
    if simulated_s := sum(each.cost.simulated_s for each in some):
        times.append(duration(simulated_s))
    return [*(f"{count:,}" for count in counts), *sent, *times]
