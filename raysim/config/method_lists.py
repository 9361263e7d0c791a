"""Lists of methods: what one is called, and old spellings that files and folders of earlier versions have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from raysim.base.errors import SettingRenamed
from raysim.base.settings import Settings, name_and_options


def method_names(specs: Sequence[str | Settings]) -> list[str]:
    """The names in a list of methods."""
    return [str(next(iter(spec))) if isinstance(spec, dict) else spec for spec in specs]


def methods_label(specs: Sequence[str | Settings]) -> str:
    """What a list of methods is called: "fedprox + fedvg"; fedavg if it is empty."""
    return " + ".join(method_names(specs)) or "fedavg"


def methods_text(specs: Sequence[object]) -> str:
    """The same with options, of a list that was not checked: "fedprox (mu=0.1) + fedvg"."""
    texts = []
    for spec in specs:
        name, options = next(iter(spec.items())) if isinstance(spec, Mapping) and spec else (spec, None)
        more = ", ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, Mapping) else ""
        texts.append(f"{name} ({more})" if more else str(name))
    return " + ".join(texts) or "fedavg"


# --- old spellings ----------------------------------------------------------------------------------------------------

#: Value of fedvg's former option `score` -> what the method is called now.
SCORES = {"gradient": "fedvg", "loss": "fedvg_loss", "cosine": "fedvg_cosine"}

#: Value of `score` -> options that had to be at these defaults beside it.
DEFAULTS: dict[str, Settings] = {
    "gradient": {"layers": "tensor", "buffers": "layer"},
    "loss": {"granularity": "model", "norm": "l1", "layers": "tensor"},
    "cosine": {"norm": "l1", "layers": "tensor", "every": 1, "as_in": None},
}

#: Former option of fedvg -> what is said of any other value of it.
GONE = {
    "layers": "is gone: a layer is a parameter tensor, as in the released code; drop it",
    "buffers": "is gone: as_in: release gives buffers the same weight from every client; drop it",
}

#: Value of `score` -> options that had no effect beside it.
IDLE = {"loss": ("buffers", "one_axis"), "cosine": ("eps", "one_axis")}


def renamed(spec: object) -> object:
    """An entry of `methods` in today's spelling; anything else as it is."""
    try:
        name, options = name_and_options(spec)
    except ValueError:  # is told where methods are checked
        return spec
    is_old = "score" in options
    score = options.pop("score", "gradient")
    if name != "fedvg" or not isinstance(score, str) or score not in SCORES:
        return spec
    at_default = (key for key, value in DEFAULTS.get(score, {}).items() if options.get(key) == value)
    dropped = {*IDLE.get(score, ()), *at_default}
    kept = {key: value for key, value in options.items() if key not in dropped}
    if not is_old and len(kept) == len(options):
        return spec
    return {SCORES[score]: kept} if kept else SCORES[score]


def renamed_with_note(spec: object) -> object:
    """The same with a warning that says what the method is called now."""
    current = renamed(spec)
    if current is not spec:
        (_, options), (name, kept) = name_and_options(spec), name_and_options(current)
        remedy = f"write {name}" if name != "fedvg" else "drop it"
        note = f"fedvg with score: {options.get('score')} is now called {name}; {remedy}"
        if "score" not in options:
            note = f"fedvg has no {' or '.join(options.keys() - kept.keys())} any more: it is always so; drop it"
        warnings.warn(note, SettingRenamed, stacklevel=1)
    return current


def refuse_gone(name: str, options: Settings) -> None:
    """Raises ValueError for an option that went, at a value whose effect went with it."""
    for option in options.keys() & GONE.keys() if name == "fedvg" else ():
        raise ValueError(f"fedvg's {option} {GONE[option]}")
