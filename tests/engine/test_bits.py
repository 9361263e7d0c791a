"""The result does not depend on the machine room: serial, one, two and three trainers give the same bits."""

from __future__ import annotations

import pytest

from tests.helpers import plan_of, run

BATCH_NORM = {"norm": "batch"}

METHODS = {
    "fedavg": [],
    "uniform": ["uniform"],
    "fedprox": [{"fedprox": {"mu": 0.1}}],
    "fedavgm": [{"fedavgm": {"beta": 0.5}}],
    "fedavgm-nesterov": [{"fedavgm": {"form": "nesterov"}}],
    "fedvg-model": ["fedvg"],
    "fedvg-layer": [{"fedvg": {"granularity": "layer", "norm": "l2", "val_mode": "eval"}}],
    "fedvg-block": [{"fedvg": {"granularity": "block", "mix": "average"}}],
    "fedvg-spectral": [{"fedvg": {"norm": "spectral", "granularity": "layer"}}],
    "fedvg-update": [{"fedvg": {"norm": "update"}}],
    "fedprox-fedavgm-fedvg": ["fedprox", "fedavgm", {"fedvg": {"granularity": "block"}}],
    "fa": ["fa"],
    "dfa": ["dfa"],
    "flfa": [{"flfa": {"candidates": ["conv2", "fc1"]}}],
    "flfa-pairwise": [{"flfa": {"num_layers": 2, "scale": "row", "agreement": "pairwise", "feedback": "resampled"}}],
    "univarfl": [{"univarfl": {"mu": 0.1}}],
    "moon": ["moon"],
    "fedsol": [{"fedsol": {"rho": 0.3}}],
    "fedrs": ["fedrs"],
    "fedlc": ["fedlc"],
    "fedacg": ["fedacg"],
    "freeze": ["freeze"],
    "fedrs-moon-fedsol-flfa": ["fedrs", "moon", "fedsol", {"flfa": {"candidates": ["conv2", "fc1"]}}],
    "toy-scaffold-fedvg": ["tests.toys:scaffold", "fedvg"],
    "toy-livar": [{"tests.toys:livar": {"trained": ["fc1.weight"]}}],
    "toy-regmean": ["tests.toys:regmean"],
    "toy-ccvr": ["tests.toys:ccvr"],
    "toy-elastic": ["tests.toys:elastic"],
    "toy-flfa": [{"tests.toys:flfa": {"layers": ["fc1", "fc2"], "first": "fc2"}}],
    "toy-personal": ["tests.toys:personal_head"],
}


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_trainers_gives_the_same_bits(name, norm, root, ray_pools):
    plan = plan_of(root, METHODS[name], model={"norm": norm})
    expected = run(plan, root)
    digests = [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)]
    assert digests == [expected.params_sha256()] * 3
    assert expected.params_sha256() != run(plan, root, rounds=0).params_sha256()  # something was learned at all


def test_different_methods_give_different_results(root):
    digests = {name: run(plan_of(root, METHODS[name]), root).params_sha256() for name in METHODS}
    assert len(set(digests.values())) == len(digests), digests


def test_run_depends_on_the_seed(root):
    assert run(plan_of(root), root).params_sha256() != run(plan_of(root, seed=4), root).params_sha256()


def test_client_memory_and_method_state_are_the_same_on_ray(root, ray_pools):
    plan = plan_of(root, METHODS["toy-scaffold-fedvg"])
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
