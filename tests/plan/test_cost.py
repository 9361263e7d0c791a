"""What a run will cost: counts beside the records of the run itself, prices from made-up clocks."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from raysim.cli.costs import Priced
from raysim.engine.round_metrics import RoundRecord
from raysim.engine.server import Server
from raysim.folders.run_folder import RunFolder
from raysim.plan import cost as module
from raysim.plan.cost import Rates, RunCost, Work, cost_of, measure_all, measured, rates_of, seconds_of
from raysim.training.local import batch_bounds
from tests.support.runs import a_plan, quietly

RATES = Rates(step_s=2.0, client_s=3.0, evaluation_s=5.0, up_mb=7.0, down_mb=11.0)


def a_record(clients, steps, train_s, aggregate_s=0.0):
    metrics = {"comm/up_mb": 4.0, "comm/down_mb": 6.0, "system/train_s": train_s, "system/aggregate_s": aggregate_s}
    columns = {"client": np.arange(clients), "num_steps": np.full(clients, steps)}
    return RoundRecord(0, metrics, columns, np.zeros((clients, 1)))


def naive_images(rows, sizes, batch_size):
    """Every batch of every client of every round, one after the other."""
    count = 0
    for client, steps in rows:
        bounds = batch_bounds(int(sizes[client]), batch_size, skip_single=False)
        for step in range(steps):
            start, end = bounds[step % len(bounds)]
            count += end - start
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "groups"),
    [
        ([], {}),
        (["scaffold", "ccvr"], {"evaluation": {"every": 2}}),
        (["fedvg"], {"cohort": {"size": 5, "dropout": 0.4, "stragglers": 0.5, "straggler_work": 0.2}}),
        (
            [{"krum": {"attackers": 1}}],
            {"cohort": {"size": 6}},
        ),  # which two clients, the measurement's, are too few for
        ([], {"local": {"epochs": 2.5}, "evaluation": {"every": 0}}),
        pytest.param(  # in some rounds nobody comes
            *([], {"cohort": {"size": 1, "sampling": "poisson"}, "rounds": 6}), marks=pytest.mark.essential
        ),
        ([], {"partition": {"scheme": "joint"}}),
        ([], {"time": {"step_s": {"lognorm": {"s": 1}}, "deadline_s": 3.0}}),
        ([{"fedbuff": {"buffer": 2}}], {"cohort": {"size": 5}, "rounds": 6}),
    ],
)
def test_counts_are_those_that_the_run_records(root, tmp_path, methods, groups):
    plan = a_plan(root, tmp_path, methods, **groups)
    cost = cost_of(plan)
    quietly(plan)
    folder = RunFolder(tmp_path / "a")
    table, progress = folder.client_rows(), folder.progress_rows()
    rows = list(zip(table["client"].to_pylist(), table["num_steps"].to_pylist(), strict=True))
    assert cost.total.rounds == len(progress)
    assert cost.total.clients == len(rows)
    assert cost.total.steps == sum(steps for _, steps in rows)
    assert cost.total.images == naive_images(rows, plan.manifest.sizes, plan.config.local.batch_size)
    assert cost.evaluations == sum(bool(row["server/accuracy"]) for row in progress)
    assert cost.simulated_s == pytest.approx(float(progress[-1].get("time/simulated_s", 0)))
    if methods in ([], [{"krum": {"attackers": 1}}]):
        assert cost.scored == cost.evaluations * (len(plan.manifest.test) + len(plan.manifest.validation))
    if methods == ["fedvg"]:  # its clients score the validation set, too
        assert cost.scored > len(rows) * len(plan.manifest.validation)
    rates = measured(plan, cost)
    for way in ("up", "down"):
        expected = Priced(plan.config, cost, rates, 0.0).mb(way)
        assert expected == pytest.approx(sum(float(row[f"comm/{way}_mb"]) for row in progress), rel=1e-6)
    assert all(rate.client_s > 0 for rate in rates)
    assert rates[0].step_s > 0


def test_held_out_rows_are_scored_once_however_many_rounds_are_measured(root, tmp_path, monkeypatch):
    plan, rounds, scored = a_plan(root, tmp_path), [], []
    run_round = Server.run_round

    def counted(server, index):
        record = run_round(server, index)
        rounds.append(index)
        scored.extend([index] * ("server/accuracy" in record.metrics))
        return record

    monkeypatch.setattr(Server, "run_round", counted)
    assert measured(plan, cost_of(plan), 0.0)[0].evaluation_s > 0
    assert (len(rounds), len(scored)) == (5, 1)  # a first look, to warm up, evaluated, few steps, many steps


def test_rounds_are_measured_again_and_again_as_long_as_there_is_time(root, tmp_path, monkeypatch):
    plan, rounds, run_round = a_plan(root, tmp_path), [], Server.run_round

    def counted(server, index):
        rounds.append(index)
        if len(rounds) > 7:
            raise TimeoutError
        return run_round(server, index)

    monkeypatch.setattr(Server, "run_round", counted)
    with pytest.raises(TimeoutError):
        measured(plan, cost_of(plan), 600.0)


@pytest.mark.parametrize(("methods", "scoring_s"), [([], 0.0), (["fedvg"], 0.02)])
@pytest.mark.parametrize("step_s", [0.5, 40.0])
def test_a_slow_network_scores_few_rows_and_the_price_is_that_of_all(
    root, tmp_path, monkeypatch, methods, scoring_s, step_s
):
    """Clocks by the work that is done: an image of a step, of a client's scoring and of an evaluation have their prices."""
    plan, run_round, evaluated, steps = a_plan(root, tmp_path, methods), Server.run_round, [], []

    def clocked(server, index):
        record, sizes = run_round(server, index), server.federation
        counts = record.clients["num_steps"]
        steps.append(int(counts.sum()))
        train_s = step_s * counts.sum() + scoring_s * len(counts) * sizes.num_validation
        times = {"system/train_s": float(train_s), "system/aggregate_s": 0.0}
        if "server/accuracy" in record.metrics:
            evaluated.append(sizes.num_test + sizes.num_validation)
            times["system/evaluate_s"] = 0.01 * evaluated[-1]
        return replace(record, metrics=record.metrics | times)

    monkeypatch.setattr(Server, "run_round", clocked)
    cost = cost_of(plan)
    (rates,) = measured(plan, cost, 0.0)
    (rows,) = evaluated
    assert rows < cost.held_out / 2
    assert rates.evaluation_s == pytest.approx(0.01 * cost.held_out, rel=0.2)
    assert rates.client_s == pytest.approx(scoring_s * len(plan.manifest.validation), rel=0.2)
    assert rates.step_s == pytest.approx(step_s)
    assert sum(steps[1:]) == 2 * (3 * 2 + 8 if step_s < 1 else 3 * 1 + 3)


