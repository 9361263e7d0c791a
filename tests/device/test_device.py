"""Trainers on a device that is not the CPU: the CPU's bits, no tensor of the wrong device, no wait inside the local loop."""

from __future__ import annotations

import pytest

from tests.support.federations import lora_plan, plan_of
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES


def outcome(rounds_on, device, plan):
    """(hash of the model, metrics that do not measure time) after the rounds."""
    server, records = rounds_on(device, plan)
    metrics = [
        {name: value for name, value in record.metrics.items() if not name.startswith("system/")} for record in records
    ]
    return server.params_sha256(), repr(metrics)


@pytest.mark.parametrize("name", CNN_CASES)
def test_a_method_has_the_cpus_bits(name, root, rounds_on):
    plan = plan_of(root, CNN_CASES[name], model={"norm": "batch"}, rounds=2)
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_a_method_on_adapters_has_the_cpus_bits(name, root, rounds_on):
    plan = lora_plan(root, ADAPTER_CASES[name], data={"test": 0.7}, rounds=2, cohort={"size": 5})
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)
