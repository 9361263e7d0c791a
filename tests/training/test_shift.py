"""Feature shift: every client's own, the same in every epoch, and nobody else's business."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from raysim.base.errors import UserCodeError
from raysim.core.seeding import torch_generator
from raysim.training.inputs import Examples, InputTransform
from raysim.training.local import LocalSettings, training_batches
from raysim.training.shift import Shift, noise

IMAGES = torch.randint(0, 256, (40, 6, 5, 3), dtype=torch.uint8, generator=torch_generator(3))


def brighter(images, client, num_clients):
    return images + client / num_clients


def shift(function=noise, num_clients=5, seed=0):
    return Shift(lambda *, generator, **given: function(**given), num_clients, seed)


def noisy(std, num_clients=5, seed=0):
    return Shift(lambda **given: noise(std=std, **given), num_clients, seed)


def test_noise_grows_with_the_clients_number_and_the_last_one_has_all():
    units = IMAGES.float()
    for client in range(5):
        added = (noisy(0.2).of_client(IMAGES, client) - units) / 255
        expected = 0.2 * client / 4
        error = 6 * expected / math.sqrt(2 * added.numel())  # six standard errors of a deviation
        assert float(added.std()) == pytest.approx(expected, abs=error + 1e-6)
        assert float(added.mean()) == pytest.approx(0, abs=6 * expected / math.sqrt(added.numel()) + 1e-6)
    assert noisy(3.0).of_client(IMAGES, 4).min() < -100  # nothing is cut off
    assert torch.equal(noisy(3.0, num_clients=1).of_client(IMAGES, 0).round(), units)


def test_noise_drawn_anew_differs_in_every_batch_and_has_the_same_deviation():
    shifts = Shift(lambda **given: noise(std=0.2, **given), 5, 0, is_anew=True)
    own = Examples(
        torch.full((6, 32, 32, 1), 100, dtype=torch.uint8), torch.arange(6), partial(shifts.of_batch, client=4)
    )
    settings = LocalSettings(lr=0.1, batch_size=3)

    def pixels(examples):
        batches = training_batches(
            examples, InputTransform(), settings, num_steps=4, generator=torch_generator(1), skip_single=False
        )
        return [batch.inputs for batch in batches]

    noisy_batches, plain = pixels(own), pixels(Examples(own.inputs, own.targets))
    assert all(torch.equal(batch, torch.full_like(batch, 100 / 255)) for batch in plain)
    deviations = [float((batch - 100 / 255).std()) for batch in noisy_batches]
    assert deviations == pytest.approx([0.2] * 4, abs=0.02)
    assert len({float(batch.sum()) for batch in noisy_batches}) == 4  # both epochs have noise of their own
    assert all(torch.equal(a, b) for a, b in zip(noisy_batches, pixels(own), strict=True))


def test_draws_hang_on_seed_client_and_purpose_alone():
    first = noisy(0.2).of_client(IMAGES, 3)
    assert torch.equal(first, noisy(0.2).of_client(IMAGES, 3))
    for other in (noisy(0.2).of_client(IMAGES, 3, "test"), noisy(0.2, seed=1).of_client(IMAGES, 3)):
        assert not torch.allclose(first, other)


def test_rows_that_the_server_holds_are_their_owners_or_dealt_evenly():
    black = torch.zeros(10, 2, 2, 1, dtype=torch.uint8)
    owned = shift(brighter).of_held_out(black, "test", np.array([1, 2, 3, 4, 0]))
    assert owned[:, 0, 0, 0].div(51).round().tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    dealt = shift(brighter).of_held_out(black, "test", None)[:, 0, 0, 0].div(51).round().long()
    assert dealt.bincount().tolist() == [2] * 5
    assert dealt.tolist() != sorted(dealt.tolist())
    assert torch.equal(dealt, shift(brighter).of_held_out(black, "test", None)[:, 0, 0, 0].div(51).round().long())


@pytest.mark.parametrize("wrong", [lambda images, **_: images[:1], lambda images, **_: images.numpy()])
def test_a_shift_that_returns_something_else_is_named(wrong):
    with pytest.raises(UserCodeError, match="a shift returned"):
        shift(wrong).of_client(IMAGES, 1)
