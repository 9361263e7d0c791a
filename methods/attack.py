"""Clients that attack: by their data, by what they send, or by what they send once they know the honest updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.robust_means import krum_scores
from methods.voters import gram_of, map_voters, squared_distances
from raysim.base.counting import counts_with
from raysim.core.method import (
    Batch,
    ClientView,
    Crowd,
    GradFn,
    Method,
    Model,
    RunSizes,
    ServerView,
    State,
    Update,
    Value,
)

Kind = Literal[
    "sign_flip", "gaussian", "noise", "label_flip", "backdoor", "alie", "ipm", "min_max", "min_sum", "adaptive"
]

#: Kinds whose attackers train after the honest clients, and know what these send.
OMNISCIENT = ("alie", "ipm", "min_max", "min_sum", "adaptive")

#: Fang et al. 2020: values beyond the honest ones lie within this factor of them; the search for lambda ends below the other.
BEYOND, SMALLEST = 2.0, 1e-5


def attack(
    *,
    kind: Kind = "sign_flip",
    share: Annotated[float, counts_with("clients", None)] = 0.2,
    clients: list[int] | None = None,
    from_round: int = 0,
    scale: Annotated[float, counts_with("kind", "sign_flip", "ipm", "backdoor")] = 1.0,
    sigma: Annotated[float, counts_with("kind", "gaussian", "noise")] = 0.1,
    target: Annotated[int | None, counts_with("kind", "label_flip", "backdoor")] = None,
    poison: Annotated[float, counts_with("kind", "backdoor")] = 0.5,
    trigger: Annotated[int, counts_with("kind", "backdoor")] = 3,
    value: Annotated[float, counts_with("kind", "backdoor")] = 1.0,
    z: Annotated[float | None, counts_with("kind", "alie")] = None,
    direction: Annotated[Literal["std", "unit", "sign"], counts_with("kind", "min_max", "min_sum")] = "std",
    against: Annotated[Literal["trimmed_mean", "krum"], counts_with("kind", "adaptive")] = "trimmed_mean",
    as_in: Annotated[Literal["release"] | None, counts_with("kind", "min_sum")] = None,
) -> Method:
    """Some clients, the same in every round, harm the global model or hide a backdoor in it.

    The kinds are those of Blades (Li et al. 2023, arXiv:2206.05359), and an adaptive one. u is the attacker's own update;
    mean, std, min and max are of the honest clients of the round, entry by entry, each client once; h honest clients, c
    attackers, n = h + c.
        label_flip:  classes - 1 - y in the place of y (Fang et al. 2020), or `target`
        backdoor:    a patch in some images of each batch, which become `target` (Gu et al. 2017, arXiv:1708.06733); the
                     update times `scale` (model replacement, Bagdasaryan et al., AISTATS 2020, arXiv:1807.00459)
        sign_flip:   -scale u
        gaussian:    N(0, sigma^2) in the place of u;  noise: u + N(0, sigma^2)
        alie:        mean - z std (Baruch et al., NeurIPS 2019, arXiv:1902.06156); z is the standard normal
                     quantile of (h - s) / h, s = floor(n/2 + 1) - c
        ipm:         -scale mean (Xie et al., UAI 2019, arXiv:1903.03936)
        min_max:     mean + gamma p with the largest gamma at which no honest update is farther away than two of them
                     are from each other (Shejwalkar and Houmansadr, NDSS 2021)
        min_sum:     likewise for the sum of squared distances to all honest updates (same paper)
        adaptive:    Fang et al. (USENIX Security 2020, arXiv:1911.11815), with s = sign(mean). Against trimmed_mean (and
                     the median): where s > 0 uniform between min and 2 min, or min / 2 for a min above 0; else likewise
                     above max. Against krum: -lambda s, lambda halved from Theorem 1's bound until Krum chooses it.
    Attackers of the last five kinds train after the others and know all honest updates: an upper bound on what real ones
    can do, who know their own. Those of the first five know nothing of the others.

    Departures from the papers: gamma is the root of a quadratic, not a search for it; against trimmed_mean min and max are
    of updates, not of models; against krum all c attackers send one vector. n and c are those of the round; with Poisson
    sampling c is expected from h, and with dropout, clients that are missing count as attackers. In evaluated rounds
    `attackers` logs how many took part, and `success` of a backdoor the share of the test rows of other classes that become
    `target` with the patch on them.
    Degenerate cases: without an honest client in the round attackers send what they trained; with one, std is 0 and
    alie, min_max and min_sum send its update. alie's s counts at least 1 and its z at least 0: too few attackers, or too
    many, to need a quantile. Honest clients without a step are not listened to.

    Args:
      kind: see above.
      share: of all clients, drawn once from the seed, rounded to whole clients.
      clients: ids of the attackers; null: a drawn share.
      from_round: before this round all clients are honest.
      scale: factor of the update, or of the mean that is turned around, > 0.
      sigma: standard deviation of the noise in each entry of the update, > 0.
      target: the class that attackers want; null: of a backdoor class 0, of label_flip every class its opposite.
      poison: share of each batch that gets the patch, in (0, 1], rounded up.
      trigger: side of the patch in the lower right corner, in pixels of the model's input.
      value: of the patch in all channels, in the units of the model's input: after normalisation.
      z: how many deviations from the mean; null: the largest that the paper's formula allows.
      direction: p: -std, -mean / ||mean|| ("unit"), or -sign(mean).
      against: the defence that the attackers expect.
      as_in: "release": min_sum's bound is the lowest of the honest clients' sums, as in its authors' notebooks; the paper has
        the highest. Which of the two the printed tables have is not said there.
    Raises:
      ValueError: an option outside of its range.
      MethodError: in the run, a client or a class that is not there, or a patch that does not fit the inputs.
    """
    _check_ranges(share, clients, from_round, scale, sigma, target, poison, trigger)
    stamp, wanted = partial(stamped, size=trigger, value=value), target or 0
    spoil = partial(flipped, target=target)
    if kind == "backdoor":
        spoil = partial(with_backdoor, stamp=stamp, target=wanted, poison=poison)
    craft = partial(
        crafted, kind, scale=scale, z=z, direction=direction, against=against, is_released=as_in == "release"
    )

    def attackers(crowd: Crowd) -> Tensor:
        return crowd.drawn(share) if clients is None else torch.tensor(clients)

    def attacks(client: ClientView) -> bool:
        return client.round_index >= from_round and bool((attackers(client.crowd) == client.id).any())

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        num_classes = len(client.class_counts)
        return (lambda params, batch: inner(params, spoil(batch, num_classes))) if attacks(client) else inner

    def outgoing(update: Update, client: ClientView) -> Update:
        return whole(sent(kind, update.values, client, scale, sigma), client) if attacks(client) else update

    def overhear(server: ServerView) -> Mapping[str, Value]:
        is_on = server.round_index >= from_round and bool(server.is_active.any())
        return craft(server, attackers(server.crowd)) if is_on else {}

    def look(state: State, server: ServerView) -> Mapping[str, Tensor]:
        is_on = server.round_index >= from_round
        server.log("attackers", float(is_on and torch.isin(server.clients, attackers(server.crowd)).sum()))
        if kind == "backdoor":
            fooled, rows = map(sum, zip(*server.map_test(partial(_fooled, stamp=stamp), wanted), strict=True))
            server.log("success", fooled / max(1, rows))
        return {}

    def fits(sizes: RunSizes) -> str:
        if clients is not None and max(clients) >= sizes.population:
            return f"client {max(clients)} is none of the {sizes.population} clients, which count from 0"
        if clients is None and share > 0 and round(share * sizes.population) == 0:
            return f"{share:g} of {sizes.population} clients is nobody; raise share, or name clients"
        if from_round >= sizes.num_rounds:
            return f"from_round {from_round} is behind the last round, {sizes.num_rounds - 1}: nobody would attack"
        if target is not None and target >= sizes.num_classes:
            return f"target {target} is none of the {sizes.num_classes} classes, which count from 0"
        if kind == "backdoor" and (len(sizes.input_shape) != 3 or trigger > min(sizes.input_shape[:2])):
            return f"a patch of {trigger} x {trigger} does not fit inputs of shape {sizes.input_shape}; lower trigger"
        return ""

    is_data, is_late = kind in ("label_flip", "backdoor"), kind in OMNISCIENT
    return Method(
        "attack",
        grads=grads if is_data else None,
        latecomers=(lambda clients, crowd: torch.isin(clients, attackers(crowd))) if is_late else None,
        overhear=overhear if is_late else None,
        outgoing=None if kind == "label_flip" else outgoing,
        evaluation_override=look,
        fits=fits,
        needs=frozenset({"classes"} if is_data else ()) | frozenset({"test-set"} if kind == "backdoor" else ()),
    )


# --- poisoned data ------------------------------------------------------------------------------------------------------


def flipped(batch: Batch, num_classes: int, *, target: int | None) -> Batch:
    """The batch with every class turned into its opposite, or into `target`."""
    if target is None:
        return batch._replace(targets=num_classes - 1 - batch.targets)
    return batch._replace(targets=torch.full_like(batch.targets, target))


def with_backdoor(
    batch: Batch, num_classes: int, *, stamp: Callable[[Tensor], Tensor], target: int, poison: float
) -> Batch:
    """The batch whose first rows, a share, have the patch and the class `target`; batches are shuffled, so any rows are."""
    count, targets = math.ceil(poison * len(batch.targets)), batch.targets.clone()
    targets[:count] = target
    return Batch(torch.cat([stamp(batch.inputs[:count]), batch.inputs[count:]]), targets)


def stamped(images: Tensor, *, size: int, value: float) -> Tensor:
    """A copy of (B, channels, height, width) with a square in the lower right corner."""
    images = images.clone()
    images[..., -size:, -size:] = value
    return images


def _fooled(model: Model, batch: Batch, target: int, *, stamp: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """(rows of other classes that become `target` with the patch, all rows of other classes)."""
    images = batch.inputs[batch.targets != target]
    is_fooled = model.module(stamp(images)).argmax(1) == target if len(images) else torch.zeros(0)
    return int(is_fooled.sum()), len(images)


# --- what attackers send ------------------------------------------------------------------------------------------------


def whole(values: Tensor, client: ClientView) -> Update:
    """An update that is sent as it is, also behind a compressor."""
    return Update(values, 4 * sum(leaf.size for leaf in client.layout.shared if not leaf.is_buffer))


def sent(kind: str, update: Tensor, client: ClientView, scale: float, sigma: float) -> Tensor:
    """[num_params] in the place of an attacker's update."""
    if kind in ("sign_flip", "backdoor"):
        return update * (scale if kind == "backdoor" else -scale)
    if kind in ("gaussian", "noise"):
        drawn = sigma * torch.randn(len(update), generator=client.generator).to(update.device)
        return update + drawn if kind == "noise" else drawn
    vector: Tensor = client.overheard.get("vector", update)
    spread: Tensor | None = client.overheard.get("spread")
    if spread is None:
        return vector
    return vector + spread * torch.rand(len(update), generator=client.generator).to(update.device)


