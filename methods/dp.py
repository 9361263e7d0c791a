"""Differential privacy of clients: clipped updates, noise on the sum, and the privacy spent."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from raysim.base.conditions import applies_with, applies_without
from raysim.base.options import Bounds
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Count, Message, Method, OpenShare, Positive, RunSizes, ServerView, State
from raysim.core.weights import Weights

#: Hooks of other methods that may reveal a client without noise -> reason.
EXCLUDES = {
    "report": "clients' reports reach the server without noise",
    "overhear": "messages between clients have no noise",
    "weigh": "dp bounds each client by its weight, and another weight could exceed `clip`",
    "server_update": "the server step may read updates or clients without noise",
}

#: Largest noise multiplier; above it epsilon is 0 to all digits, and the model is noise.
MOST_NOISE = 1e4

#: Methods whose server step is a function of the noised sum only.
POST_PROCESSING = frozenset({"fedavgm", "fedacg"})

#: Width of the bins of a privacy loss distribution; rounding raises epsilon by less than this width.
BIN = 1e-3

Accountant = Literal["rdp", "pld"]

#: Options of every private method.
Noise = Annotated[float, Bounds(ge=0, le=MOST_NOISE)]
Delta = Annotated[OpenShare, applies_without("noise", 0.0)]

#: Adaptive clipping as in the paper's experiments: the step eta_C, and the count's noise sigma_b as a share of the
#: cohort.
STEP, COUNT_NOISE = 0.2, 1 / 20


def dp(
    *,
    clip: Positive = 1.0,
    noise: Annotated[Noise, applies_with("epsilon", None)] = 1.0,
    epsilon: Positive | None = None,
    delta: Delta = 1e-5,
    adaptive: OpenShare | None = None,
    noise_cohort_size: Count | None = None,
    accountant: Accountant = "rdp",
    trust: list[str] | None = None,
) -> Method:
    """DP-FedAvg: clip each update and add Gaussian noise to the sum, which then reveals little about a single client.

    McMahan et al. 2018 (arXiv:1710.06963), Algorithm 1 with uniform weights and a fixed denominator, for the clip S,
    the noise z and the size m of the cohort (with Poisson sampling the expected size, not the number of participants):
        w+ = w + (1/m) (sum_k min(1, S / ||u_k||) u_k + N(0, (z S)^2 I))
    The norm is over all shared parameters. Server steps listed after dp (fedavgm) see only the noised mean. The update
    of a round without clients is noise.

    Adaptive clipping, Andrew et al. 2021 (arXiv:1905.03871), Algorithm 1, with the noised share b of norms <= S:
        S+ = S exp(-0.2 (b - adaptive)),   b = 1/2 + (1/m) (sum_k (b_k - 1/2) + N(0, sigma_b^2)),   sigma_b = m / 20
    and noise z_sum = (z^-2 - (2 sigma_b)^-2)^(-1/2) on the sum, so that the sum and the count together have the privacy
    of z. A departure from the paper: a cohort smaller than 20 z has sigma_b = z, since with m / 20 the count alone
    would spend the privacy of z at m = 10 z.

    With `epsilon`, z is the least noise with which all rounds of the run spend at most epsilon; `dp/noise` is z. A finished run
    that is resumed with more rounds keeps z, and spends more.

    `dp/epsilon` is the epsilon spent so far at this delta, `dp/next_epsilon` the epsilon after one more round
    (dp-accounting, the extra `privacy`). Accountant rdp composes Renyi divergences (Mironov, Talwar, Zhang 2019,
    arXiv:1908.10530); pld composes distributions of the privacy loss (Koskela, Jälkö, Honkela 2020, arXiv:1906.03049;
    Doroshenko et al. 2022, arXiv:2207.04380), which gives a lower epsilon for the same noise. With cohort.sampling
    poisson and the share m / clients, neighbours are two populations of which one has one client more. With fixed
    cohorts, neighbours are two populations of the same size that differ in one client; a client can then move the sum
    by 2 S, so the accounting uses z / 2.

    Epsilon holds for the messages to clients and for the final model, not for the records of a simulation, and only as
    far as pseudo-random noise from a seed and float arithmetic are random and exact: docs/methods/privacy.md.
    Degenerate cases: with noise 0 updates are only clipped (the count keeps its noise), and epsilon is infinite. A
    client without a step adds 0 to the sum.
    Refused together with dp: methods with a hook `report`, `weigh` or `overhear`, or with a server step that may read more
    than the noised sum.

    Args:
      clip: S, largest L2 norm of a client's update, > 0; with `adaptive`, the clip of the first round.
      noise: z, standard deviation of the noise on the sum as a multiple of the clip, >= 0.
      epsilon: budget of all rounds of the run together, > 0, from which the noise is computed. null: `noise` is given.
      delta: delta of (epsilon, delta)-privacy, in (0, 1) and below 1 / clients.
      adaptive: quantile of the norms that the clip follows, in (0, 1); 0.5 in the paper. null: the clip is constant.
      noise_cohort_size: cohort size for noise and epsilon, to simulate a large cohort with few clients (pfl-research,
        arXiv:2404.06430): the noise of the mean is z S / noise_cohort_size. null: cohort.size.
      accountant: how epsilon is computed; pld needs cohort.sampling poisson and some 0.03 s a round.
      trust: methods that may be combined with dp although dp would refuse them. Epsilon then holds only if these methods
        learn nothing about the clients, or if what they learn is protected in another way.
    Raises:
      ValueError: when the run is checked, shared buffers or no dp-accounting.
    """
    trusted = frozenset(trust or ())

    def broadcast(message: Message, state: State) -> Message:
        return Message(message.params, {"clip": state["clip"]})

    def weigh(weights: Weights, server: ServerView) -> Weights:
        return dict.fromkeys(weights, server.report["scale"] * server.is_active / server.cohort_size)

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        size, bound = noise_cohort_size or server.cohort_size, state["clip"]
        sampled, z = (size, server.population, server.sampling), noise
        if epsilon is not None:  # kept: a run resumed with more rounds keeps its noise
            z = state.get("noise") or noise_for(accountant, epsilon, delta, server.num_rounds, *sampled)
            server.log("noise", z)
        _log(server, bound, epsilon_by_rounds(accountant, delta, z, *sampled), trusted)
        sigma_count, sigma_sum = (0.0, z) if adaptive is None else split_noise(z, size)
        draws = torch.randn(len(update), generator=server.generator)
        noised = update + server.layout.zero_personal_(draws * (sigma_sum * bound / size))
        bound = bound if adaptive is None else next_clip(bound, adaptive, sigma_count / size, server)
        return noised, {"clip": bound} if epsilon is None else {"clip": bound, "noise": z}

    return Method(
        "dp",
        init=private_init("dp", clip=clip),
        broadcast=broadcast,
        report=clipping,
        weigh=weigh,
        server_update=server_update,
        claims=frozenset({"weights:*", "merge"}),
        fits=lambda sizes: _fault(sizes, noise, epsilon, delta, noise_cohort_size, accountant, trusted),
        excludes=EXCLUDES,
        trusts=POST_PROCESSING | trusted,
    )


def private_init(name: str, **state: float) -> Callable[[Tensor, Layout], State]:
    """Return the `init` hook of a private method, which refuses shared buffers. name: of the method; state: at the start."""

    def init(params: Tensor, layout: Layout) -> State:
        if shared := [leaf.name for leaf in layout.buffers if leaf.is_shared]:
            names = f"{shared[0]}{f' and {len(shared) - 1} more' if shared[1:] else ''}"
            mend = "set model.norm to group, or keep the norms personal"
            raise ValueError(f"{name}: {names} would be averaged without noise; {mend}")
        require_accounting()
        return dict(state)

    return init


def clipping(client: ClientView) -> dict[str, Tensor]:
    """Report norm: ||u_k|| of the sent update; scale: min(1, S / ||u_k||), 1 for an update of 0."""
    update = client.layout.zero_personal_(client.params - client.start)
    norm = torch.linalg.vector_norm(update, dtype=torch.float64)
    return {"norm": norm, "scale": (client.message["clip"] / norm).clamp(max=1.0)}


def next_clip(clip: float, quantile: float, deviation: float, server: ServerView) -> float:
    """Return the clip after a round: Andrew et al. 2021, Algorithm 1, as in `dp`.

    Args:
      quantile: gamma, `adaptive` of `dp`.
      deviation: standard deviation of the noise on the share of norms within the clip.
    """
    draw = float(torch.randn((), dtype=torch.float64, generator=server.generator)) * deviation
    is_within = (server.report["scale"] >= 1)[server.is_active].double()
    share = 0.5 + float((is_within - 0.5).sum()) / server.cohort_size + draw
    return clip * math.exp(-STEP * (share - quantile))


def split_noise(noise: float, size: int) -> tuple[float, float]:
    """Return (sigma_b of the count, multiplier of the sum), together as private as `noise`: Andrew et al., thm. 1."""
    sigma_count = max(COUNT_NOISE * size, noise)
    return sigma_count, noise / math.sqrt(1 - (noise / (2 * sigma_count)) ** 2)


def _of_round(noise: float, size: float, population: int, sampling: str) -> tuple[Any, Any]:
    """Return dp-accounting's (event, neighbouring relation) of one round."""
    accounting = require_accounting()
    relation = accounting.NeighboringRelation
    if noise == 0:
        return accounting.NonPrivateDpEvent(), relation.ADD_OR_REMOVE_ONE
    if sampling == "poisson":
        event = accounting.PoissonSampledDpEvent(size / population, accounting.GaussianDpEvent(noise))
        return event, relation.ADD_OR_REMOVE_ONE
    # One client replaced by another moves the sum by up to 2 S.
    event = accounting.SampledWithoutReplacementDpEvent(population, size, accounting.GaussianDpEvent(noise / 2))
    return event, relation.REPLACE_ONE


