"""Compressed updates: clients encode updates to few bytes; the decoded values are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.core.method import ClientView, Method, ServerView, State, Update, require
from raysim.core.seeding import torch_generator

#: The encoded form: the arrays that a client would send.
Encoded = dict[str, np.ndarray]


class Codec(NamedTuple):
    """encode(values [n] float32 on the CPU, generator) -> code; decode(code, n) -> [n] float32."""

    encode: Callable[[Tensor, torch.Generator], Encoded]
    decode: Callable[[Encoded, int], Tensor]


def top_k(*, share: float = 0.01, error_feedback: bool = True) -> Method:
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
    Raises:
      ValueError: share out of its range.
    """
    require("top_k: share", share, 0 < share <= 1, "in (0, 1]", "0.01 is common")
    return _method("top_k", Codec(lambda values, _: largest_of(values, share), entries), error_feedback)


def random_k(*, share: float = 0.01, error_feedback: bool = True) -> Method:
    """Send randomly drawn entries of an update; the places follow from a seed of 8 bytes, new in each round.

    Stich et al. 2018 (arXiv:1809.07599), rand_k, with the error feedback of `top_k`. Without error feedback the entries
    are multiplied by d/k, so that their mean over the draws is the update, and the mean of ||.||^2 is d/k times the
    update's (Konečný et al. 2016, arXiv:1610.05492, subsampling).

    Args:
      share: share of the shared parameters that are sent, in (0, 1]; at least one parameter.
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    Raises:
      ValueError: share out of its range.
    """
    require("random_k: share", share, 0 < share <= 1, "in (0, 1]", "0.01 is common")

    def encode(values: Tensor, generator: torch.Generator) -> Encoded:
        return drawn_of(values, share, generator, is_unbiased=not error_feedback)

    return _method("random_k", Codec(encode, drawn_entries), error_feedback)


def qsgd(*, levels: int = 7, bucket: int = 512) -> Method:
    """Send every entry as one of 2 s + 1 levels, rounded at random without bias.

    Alistarh et al. 2017 (arXiv:1610.02132), section 3.1, with ||v|| the norm of the entry's bucket:
        Q(v_i) = ||v|| sign(v_i) l_i / s,   l_i = floor(s |v_i| / ||v||), or one more with probability of the rest
    Unbiased, with variance <= min(n / s^2, sqrt(n) / s) ||v||^2 for buckets of n. An entry takes ceil(log2(2 s + 1)) bits, a
    bucket 4 bytes more; the paper's Elias code takes less where most levels are 0.
    No error feedback: the operator is not a contraction, so the unsent part could grow.

    Args:
      levels: s, number of levels above 0, 1 to 127: 7 levels take 4 bits an entry, 1 level takes 2 bits.
      bucket: number of neighbouring entries that share a norm; 512 in the paper's experiments with 4 bits.
    Raises:
      ValueError: levels or bucket out of range.
    """
    require("qsgd: levels", levels, 1 <= levels <= 127, "1 to 127", "7 are 4 bits an entry")
    require("qsgd: bucket", bucket, bucket >= 1, ">= 1", "512 is common")
    codec = Codec(
        lambda values, generator: quantised(values, generator, levels, bucket),
        lambda encoded, size: dequantised(encoded, size, levels, bucket),
    )
    return _method("qsgd", codec, False)


def sign(*, error_feedback: bool = True) -> Method:
    """A client sends the sign of every entry, a bit, and the mean absolute value, 4 bytes.

    Karimireddy et al. 2019 (arXiv:1901.09847), EF-SignSGD, Algorithm 1 with a local update in the place of a gradient:
        c_k = (||p||_1 / d) sign(p),   p = u_k + e_k,   e_k+ = p - c_k
    The whole vector has one scale. The sign of 0 is drawn at random. Without error feedback, sign methods need not
    converge (section 3 of the paper).

    Args:
      error_feedback: keep the unsent part of the update at the client and add it to the client's next update.
    """
    return _method("sign", Codec(signs_of, signed), error_feedback)


