"""The common part of all attacks, and attacks that change the attacker's own update.

Attacks by poisoned data are in `attack_data`, attacks that know the honest updates in `attack_omniscient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from raysim.core.method import (
    Batch,
    ClientView,
    GradFn,
    Method,
    Positive,
    RunSizes,
    ServerView,
    Share,
    State,
    Update,
    Value,
    Whole,
)


def attacked(
    share: float,
    from_round: int,
    *,
    spoil: Callable[[Batch, int], Batch] | None = None,
    send: Callable[[Tensor, ClientView], Tensor] | None = None,
    craft: Callable[[ServerView, Tensor], Mapping[str, Value]] | None = None,
    look: Callable[[ServerView], None] | None = None,
    fits: Callable[[RunSizes], str] | None = None,
    needs: Iterable[str] = (),
) -> Method:
    """Return the method in which some clients, the same in every round, attack.

    Every attack is named "attack", so all attacks draw the same attackers and the same noise, and metrics are
    `attack/...`. In evaluated rounds `attack/attackers` logs the number of attackers in the cohort.

    Args:
      share, from_round: see `sign_flip`.
      spoil: spoil(batch, num_classes) -> the batch that an attacker trains on.
      send: send(update [num_params], client) -> [num_params] that an attacker sends.
      craft: craft(server, ids of all attackers) -> `ClientView.overheard` of the attackers, who then train after the others.
      look: logs further numbers in evaluated rounds.
      fits: see `Method`.
    """

    def attacks(client: ClientView) -> bool:
        return client.round_index >= from_round and bool((client.crowd.drawn(share) == client.id).any())

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        assert spoil
        num_classes = len(client.class_counts)
        return (lambda params, batch: inner(params, spoil(batch, num_classes))) if attacks(client) else inner

    def outgoing(update: Update, client: ClientView) -> Update:
        assert send
        return sent_in_full(send(update.values, client), client) if attacks(client) else update

    def overhear(server: ServerView) -> Mapping[str, Value]:
        assert craft
        is_on = server.round_index >= from_round and bool(server.is_active.any())
        return craft(server, server.crowd.drawn(share)) if is_on else {}

    def evaluated(state: State, server: ServerView) -> Mapping[str, Tensor]:
        is_on = server.round_index >= from_round
        server.log("attackers", float(is_on and torch.isin(server.clients, server.crowd.drawn(share)).sum()))
        if look:
            look(server)
        return {}

    def run_fits(sizes: RunSizes) -> str:
        if share > 0 and round(share * sizes.population) == 0:
            return f"{share:g} of {sizes.population} clients is no client; raise share"
        if from_round >= sizes.num_rounds:
            return f"from_round {from_round} is behind the last round, {sizes.num_rounds - 1}: no client would attack"
        return fits(sizes) if fits else ""

    return Method(
        "attack",
        grads=grads if spoil else None,
        overhear=overhear if craft else None,
        late_share=share,
        outgoing=outgoing if send else None,
        evaluation_override=evaluated,
        fits=run_fits,
        needs=frozenset(needs),
    )


def sent_in_full(values: Tensor, client: ClientView) -> Update:
    """Return an update that is sent in full, also if a compressor is listed."""
    return Update(values, 4 * sum(leaf.size for leaf in client.layout.shared if not leaf.is_buffer))


def sign_flip(*, share: Share = 0.2, from_round: Whole = 0, scale: Positive = 1.0) -> Method:
    """Attackers send their update turned around: -scale u (Li et al. 2019, arXiv:1811.03761).

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      scale: factor of the update, > 0.
    """
    return attacked(share, from_round, send=lambda update, client: -scale * update)


def gaussian(*, share: Share = 0.2, from_round: Whole = 0, sigma: Positive = 0.1) -> Method:
    """Attackers send N(0, sigma^2) in place of their update (Blades, Li et al. 2023, arXiv:2206.05359).

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      sigma: standard deviation of each entry, > 0.
    """
    return attacked(share, from_round, send=lambda update, client: noise_of(update, client, sigma))


def additive_noise(*, share: Share = 0.2, from_round: Whole = 0, sigma: Positive = 0.1) -> Method:
    """Attackers add N(0, sigma^2) to their update (Blades, Li et al. 2023, arXiv:2206.05359).

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      sigma: standard deviation of the noise in each entry, > 0.
    """
    return attacked(share, from_round, send=lambda update, client: update + noise_of(update, client, sigma))


def noise_of(update: Tensor, client: ClientView, sigma: float) -> Tensor:
    """[num_params] drawn from N(0, sigma^2) by the attacker's own stream."""
    return sigma * torch.randn(len(update), generator=client.generator).to(update.device)