@lru_cache(maxsize=4096)
def spending(
    noise: float, size: float, population: int, sampling: str, orders: tuple[int, ...] | None = None
) -> tuple[Sequence[float], Any]:
    """Return (orders, Renyi divergence at each order) of one round; divergences add up.

    Args:
      size: number of clients in a round; orders: None for those of dp-accounting.
    """
    event, neighbours = _of_round(noise, size, population, sampling)
    accountant = require_accounting().rdp.RdpAccountant(orders, neighboring_relation=neighbours)
    accountant.compose(event)
    return accountant.orders, accountant.rdp


@lru_cache(maxsize=8)
def epsilon_by_pld(delta: float, noise: float, size: int, population: int) -> Callable[[int], float]:
    """Return epsilon(rounds) at delta by the privacy loss distribution of Poisson-sampled rounds; each round is composed once.

    Args:
      noise: z; size: expected number of clients in a round; population: number of all clients.
    """
    require_accounting()
    from dp_accounting.pld import privacy_loss_distribution as distribution

    one = total = distribution.from_gaussian_mechanism(
        noise, sampling_prob=size / population, value_discretization_interval=BIN
    )
    epsilons: list[float] = []

    def epsilon(rounds: int) -> float:
        nonlocal total
        while len(epsilons) < rounds:
            total = total.compose(one) if epsilons else one
            epsilons.append(float(total.get_epsilon_for_delta(delta)))
        return epsilons[rounds - 1]

    return epsilon


