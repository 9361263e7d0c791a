"""Compressed downlink: the server sends the global model with a few bits per parameter."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from methods.compression import Sent, packed_bytes
from raysim.base.options import Bounds
from raysim.core.layout import Layout
from raysim.core.method import Message, Method, ServerView, State
from raysim.core.seeding import torch_generator


def quantised_broadcast(*, bits: Annotated[int, Bounds(ge=1, le=8)] = 8) -> Method:
    """Round the broadcast model at random, without bias, to 2^bits levels between the extremes of each leaf.

    Probabilistic quantization of Konečný et al. 2016 (arXiv:1610.05492), section 3.2, on the downlink as in Caldas et al.
    2018 (arXiv:1812.07210). For a leaf w with the step h = (max w - min w) / (2^bits - 1), and x = (w - min w) / h:
        Q(w)_i = min w + h l_i,   l_i = floor(x_i) + 1 with probability x_i - floor(x_i), else floor(x_i)
    Every client of a round receives the same Q(w) and computes its update from Q(w); the server adds the sum of the
    updates to w. A parameter takes `bits` bits, and each leaf 8 further bytes. The papers' random rotations are left
    out. Buffers are sent whole.

    Args:
      bits: number of bits of each parameter, 1 to 8.
    """

    def init(params: Tensor, layout: Layout) -> State:
        return {"seed": 0, "leaves": [[leaf.offset, leaf.end] for leaf in layout.params if leaf.is_shared]}

    def broadcast(message: Message, state: State) -> Message:
        sent, size, generator = message.params.clone(), 0, torch_generator(state["seed"])
        for start, end in state["leaves"]:
            sent[start:end], num_bytes = rounded(sent[start:end], bits, generator)
            size += num_bytes
        return Message(sent, message.fields, size)

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        seed = int(torch.randint(2**62, (1,), generator=server.generator))
        return update, {**state, "seed": seed}

    claims = frozenset({"broadcast-point"})
    return Method("quantised_broadcast", init=init, broadcast=broadcast, server_update=server_update, claims=claims)


def rounded(values: Tensor, bits: int, generator: torch.Generator) -> Sent:
    """Round values [n] at random, without bias, to 2^bits levels between their extremes, which take 8 bytes."""
    low, high = values.aminmax()
    exact = ((values - low) * ((2**bits - 1) / (high - low))).nan_to_num(0.0)  # a constant leaf is 0 * inf
    level = exact.floor() + (torch.rand(len(values), generator=generator) < exact - exact.floor())
    step = (float(high) - float(low)) / (2**bits - 1)
    return level.clamp(max=2**bits - 1) * step + float(low), packed_bytes(len(values), bits) + 8
