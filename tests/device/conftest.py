"""Fixtures: the device of tests/device/other.py, which trainers take as the accelerator of this machine."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.other import OtherDevice, register
from tests.support.federations import recipe_of, server_on


@pytest.fixture
def on_device(monkeypatch):
    """on_device(name): a block in which trainers take the device "cpu" or "other" as this machine's accelerator."""
    register()

    @contextmanager
    def block(name):
        with monkeypatch.context() as patch, OtherDevice(), sdpa_kernel(SDPBackend.MATH):  # others round otherwise
            patch.setattr("raysim.plan.build.accelerator", lambda _: name)
            patch.setattr("tests.support.federations.recipe_of", partial(recipe_of, wants_gpu=True))
            yield

    return block


@pytest.fixture
def rounds_on(root, on_device):
    """rounds_on(device, plan) -> (server after all rounds, records)."""

    def rounds(device, plan):
        with on_device(device):
            server = server_on(plan, root)
            records = [server.run_round(index) for index in range(plan.num_rounds)]
            assert server.pool._trainer.model.params.device.type == device
        return server, records

    return rounds
