"""Whole runs against whole bare loops: `raysim run` in a process of its own, as its user starts it, everything on.

Runs alternate with loops, bare, raysim, tuned, bare, raysim, tuned, bare ..., each a command; a raysim run and a tuned loop
are compared with the mean of the two bare loops around them, and these with each other: that is the noise. Whole runs, and not
single rounds, take turns: what a run does beside its rounds (records in the background, checkpoints, Ray's own processes) then
falls on its own time, never on the bare loop's. A round's time is that between two lines of the command's output.

A first run, `cold`, builds the shards and is the one whose memory is sampled; its rounds are not counted.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from raysim.base.settings import Settings
from tests.bench.watch import Watched, raysim_command, watch
from tests.bench.workloads import Prepared

PARTS = ("train", "aggregate", "evaluate")


@dataclass(frozen=True)
class System:
    """What is compared: settings of raysim, and the processes of the bare loop beside it."""

    name: str
    settings: tuple[str, ...]
    processes: int


SYSTEMS = {
    system.name: system
    for system in (
        System("ray", ("resources.backend=ray", "resources.trainers=2"), 2),
        System("serial", ("resources.backend=serial",), 1),
    )
}


@dataclass(frozen=True)
class Sample:
    """A watched run and where its time went: seconds of rounds after the first by part, threads of a trainer."""

    run: Watched
    parts: dict[str, float]
    threads: int = 1

    @property
    def facts(self) -> Settings:
        """As JSON keeps it; `of` is the way back."""
        return {"run": self.run.facts, "parts": self.parts, "threads": self.threads}

    @classmethod
    def of(cls, facts: Settings) -> Sample:
        return cls(Watched(**facts["run"]), facts["parts"], facts["threads"])

    @property
    def rounds_s(self) -> float:
        """Seconds of all rounds after the first, which touches fresh memory."""
        return sum(self.run.round_s[1:])


def raysim_sample(ready: Prepared, system: System, name: str, *, samples_memory: bool = False) -> Sample:
    run = watch(raysim_command(ready.config, name, *system.settings), samples_memory=samples_memory)
    folder = ready.root / "runs" / name
    with open(folder / "progress.csv") as file:
        rows = list(csv.DictReader(file))[1:]
    parts = {part: sum(float(row[f"system/{part}_s"]) for row in rows) for part in PARTS}
    return Sample(run, parts, int(json.loads((folder / "env.json").read_text())["resources"]["threads_per_trainer"]))


def bare_sample(ready: Prepared, processes: int, threads: int = 1, *flags: str, samples_memory: bool = False) -> Sample:
    command = [
        sys.executable,
        "-m",
        "tests.bench.bare",
        ready.job,
        "--processes",
        processes,
        "--threads",
        threads,
        *flags,
    ]
    run = watch(command, samples_memory=samples_memory)
    rows = [line.split()[-len(PARTS) :] for line in run.output.splitlines() if line.startswith("round ")][1:]
    parts = {part: sum(map(float, column)) for part, column in zip(PARTS, zip(*rows, strict=True), strict=True)}
    return Sample(run, parts, threads)


@dataclass
class Comparison:
    """Samples of a workload on one system.

    Attributes:
      bare: one more than `runs`, before, between and after them; tuned: the tuned loop after each run.
    """

    ready: Prepared
    system: System
    cold: Sample
    cold_bare: Sample
    bare: list[Sample]
    runs: list[Sample]
    tuned: list[Sample]

    def ratios(self, of: str, samples: list[Sample] | None = None) -> list[float]:
        """Samples (raysim's if None) over the mean of the bare loops around them. of: an attribute of Sample or of its run."""
        values = [[_value(sample, of) for sample in each] for each in (samples or self.runs, self.bare)]
        return [
            run / (before + after) * 2 for run, before, after in zip(values[0], values[1], values[1][1:], strict=False)
        ]

    @property
    def noise(self) -> list[float]:
        """Each bare loop over the one before it."""
        sums = [sample.rounds_s for sample in self.bare]
        return [after / before for before, after in pairwise(sums)]

    @property
    def ratio(self) -> float:
        """All rounds after the first, of all repetitions."""
        before, after = self.bare[:-1], self.bare[1:]
        bare = sum(one.rounds_s + other.rounds_s for one, other in zip(before, after, strict=True)) / 2
        return sum(sample.rounds_s for sample in self.runs) / bare

    @property
    def of_tuned(self) -> list[float]:
        """raysim over the tuned loop that follows it."""
        return [run.rounds_s / tuned.rounds_s for run, tuned in zip(self.runs, self.tuned, strict=True)]


def _value(sample: Sample, of: str) -> float:
    return float(getattr(sample, of) if hasattr(sample, of) else getattr(sample.run, of))


def compare(ready: Prepared, system: System, repeats: int = 3, until: float = math.inf) -> Comparison | None:
    """Measure what is not yet in the workload's folder: cold runs, then bare loops, runs and tuned loops in turns.

    Args:
      until: on the clock of time.monotonic; no further command is started then, and the comparison is None: the same call goes
        on with it.
    """
    folder = ready.root / f"samples-{system.name}"
    folder.mkdir(exist_ok=True)

    def sample(name: str, make: Callable[[], Sample]) -> Sample:
        path = folder / f"{name}.json"
        if not path.exists():
            if time.monotonic() > until:
                raise TimeoutError
            path.write_text(json.dumps(make().facts))
        return Sample.of(json.loads(path.read_text()))

    try:
        cold = sample("cold", lambda: raysim_sample(ready, system, f"{system.name}-cold", samples_memory=True))
        bare_of = partial(bare_sample, ready, system.processes, cold.threads)
        cold_bare = sample("bare-cold", lambda: bare_of(samples_memory=True))
        bare, runs, tuned = [sample("bare-before", bare_of)], [], []
        for index in range(repeats):
            name = f"{system.name}-{index}"
            runs.append(sample(name, lambda name=name: raysim_sample(ready, system, name)))
            tuned.append(sample(f"tuned-{index}", lambda: bare_of("--tuned")))
            bare.append(sample(f"bare-{index}", bare_of))
        return Comparison(ready, system, cold, cold_bare, bare, runs, tuned)
    except TimeoutError:
        return None


def part_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean milliseconds of the parts of a round after the first; `rest` is records, checkpoints and the driver."""
    count = sum(len(sample.run.round_s) - 1 for sample in samples)
    parts = {part: 1e3 * sum(sample.parts[part] for sample in samples) / count for part in PARTS}
    return parts | {"rest": 1e3 * sum(sample.rounds_s for sample in samples) / count - sum(parts.values())}


def shares(made: Comparison) -> dict[str, float]:
    """Shares of raysim's rounds after the first; what none of the three names is records, checkpoints and the driver."""
    ms = part_ms(made.runs)
    total = sum(ms.values())
    return {part: ms[part] / total for part in PARTS} | {"record and rest": ms["rest"] / total}


def table(all_made: Sequence[Comparison]) -> list[str]:
    """A Markdown table with a row for each comparison: rounds after the first over the bare loop's."""
    columns = "sum / bare|tuned loop / bare|sum / tuned|bare against itself|CPU time / bare|median round, bare"
    columns += "|train, sum, evaluation, rest"
    columns += "|before the first round, bare|after the last, bare|command cold, warm, bare|memory, bare"
    lines = [f"| |{columns}|", "|---|" + "---|" * (columns.count("|") + 1)]
    for made in all_made:
        runs, bare = made.runs, made.bare
        memory_gb = [sum(sample.run.memory_mb.values()) / 1e3 for sample in (made.cold, made.cold_bare)]
        cells = [
            f"{made.ready.load.name}, {made.system.name}",
            f"{made.ratio:.2f} ({span(made.ratios('rounds_s'), 2)})",
            f"{np.mean(made.ratios('rounds_s', made.tuned)):.2f}",
            f"{np.mean(made.of_tuned):.2f} ({span(made.of_tuned, 2)})",
            span(made.noise, 2),
            f"{np.mean(made.ratios('cpu_s')):.2f}, tuned {np.mean(made.ratios('cpu_s', made.tuned)):.2f}",
            f"{median_ms(runs):.0f}, {median_ms(bare):.0f} ms",
            ", ".join(f"{100 * share:.0f}" for share in shares(made).values()) + " %",
            f"{mean(runs, 'start_s'):.1f}, {mean(bare, 'start_s'):.1f} s",
            f"{mean(runs, 'end_s'):.1f}, {mean(bare, 'end_s'):.1f} s",
            f"{made.cold.run.total_s:.0f}, {mean(runs, 'total_s'):.0f}, {mean(bare, 'total_s'):.0f} s",
            f"{memory_gb[0]:.1f}, {memory_gb[1]:.1f} GB",
        ]
        lines.append("|" + "|".join(cells) + "|")
    return lines


def median_ms(samples: list[Sample]) -> float:
    return 1000 * float(np.median([seconds for sample in samples for seconds in sample.run.round_s[1:]]))


def describe(made: Comparison) -> list[str]:
    """The lines of one comparison."""
    load, runs, bare = made.ready.load, made.runs, made.bare
    medians = median_ms(runs), median_ms(bare)
    system = f"raysim {made.system.name}, {made.system.processes} x {made.cold.threads} threads"
    lines = [
        f"{load.name}, {system}: {load.about}; {load.rounds} rounds, {len(runs)} repetitions",
        f"    sum of rounds / bare loop   {made.ratio:.3f}   ({span(made.ratios('rounds_s'))}); "
        f"bare against itself {span(made.noise)}",
        f"    CPU time of these rounds    {np.mean(made.ratios('cpu_s')):.3f} of the bare loop's "
        f"({span(made.ratios('cpu_s'))}): {mean(runs, 'cpu_s'):.1f} s, bare {mean(bare, 'cpu_s'):.1f} s",
        f"    median round                {medians[0]:.0f} ms, bare {medians[1]:.0f} ms: {medians[0] / medians[1]:.3f}",
        "    where a round goes          " + ", ".join(f"{part} {share:.1%}" for part, share in shares(made).items()),
        "    ms of a round               "
        + "; ".join(
            f"{name} " + ", ".join(f"{part} {ms:.1f}" for part, ms in part_ms(samples).items())
            for name, samples in (("raysim", runs), ("tuned", made.tuned), ("bare", bare))
        ),
        f"    command to first round      {mean(runs, 'start_s'):.1f} s, bare {mean(bare, 'start_s'):.1f} s; first round "
        f"{np.mean([s.run.round_s[0] for s in runs]):.2f} s; last round to the end {mean(runs, 'end_s'):.1f} s",
        f"    whole command, warm         {mean(runs, 'total_s'):.1f} s, bare {mean(bare, 'total_s'):.1f} s: "
        f"{np.mean(made.ratios('total_s')):.3f}; cold {made.cold.run.total_s:.1f} s, bare {made.cold_bare.run.total_s:.1f} s",
        f"    memory (PSS)                {memory(made.cold)}; bare {memory(made.cold_bare)}",
        f"    sum of rounds / tuned loop  {np.mean(made.of_tuned):.3f}   ({span(made.of_tuned)}); tuned loop / bare loop "
        f"{span(made.ratios('rounds_s', made.tuned))}, CPU time {span(made.ratios('cpu_s', made.tuned))}",
    ]
    return lines


def memory(sample: Sample) -> str:
    kinds = sample.run.memory_mb
    return f"{sum(kinds.values()):.0f} MB (" + ", ".join(f"{kind} {mb:.0f}" for kind, mb in kinds.items()) + ")"


def mean(samples: list[Sample], of: str) -> float:
    return float(np.mean([_value(sample, of) for sample in samples]))


def span(values: list[float], digits: int = 3) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"