def test_what_waits_for_other_work_is_not_priced(root, tmp_path, monkeypatch):
    """A second of waiting in each round, as on a busy machine, is no CPU second."""
    plan, broadcast = a_plan(root, tmp_path), Server._broadcast
    monkeypatch.setattr(Server, "_broadcast", lambda *given: (time.sleep(1.0), broadcast(*given))[1])
    (rates,) = measured(plan, cost_of(plan), 0.0)
    assert 0 < rates.client_s * plan.config.cohort_size < 0.9


def test_a_step_costs_the_slope_and_a_client_what_is_left():
    few = a_record(2, 2, train_s=2 * (2 * 0.5 + 3.0), aggregate_s=0.4)
    many = a_record(2, 8, train_s=2 * (8 * 0.5 + 3.0), aggregate_s=0.4)
    found = rates_of(few, many, 1.5)
    assert found.step_s == pytest.approx(0.5)
    assert found.client_s == pytest.approx(3.0 + 0.2)
    assert found.evaluation_s == 1.5
    assert (found.up_mb, found.down_mb) == (2.0, 3.0)


def test_a_phase_without_steps_has_clients_that_cost_and_steps_that_do_not():
    found = rates_of(a_record(4, 0, train_s=8.0), a_record(4, 0, train_s=9.0), 0.0)
    assert (found.step_s, found.client_s) == (0.0, 2.0)


def test_a_clock_that_ran_backwards_gives_no_price_below_0():
    found = rates_of(a_record(2, 2, train_s=3.0), a_record(2, 8, train_s=1.0), 0.0)
    assert (found.step_s, found.client_s) == (0.0, 1.5)


def test_seconds_add_up_over_phases_and_share_out_over_trainers(monkeypatch):
    monkeypatch.setattr(module, "RUN_S", 0.5)
    monkeypatch.setattr(module, "ROUND_S", 0.25)
    cost = RunCost((Work(10, 40, 100, 0), Work(1, 2, 0, 0)), 10, 0, 0, "p", "n")
    rates = (RATES, Rates(0.0, 1.0, 0.0, 0.0, 0.0))
    assert seconds_of(cost, rates) == 0.5 + 10 * 5 + (40 * 3 + 100 * 2 + 10 * 0.25) + (2 * 1 + 0.25)
    # Four clients a round keep four trainers busy, two clients two.
    assert seconds_of(cost, rates, 4) == 0.5 + 10 * 5 / 4 + (320 / 4 + 2.5) + (2 / 2 + 0.25)


def test_every_network_is_measured_once_and_then_as_many_pairs_as_time_allows(monkeypatch):
    asked, seconds = [], []

    def fake(plan, cost, phase_s):
        asked.append(plan)
        seconds.append(phase_s)
        return (Rates(*[float(plan)] * 5),)

    monkeypatch.setattr(module, "measured", fake)
    runs = [
        (RunCost((Work(1, 1, 1, 1),), 1, 1, 1, pair, network), partial(int, number))
        for number, (pair, network) in enumerate([("a", "x"), ("b", "x"), ("c", "y"), ("a", "x")])
    ]
    rates, num_left = measure_all(runs, limit_s=0.0)
    assert (len(asked), num_left) == (2, 1)
    assert rates["a"] == rates["b"]  # of the same network
    assert rates["c"][0].step_s == 2.0
    asked.clear()
    rates, num_left = measure_all(runs, limit_s=60.0)
    assert (len(asked), num_left) == (3, 0)
    assert seconds[-1] == module.PHASE_S
    measure_all(runs, limit_s=6.0)
    assert seconds[-1] == 2.0  # three pairs share the time
    assert rates["b"][0].step_s == 1.0


@pytest.mark.parametrize(("steps", "taken"), [(None, 3), (1, 3), (0, 0)])
def test_a_phase_without_steps_is_measured_without_steps(steps, taken):
    assert module._steps(SimpleNamespace(settings=SimpleNamespace(steps=steps)), 3) == taken
