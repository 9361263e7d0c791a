"""Freeze: the classifier keeps its initial value; only the body is trained and averaged."""

from __future__ import annotations

from raysim.core.method import Method, Partition, ServerView
from raysim.core.weights import Weights


def freeze(*, trains_locally: bool = False) -> Method:
    """Never trains or sends the head, whose initial value every process derives from the seed.

    FedBABU (Oh, Kim, Yun, ICLR 2022) without its personalisation; "Freeze" in FedUV and UniVarFL. The head takes no
    part in momentum, weight decay or any other method.

    Args:
      trains_locally: true: clients train the head from its initial value in every round, and the aggregation leaves it
        out, as in FedUV's released code.
    """

    def partition(part: Partition) -> Partition:
        head = {name for name in part.trained if name.startswith(f"{part.head}.")}
        return Partition(part.trained - head, part.shared - head, part.head)

    def weigh(weights: Weights, server: ServerView) -> Weights:
        return {name: weight for name, weight in weights.items() if not server.layout.by_name[name].is_head}

    return Method("freeze", weigh=weigh) if trains_locally else Method("freeze", partition=partition)
