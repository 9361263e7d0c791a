"""Shared parts of robust rules: which clients vote, functions of the votes, and methods built from such functions.

Voters are the clients that took a step. All voters have equal weights. Rules use shared parameters only, since personal
parameters are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from methods.moments import one_thread
from raysim.base.errors import MethodError
from raysim.base.options import Bounds
from raysim.base.texts import round_name
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Method, RunSizes, ServerView, State, Value
from raysim.core.weights import Weights, normalised, scale

#: Hooks without effect together with a rule that computes the update itself -> reason.
NO_WEIGHTS = {"weigh": "every client's update counts the same, so weights would have no effect"}

Rule = Callable[..., Any]
Measure = Callable[[ServerView], Any]
Decision = Callable[[Any, ServerView], Tensor]

#: Number of iterations; more would take hours.
Iterations = Annotated[int, Bounds(ge=1, le=100_000)]


def voting(name: str, measure: Measure, decide: Decision, scale: Decision | None = None, **fields: Any) -> Method:
    """Return a method that weights the n voters, equally on all leaves, by a measure of the updates.

    Args:
      measure: measure(server) -> the first argument of `decide` and `scale`.
      decide: decide(measured, server) -> (n,), >= 0, to which the weights are proportional. `chosen` logs the number of
        voters with a weight above 0; without any, the model does not change.
      scale: scale(measured, server) -> (n,), factors of the weights on parameters; weights on buffers have no factor.
      fields: further fields of the `Method`.
    """

    def weigh(weights: Weights, server: ServerView) -> Weights:
        if not bool(server.is_active.any()):
            return weights
        measured = measure(server)  # not within `one_thread`: a trainer in this process keeps its threads
        with one_thread():
            share = normalised(of_all(server, decide(measured, server)))
            server.log("chosen", float((share > 0).sum()))
            weights = dict.fromkeys(weights, share)
            return scaled(weights, of_all(server, scale(measured, server)), server.layout) if scale else weights

    return Method(name, weigh=weigh, claims=frozenset({"weights:*"}), is_robust=True, **fields)


def merging(name: str, merged: Callable[[State, ServerView], tuple[Tensor, State]], **fields: Any) -> Method:
    """Return a method whose server update is a function of the voters' updates; buffers are averaged over the
    voters.

    Args:
      merged: merged(state, server) -> (update [num_params], state); not called without voters, when nothing changes.
      fields: further fields of the `Method`.
    """

    def step(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        return merged(state, server) if bool(server.is_active.any()) else (update, state)

    fields |= {"claims": frozenset({"merge"}), "excludes": NO_WEIGHTS}
    return Method(name, server_update=step, base_weights="uniform", is_robust=True, **fields)


def merging_columns(name: str, rule: Rule, prepare: Measure = lambda server: None, **fields: Any) -> Method:
    """Return the method that computes the update in blocks of columns.

    rule(block (n, width), extra (0, width), prepared) -> (width,) is a function of a module; prepared: prepare(server).
    """

    def merged(state: State, server: ServerView) -> tuple[Tensor, State]:
        return server.layout.zero_personal_(torch.cat(map_voters(server, rule, prepare(server)))), state

    return merging(name, merged, **fields)


def map_voters(server: ServerView, rule: Rule, shared: Value = None, rows: Tensor | None = None) -> list[Value]:
    """`ServerView.map_columns` over the voters. rule: a function of a module, since it is sent to the trainers."""
    return server.map_columns(partial(_among_voters, rule), (server.is_active, shared), rows)


def _among_voters(rule: Rule, block: Tensor, extra: Tensor, about: tuple[Tensor, Value]) -> Value:
    return rule(block if bool(about[0].all()) else block[about[0]], extra, about[1])


def mask_of(server: ServerView, share: float = 1.0) -> Tensor:
    """[num_params]: 1 at shared parameters, or at a random share, each drawn independently; 0 elsewhere."""
    drawn = torch.rand(len(server.start), generator=server.generator) < share
    return server.layout.zero_personal_(drawn.float())


def gram_of(server: ServerView, *rows: Tensor, share: float = 1.0) -> Tensor:
    """(n + m, n + m) float64: products of all pairs of the voters' updates and of m rows [num_params], see `mask_of`."""
    return torch.stack(map_voters(server, _products, None, torch.stack([mask_of(server, share), *rows]))).sum(dim=0)


def _products(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    vectors = torch.cat([block, extra[1:]]).double().mul_(extra[0])
    return vectors @ vectors.T


def squared_distances(gram: Tensor) -> Tensor:
    """(n, n) of all pairs from their products: |x - y|^2 = <x, x> + <y, y> - 2 <x, y>, which rounding keeps at 0 or above."""
    return (gram.diagonal()[:, None] + gram.diagonal() - 2 * gram).clamp_min(0)


def distances_from(gram: Tensor, mixture: Tensor) -> Tensor:
    """(n,): |x_i - v| for v = sum_j c_j x_j. gram: (n, n), products of all pairs; mixture: (n,), c."""
    products = gram @ mixture
    return (mixture @ products - 2 * products + gram.diagonal()).clamp_min(0).sqrt()


def report_norm(client: ClientView) -> dict[str, Tensor]:
    """norm: float64, the L2 norm of the client's update over the shared parameters."""
    return {"norm": client.layout.norms(client.layout.zero_personal_(client.params - client.start)).norm()}


def bounding(norms: Tensor, bound: Tensor | float) -> Tensor:
    """min(1, bound / norm), 1 where a norm is 0."""
    return (bound / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)


def of_all(server: ServerView, values: Tensor) -> Tensor:
    """(K,) float64: the voters' values (n,), 0 for all other clients."""
    return torch.zeros(len(server.clients), dtype=torch.float64).masked_scatter(server.is_active, values.double())


def scaled(weights: Weights, factor: Tensor, layout: Layout) -> Weights:
    """Return the weights, on parameters times (K,) factors, on buffers unchanged."""
    return weights | scale({leaf.name: weights[leaf.name] for leaf in layout.params if leaf.name in weights}, factor)


def counter(name: str, option: str, value: float, below: float = 1.0) -> Callable[[int], int]:
    """Return count(num), the number of clients of `num` given by an option: a whole number, or a share rounded up.

    Raises:
      ValueError: value is neither a whole number nor a share in [0, below).
    """
    if value < 0 or (value >= below and value != int(value)):
        raise ValueError(f"{name}: {option} must be a whole number or a share in [0, {below:g}), got {value}; try 0.1")
    return lambda num: int(value) if value >= 1 else math.ceil(value * num - 1e-9)  # 0.07 * 100 is above 7


def fewest(least: Callable[[int], int], options: str) -> Callable[[RunSizes], str]:
    """Return `Method.fits` of a rule that needs least(n) of the n clients of a round. options: alternative remedies."""

    def fits(sizes: RunSizes) -> str:
        num = sizes.cohort_size
        if num >= (needed := least(num)):
            return ""
        return f"needs the updates of {needed} clients at least, and a round has {num}; raise cohort.size, or {options}"

    return fits


def refuse_fewer(server: ServerView, least: int, name: str, options: str) -> None:
    """Raises MethodError where fewer clients than a rule needs took a step. name: of the method, with its numbers."""
    if (num := int(server.is_active.sum())) < least:
        what = f"{name} needs the updates of {least} clients at least, got {num}"
        raise MethodError(what, round_name(server.round_index), f"raise cohort.size, or {options}")