def epsilon_by_rounds(
    accountant: Accountant, delta: float, noise: float, size: int, population: int, sampling: str
) -> Callable[[int], float]:
    """Return epsilon(rounds) at delta.

    Args:
      noise: z; size: number of clients in a round; population: number of all clients; sampling: "fixed" or "poisson".
    """
    if accountant == "pld" and noise:
        return epsilon_by_pld(delta, noise, size, population)
    return partial(epsilon_after, spent=spending(noise, size, population, sampling), delta=delta)


@lru_cache(maxsize=32)
def noise_for(
    accountant: Accountant, epsilon: float, delta: float, rounds: int, size: int, population: int, sampling: str
) -> float:
    """Return the least noise multiplier, to 0.001, with which all rounds spend at most epsilon.

    Arguments as in `epsilon_by_rounds`.
    """
    accounting = require_accounting()
    _, neighbours = _of_round(1.0, size, population, sampling)
    make: Callable[[], Any] = partial(accounting.rdp.RdpAccountant, neighboring_relation=neighbours)
    bracket = None
    if accountant == "pld":  # near zero noise, the distributions would fill the memory
        most = noise_for("rdp", epsilon, delta, rounds, size, population, sampling)
        bracket = accounting.ExplicitBracketInterval(most / 3, most)
        make = partial(accounting.pld.PLDAccountant, value_discretization_interval=BIN)
    multiplier: float = accounting.calibrate_dp_mechanism(
        make,
        lambda noise: accounting.SelfComposedDpEvent(_of_round(noise, size, population, sampling)[0], rounds),
        epsilon,
        delta,
        bracket,
        tol=1e-3,
    )
    return multiplier


