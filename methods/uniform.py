"""FedAvg by name, and uniform weights: every participant has the same weight."""

from __future__ import annotations

from raysim.core.method import Method


def fedavg() -> Method:
    """FedAvg (McMahan et al. 2017): local SGD, and the mean of the updates weighted by the examples of each participant.

    It has no hook, so that it changes nothing: `methods: [fedavg]` is `methods: []`.
    """
    return Method("fedavg")


def uniform() -> Method:
    """a_k = 1/K over the participants that took a step (FedBABU, SCAFFOLD and others aggregate so)."""
    return Method("uniform", base_weights="uniform", claims=frozenset({"weights:*"}))
