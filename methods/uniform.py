"""FedAvg by name, and uniform weights: every participant has the same weight."""

from __future__ import annotations

from raysim.core.method import Method


def fedavg() -> Method:
    """FedAvg (McMahan et al. 2017): local SGD, and the mean of the updates weighted by the examples of each participant.

    fedavg has no hook and changes nothing: `methods: [fedavg]` equals `methods: []`.
    """
    return Method("fedavg")


def uniform() -> Method:
    """Weight all participants that took a step equally, a_k = 1/K (as FedBABU, SCAFFOLD and others do)."""
    return Method("uniform", base_weights="uniform", claims=frozenset({"weights:*"}))
