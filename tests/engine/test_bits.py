"""The result does not depend on the machine room: serial, one, two and three trainers give the same bits."""

from __future__ import annotations

import functools

import pytest

from raysim.engine import cohort
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES

#: With BatchNorm there are buffers and counters as well; without it a few stand for all.
CASES = [(name, "batch") for name in CNN_CASES] + [(name, "none") for name in ("fedavg", "fedvg-block", "fedprox")]


def case(name, norm, root):
    """A plan of as many rounds as a difference takes to reach the parameters: a client's memory is read again in the third."""
    plan = functools.partial(plan_of, root, CNN_CASES[name], model={"norm": norm})
    return plan() if plan().keeps_memory else plan(rounds=2)


@functools.cache
def serial_digest(name, norm, root):
    return run(case(name, norm, root), root).params_sha256()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_any_number_of_trainers_gives_the_same_bits(name, norm, root, ray_pools):
    plan = case(name, norm, root)
    # What a method does not see is how clients are cut among trainers: three for each of them, and one and two for a few.
    pools = ray_pools(plan)[0 if norm == "none" else 2 :]
    assert {run(plan, root, pool).params_sha256() for pool in pools} == {serial_digest(name, norm, root)}
    assert serial_digest(name, norm, root) != run(plan, root, rounds=0).params_sha256()  # something was learned at all


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_give_the_same_bits_and_scores_on_any_number_of_trainers(name, root, ray_pools):
    plan = lora_plan(root, ADAPTER_CASES[name], data={"test": 0.7}, rounds=2, cohort={"size": 5})

    def outcome(pool=None):
        server = server_on(plan, root, pool)
        records = [server.run_round(index) for index in range(plan.num_rounds)]
        return server.params_sha256(), [record.metrics["server/loss"] for record in records]

    expected = outcome()
    assert [outcome(pool) for pool in ray_pools(plan)[1:]] == [expected] * 2


def test_vision_transformer_gives_the_same_bits_too(root, ray_pools):
    part, local = {"alpha": 10.0, "num_clients": 24}, {"batch_size": 8, "epochs": 0.5}
    model = {"name": "vit", "dim": 16, "depth": 2}
    plan = plan_of(root, model=model, rounds=2, cohort={"size": 3}, partition=part, local=local)
    expected = run(plan, root).params_sha256()
    assert [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)] == [expected] * 3


@pytest.mark.essential
def test_stacked_clients_give_the_same_bits_too(root, ray_pools):
    part = {"alpha": 5.0, "num_clients": 80, "min_samples": 2}  # blocks of several clients, which are stacked
    local = {"batch_size": 4, "epochs": 1.5}
    plan = plan_of(root, model={"name": "mlp", "hidden": 8}, rounds=1, cohort={"size": 80}, partition=part, local=local)
    expected = run(plan, root).params_sha256()
    assert [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)] == [expected] * 3


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedvg-block", "scaffold-fedvg"])
def test_a_sum_in_many_parts_gives_the_same_bits_too(name, root, ray_pools, monkeypatch):
    """As those of large models are made; this one has buffers, and SCAFFOLD sums a second vector."""
    expected = serial_digest(name, "batch", root)
    monkeypatch.setattr(cohort, "SUM_ENTRIES", 10)
    plan = case(name, "batch", root)
    assert len(cohort.leaf_cuts(plan.layout.leaves)) > 5
    assert [run(plan, root, pool).params_sha256() for pool in (None, ray_pools(plan)[1])] == [expected] * 2


@pytest.mark.slow
def test_different_methods_give_different_results(root):
    digests = {name: serial_digest(name, "batch", root) for name in CNN_CASES}
    # Own models leave the global model alone; runs with client memory have a third round.
    own = {"fine_tune-fedvg": "fedvg-model", "ditto-top_k": "top_k", "apfl": "ditto"}
    for name, same in {"fedavg-by-name": "fedavg", **own}.items():
        assert digests.pop(name) == digests[same], name
    assert len(set(digests.values())) == len(digests), digests


def test_run_depends_on_the_seed(root):
    assert run(plan_of(root), root).params_sha256() != run(plan_of(root, seed=4), root).params_sha256()


@pytest.mark.essential
def test_client_memory_and_method_state_are_the_same_on_ray(root, ray_pools):
    plan = plan_of(root, [*CNN_CASES["scaffold-fedvg"], "feddyn"])
    expected = run(plan, root)
    for pool in ray_pools(plan):
        server = run(plan, root, pool)
        assert (server.method_state["scaffold"]["control"] == expected.method_state["scaffold"]["control"]).all()
        clients = expected.changed_clients()
        expected._changed = set(clients)
        assert server.changed_clients() == clients
        for client in clients:
            mine, theirs = server.client_memory(client), expected.client_memory(client)
            assert (mine["scaffold"]["control"] == theirs["scaffold"]["control"]).all()
            assert (mine["feddyn"]["h"] == theirs["feddyn"]["h"]).all()
