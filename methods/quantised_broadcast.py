"""Compressed downlink: the server sends the global model in a few bits a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.compression import Encoded, num_bytes, packed, unpacked
from raysim.core.layout import Layout
from raysim.core.method import Message, Method, ServerView, State, require
from raysim.core.seeding import torch_generator


def quantised_broadcast(*, bits: int = 8) -> Method:
    """Clients start from the global model rounded at random, without bias, to 2^bits levels between each leaf's extremes.

    Probabilistic quantization of Konečný et al. 2016 (arXiv:1610.05492), section 3.2, on the downlink as in Caldas et al. 2018
    (arXiv:1812.07210); of a leaf w with the step h = (max w - min w) / (2^bits - 1):
        Q(w)_i = min w + h l_i,   l_i = floor((w_i - min w) / h) or one more, with the chance of the rest
    Every client of a round receives the same Q(w). The server keeps w and adds the sum of the updates, which clients take
    from Q(w), to w. A parameter takes `bits` bits, a leaf 8 bytes more. Left out of those papers: random rotations. Buffers are
    sent whole.

    Args:
      bits: of each parameter, 1 to 8.
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
    """Levels and bounds of values [n], rounded at random without bias."""
    low, high = values.aminmax()
    exact = (values - low) * ((2**bits - 1) / (high - low).clamp_min(torch.finfo(torch.float32).tiny))
    level = (exact.floor() + (torch.rand(len(values), generator=generator) < exact - exact.floor())).clamp(
        max=2**bits - 1
    )
    return {"bounds": torch.stack([low, high]).numpy(), "codes": packed(level.byte().numpy(), bits)}


def restored(encoded: Encoded, size: int, bits: int) -> Tensor:
    """[size]: the values that levels stand for."""
    low, high = encoded["bounds"].tolist()
    levels = torch.from_numpy(unpacked(encoded["codes"], size, bits)).float()
    return levels.mul_((high - low) / (2**bits - 1)).add_(low)
