"""Compressed downlink: the server sends the global model with a few bits per parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.compression import Encoded, num_bytes, packed, unpacked
from raysim.core.layout import Layout
from raysim.core.method import Message, Method, ServerView, State, require
from raysim.core.seeding import torch_generator


def quantised_broadcast(*, bits: int = 8) -> Method:
    """Round the broadcast model at random, without bias, to 2^bits levels between the extremes of each leaf.

    Probabilistic quantization of Konečný et al. 2016 (arXiv:1610.05492), section 3.2, on the downlink as in Caldas et al.
    2018 (arXiv:1812.07210). For a leaf w with the step h = (max w - min w) / (2^bits - 1), and x = (w - min w) / h:
        Q(w)_i = min w + h l_i,   l_i = floor(x_i) + 1 with probability x_i - floor(x_i), else floor(x_i)
    Every client of a round receives the same Q(w) and computes its update from Q(w); the server adds the sum of the
    updates to w. A parameter takes `bits` bits, and each leaf 8 further bytes. The papers' random rotations are left
    out. Buffers are sent whole.

    Args:
      bits: number of bits of each parameter, 1 to 8.
    Raises:
      ValueError: bits out of its range.
    """
    require("quantised_broadcast: bits", bits, 1 <= bits <= 8, "1 to 8", "8 is a start")

    def init(params: Tensor, layout: Layout) -> State:
        return {"seed": 0, "leaves": [[leaf.offset, leaf.end] for leaf in layout.params if leaf.is_shared]}

    def broadcast(message: Message, state: State) -> Message:
        sent, size, generator = message.params.clone(), 0, torch_generator(state["seed"])
        for start, end in state["leaves"]:
            encoded = rounded(sent[start:end], bits, generator)
            sent[start:end] = restored(encoded, end - start, bits)
            size += num_bytes(encoded)
        return Message(sent, message.fields, size)

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        seed = int(torch.randint(2**62, (1,), generator=server.generator))
        return update, {**state, "seed": seed}

    claims = frozenset({"broadcast-point"})
    return Method("quantised_broadcast", init=init, broadcast=broadcast, server_update=server_update, claims=claims)


def rounded(values: Tensor, bits: int, generator: torch.Generator) -> Encoded:
    """Return encoded levels and bounds of values [n], rounded at random without bias."""
    low, high = values.aminmax()
    exact = (values - low) * ((2**bits - 1) / (high - low).clamp_min(torch.finfo(torch.float32).tiny))
    level = (exact.floor() + (torch.rand(len(values), generator=generator) < exact - exact.floor())).clamp(
        max=2**bits - 1
    )
    return {"bounds": torch.stack([low, high]).numpy(), "codes": packed(level.byte().numpy(), bits)}


def restored(encoded: Encoded, size: int, bits: int) -> Tensor:
    """Return the decoded values, [size]."""
    low, high = encoded["bounds"].tolist()
    levels = torch.from_numpy(unpacked(encoded["codes"], size, bits)).float()
    return levels.mul_((high - low) / (2**bits - 1)).add_(low)
