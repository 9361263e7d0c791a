"""Personal layers: trained by every client for itself and never averaged."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from raysim.core.layout import Layout
from raysim.core.method import Method, Partition, State


def personal(*, layers: Literal["all", "head"] | list[str] = "head") -> Method:
    """Keeps layers at their clients: each client goes on from its own values, whatever round it was last chosen in.

    A client that is chosen for the first time begins with the initial values of the seed. Its own values are client memory:
    they do not travel in either direction, and checkpoints hold them.

    Args:
      layers: "all": every client trains alone, for nothing is shared (local-only training). "head": FedPer (Arivazhagan
        et al. 2019, arXiv:1912.00818), a common body and a classifier of one's own. Or shell patterns of the paths of
        tensors, layers or blocks: ["conv1", "conv2"] of a small network is LG-FedAvg (Liang et al. 2020, arXiv:2001.01523),
        representations of one's own below a common rest; ["*.lora_B"] shares A alone.
    `clients/personal_accuracy_*`, on test rows of the clients' own, or `clients/expected_personal_accuracy_*`, on the test set by
    each client's mix of classes and domains, are the numbers of these methods. They score, for the clients of the round
    only, the whole model of a client as its local steps left it: its own layers and the shared ones as it trained them,
    before these are averaged. `server/*` and `clients/accuracy_*` score the global model, in which personal layers are as they
    began, and so they are in `model.safetensors`: with "all" that model never moves.
    Degenerate cases: a client without a step keeps what it had. A method that decides the weights of personal layers
    alone, such as `fedvg` beside "all", is refused.
    Raises:
      ValueError: when the run is checked, a pattern that nothing trained matches, or BatchNorm statistics beside "all".
    """

    def partition(part: Partition) -> Partition:
        patterns = layers if isinstance(layers, list) else {"all": ["*"], "head": [part.head]}[layers]
        return Partition(part.trained, part.shared - _matching(patterns, part.trained), part.head)

    def init(params: object, layout: Layout) -> State:
        if layers == "all" and layout.buffers:
            raise ValueError("personal: BatchNorm statistics are always shared; use a model without for layers: all")
        return {}

    return Method("personal", partition=partition, init=init, needs=frozenset({"client-memory"}))


def _matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The names that a pattern matches, whole or up to one of their dots.

    Raises:
      ValueError: a pattern matches nothing.
    """
    names, found = list(names), set()
    for pattern in patterns:
        matches = {name for name in names if any(fnmatchcase(path, pattern) for path in _paths(name))}
        if not matches:
            layers = sorted({name.rpartition(".")[0] for name in names})
            raise ValueError(
                f"personal: {pattern!r} matches no layer that is trained; there are {', '.join(layers[:8])}"
                f"{' ...' if len(layers) > 8 else ''}"
            )
        found |= matches
    return found


def _paths(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
