"""Fixtures: the device of tests/device/other.py, which trainers take as the accelerator of this machine."""

from __future__ import annotations

from functools import partial

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from raysim.engine.pool import SerialPool
from raysim.plan.build import make_server, make_trainer
from tests.device.other import OtherDevice, register
from tests.support.federations import recipe_of


@pytest.fixture
def rounds_on(root, monkeypatch):
    """rounds_on(device, plan) -> (server after all rounds, records); device: "cpu" or "other"."""
    register()

    def rounds(device, plan):
        monkeypatch.setattr("raysim.plan.build.accelerator", lambda: device)
        recipe = recipe_of(plan, root, wants_gpu=True)
        with OtherDevice(), sdpa_kernel(SDPBackend.MATH):  # one kernel of attention: others round otherwise
            server = make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))
            records = [server.run_round(index) for index in range(plan.num_rounds)]
            assert server.pool._trainer.model.params.device.type == device
        return server, records

    return rounds
