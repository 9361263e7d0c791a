"""Uniform weights: every participant counts the same, whatever its number of examples."""

from __future__ import annotations

from raysim.core.method import Method, ServerView
from raysim.core.weights import Weights, normalised


def uniform() -> Method:
    """a_k = 1/K over the participants that took a step (FedBABU, SCAFFOLD and others aggregate so)."""

    def weigh(weights: Weights, server: ServerView) -> Weights:
        return dict.fromkeys(weights, normalised(server.is_active.double()))

    return Method("uniform", weigh=weigh, claims=frozenset({"weights:*"}))