def crafted(
    kind: str,
    server: ServerView,
    attackers: Tensor,
    *,
    scale: float,
    z: float | None,
    direction: str,
    against: str,
    is_released: bool,
) -> dict[str, Tensor]:
    """What omniscient attackers send: vector [num_params], and spread [num_params] times a uniform number of each attacker.

    Args:
      server: the round of the honest clients; attackers: ids of all of the run.
    """
    # What stays at the clients is not known to anybody else.
    mean, std, low, high = map(server.layout.zero_personal_, torch.cat(map_voters(server, _statistics), dim=1))
    if kind == "alie":
        used = largest_z(*_counts(server, attackers)) if z is None else z
        server.log("z", used)
        if used <= 0:
            warnings.warn(
                "attack: alie sends the honest mean, since its z is 0 for so few attackers; set z", stacklevel=2
            )
        return {"vector": mean - used * std}
    if kind == "ipm":
        return {"vector": -scale * mean}
    if kind == "adaptive" and against == "krum":
        s = mean.sign()
        return {"vector": -krum_step(gram_of(server, s), _counts(server, attackers)[1]) * s}
    if kind == "adaptive":
        # The extreme against the honest direction, and what lies beyond it: twice as far from 0, or half.
        vector = torch.where(mean > 0, low, high)
        spread = torch.where((mean > 0) == (vector > 0), 1 / BEYOND - 1, BEYOND - 1) * vector
        return {"vector": vector, "spread": spread}
    p = {"std": -std, "unit": -mean / mean.norm().clamp_min(torch.finfo().tiny), "sign": -mean.sign()}[direction]
    gram = gram_of(server, mean, p)
    return {"vector": mean + largest_gamma(gram, is_sum=kind == "min_sum", is_released=is_released) * p}