def sign_majority(*, server_lr: float = 0.001) -> Method:
    """A client sends the sign of every entry; the server moves every entry by server_lr where most clients point.

    Bernstein et al. 2018 (arXiv:1802.04434), Algorithm 3 (majority vote), with a local update in the place of a gradient:
        w+ = w + server_lr sign(sum_k sign(u_k))
    Every participant has one vote. A tie moves nothing. The sign of 0 is drawn at random, so that an entry in which no
    client moved is not pushed in one direction. As in the paper, there is no error feedback.

    Args:
      server_lr: length of the step of every entry, > 0.
    Raises:
      ValueError: server_lr <= 0.
    """
    require("sign_majority: server_lr", server_lr, server_lr > 0, "> 0", "0.001 is a start")

    def encode(values: Tensor, generator: torch.Generator) -> Encoded:
        return {"signs": signs_of(values, generator)["signs"]}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        return server_lr * update.sign(), state

    return Method(
        "sign_majority",
        outgoing=_outgoing(_through(Codec(encode, signed)), False),
        server_update=server_update,
        claims=frozenset({"weights:*", "merge"}),
        base_weights="uniform",
    )


def power_sgd(*, rank: int = 2, error_feedback: bool = True) -> Method:
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
    Raises:
      ValueError: rank < 1.
    """
    require("power_sgd: rank", rank, rank >= 1, ">= 1", "2 is common")

    def send(wanted: Tensor, client: ClientView) -> tuple[Tensor, int]:
        sent, size = torch.zeros_like(wanted), 0
        bases = client.memory.setdefault("bases", {})
        for leaf in (leaf for leaf in client.layout.params if leaf.is_shared):
            values, place = client.layout.view(wanted, leaf), client.layout.view(sent, leaf)
            if values.dim() < 2 or rank * sum(values.flatten(1).shape) >= leaf.size:
                encoded = {"values": values.cpu().numpy()}
                place.copy_(values)
            else:
                matrix = values.flatten(1).cpu()
                if (basis := bases.get(leaf.name)) is None or not bool(basis.any()):  # the last update was 0
                    basis = torch.randn(matrix.shape[1], rank, generator=client.generator)
                encoded = factors_of(matrix, basis.cpu())
                place.copy_(product_of(encoded).view(leaf.shape))
                bases[leaf.name] = torch.from_numpy(encoded["right"])
            size += num_bytes(encoded)
        return sent, size

    return Method("power_sgd", outgoing=_outgoing(send, error_feedback), needs=frozenset({"client-memory"}))


def num_bytes(encoded: Encoded) -> int:
    """Bytes of an encoded form."""
    return sum(array.nbytes for array in encoded.values())


def largest_of(values: Tensor, share: float) -> Encoded:
    """The share of the entries that are largest in absolute value. values: [n]."""
    places = values.abs().topk(_count(share, len(values)), sorted=False).indices.sort().values
    return {"places": places.int().numpy(), "values": values[places].numpy()}


def entries(encoded: Encoded, size: int) -> Tensor:
    """[size]: the entries at their places, 0 elsewhere."""
    values, places = torch.from_numpy(encoded["values"]), torch.from_numpy(encoded["places"])
    return torch.zeros(size).index_copy_(0, places.long(), values)


def drawn_of(values: Tensor, share: float, generator: torch.Generator, *, is_unbiased: bool) -> Encoded:
    """Encode a random share of the values [n]; is_unbiased: times n / k, so that the mean over draws is the values."""
    seed, count = torch.randint(2**62, (1,), generator=generator), _count(share, len(values))
    places = _drawn(int(seed), len(values), count)
    return {"seed": seed.numpy(), "values": (values[places] * (len(values) / count if is_unbiased else 1.0)).numpy()}


def drawn_entries(encoded: Encoded, size: int) -> Tensor:
    """[size]: the entries at the places that the seed gives, 0 elsewhere."""
    places = _drawn(int(encoded["seed"][0]), size, len(encoded["values"]))
    return entries({"places": places.numpy(), "values": encoded["values"]}, size)


def _drawn(seed: int, size: int, count: int) -> Tensor:
    return torch.randperm(size, generator=torch_generator(seed))[:count]


def quantised(values: Tensor, generator: torch.Generator, levels: int, bucket: int) -> Encoded:
    """QSGD's random rounding of values [n] to levels of their bucket's norm."""
    rows = F.pad(values, (0, -len(values) % bucket)).view(-1, bucket)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    exact = (levels * rows.abs() / norms.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=levels)
    level = exact.floor() + (torch.rand(rows.shape, generator=generator) < exact - exact.floor())
    codes = (level * rows.sign() + levels).flatten()[: len(values)].byte().numpy()
    return {"norms": norms.flatten().numpy(), "codes": packed(codes, (2 * levels).bit_length())}


def dequantised(encoded: Encoded, size: int, levels: int, bucket: int) -> Tensor:
    """[size]: the levels times their bucket's norm."""
    codes = torch.from_numpy(unpacked(encoded["codes"], size, (2 * levels).bit_length()))
    return (codes.float() - levels) / levels * torch.from_numpy(encoded["norms"]).repeat_interleave(bucket)[:size]