def epsilon_after(rounds: int, spent: tuple[Sequence[float], Any], delta: float) -> float:
    """Return epsilon after a number of rounds, by Renyi divergences. spent: divergences of one round, see `spending`."""
    orders, divergences = spent
    return float(require_accounting().rdp.compute_epsilon(orders, rounds * divergences, delta)[0])


def _log(server: ServerView, bound: float, epsilon: Callable[[int], float], trusted: frozenset[str]) -> None:
    rounds = server.round_index + 1
    server.log("epsilon", epsilon(rounds))
    server.log("next_epsilon", epsilon(rounds + 1))
    server.log("clip", bound)
    server.log("norms", server.report["norm"])
    server.log("num_clipped", float((server.report["scale"] < 1).sum()))
    if trusted:  # in the records, since epsilon depends on them
        server.log("num_trusted", float(len(trusted)))


def _fault(
    sizes: RunSizes,
    noise: float,
    epsilon: float | None,
    delta: float,
    noise_cohort_size: int | None,
    accountant: Accountant,
    trusted: frozenset[str],
) -> str:
    """Return why a run of these sizes is refused; empty if it is not."""
    if unknown := sorted(trusted - set(sizes.methods)):
        return f"trust names {unknown[0]!r}, which is not a method of the run; correct or remove it"
    if noise and delta * sizes.population >= 1:
        return (
            f"delta {delta:g} is not below 1 / clients, {1 / sizes.population:g}: one client's data could be published"
        )
    if accountant == "pld" and sizes.sampling != "poisson":
        return "accountant pld needs Poisson cohorts; set cohort.sampling to poisson, or accountant to rdp"
    size = noise_cohort_size or sizes.cohort_size
    if epsilon is not None:
        least = epsilon_after(sizes.num_rounds, spending(MOST_NOISE, size, sizes.population, sizes.sampling), delta)
        if least > epsilon:
            text = f"epsilon {epsilon:g} in {sizes.num_rounds} rounds takes more noise than {MOST_NOISE:g}"
            return f"{text}; raise epsilon or lower rounds"
        noise = noise_for(accountant, epsilon, delta, sizes.num_rounds, size, sizes.population, sizes.sampling)
    if sizes.stop_epsilon is not None:
        first = epsilon_by_rounds(accountant, delta, noise, size, sizes.population, sizes.sampling)(1)
        if first > sizes.stop_epsilon:
            return (
                f"the first round spends epsilon {first:.4g}, and stop.epsilon is {sizes.stop_epsilon:g}; raise noise"
            )
    if noise_cohort_size is not None and not sizes.cohort_size <= noise_cohort_size <= sizes.population:
        bounds = f"{sizes.cohort_size} (the cohort) and {sizes.population} (all clients)"
        return f"noise_cohort_size must lie between {bounds}, got {noise_cohort_size}; or drop it"
    if sizes.dropout and sizes.sampling == "poisson":
        return (
            "with cohort.sampling poisson and cohort.dropout a round is not a Poisson sample: set cohort.dropout to 0"
        )
    return ""


def require_accounting() -> Any:
    """Return the package dp_accounting. Raises ValueError if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        text = "dp: epsilon is computed by dp-accounting, which is not installed: pip install 'raysim-fl[privacy]'"
        raise ValueError(text) from error
    logging.getLogger("absl").addFilter(_is_not_of_accounting)  # a filter is added once
    return dp_accounting


def _is_not_of_accounting(record: logging.LogRecord) -> bool:
    """Turn a log line of dp-accounting into a Python warning, which is shown once a run, and return False for it."""
    is_theirs = "dp_accounting" in record.pathname
    if is_theirs:
        text = re.sub("%[a-z]", "...", str(record.msg))  # one text, whatever its numbers
        warnings.warn(f"dp: dp-accounting says: {text}", stacklevel=2)
    return not is_theirs
