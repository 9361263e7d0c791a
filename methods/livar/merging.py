"""Eq. 3 of LIVAR, the merged update sum_i lambda_i B_i A_i of a layer: coefficients, factors and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raysim.base.errors import MethodError
from raysim.core.layout import Layout, Leaf
from raysim.core.method import ClientView, GradFn, ServerView
from raysim.core.weights import Weights, normalised, refuse_factors


class Adapter(NamedTuple):
    """Leaves of an adapted layer with the product B A. `layer`: path of the layer."""

    layer: str
    a: Leaf
    b: Leaf


def adapters_of(layout: Layout) -> list[Adapter]:
    """Every adapted layer, in order of the layout; peft's names tell which leaf is which."""
    adapters = []
    for leaf in layout.params:
        layer, is_a, rest = leaf.name.partition(".lora_A.")
        if is_a:
            adapters.append(Adapter(layer, leaf, layout.by_name[f"{layer}.lora_B.{rest}"]))
    return adapters


@dataclass(frozen=True)
class Coefficients:
    """Where lambda of eq. 3 comes from.

    Attributes:
      of: of(server, shares) -> (K, L) float64, layers in order of the layout; columns sum to 1, or are 0 if no client
        took a step. shares: (K,) float64, n_i / sum n over the clients that did.
      grads, report: hooks of the clients whose reports `of` takes; see `Method`.
      check: check(layout) raises ValueError where they cannot be had.
      needs: see `Method`.
    """

    of: Callable[[ServerView, Tensor], Tensor]
    grads: Callable[[GradFn, ClientView], GradFn] | None = None
    report: Callable[[ClientView], dict[str, Tensor]] = lambda client: {}
    check: Callable[[Layout], None] = lambda layout: None
    needs: frozenset[str] = frozenset()


def from_examples() -> Coefficients:
    """lambda_i = n_i / sum n in every layer."""
    return Coefficients(lambda server, shares: shares[:, None].expand(-1, len(adapters_of(server.layout))))


def example_shares(server: ServerView) -> Tensor:
    """(K,) float64: n_i / sum n over the clients that took a step."""
    return normalised(server.num_examples.double() * server.is_active)


def factor_weights(server: ServerView, coefficients: Coefficients) -> Weights:
    """Return leaf -> (K,): coefficients of an adapted layer, for A and for B. Coefficients are logged."""
    adapters, values = adapters_of(server.layout), coefficients.of(server, example_shares(server))
    server.log("coefficients", values, [pair.layer for pair in adapters])
    return {leaf.name: values[:, index].clone() for index, pair in enumerate(adapters) for leaf in (pair.a, pair.b)}


def merged_update(server: ServerView, *, by_examples: bool = False) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
    """(adapter, left, right) of every layer, whose product is the merged update of eq. 3; see `stacked`.

    Args:
      by_examples: weigh the products by `example_shares` instead of the final weights of the leaves.
    """
    for pair, a, b in factors_of(server):
        weights = example_shares(server) if by_examples else server.weights[pair.a.name]
        assert isinstance(weights, Tensor)  # no other method may decide the weights of adapters
        refuse_factors(weights, pair.a.name, "the products of eq. 3 are weighed by shares")
        yield pair, *stacked(weights, a, b)


def refuse_other_steps(server: ServerView) -> None:
    """Once the round has ended: raises MethodError where adapters are not the weighted sums of the clients'.

    The products that are scored are made from the clients' factors: another method's step at the server would go unseen.
    """
    views = server.layout.views(server.params)
    for pair, a, b in factors_of(server):
        for leaf, factors in ((pair.a, a), (pair.b, b)):
            weights = server.weights[leaf.name]
            assert isinstance(weights, Tensor)
            refuse_factors(weights, leaf.name, "the products of eq. 3 are weighed by shares")
            mean = (weights[:, None, None] * factors).sum(0).to(server.params.dtype)
            if not torch.allclose(views[leaf.name], mean.view_as(views[leaf.name]), rtol=1e-3, atol=1e-5):
                what = f"another method moved {leaf.name} at the server, which the scored products of eq. 3 do not see"
                raise MethodError(what, "livar", "remove the method, or set evaluate: factors")


def stacked(weights: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the merged update of eq. 3, sum_k w_k B_k A_k = left @ right, of rank K r at most.

    Args:
      weights: (K,); a: (K, rank, d_in); b: (K, d_out, rank); all float64.
    Returns:
      left (d_out, s) and right (s, d_in), s = min(K r, d_out, d_in).
    """
    right = a.flatten(0, 1)
    left = (weights[:, None, None] * b).permute(1, 0, 2).flatten(1)
    size, d_out, d_in = right.shape[0], left.shape[0], right.shape[1]
    if size <= min(d_out, d_in):
        return left, right
    dense = left @ right
    eye = torch.eye(min(d_out, d_in), dtype=dense.dtype)
    return (dense, eye) if d_in <= d_out else (eye, dense)


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-r approximation of left @ right as balanced factors, B = U sqrt(S), A = sqrt(S) V'.

    Through QR of both factors, so that no d_out x d_in matrix is decomposed.

    Returns:
      a (rank, d_in) and b (d_out, rank); zero-padded where the product has a lower rank.
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vt = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    a, b = right.new_zeros(rank, right.shape[1]), left.new_zeros(left.shape[0], rank)
    a[: len(root)] = root[:, None] * (vt[:rank] @ q_right.T)
    b[:, : len(root)] = (q_left @ u[:, :rank]) * root
    return a, b


def factors_of(server: ServerView) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
    """(adapter, A (K, rank, d_in), B (K, d_out, rank)) of the clients after training, float64, in order of the layout.

    They are fetched one layer block at a time: small beside the model, K times what is broadcast.
    """
    blocks: dict[str, list[Adapter]] = {}
    for pair in adapters_of(server.layout):
        blocks.setdefault(pair.a.block, []).append(pair)
    for pairs in blocks.values():
        leaves = [leaf for pair in pairs for leaf in (pair.a, pair.b)]
        updates = server.map_updates(parts_of, [(leaf.offset, leaf.end) for leaf in leaves])
        values = {
            leaf: server.start[leaf.offset : leaf.end].double()
            + torch.stack([parts[index] for parts in updates]).double()
            for index, leaf in enumerate(leaves)
        }
        for pair in pairs:
            yield pair, values[pair.a].view(-1, *pair.a.shape), values[pair.b].view(-1, *pair.b.shape)


def parts_of(update: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Stretches of one client's update."""
    return [update[start:end] for start, end in spans]
