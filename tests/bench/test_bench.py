"""The bench's own numbers on a tiny federation: the bare loop does what raysim does, and a comparison has all its lines."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

import raysim
from raysim.data.sources import prepare
from tests.bench import bare, endurance, large, scale, scoring, whole
from tests.bench.watch import Watched
from tests.bench.workloads import WORKLOADS, prepared

PROJECT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "is_tuned"),
    [
        ({}, False),
        ({"model": {**WORKLOADS["tiny"].config["model"], "norm": "batch"}, "methods": []}, True),
        ({"model": {"name": "mlp"}, "methods": []}, True),  # clients as batched matrix products
    ],
)
def test_the_bare_loop_trains_weighs_and_evaluates_as_raysim(changes, is_tuned, tmp_path):
    tiny = WORKLOADS["tiny"]
    ready = prepared(replace(tiny, config=tiny.config | changes), tmp_path)
    run = raysim.run(ready.config, resources={"backend": "serial"}, name="serial", quiet=True)
    job = bare.Job(ready.job, is_tuned=is_tuned)
    start = [tensor.detach().clone() for tensor in bare.tensors_of(job.model)]
    outs, losses = [[torch.zeros_like(tensor) for tensor in start] for _ in range(2)], []
    totals = [torch.zeros(len(start), dtype=torch.float64) for _ in range(2)]
    workers = [bare.Worker(job, start, out, total) for out, total in zip(outs, totals, strict=True)]
    for index, cohort in enumerate(job.cohorts.tolist()):
        for worker, share in zip(workers, (cohort[:1], cohort[1:]), strict=True):
            worker.train(index, share)
        bare.average(start, outs, totals)
        losses.append(
            sum(worker.evaluate(rows)[1] for worker, rows in zip(workers, (slice(9), slice(9, None)), strict=True))
        )
    expected = run.history["server/loss"].tolist()
    assert [loss / 40 for loss in losses] == pytest.approx(expected, abs=1e-5)
    assert len(expected) == 4
    assert max(expected) - min(expected) > 1e-3  # the losses are no constants


def test_ratios_are_taken_to_the_bare_loops_on_both_sides():
    def sample(*rounds, **parts):
        return whole.Sample(Watched(1.0, [9.0, *rounds], 1.0, 20.0, 5.0, {"driver": 5.0}), parts)

    class ready:
        load = WORKLOADS["tiny"]

    loop = {"train": 0.2, "aggregate": 0.1, "evaluate": 0.0}
    made = whole.Comparison(
        ready,
        whole.SYSTEMS["ray"],
        cold=sample(1),
        cold_bare=sample(1),
        bare=[sample(2.0, 2.0, **loop), sample(3.0, 3.0, **loop), sample(1.0, 1.0, **loop)],
        runs=[
            sample(5.0, 5.0, train=4.0, aggregate=2.0, evaluate=1.0),
            sample(2.0, 4.0, train=4.0, aggregate=2.0, evaluate=0.2),
        ],
        tuned=[sample(0.5, 0.5, **loop), sample(0.25, 0.25, **loop)],
    )
    assert made.ratios("rounds_s") == [10 / 5, 6 / 4]
    assert made.ratio == 16 / 9
    assert made.noise == [6 / 4, 2 / 6]
    text = "\n".join([*whole.describe(made), *whole.table([made])])
    assert "1.778   (1.500 to 2.000); bare against itself 0.333 to 1.500" in text
    assert made.of_tuned == [10, 12]
    assert "sum of rounds / tuned loop  11.000   (10.000 to 12.000); tuned loop / bare loop 0.125 to 0.200" in text
    assert (
        "|tiny, ray|1.78 (1.50 to 2.00)|0.16|11.00 (10.00 to 12.00)|0.33 to 1.50|1.00, tuned 1.00|4500, 2000 ms|50, 25, 8, 18 %|"
        in text
    )
    assert "tuned train 100.0, aggregate 50.0, evaluate 0.0, rest 225.0; bare" in text
    assert "train 50.0%, aggregate 25.0%, evaluate 7.5%, record and rest 17.5%" in text


@pytest.mark.slow
def test_the_plain_way_of_scoring_finds_the_same_norms(tmp_path):
    ours, plain, error = scoring.measure(tmp_path, WORKLOADS["tiny"], pairs=1)
    assert len(ours) == len(plain) == 1
    assert error < 1e-3  # sums in another order


@pytest.mark.slow
def test_scale_reports_memory_early_and_late_and_the_size_of_files(tmp_path):
    lines = scale.measure(scale.load_of(20, cohort=5, rounds=6), tmp_path, "resources.backend=serial")
    assert re.search(r"20 clients of 4 images, 5 a round: \d+ ms a round", lines[0])
    assert re.search(r"after round 5 and 6, MB: driver [1-9]\d+ -> [1-9]\d+", lines[1])
    assert re.search(r"run directory: \d\.\d MB in \d+ files: .*events", lines[2])
    assert "clients-00000.arrow" in lines[3]


@pytest.mark.cluster
@pytest.mark.skipif(
    tuple(map(int, ray.__version__.split(".")[:2])) < (2, 60),
    reason="older Rays do not count the bytes that a node received",
)
def test_a_round_moves_one_model_to_each_node_and_one_sum_from_it_whatever_its_number_of_trainers():
    """Ray's own count. The model is sent once more before the first round; a sum has eight bytes for four of the model."""
    rounds = 3
    for trainers_each in (1, 2):
        run = large.carried("tiny", 2, trainers_each, store_mb=100, rounds=rounds)
        size = 1e6 * run.size_mb
        assert run.server.received / rounds == pytest.approx(2 * 2 * size, rel=0.01)
        assert [load.received / (rounds + 1) for load in run.others] == pytest.approx([size] * 2, rel=0.01)
        assert [load.spilled for load in (run.server, *run.others)] == [0, 0, 0]


@pytest.mark.slow
def test_memory_does_not_grow_with_rounds():
    """In a process of its own: others' garbage is not counted. 500 rounds, serial and on Ray, by hand: README."""
    command = [sys.executable, "-m", "tests.bench.growth", "serial", "250"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT).stdout
    assert float(printed.split()[1]) < 0.05, printed


def test_growth_over_several_lives_of_a_process_is_one_slope_and_no_jump_between_them():
    def life(first, level, per_round):
        return [endurance.Look(index, {"driver MB": level + per_round * index}) for index in range(first, first + 50)]

    # The second process holds 40 MB less than the first one did; both grow by 2 MB in 1,000 rounds.
    assert endurance.slopes([life(0, 100, 0.002), life(50, 60, 0.002)]) == {"driver MB": pytest.approx(2.0)}
    assert endurance.slopes([life(0, 100, 0.0), life(50, 140, 0.0)]) == {"driver MB": pytest.approx(0.0)}


@pytest.mark.slow
def test_copies_of_a_run_are_finished_runs_to_a_report(tmp_path):
    prepare("digits", tmp_path / "data")
    endurance.many_runs(tmp_path, 24)
    report = raysim.report(tmp_path / "many", out=tmp_path / "report")
    assert "24 finished of 24" in report.text
    assert len(report.cells) == 20
    assert report.cells["n"].sum() == 24