def largest_z(num_honest: int, num_attackers: int) -> float:
    """z_max of Baruch et al. 2019; see `attack` for where the formula has no value."""
    supporters = (num_honest + num_attackers) // 2 + 1 - num_attackers
    return NormalDist().inv_cdf(max(0.5, 1 - max(1, supporters) / num_honest))


def largest_gamma(gram: Tensor, *, is_sum: bool, is_released: bool = False) -> float:
    """The largest gamma >= 0 of min_max or min_sum.

    ||mean + gamma p - u_i||^2 = a_i + 2 b_i gamma + c gamma^2, so the bound is met up to a root.

    Args:
      gram: (h + 2, h + 2) float64, products of the honest updates, their mean and p.
      is_released: the bound of min_sum is the lowest of the honest sums, not the highest.
    """
    h = len(gram) - 2
    honest = squared_distances(gram[:h, :h])
    a, b, c = squared_distances(gram)[h, :h], gram[h + 1, h] - gram[h + 1, :h], gram[h + 1, h + 1]
    sums = honest.sum(1)
    limit = (sums.min() if is_released else sums.max()) if is_sum else honest.max()
    if is_sum:
        a, b, c = a.sum(), b.sum(), h * c
    roots = ((b.square() + c * (limit - a)).clamp_min(0).sqrt() - b) / c
    return float(roots.min().clamp_min(0)) if c > 0 else 0.0


