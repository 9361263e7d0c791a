"""Uniform weights: every participant counts the same, whatever its number of examples."""

from __future__ import annotations

from raysim.core.method import Method


def uniform() -> Method:
    """a_k = 1/K over the participants that took a step (FedBABU, SCAFFOLD and others aggregate so)."""
    return Method("uniform", base_weights="uniform", claims=frozenset({"weights:*"}))
