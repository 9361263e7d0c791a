"""Conflicts between methods, with remedies: claims and needs of a list of methods, checked before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations, permutations

from raysim.base.texts import listed
from raysim.core.layout import Layout
from raysim.core.method import Method

#: Claim -> hook whose argument the claimant replaces; list the claimant before methods that modify the argument.
REPLACES = {"criterion": "loss", "weights": "weigh", "merge": "server_update"}

#: In a claim: the path of the classifier layer, which a method does not know when it is built.
HEAD = "@head"

#: Need -> remedy, for needs that a run may not meet.
REMEDY = {
    "clock": "set time.step_s, the seconds of a local step",
    "classes": "use a set with one class a row, or remove the method",
    "validation-set": "set data.validation above 0, or data.validation_set, to give the server examples",
    "test-set": "set data.test above 0",
    "sgd": "set local.optimizer to sgd: the method counts how often a gradient enters the update",
    "client-order": "set data.split_within_clients and data.validation_set.order to client: scores go client after client",
    "lora": "set model.lora, for example {rank: 16}",
    "lora-factors": "drop the method that freezes A or B of the adapters, or keeps A or B personal",
}


def resources_of(layout: Layout) -> list[str]:
    """Return the names of all claimable resources of a layout."""
    layers = dict.fromkeys(leaf.layer for leaf in layout.params if len(leaf.shape) >= 2)
    weights = [f"weights:{leaf.name}" for leaf in layout.shared]
    backward = [f"backward:{name}" for name in layers]
    return ["arrivals", "criterion", "own-model", "merge", "broadcast-point", "server-optimizer", *weights, *backward]


def conflicts(
    methods: Sequence[Method], resources: Sequence[str], available: Collection[str], *, head: str = ""
) -> list[str]:
    """Return reasons why the methods cannot be combined, each with a remedy. Empty: the methods compose.

    Example:
      >>> everywhere = Method("everywhere", claims=frozenset({"weights:*"}))
      >>> in_the_head = Method("in_the_head", claims=frozenset({"weights:@head.*"}), needs=frozenset({"features"}))
      >>> resources = ["weights:conv.weight", "weights:fc.weight"]
      >>> for fault in conflicts([everywhere, in_the_head], resources, {"features"}, head="fc"):
      ...     print(fault.partition(":")[0])
      everywhere and in_the_head both decide weights
      >>> body = Method("body", claims=frozenset({"weights:*!weights:@head.*"}))
      >>> conflicts([body, in_the_head], resources, {"features"}, head="fc")
      []

    Args:
      methods: in the order of the list, which is the order in which hooks apply.
      resources: see `resources_of`.
      available: the needs that this run can meet.
      head: path of the classifier layer.
    """
    methods = [replace(m, claims=frozenset(claim.replace(HEAD, head) for claim in m.claims)) for m in methods]
    counts = Counter(method.name for method in methods)
    faults = [f"{name} is listed twice; list it once" for name, count in counts.items() if count > 1]
    for method in methods:
        lacking = sorted(method.needs - set(available))
        faults += [f"{method.name} needs {need}: {REMEDY.get(need, 'this run does not offer it')}" for need in lacking]
        for claim in [] if lacking else sorted(method.claims):
            if not any(_covers(claim, resource) for resource in resources):
                nothing = f"{method.name} claims {claim}, but no trained and shared tensor has the name"
                faults.append(f"{nothing}: {_resources_of_kind(claim, resources)}")
    faults += exclusions(methods)
    pairs = list(combinations([m for m in methods if not m.is_phase], 2))
    pairs = [pair for pair in pairs if not exclusions(pair)]
    return faults + _decided_twice(pairs, resources) + [text for pair in pairs for text in _discarded(*pair)]


def exclusions(methods: Sequence[Method]) -> list[str]:
    """Return faults for methods whose hooks are excluded by another method."""
    reasons: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for method, other in permutations(methods, 2):
        hooks = [hook for hook in method.excludes if getattr(other, hook) not in (None, False)]
        if hooks and other.name not in method.trusts:
            reasons.setdefault((hooks[0], method.excludes[hooks[0]]), []).append((other.name, method.name))
    faults = []
    for (hook, text), pairs in reasons.items():
        others, beside = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
        its = f"because of {'its' if len(others) == 1 else 'their'} `{hook}`"
        keep = "drop one" if len(pairs) == 1 else f"drop {listed(others, 'and')}, or {listed(beside, 'and')}"
        faults.append(f"{listed(others, 'and')} cannot be combined with {listed(beside, 'and')} {its}: {text}; {keep}")
    return faults


def _decided_twice(pairs: Sequence[tuple[Method, Method]], resources: Sequence[str]) -> list[str]:
    """Return faults for resources claimed by several methods, one for each set of resources."""
    rivals: dict[tuple[str, ...], dict[str, Method]] = {}
    for pair in pairs:
        if both := tuple(resource for resource in resources if all(_claims(method, resource) for method in pair)):
            rivals.setdefault(both, {}).update({method.name: method for method in pair})
    faults = []
    for both, named in rivals.items():
        decide = f"{listed(list(named), 'and')} {'both' if len(named) == 2 else 'all'} decide"
        what = f"{', '.join(both[:3])}{' ...' if len(both) > 3 else ''}"
        keep = "drop one" if len(named) == 2 else "keep one"
        faults.append(f"{decide} {what}: {keep}, or build one method without the part")
    return faults


def _discarded(first: Method, second: Method) -> list[str]:
    """Return faults for hooks of the first method whose result the second method discards."""
    faults = []
    for kind, hook in REPLACES.items():
        have_hook = getattr(first, hook) is not None and getattr(second, hook) is not None
        if have_hook and _replaces(second, kind) and not _replaces(first, kind):
            faults.append(
                f"{second.name} after {first.name} would discard what {first.name} does in `{hook}`: "
                f"put {second.name} before {first.name}"
            )
    return faults


def _claims(method: Method, resource: str) -> bool:
    return any(_covers(claim, resource) for claim in method.claims)


def _covers(claim: str, resource: str) -> bool:
    """Return whether a claim covers a resource. claim: "pattern" or "pattern!excluded pattern"."""
    wanted, _, left_out = claim.partition("!")
    return fnmatchcase(resource, wanted) and not fnmatchcase(resource, left_out)


def _replaces(method: Method, kind: str) -> bool:
    return any(claim.partition(":")[0] == kind for claim in method.claims)


def _resources_of_kind(claim: str, resources: Sequence[str]) -> str:
    kind = claim.partition(":")[0]
    same = [resource for resource in resources if resource.partition(":")[0] == kind]
    return f"there are {', '.join(same[:6])}{' ...' if len(same) > 6 else ''}" if same else f"there is no {kind} at all"
