"""Figures of a report, by name: shipped figures and functions of the user.

A figure is a function of `ReportContents` that returns a matplotlib Figure, or yields several: one for each table, say. Its
docstring begins with the caption; a paragraph `Missing: ...` says why there is none, where it yields none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence

from matplotlib.figure import Figure

from raysim.base.errors import Fault, RaysimError
from raysim.base.own import own_errors, words_of
from raysim.base.own_code import own_function
from raysim.config import nearest
from raysim.reporting.contents import ReportContents

#: Module -> names of its figures.
MODULES = {
    "raysim.reporting.figures": ("bars", "lines", "ranks", "curves", "time_curves", "integration"),
    "raysim.reporting.maps": ("gains", "space"),
    "methods.figures.fedvg": ("imbalance", "weights", "strategies", "norms", "premise"),
    "methods.figures.flfa": ("representation", "drift", "agreement", "selection"),
    "methods.figures.univarfl": ("spectrum",),
}

#: Name in `report.figures` -> `module:function`.
FIGURES = {name: f"{module}:{name}" for module, names in MODULES.items() for name in names}
FIGURES["map"] = "raysim.reporting.maps:pair_map"

#: Drawn where nothing else is asked for, as far as the runs hold them.
DEFAULT = ("bars", "lines", "curves", "time_curves")


def figure_faults(names: Sequence[str], *, imports: bool = True) -> list[Fault]:
    """Return faults for unknown figures in `report.figures`, and for functions that cannot be imported.

    Args:
      imports: whether these functions are imported at all.
    """
    faults = []
    for place, name in enumerate(names):
        if ":" in name and not imports:
            continue
        try:
            figure_function(name)
        except LookupError as error:
            faults.append(Fault(f"report.figures[{place}]", str(error)))
    return faults


def figure_function(name: str) -> Callable[[ReportContents], Figure | Iterable[Figure]]:
    """The function that draws a figure. Raises LookupError, with a sentence."""
    if ":" not in name and name not in FIGURES:
        raise LookupError(f"unknown figure {name!r}. {nearest(name, [*FIGURES])}")
    return own_function(FIGURES.get(name, name), "figure")  # type: ignore[return-value]


def kinds(names: Sequence[str] | None) -> list[str]:
    """Return figure names, each once; the default figures for None."""
    return list(dict.fromkeys(DEFAULT if names is None else names))


def draw_figures(report: ReportContents, *, on_missing: Callable[[str, str], None]) -> dict[str, Figure]:
    """File name -> figure, for the figures asked for: `norms` for one figure of a kind, `norms_1` and so on for several.

    Args:
      on_missing: on_missing(kind, reason) for a figure that failed, or that was asked for and that the runs do not hold.
    """
    drawn: dict[str, Figure] = {}
    for name in kinds(report.group.figures):
        function = figure_function(name)
        try:
            with own_errors():
                made = function(report)
                found = [made] if isinstance(made, Figure) else list(made)
        except Exception as error:  # one figure, of whoever's code, never costs the report
            on_missing(name, str(error) if isinstance(error, RaysimError) else words_of(error))
            continue
        if not found and report.group.figures is not None:
            reasons = (text for text in _paragraphs(function) if text.startswith("Missing: "))
            reason = next(reasons, "the runs do not hold the numbers of the figure")
            on_missing(name, reason.removeprefix("Missing: ").rstrip("."))
        stem = _stem(name)
        drawn |= {stem if len(found) == 1 else f"{stem}_{number}": figure for number, figure in enumerate(found, 1)}
    return drawn


def captions(report: ReportContents, names: Iterable[str]) -> dict[str, str]:
    """Return file name of a figure -> caption."""
    texts = {_stem(kind): _paragraphs(figure_function(kind))[0] for kind in kinds(report.group.figures)}
    return {name: texts.get(name) or texts[re.sub(r"_\d+$", "", name)] for name in names}


def is_figure(file_name: str) -> bool:
    """Whether a file name, without suffix, may be a figure of an earlier report."""
    return re.sub(r"_\d+$", "", file_name) in FIGURES or "." in file_name


def _stem(name: str) -> str:
    """How the files of a figure begin: `mine:heat` is in mine.heat.png."""
    return name.replace(":", ".")


def _paragraphs(function: Callable[..., object]) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n")]
