"""Attacks by data: flipped labels and backdoors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.attack_data import backdoor, label_flip
from raysim.core.method import Batch, Crowd, RunSizes, Update
from tests.methods.test_attack import STEADY, attacked
from tests.support.federations import plan_of, server_on
from tests.twins.federation import Naive, assert_close

#: Three clients, and the one that attacks with a share of a third.
CROWD = Crowd(3, 0)
BAD = int(CROWD.drawn(1 / 3))


class NaiveFlip(Naive):
    """A client whose labels are the others'."""

    def batch(self, rows):
        x, y = super().batch(rows)
        return x, torch.tensor([9 - int(label) for label in y])


def test_a_flipped_client_trains_on_flipped_labels(root):
    found = attacked(root, "label_flip")
    naive = NaiveFlip(plan_of(root))
    for client in found.attackers:
        model, _ = naive.local(client, 0)
        views = found.server.layout.views(found.sent[client])
        for name, value in model.named_parameters():
            assert_close(views[name], value.detach() - naive.begun[name], 1e-4, name)


def test_every_methods_loss_sees_the_poisoned_batch():
    seen = []
    client = SimpleNamespace(id=BAD, round_index=0, crowd=CROWD, class_counts=torch.zeros(5))
    batch = Batch(torch.zeros(5, 1, 6, 6), torch.tensor([0, 1, 3, 2, 4]))

    def inner(params, batch):
        seen.append(batch)
        return params

    patched = backdoor(share=1 / 3, target=2, poison=0.45)
    flips = [
        label_flip(share=1 / 3, **options) for options in ({}, {"target": 3}, {"source": 1}, {"source": 1, "target": 0})
    ]
    for method in (*flips, patched):
        method.grads(inner, client)(torch.zeros(2), batch)
    assert [found.targets.tolist() for found in seen] == [
        [4, 3, 1, 2, 0],
        [3] * 5,
        [0, 3, 3, 2, 4],
        [0, 0, 3, 2, 4],
        [2, 2, 2, 2, 4],
    ]
    images = seen[4].inputs
    assert images[:3].sum() == 3 * 9
    assert (images[:3, :, 3:, 3:] == 1).all()
    assert images[3:].sum() == 0
    assert batch.inputs.sum() == 0  # the rows of the set are as they were
    client.id = (BAD + 1) % 3
    assert label_flip(share=1 / 3).grads(inner, client) is inner


def test_a_boosted_backdoor_multiplies_the_update():
    hook = backdoor(share=1 / 3, scale=4.0).outgoing
    leaves = [SimpleNamespace(size=2, is_buffer=False), SimpleNamespace(size=5, is_buffer=True)]
    client = SimpleNamespace(id=BAD, round_index=0, crowd=CROWD, layout=SimpleNamespace(shared=leaves))
    sent = hook(Update(torch.ones(2), 1), client)
    assert (sent.values.tolist(), sent.num_bytes) == ([4, 4], 8)


def test_a_patch_has_to_fit_the_shorter_side_of_an_image():
    sizes = RunSizes(population=10, cohort_size=5, num_rounds=2, num_classes=10, input_shape=(8, 4, 1))
    assert backdoor(trigger=4).fits(sizes) == ""
    assert "5 x 5 does not fit" in backdoor(trigger=5).fits(sizes)


@pytest.mark.slow
def test_a_backdoor_opens_and_an_honest_model_has_none(root):
    options = {"share": 0.4, "target": 7, "scale": 2.0}
    groups = {**STEADY, "rounds": 30, "evaluation": {"every": 30}}

    def last(**others):
        server = server_on(plan_of(root, [{"backdoor": {**options, **others}}], **groups), root)
        for index in range(30):
            record = server.run_round(index)
        return record.metrics

    poisoned, honest = last(), last(share=0)
    assert min(poisoned["server/accuracy"], honest["server/accuracy"]) > 0.7
    assert poisoned["attack/success"] > 0.9
    assert honest["attack/success"] < 0.3


def test_success_is_the_share_of_other_classes_that_become_the_target(root):
    """Against the model's own answers, image by image."""
    options = {"share": 0.4, "target": 7, "value": 0.7, "trigger": 2, "scale": 2.0}
    server = server_on(plan_of(root, [{"backdoor": options}], rounds=8, evaluation={"every": 8}, **STEADY), root)
    for index in range(8):
        record = server.run_round(index)
    trainer = server.pool._trainer
    rows = trainer.data.held_out("test")
    trainer.model.load(server.state, {})
    trainer.module.eval()
    fooled = []
    for image, label in zip(trainer.transform(rows.inputs), rows.targets.tolist(), strict=True):
        if label != 7:
            image = image.clone()
            image[:, -2:, -2:] = 0.7
            with torch.no_grad():
                fooled.append(int(trainer.module(image[None]).argmax()) == 7)
    assert 0.2 < np.mean(fooled) < 0.8  # of both sorts
    assert record.metrics["attack/success"] == pytest.approx(np.mean(fooled), abs=1.5 / len(fooled))
