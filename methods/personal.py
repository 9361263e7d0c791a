"""Personal layers: trained by every client for itself and never averaged."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from raysim.core.method import Method, Partition


def personal(*, layers: Literal["all", "head", "norm"] | list[str] = "head") -> Method:
    """Keep layers at the clients: each client continues from its own values of the last round it took part in.

    A client that is chosen for the first time begins with the initial values of the seed. Its own values are client memory:
    they do not travel in either direction, and checkpoints hold them.

    Args:
      layers: layers kept at the clients. "all": nothing is shared (local-only training); "head": the classifier
        (FedPer, Arivazhagan et al. 2019, arXiv:1912.00818); "norm": all normalisation layers with BatchNorm's running
        statistics (FedBN, Li et al. 2021, ICLR, arXiv:2102.07623); or shell patterns of the paths of tensors, layers or
        blocks: ["conv1", "conv2"] in a small network is LG-FedAvg (Liang et al. 2020, arXiv:2001.01523), ["*.lora_B"]
        shares A alone.
    `clients/personal_accuracy_*`, on test rows of the clients' own, or `clients/expected_personal_accuracy_*`, on the
    test set by each client's mix of classes and domains, are the numbers of these methods. They score, for the clients
    of the round only, the whole model of a client as its local steps left it: its own layers and the shared ones as it
    trained them, before these are averaged. `server/*` and `clients/accuracy_*` score the global model, in which
    personal layers keep their initial values, as in `model.safetensors`: with "all" the global model never changes.
    BatchNorm's statistics follow its weights, also with "all" and with patterns that match the layer. Its counter of
    batches, which only a cumulative average (momentum None) uses, is the largest counter of the cohort.
    Degenerate cases: a client without a step keeps its values. A method that decides the weights of personal layers
    alone, such as `fedvg` with "all", is refused.
    Raises:
      ValueError: when the run is checked, a pattern that nothing trained matches, or "norm" in a network without such layers.
    """

    def partition(part: Partition) -> Partition:
        names = part.trained | part.shared
        if layers == "norm":
            kept_names = names & part.norms
            if not kept_names:
                raise ValueError(
                    "personal: the model has no normalisation layers; set model.norm, or name further layers"
                )
        else:
            patterns = layers if isinstance(layers, list) else {"all": ["*"], "head": [part.head]}[layers]
            kept_names = _matching(patterns, names)
        return Partition(part.trained, part.shared - kept_names, part.head)

    return Method("personal", partition=partition, needs=frozenset({"client-memory"}))


def _matching(patterns: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Return the names matched by a pattern, whole or up to a dot.

    Raises:
      ValueError: a pattern matches nothing.
    """
    names, matched = list(names), frozenset[str]()
    for pattern in patterns:
        matches = frozenset(name for name in names if any(fnmatchcase(path, pattern) for path in _paths(name)))
        if not matches:
            layers = sorted({name.rpartition(".")[0] for name in names})
            raise ValueError(
                f"personal: {pattern!r} matches no trained layer; known: {', '.join(layers[:8])}"
                f"{' ...' if len(layers) > 8 else ''}"
            )
        matched |= matches
    return matched


def _paths(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
