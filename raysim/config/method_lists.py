"""Names of lists of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysim.base.settings import Spec


def methods_label(specs: Sequence[Spec]) -> str:
    """Return the label of a list of methods: "fedprox + fedvg"; "fedavg" for an empty list."""
    return " + ".join(spec.name for spec in specs) or "fedavg"


def methods_text(specs: Sequence[object]) -> str:
    """Return the label with options, of an unchecked list of methods: "fedprox (mu=0.1) + fedvg"."""
    texts = []
    for spec in specs:
        name, options = next(iter(spec.items())) if isinstance(spec, Mapping) and spec else (spec, None)
        more = ", ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, Mapping) else ""
        texts.append(f"{name} ({more})" if more else str(name))
    return " + ".join(texts) or "fedavg"
