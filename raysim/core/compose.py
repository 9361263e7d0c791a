"""Can these methods run together? Checked once, on declared claims and needs, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations

from raysim.core.layout import Layout
from raysim.core.method import Method

#: A claim of this kind replaces what the hook was given, so the claimant must stand before every modifier of the hook.
REPLACES = {"criterion": "loss", "weights": "weigh", "merge": "server_update"}

#: In a claim: the path of the classifier layer, which a method does not know when it is built.
HEAD = "@head"

REMEDY = {
    "validation-set": "set data.validation above 0, or data.validation_set, so that the server holds examples",
    "sgd": "set local.optimizer to sgd and local.nesterov to false: it counts how often a gradient enters the update",
    "client-order": "set data.split_within_clients and data.validation_set.order to client: it scores client after client",
    "features": "use a model with a classifier layer, so that there is a penultimate feature",
    "linear-head": "use a model whose classifier is one linear layer",
    "client-memory": "nothing to do: the engine keeps it",
    "lora": "set model.lora, for example to {rank: 16}, so that there are adapters",
}


def resources_of(layout: Layout) -> list[str]:
    """Names of everything that can be claimed with this layout."""
    layers = dict.fromkeys(leaf.layer for leaf in layout.params if len(leaf.shape) >= 2)
    weights = [f"weights:{leaf.name}" for leaf in layout.shared]
    return [
        "criterion",
        "merge",
        "broadcast-point",
        "server-optimizer",
        *weights,
        *(f"backward:{name}" for name in layers),
    ]


def conflicts(
    methods: Sequence[Method], resources: Sequence[str], available: Collection[str], *, head: str = ""
) -> list[str]:
    """Everything that keeps these methods from running together, each with the remedy. Empty: they compose.

    Args:
      methods: in the order of the list, which is the order in which hooks apply.
      resources: see `resources_of`.
      available: the needs that this run can meet.
      head: path of the classifier layer.
    """
    found: list[str] = []
    methods = [replace(m, claims=frozenset(claim.replace(HEAD, head) for claim in m.claims)) for m in methods]
    for name in {m.name for m in methods if sum(other.name == m.name for other in methods) > 1}:
        found.append(f"{name} is listed twice; list it once")
    for method in methods:
        for need in sorted(method.needs - set(available)):
            found.append(f"{method.name} needs {need}: {REMEDY.get(need, 'this run does not offer it')}")
        for claim in sorted(method.claims):
            if not _held(claim, resources):
                found.append(
                    f"{method.name} claims {claim}, but nothing like it is trained and shared in this run: "
                    f"{_known(claim, resources)}"
                )
    for first, second in combinations([m for m in methods if not m.is_phase], 2):
        both = [r for r in resources if _claims(first, r) and _claims(second, r)]
        if both:
            found.append(
                f"{first.name} and {second.name} both decide {', '.join(both[:3])}{' ...' if len(both) > 3 else ''}: "
                f"drop one, or build one of them without that part (see `raysim methods`)"
            )
        for kind, hook in REPLACES.items():
            replaces = _replaces(second, kind) and getattr(second, hook) is not None
            if replaces and not _replaces(first, kind) and getattr(first, hook) is not None:
                found.append(
                    f"{second.name} after {first.name} would discard what {first.name} does in `{hook}`: "
                    f"put {second.name} before {first.name}"
                )
    return found


def _held(claim: str, resources: Sequence[str]) -> list[str]:
    return [resource for resource in resources if _covers(claim, resource)]


def _claims(method: Method, resource: str) -> bool:
    return any(_covers(claim, resource) for claim in method.claims)


def _covers(claim: str, resource: str) -> bool:
    """Whether a claim, a pattern or "pattern!pattern that is left out", is on a resource."""
    wanted, _, left_out = claim.partition("!")
    return fnmatchcase(resource, wanted) and not fnmatchcase(resource, left_out)


def _replaces(method: Method, kind: str) -> bool:
    return any(claim.partition(":")[0] == kind for claim in method.claims)


def _known(claim: str, resources: Sequence[str]) -> str:
    kind = claim.partition(":")[0]
    same = [resource for resource in resources if resource.partition(":")[0] == kind]
    return f"there are {', '.join(same[:6])}{' ...' if len(same) > 6 else ''}" if same else f"there is no {kind} at all"
