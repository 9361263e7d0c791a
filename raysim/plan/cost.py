"""Cost of a run: counts without training, and seconds from a few short rounds on the run's shards."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from raysim.base.errors import MethodError
from raysim.core.cohorts import choose_cohort, without_dropouts
from raysim.core.method import Sampling
from raysim.core.seeding import derive_seed
from raysim.core.timetable import Timetable, Turn
from raysim.engine.pool import SerialPool
from raysim.engine.round_metrics import RoundRecord
from raysim.engine.schedule import Phase
from raysim.plan.build import Plan, Recipe, cached_skeleton, device_of, make_phases, make_server, make_trainer
from raysim.plan.start import serial_recipe
from raysim.plan.timing import speeds_of, timetable_of
from raysim.training.local import LocalSettings, batch_bounds, needs_two_examples

#: Seconds of a run outside of its rounds, and of a round outside of training, sum and scores: records, pictures, the
#: final model. Measured with the digits on a machine of two cores.
RUN_S, ROUND_S = 0.6, 0.002

#: Local steps of the two measured rounds, whose difference gives the cost of a step; slow steps take fewer.
FEW_AND_MANY, SLOW_STEP_S, SLOW_FEW_AND_MANY = (2, 8), 1.0, (1, 3)

#: Held-out rows of the first measurement and the least number of later ones; seconds that more rows may take.
LOOK_ROWS, SCORING_S = 64, 4.0

#: Seconds of a measured round up to which clients are added for accuracy, and seconds of all measured rounds of a phase
#: if there are few pairs: short measurements are inaccurate beside other work on the machine.
ROUND_LIMIT_S, PHASE_S = 0.5, 4.0

#: CPU seconds after which further pairs of network and method are no longer measured.
LIMIT_S = 60.0

#: Keys that do not change the time of a step.
TIMELESS = {
    "local": {"lr", "lr_decay", "schedule", "epochs", "steps"},
    "data": {"root", "files", "split", "split_within_clients"},
}


@dataclass(frozen=True)
class Work:
    """Work of a phase: rounds, and the totals of clients, local steps, trained images, and late clients."""

    rounds: int
    clients: int
    steps: int
    images: int
    late: int = 0


@dataclass(frozen=True)
class RunCost:
    """Work of a run without an early end.

    Attributes:
      work: of each phase.
      scored: images in evaluations, and a rough count of images that clients score for methods.
      held_out: images of one evaluation.
      simulated_s: simulated time of the run, with updates and reports that are not compressed; 0 without a clock.
      pair: network, inputs, batch size and methods; runs of one pair have the same time of a step. network: a part
        of pair.
    """

    work: tuple[Work, ...]
    evaluations: int
    scored: int
    held_out: int
    pair: str
    network: str
    simulated_s: float = 0.0

    @property
    def total(self) -> Work:
        return Work(*(sum(column) for column in zip(*map(astuple, self.work), strict=True)))


@dataclass(frozen=True)
class Rates:
    """Rates of a phase on this machine: seconds of a step, of a client without steps, of an evaluation; MB of a
    client.
    """

    step_s: float
    client_s: float
    evaluation_s: float
    up_mb: float
    down_mb: float


def cost_of(plan: Plan) -> RunCost:
    """Return the work of a plan, from the sizes of the clients."""
    config, phases = plan.config, make_phases(plan.config, plan.methods)
    skips_single = needs_two_examples(cached_skeleton(replace(plan.spec, pretrained=None)))
    work, first, sizes = [], 0, plan.manifest.sizes
    table = timetable_of(config, speeds_of(config))
    for phase in phases:
        if table is None:
            part = range(first, first + phase.rounds)
            turns = _turns(sizes.size, phase.cohort_size, part, config.seed, phase.dropout, phase.sampling)
        else:
            turns = _timed_turns(table, plan, phase, first, skips_single)
        work.append(_work(phase, sizes, config.seed, first, turns, skips_single))
        first += phase.rounds
    every, rounds = config.evaluation.every, plan.num_rounds
    evaluations = (rounds // every if every else 0) + (every == 0 or rounds % every > 0)
    num_test, num_validation = len(plan.manifest.test), len(plan.manifest.validation)
    held_out = num_test + num_validation + len(plan.manifest.unseen)
    held_out += sum(len(other.rows) for other in plan.manifest.test_sets)
    scored = evaluations * held_out
    for phase, done in zip(phases, work, strict=True):
        scored += done.clients * num_validation * ("validation-set" in phase.stack.needs)
        scored += done.clients * num_test * ("test-set" in phase.stack.needs)
    network = json.dumps([config.model.model_dump(mode="json"), plan.info.shape, len(plan.info.classes)])
    groups = config.model_dump(mode="json", include={"methods", "evaluation", *TIMELESS}, exclude=TIMELESS)
    counts = groups | {"held_out": held_out}
    threads = [config.resources.cpus, config.resources.gpus_per_trainer]
    pair = json.dumps([network, counts, threads], sort_keys=True)
    simulated_s = 0.0 if table is None else table.now_s
    return RunCost(tuple(work), evaluations, scored, held_out, pair, network, simulated_s)


def _timed_turns(table: Timetable, plan: Plan, phase: Phase, first: int, skips_single: bool) -> list[Turn]:
    """Return the clients whose updates end each round; advance simulated time to the end of the phase."""
    sizes, sent = plan.manifest.sizes, plan.layout.shared_bytes
    turns = []
    for index in range(first, first + phase.rounds):

        def seconds_of(clients: np.ndarray, index: int = index) -> np.ndarray:
            steps = [phase.num_steps(each, int(sizes[each]), skips_single, plan.config.seed, index) for each in clients]
            return table.speeds.seconds(clients, np.array(steps), sent, sent)

        turns.append(_trained(phase.turn_of(table, index, seconds_of), index))
    return turns


def _trained(turn: Turn, index: int) -> Turn:
    """Return the turn; in a round without clients, one client trains and is dropped."""
    return turn if len(turn.clients) else turn._replace(clients=np.zeros(1, np.int64), begun=np.array([index]))


def _work(phase: Phase, sizes: np.ndarray, seed: int, first: int, turns: Sequence[Turn], skips_single: bool) -> Work:
    if phase.stragglers:  # the share of a client is drawn for each round
        pairs = [pair for turn in turns for pair in zip(turn.begun.tolist(), turn.clients.tolist(), strict=True)]
    else:
        pairs = [(first, client) for client in range(len(sizes))]
    steps = [phase.num_steps(client, int(sizes[client]), skips_single, seed, index) for index, client in pairs]
    counts = zip(steps, (int(sizes[client]) for _, client in pairs), strict=True)
    images = [images_of(count, size, phase.settings, skips_single) for count, size in counts]
    chosen = np.concatenate([turn.clients for turn in turns]) if turns else np.empty(0, np.int64)
    times = np.ones(len(pairs), np.int64) if phase.stragglers else np.bincount(chosen, minlength=len(sizes))
    late = sum(turn.num_late for turn in turns)
    return Work(phase.rounds, len(chosen), int(times @ np.array(steps)), int(times @ np.array(images)), late)


@lru_cache(maxsize=64)  # the trials of a sweep have few different cohorts
def _turns(population: int, size: int, rounds: range, seed: int, dropout: float, sampling: Sampling) -> list[Turn]:
    """The cohort of each round."""
    turns = []
    for index in rounds:
        cohort = choose_cohort(population, size, seed=seed, round_index=index, sampling=sampling)
        cohort = without_dropouts(cohort, dropout, seed=seed, round_index=index)
        turns.append(_trained(Turn(cohort, np.full(len(cohort), index)), index))
    return turns


def images_of(steps: int, num_examples: int, settings: LocalSettings, skips_single: bool) -> int:
    """Images in the local steps of a client: the last batch of an epoch may be short."""
    batches = [end - start for start, end in batch_bounds(num_examples, settings.batch_size, skip_single=skips_single)]
    return 0 if not batches else steps // len(batches) * sum(batches) + sum(batches[: steps % len(batches)])


def measured(plan: Plan, cost: RunCost, phase_s: float = PHASE_S) -> tuple[Rates, ...]:
    """Return the rates of each phase, from short rounds of few and of many local steps on the plan's own shards.

    Parameters are random: a step takes as long, and no pretrained weights are read or fetched.

    A network too slow for all held-out rows scores every n-th row. The times are scaled up by n: of an evaluation, and,
    if methods score at clients, of a client outside of its steps.
    """
    model = plan.config.model.model_copy(update={"pretrained": None})
    plan = replace(plan, config=plan.config.model_copy(update={"model": model}))
    recipe, phases = serial_recipe(plan), make_phases(plan.config, plan.methods)
    most = math.ceil(max(1, cost.held_out) / LOOK_ROWS)
    look = _Rounds(plan, replace(recipe, held_out_every=most))
    first, batch = phases[0], cost.work[0].images / max(1, cost.work[0].steps)
    record = look.of_few_clients(first, min(1, _steps(first, 1)), batch)
    images = int(record.clients["num_steps"].sum()) * batch + len(record.clients["client"]) * LOOK_ROWS * _scores(first)
    image_s = record.metrics["system/train_s"] / max(1.0, images)
    every = min(most, max(1, math.ceil(cost.held_out * image_s / SCORING_S)))
    rounds = _Rounds(plan, replace(recipe, held_out_every=every))

    rates = []
    for phase, work in zip(phases, cost.work, strict=True):
        batch = work.images / max(1, work.steps)
        few, many = (_steps(phase, n) for n in (SLOW_FEW_AND_MANY if image_s * batch > SLOW_STEP_S else FEW_AND_MANY))
        began = time.perf_counter()
        # The first round warms up; the second is evaluated, once, since scores can take longer than steps.
        trial = [rounds.of_few_clients(phase, few, batch, evaluates=evaluates) for evaluates in (False, True)][-1]
        count = len(trial.clients["client"])
        guess_s = trial.metrics["system/train_s"] / count * (many / few if few else 1)
        count = max(count, min(phase.cohort_size, int(ROUND_LIMIT_S / max(guess_s, 1e-6))))
        pairs: list[list[RoundRecord]] = []
        while not pairs or time.perf_counter() - began < phase_s:
            pairs.append([rounds.of(phase, steps, count, batch) for steps in (few, many)])
        shorter, longer = (_mean(records) for records in zip(*pairs, strict=True))
        rate = rates_of(shorter, longer, trial.metrics["system/evaluate_s"] * every)
        rates.append(replace(rate, client_s=rate.client_s * (every if _scores(phase) else 1)))
    return tuple(rates)


def _scores(phase: Phase) -> bool:
    """Whether clients score held-out rows for a method."""
    return bool({"validation-set", "test-set"} & phase.stack.needs)


def _steps(phase: Phase, wanted: int) -> int:
    return 0 if phase.settings.steps == 0 else wanted


class _Rounds:
    """Short rounds of a plan in this process; each round has its own number, since trainers cache by round."""

    def __init__(self, plan: Plan, recipe: Recipe):
        self._trainer = make_trainer(recipe)
        # Without simulated time: all clients of a short round train.
        server = make_server(replace(recipe, speeds=None), SerialPool(lambda: self._trainer, plan.keeps_memory))
        self._server = replace(server, clock=clock_of(recipe))
        self._sizes, self._seed, self._played = plan.manifest.sizes, plan.config.seed, 0

    def of(self, phase: Phase, steps: int, num_clients: int, batch: float, *, evaluates: bool = False) -> RoundRecord:
        """Run a round of a phase. batch: mean number of images of a step in the whole run."""
        settings = replace(phase.settings, steps=steps, lr=min(phase.settings.lr, 1e-3))  # 8 steps must not diverge
        one = replace(phase, settings=settings, rounds=1, cohort_size=num_clients)
        one = replace(one, dropout=0.0, stragglers=0.0, sampling="fixed")
        # Phases without rounds before it give the round a new number; a phase after it keeps it from being the last
        # round, which is always evaluated.
        self._trainer.phases = (*[replace(one, rounds=0)] * self._played, one, one)
        seed = _like_all(self._sizes, num_clients, phase.settings.batch_size, batch, self._seed)
        self._played += 1
        server = replace(self._server, phases=self._trainer.phases, evaluate_every=int(evaluates), seed=seed)
        return server.run_round(0)

    def of_few_clients(self, phase: Phase, steps: int, batch: float, *, evaluates: bool = False) -> RoundRecord:
        """Run a round with two clients, or with more if a method needs more."""
        count = min(2, phase.cohort_size)
        while True:
            try:
                return self.of(phase, steps, count, batch, evaluates=evaluates)
            except MethodError:
                if count == phase.cohort_size:
                    raise
                count = min(2 * count, phase.cohort_size)


def clock_of(recipe: Recipe) -> Callable[[], float]:
    """Return a clock: CPU seconds of this process; wall-clock seconds with a GPU."""
    if device_of(recipe) != "cpu":
        return time.perf_counter
    return lambda: time.process_time() / recipe.num_threads


def _mean(records: Sequence[RoundRecord]) -> RoundRecord:
    """Return one record with the mean of each metric."""
    metrics = {key: fmean(record.metrics[key] for record in records) for key in records[0].metrics}
    return replace(records[0], metrics=metrics)


def _like_all(sizes: np.ndarray, count: int, batch_size: int, mean_images: float, seed: int) -> int:
    """Return a seed whose first cohort has representative batch sizes."""
    batches = np.minimum(sizes, batch_size)

    def distance(each: int) -> float:
        return abs(float(batches[choose_cohort(len(sizes), count, seed=each, round_index=0)].mean()) - mean_images)

    return min((derive_seed(seed, "cost", number) for number in range(64)), key=distance)


def rates_of(few: RoundRecord, many: RoundRecord, evaluation_s: float) -> Rates:
    """Return the rates: a step costs the slope between two rounds of the same clients, a client the remainder.

    Args:
      few, many: rounds that differ only in their local steps. evaluation_s: seconds of an evaluation, returned as
        given.
    """
    clients = len(few.clients["client"])
    steps = [int(record.clients["num_steps"].sum()) for record in (few, many)]
    train = [record.metrics["system/train_s"] for record in (few, many)]
    more = steps[1] - steps[0]
    step_s = max(0.0, (train[1] - train[0]) / more) if more else 0.0
    left_s = max(0.0, train[0] - steps[0] * step_s) + few.metrics["system/aggregate_s"]
    up, down = (few.metrics[f"comm/{way}_mb"] / clients for way in ("up", "down"))
    return Rates(step_s, left_s / clients, evaluation_s, up, down)


def seconds_of(cost: RunCost, rates: Sequence[Rates], trainers: int = 1) -> float:
    """Return the seconds of a run with this number of trainers."""
    seconds = RUN_S + cost.evaluations * rates[0].evaluation_s / trainers
    for work, rate in zip(cost.work, rates, strict=True):
        at_once = max(1.0, min(trainers, work.clients / max(1, work.rounds)))
        seconds += (work.clients * rate.client_s + work.steps * rate.step_s) / at_once + work.rounds * ROUND_S
    return seconds


def measure_all(
    runs: Sequence[tuple[RunCost, Callable[[], Plan]]],
    on_step: Callable[[str], None] = lambda _: None,
    limit_s: float = LIMIT_S,
) -> tuple[dict[str, tuple[Rates, ...]], int]:
    """Return (pair -> its rates, number of pairs that have the mean rates of their network, since time ran out).

    Args:
      runs: (cost, function that makes the plan) of each run; one run is measured for each pair.
    """
    pairs = {cost.pair: (cost, make_plan) for cost, make_plan in runs}
    networks = {cost.network: cost.pair for cost, _ in pairs.values()}  # one pair of each network is always measured
    order = dict.fromkeys([*networks.values(), *pairs])
    rates: dict[str, tuple[Rates, ...]] = {}
    began = time.process_time()
    for number, pair in enumerate(order):
        cost, make_plan = pairs[pair]
        if number < len(networks) or time.process_time() - began < limit_s:
            on_step(f"measuring a few local steps: {number + 1} of {len(pairs)} pairs of network and methods")
            rates[pair] = measured(make_plan(), cost, min(PHASE_S, limit_s / len(pairs)))
    num_measured = len(rates)
    for pair, (cost, _) in pairs.items():
        if pair not in rates:
            alike = [phases[0] for other, phases in rates.items() if pairs[other][0].network == cost.network]
            mean = Rates(*(fmean(column) for column in zip(*map(astuple, alike), strict=True)))
            rates[pair] = (mean,) * len(cost.work)
    return rates, len(pairs) - num_measured
