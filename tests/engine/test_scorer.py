"""Held-out sets in slices: the same whoever scores them, and shared out over who is there."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from raysim.engine.messages import EvaluationPoint, Slice
from raysim.engine.ray.pool import RayPool
from raysim.engine.ray.slots import TrainerActor, TrainerSlots
from raysim.engine.scorer import Scorer, map_features, slices_of
from raysim.engine.trainer import Trainer
from raysim.plan.build import make_trainer
from raysim.training.evaluate import Score
from raysim.training.inputs import bounds_of
from tests.support.federations import plan_of, recipe_of, server_on


@pytest.mark.parametrize("batch_size", [1, 32, 100, 256, 512, 1000])
@pytest.mark.parametrize("count", [0, 1, 33, 200, 450, 1300, 2049, 2305, 6000, 10_000])
def test_slices_cover_a_set_in_whole_batches_and_are_enough_to_share_out(count, batch_size):
    slices = slices_of("test", count, batch_size)
    assert [row for _, start, end in slices for row in range(start, end)] == list(range(count))
    rows = [end - start for _, start, end in slices]
    assert len(set(rows[:-1])) <= 1
    assert all(size <= max(512, batch_size) + 1 for size in rows)
    if batch_size <= 32:
        assert len(rows) >= min(8, count / 128)
    if (
        rows and rows[0] >= batch_size > 1
    ):  # the batches are those of a pass over the whole set, and so are their losses
        batches = [(start + a, start + b) for _, start, end in slices for a, b in bounds_of(end - start, batch_size)]
        assert batches == bounds_of(count, batch_size)


def test_a_set_of_few_rows_is_one_slice():
    assert len(slices_of("test", 100, 10)) == 1


def test_scores_are_those_of_one_plain_pass(root):
    server = server_on(plan_of(root, model={"norm": "batch"}, data={"test": 0.25}), root)
    server.run_round(0)
    found = server.scorer.scores(server.state, server.counters)["test"]
    trainer = server.pool._trainer
    images, labels = trainer.data.federation.held_out("test")
    trainer.model.load(server.state, server.counters)
    trainer.model.module.eval()
    with torch.no_grad():
        logits = trainer.model.module(trainer.transform(torch.from_numpy(images.copy())))
    assert len(slices_of("test", len(labels), 256)) > 1
    assert (found.labels == labels).all()
    assert (found.columns["predictions"] == logits.argmax(1).numpy()).all()
    assert found.mean_loss == pytest.approx(float(F.cross_entropy(logits, torch.from_numpy(labels.copy()))), rel=1e-5)


def test_every_slice_of_a_large_set_counts():
    class Echo:
        """Scores with the rows' numbers as their labels."""

        def on_slices(self, call, point, slices):
            rows = [np.arange(part.start, part.end) for part in slices]
            return [
                Score({"labels": numbers, "predictions": numbers, "confidences": numbers}, float(len(numbers)))
                for numbers in rows
            ]

    found = Scorer(Echo(), {"test": 10_000, "validation": 30, "test-b": 0}, 256).scores(torch.zeros(1), {})
    assert {name: len(score.labels) for name, score in found.items()} == {"test": 10_000, "validation": 30}
    assert (found["test"].labels == np.arange(10_000)).all()
    assert found["test"].mean_loss == 1


def test_without_a_test_set_no_slice_is_asked_for():
    pool = SimpleNamespace(on_slices=lambda call, point, slices: slices)
    scorer = Scorer(pool, {"validation": 30, "test": 0}, 256)
    assert scorer.on_test(map_features, torch.zeros(1), {}) == []


def test_the_model_is_loaded_once_for_all_slices(root, monkeypatch):
    server = server_on(plan_of(root, data={"test": 0.25, "validation": 0.25}), root)
    loads, model = [], server.pool._trainer.model
    monkeypatch.setattr(model, "load", lambda *values, load=model.load: loads.append(1) or load(*values))
    server.evaluate()
    assert len(loads) == 1


def who(trainer: Trainer, slices: list[Slice]) -> list[tuple]:
    """The trainer's process, how many slices it got, and the slice itself."""
    return [(os.getpid(), len(slices), part) for part in slices]


@pytest.mark.parametrize("count", [1, 2, 8, 11])
def test_slices_are_dealt_evenly_and_answered_in_order(count, root, ray_pools):
    slices = [Slice("test", 10 * index, 10 * index + 10) for index in range(count)]
    for trainers, pool in enumerate(ray_pools(plan_of(root)), 1):
        pool.begin_round()
        answers = pool.on_slices(who, EvaluationPoint(np.zeros(1), {}, {}), slices)
        assert [part for _, _, part in answers] == slices
        shares = {process: share for process, share, _ in answers}
        assert len(shares) == min(trainers, count)
        assert max(shares.values()) - min(shares.values()) <= 1
        assert pool.on_slices(who, EvaluationPoint(np.zeros(1), {}, {}), []) == []


def dies_once(marker: Path, trainer: Trainer, slices: list[Slice]) -> list:
    """Scores, but the first trainer that is asked for the first slice ends its process."""
    if slices[0].start == 0 and not marker.exists():
        marker.write_text(str(os.getpid()))
        os._exit(1)
    return trainer.evaluate(slices)


@pytest.mark.slow  # it starts trainers of its own: the session's must not be lost
def test_a_trainer_lost_in_an_evaluation_changes_no_bit(root, tmp_path, ray_cluster):
    plan = plan_of(root, data={"test": 0.25})
    recipe, serial = recipe_of(plan, root), server_on(plan, root)
    remote = ray_cluster.remote(TrainerActor).options(num_cpus=0.5)
    slots = TrainerSlots(lambda index: remote.remote(partial(make_trainer, recipe)), 2)
    pool = RayPool(slots, plan.keeps_memory)
    server = server_on(plan, root, pool)
    server.pool.begin_round()
    on_slices, marker = pool.on_slices, tmp_path / "died"
    pool.on_slices = lambda call, *values: on_slices(partial(dies_once, marker), *values)
    assert server.evaluate() == serial.evaluate()
    assert int(marker.read_text()) != os.getpid()
    pool.slots.wait_for(2)  # the lost one was replaced
    assert server.evaluate() == serial.evaluate()
    for slot in pool.slots.ready():
        ray_cluster.kill(slot.actor)