def packed(codes: np.ndarray, width: int) -> np.ndarray:
    """Codes (n,) uint8 below 2^width, `width` bits each, lowest bit first."""
    return np.packbits((codes[:, None] >> np.arange(width, dtype=np.uint8)) & 1)


def unpacked(data: np.ndarray, count: int, width: int) -> np.ndarray:
    """Return (count,) uint8: the codes that were given to `packed`."""
    bits = np.unpackbits(data, count=count * width).reshape(count, width)
    return np.asarray(bits @ (1 << np.arange(width)).astype(np.uint8))


def signs_of(values: Tensor, generator: torch.Generator) -> Encoded:
    """Return a bit for each entry, drawn at random for zeros, and the mean absolute value. values: [n]."""
    coins = torch.rand(len(values), generator=generator) < 0.5
    is_up = torch.where(values == 0, coins, values > 0)
    scale = values.abs().mean(dtype=torch.float64).float()
    return {"scale": scale.reshape(1).numpy(), "signs": np.packbits(is_up.numpy())}


def signed(encoded: Encoded, size: int) -> Tensor:
    """[size]: plus or minus the scale, or plus or minus 1 if no scale was sent."""
    signs = torch.from_numpy(np.unpackbits(encoded["signs"], count=size)).float() * 2 - 1
    return signs * float(encoded["scale"][0]) if "scale" in encoded else signs


def factors_of(matrix: Tensor, basis: Tensor) -> Encoded:
    """left (n, rank), orthonormal, and right (m, rank) of a matrix (n, m), from a basis (m, rank)."""
    left = torch.linalg.qr(matrix @ basis).Q
    return {"left": left.numpy(), "right": (matrix.T @ left).numpy()}


def product_of(encoded: Encoded) -> Tensor:
    """left right^T, (n, m)."""
    return torch.from_numpy(encoded["left"]) @ torch.from_numpy(encoded["right"]).T


#: send(wanted [num_params], 0 in personal leaves, client) -> (decoded vector [num_params], number of bytes).
Send = Callable[[Tensor, ClientView], tuple[Tensor, int]]


def _method(name: str, codec: Codec, error_feedback: bool) -> Method:
    needs = frozenset({"client-memory"} if error_feedback else ())
    return Method(name, outgoing=_outgoing(_through(codec), error_feedback), needs=needs)


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


def _through(codec: Codec) -> Send:
    """All shared parameters as one vector through a codec."""

    def send(wanted: Tensor, client: ClientView) -> tuple[Tensor, int]:
        is_shared = client.layout.zero_personal_(torch.ones(len(wanted))).bool()
        values = wanted.cpu()[is_shared]
        encoded = codec.encode(values, client.generator)
        sent = torch.zeros(len(wanted))
        sent[is_shared] = codec.decode(encoded, len(values))
        return sent.to(wanted.device), num_bytes(encoded)

    return send


def _count(share: float, size: int) -> int:
    return max(1, round(share * size))
