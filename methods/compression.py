"""Compressed updates: each method gives the update that the server decodes, and the bytes of the encoded form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.base.options import Bounds
from raysim.core.method import ClientView, Count, Fraction, Method, Positive, ServerView, State, Update
from raysim.core.seeding import torch_generator

#: Decoded values [n], and the number of bytes of the encoded form.
Sent = tuple[Tensor, int]
#: encode(values [n] float32 on the CPU, generator) -> [n] float32, and bytes.
Encode = Callable[[Tensor, torch.Generator], Sent]


def top_k(*, share: Fraction = 0.01, error_feedback: bool = True) -> Method:
    """Send the entries of an update with the largest absolute values, and their places.

    Aji, Heafield 2017 (arXiv:1704.05021); with error feedback Stich et al. 2018 (arXiv:1809.07599), Algorithm 1: with
    e_k the unsent part of earlier updates, 0 at first,
        c_k = top_k(u_k + e_k),   e_k+ = u_k + e_k - c_k
    The k largest entries are chosen in the whole vector, not in each layer. An entry takes 8 bytes: its value and its
    place. The operator is a contraction, ||u - top_k(u)||^2 <= (1 - k/d) ||u||^2. A client keeps the unsent part until
    the next round in which it takes part.

    Args:
      share: share of the shared parameters that are sent, in (0, 1]; at least one parameter.
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    """
    return _method("top_k", lambda values, _: largest_of(values, share), error_feedback)


def random_k(*, share: Fraction = 0.01, error_feedback: bool = True) -> Method:
    """Send randomly drawn entries of an update; the places follow from a seed of 8 bytes, new in each round.

    Stich et al. 2018 (arXiv:1809.07599), rand_k, with the error feedback of `top_k`. Without error feedback the entries
    are multiplied by d/k, so that their mean over the draws is the update, and the mean of ||.||^2 is d/k times the
    update's (Konečný et al. 2016, arXiv:1610.05492, subsampling).

    Args:
      share: share of the shared parameters that are sent, in (0, 1]; at least one parameter.
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    """
    return _method("random_k", partial(drawn_of, share=share, is_unbiased=not error_feedback), error_feedback)


def qsgd(*, levels: Annotated[int, Bounds(ge=1, le=127)] = 7, bucket: Count = 512) -> Method:
    """Send every entry as one of 2 s + 1 levels, rounded at random without bias.

    Alistarh et al. 2017 (arXiv:1610.02132), section 3.1, with ||v|| the norm of the entry's bucket:
        Q(v_i) = ||v|| sign(v_i) l_i / s,   l_i = floor(s |v_i| / ||v||), or one more with probability of the rest
    Unbiased, with variance <= min(n / s^2, sqrt(n) / s) ||v||^2 for buckets of n. An entry takes ceil(log2(2 s + 1)) bits, a
    bucket 4 bytes more; the paper's Elias code takes less where most levels are 0.
    No error feedback: the operator is not a contraction, so the unsent part could grow.

    Args:
      levels: s, number of levels above 0, 1 to 127: 7 levels take 4 bits an entry, 1 level takes 2 bits.
      bucket: number of neighbouring entries that share a norm; 512 in the paper's experiments with 4 bits.
    """
    return _method("qsgd", partial(quantised, levels=levels, bucket=bucket), False)


def sign(*, error_feedback: bool = True) -> Method:
    """A client sends the sign of every entry, a bit, and the mean absolute value, 4 bytes.

    Karimireddy et al. 2019 (arXiv:1901.09847), EF-SignSGD, Algorithm 1 with a local update in the place of a gradient:
        c_k = (||p||_1 / d) sign(p),   p = u_k + e_k,   e_k+ = p - c_k
    The whole vector has one scale. The sign of 0 is drawn at random. Without error feedback, sign methods need not
    converge (section 3 of the paper).

    Args:
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    """
    return _method("sign", scaled_signs, error_feedback)


def sign_majority(*, server_lr: Positive = 0.001) -> Method:
    """A client sends the sign of every entry; the server moves every entry by server_lr where most clients point.

    Bernstein et al. 2018 (arXiv:1802.04434), Algorithm 3 (majority vote), with a local update in the place of a gradient:
        w+ = w + server_lr sign(sum_k sign(u_k))
    Every participant has one vote. A tie moves nothing. The sign of 0 is drawn at random, so that an entry in which no
    client moved is not pushed in one direction. As in the paper, there is no error feedback.

    Args:
      server_lr: length of the step of every entry, > 0.
    """

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        return server_lr * update.sign(), state

    return Method(
        "sign_majority",
        outgoing=_outgoing(_through(signs_of), False),
        server_update=server_update,
        claims=frozenset({"weights:*", "merge"}),
        base_weights="uniform",
    )


def power_sgd(*, rank: Count = 2, error_feedback: bool = True) -> Method:
    """A client sends two thin factors of every weight matrix of its update; vectors are sent in full.

    Vogels et al. 2019 (arXiv:1905.13727), Algorithm 1 with one worker, one step of subspace iteration from the last round's Q:
        P = orthogonalised(M Q),   Q+ = M^T P,   sent: P Q+^T,   M = update of a leaf + the unsent part
    with M a leaf of two or more axes as (first axis, all others). In the paper all workers agree on P before they
    compute Q, which takes a second exchange. In raysim clients send once, so each client has its own P, and the sum has
    a higher rank. Q is client memory, drawn at random at first and after an update of 0. A leaf is sent in full if its
    two factors are no smaller.

    Args:
      rank: columns of the factors, >= 1.
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    """

    def send(wanted: Tensor, client: ClientView) -> Sent:
        sent, num_values = torch.zeros_like(wanted), 0
        bases = client.memory.setdefault("bases", {})
        for leaf in (leaf for leaf in client.layout.params if leaf.is_shared):
            values, place = client.layout.view(wanted, leaf), client.layout.view(sent, leaf)
            if values.dim() < 2 or rank * sum(values.flatten(1).shape) >= leaf.size:
                place.copy_(values)
                num_values += leaf.size
            else:
                matrix = values.flatten(1).cpu()
                if (basis := bases.get(leaf.name)) is None or not bool(basis.any()):  # the last update was 0
                    basis = torch.randn(matrix.shape[1], rank, generator=client.generator)
                left = torch.linalg.qr(matrix @ basis.cpu()).Q
                right = bases[leaf.name] = matrix.T @ left
                place.copy_((left @ right.T).view(leaf.shape))
                num_values += left.numel() + right.numel()
        return sent, 4 * num_values

    return Method("power_sgd", outgoing=_outgoing(send, error_feedback), needs=frozenset({"client-memory"}))


def largest_of(values: Tensor, share: float) -> Sent:
    """Keep the share of the values [n] that is largest in absolute value; 0 elsewhere. A place takes 4 bytes."""
    places = values.abs().topk(_count(share, len(values)), sorted=False).indices
    return torch.zeros_like(values).index_copy_(0, places, values[places]), 8 * len(places)


def drawn_of(values: Tensor, generator: torch.Generator, *, share: float, is_unbiased: bool) -> Sent:
    """Keep a random share, k of the values [n]; 0 elsewhere. The seed of the places takes 8 bytes.

    Args:
      is_unbiased: multiply by n / k, so that the mean over draws is the values.
    """
    seed, count = torch.randint(2**62, (1,), generator=generator), _count(share, len(values))
    places = torch.randperm(len(values), generator=torch_generator(int(seed)))[:count]
    kept = values[places] * (len(values) / count if is_unbiased else 1.0)
    return torch.zeros_like(values).index_copy_(0, places, kept), 4 * count + 8


def quantised(values: Tensor, generator: torch.Generator, *, levels: int, bucket: int) -> Sent:
    """Round values [n] at random to levels of the norm of each bucket (QSGD, section 3.1). A norm takes 4 bytes."""
    rows = F.pad(values, (0, -len(values) % bucket)).view(-1, bucket)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    exact = (levels * rows.abs() / norms.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=levels)
    level = exact.floor() + (torch.rand(rows.shape, generator=generator) < exact - exact.floor())
    sent = (level * rows.sign() / levels * norms).flatten()[: len(values)]
    return sent, packed_bytes(len(values), (2 * levels).bit_length()) + 4 * len(norms)


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` codes of `width` bits each."""
    return -(-count * width // 8)


def signs_of(values: Tensor, generator: torch.Generator) -> Sent:
    """Plus or minus 1 for each entry, drawn at random for zeros. values: [n]."""
    coins = torch.rand(len(values), generator=generator) < 0.5
    return torch.where(values == 0, coins, values > 0).float() * 2 - 1, packed_bytes(len(values), 1)


def scaled_signs(values: Tensor, generator: torch.Generator) -> Sent:
    """Return `signs_of` times the mean absolute value of the values [n], which takes 4 bytes."""
    signs, size = signs_of(values, generator)
    return signs * float(values.abs().mean(dtype=torch.float64).float()), size + 4


#: send(wanted [num_params], 0 in personal leaves, client) -> (decoded vector [num_params], number of bytes).
Send = Callable[[Tensor, ClientView], Sent]


def _method(name: str, encode: Encode, error_feedback: bool) -> Method:
    needs = frozenset({"client-memory"} if error_feedback else ())
    return Method(name, outgoing=_outgoing(_through(encode), error_feedback), needs=needs)


def _outgoing(send: Send, keeps_error: bool) -> Callable[[Update, ClientView], Update]:
    """Return the `outgoing` hook; with error feedback, the unsent part is added to the next update."""

    def outgoing(update: Update, client: ClientView) -> Update:
        wanted = client.layout.zero_personal_(update.values.clone())
        if keeps_error and "error" in client.memory:
            wanted += client.memory["error"]
        sent, size = send(wanted, client)
        if keeps_error:
            client.memory["error"] = wanted - sent
        return Update(sent, size)

    return outgoing


def _through(encode: Encode) -> Send:
    """Encode all shared parameters as one vector."""

    def send(wanted: Tensor, client: ClientView) -> Sent:
        is_shared = client.layout.zero_personal_(torch.ones(len(wanted))).bool()
        sent = torch.zeros(len(wanted))
        sent[is_shared], size = encode(wanted.cpu()[is_shared], client.generator)
        return sent.to(wanted.device), size

    return send


def _count(share: float, size: int) -> int:
    return max(1, round(share * size))
