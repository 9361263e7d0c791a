"""What FLFA's and UniVarFL's tables combine runs, and every part of a combination has an effect."""

from __future__ import annotations

import pytest

from tests.support.federations import run, steps_plan

FLFA = {"flfa": {"candidates": ["conv2", "fc1"], "strategy": "lowest"}}
HOSTS = {
    "fedavg": [],
    "fedavgm": [{"fedavgm": {"beta": 0.1, "form": "damped"}}],
    "fedprox": [{"fedprox": {"mu": 0.1}}],
    "moon": [{"moon": {"mu": 0.1}}],
    "fedsol": ["fedsol"],
    "fedrs": ["fedrs"],
    "fedlc": ["fedlc"],
    "fedacg": ["fedacg"],
    "feddyn": ["feddyn"],
    "scaffold": ["scaffold"],
}
#: All clients in both rounds: MOON needs a previous model.
SMALL = {"model": {"norm": "batch"}, "partition": {"num_clients": 5}, "cohort": {"size": 5}}


def digest(root, methods):
    return run(steps_plan(root, methods, steps=3, **SMALL), root, rounds=2).params_sha256()


@pytest.fixture(scope="module")
def alone(root):
    """Two rounds of each host without FLFA; FLFA's first round is plain backpropagation."""
    return {name: digest(root, methods) for name, methods in HOSTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_flfa_combines_with_its_hosts(host, alone, root):
    combined = digest(root, [*HOSTS[host], FLFA])
    assert combined != alone[host]
    assert combined != alone["fedavg"]
    assert len(set(alone.values())) == len(alone)


@pytest.mark.slow
@pytest.mark.parametrize("partner", ["fedprox", "fedvg", "flfa", "fedrs"])
def test_univarfl_combines_with(partner, root):
    other = FLFA if partner == "flfa" else partner
    combined = digest(root, [other, "univarfl"])
    assert combined not in (digest(root, [other]), digest(root, ["univarfl"]), digest(root, []))


@pytest.mark.slow
def test_all_of_them_at_once(root):
    methods = ["fedrs", "univarfl", "moon", "fedsol", "fedprox", "fedacg", FLFA, "fedvg"]
    found = digest(root, methods)
    for left_out in range(len(methods)):
        assert digest(root, [m for i, m in enumerate(methods) if i != left_out]) != found, methods[left_out]