def krum_step(gram: Tensor, num_attackers: int) -> float:
    """lambda of Fang et al. 2020: -lambda s, sent by all attackers, is what Krum chooses.

    Args:
      gram: (h + 1, h + 1) float64, products of the honest updates and of s.
    """
    h, size = len(gram) - 1, gram[-1, -1].clamp_min(1)
    nearest = krum_scores(squared_distances(gram[:h, :h]), 0).min() if h > 1 else torch.tensor(0.0)
    # Theorem 1.
    bound = (nearest / (max(1, h - num_attackers - 1) * size)).sqrt() + (gram.diagonal()[:h].max() / size).sqrt()
    step, rows = float(bound), [*range(h), *[h] * num_attackers]
    products, factors = gram[rows][:, rows], torch.ones(len(rows), dtype=gram.dtype)
    while step > SMALLEST:
        factors[h:] = -step
        if krum_scores(squared_distances(products * torch.outer(factors, factors)), num_attackers).argmin() >= h:
            break
        step /= 2
    return step


def _statistics(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(4, width): mean, standard deviation, lowest and highest of some columns."""
    exact = block.double()
    low, high = exact.aminmax(dim=0)
    return torch.stack([exact.mean(0), exact.std(0, correction=0), low, high]).float()


def _counts(server: ServerView, attackers: Tensor) -> tuple[int, int]:
    """(honest clients, attackers) of the round, of whose clients the view has the honest ones; see `attack`."""
    honest, attacking = len(server.clients), len(attackers)
    if server.sampling == "fixed":
        return honest, max(1, server.cohort_size - honest)
    return honest, max(1, round(honest * attacking / (server.population - attacking)))


# --- options ------------------------------------------------------------------------------------------------------------


def _check_ranges(
    share: float,
    clients: list[int] | None,
    from_round: int,
    scale: float,
    sigma: float,
    target: int | None,
    poison: float,
    trigger: int,
) -> None:
    rules = [
        ("share", share, 0 <= share <= 1, "in [0, 1]"),
        ("clients", clients, clients is None or (clients and min(clients) >= 0), "ids of clients, from 0 on"),
        ("from_round", from_round, from_round >= 0, ">= 0"),
        ("scale", scale, scale > 0, "> 0"),
        ("sigma", sigma, sigma > 0, "> 0"),
        ("target", target, target is None or target >= 0, "a class, from 0 on"),
        ("poison", poison, 0 < poison <= 1, "in (0, 1]"),
        ("trigger", trigger, trigger >= 1, ">= 1"),
    ]
    for name, given, is_right, words in rules:
        if not is_right:
            raise ValueError(f"attack: {name} must be {words}, got {given}")
