"""Figures of a report, by name: shipped figures and functions of the user.

A figure is a function of `ReportContents` that returns a matplotlib Figure, or yields several, for example one per
table. The first paragraph of the function's docstring is the caption; a paragraph `Missing: ...` is the reason that is
reported if the function yields no figure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from matplotlib.figure import Figure

from raysim.base.errors import Fault, RaysimError
from raysim.base.user_code import user_function
from raysim.base.user_places import user_errors, words_of
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

#: Figures drawn by default, if the runs hold their numbers.
DEFAULT = ("bars", "lines", "curves", "time_curves")


def figure_faults(names: Sequence[str], *, imports: bool = True) -> list[Fault]:
    """Return faults for unknown figures in `report.figures`, and for functions that cannot be imported.

    Args:
      imports: whether functions of the user (`module:function`) are imported; otherwise they are not checked.
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
    """Return the function that draws a figure. Raises LookupError, with a sentence: no such figure or function."""
    if ":" not in name and name not in FIGURES:
        raise LookupError(f"unknown figure {name!r}. {nearest(name, [*FIGURES])}")
    return cast(
        "Callable[[ReportContents], Figure | Iterable[Figure]]", user_function(FIGURES.get(name, name), "figure")
    )


def kinds(names: Sequence[str] | None) -> list[str]:
    """Return figure names, each once; the default figures for None."""
    return list(dict.fromkeys(DEFAULT if names is None else names))


def draw_figures(report: ReportContents, *, on_missing: Callable[[str, str], None]) -> dict[str, Figure]:
    """Return file name -> requested figure: `norms` for a single figure of a kind; `norms_1`, `norms_2` for several.

    Args:
      on_missing: called with (kind, reason) for a figure that failed, and for a requested figure that the runs lack.
    """
    drawn: dict[str, Figure] = {}
    for name in kinds(report.group.figures):
        function = figure_function(name)
        try:
            with user_errors():
                made = function(report)
                figures = [made] if isinstance(made, Figure) else list(made)
        except Exception as error:  # an error in one figure, even in user code, never prevents the report
            on_missing(name, str(error) if isinstance(error, RaysimError) else words_of(error))
            continue
        if not figures and report.group.figures is not None:
            reasons = (text for text in _paragraphs(function) if text.startswith("Missing: "))
            reason = next(reasons, "the runs do not hold the numbers of the figure")
            on_missing(name, reason.removeprefix("Missing: ").rstrip("."))
        stem = _stem(name)
        drawn |= {stem if len(figures) == 1 else f"{stem}_{number}": figure for number, figure in enumerate(figures, 1)}
    return drawn


def captions(report: ReportContents, names: Iterable[str]) -> dict[str, str]:
    """Return file name of a figure -> caption."""
    texts = {_stem(kind): _paragraphs(figure_function(kind))[0] for kind in kinds(report.group.figures)}
    return {name: texts.get(name) or texts[re.sub(r"_\d+$", "", name)] for name in names}


def is_figure(file_name: str) -> bool:
    """Return whether a file name, without suffix, may be a figure of an earlier report."""
    return re.sub(r"_\d+$", "", file_name) in FIGURES or "." in file_name


def _stem(name: str) -> str:
    """Return the beginning of a figure's file names: `mine.heat` for `mine:heat`."""
    return name.replace(":", ".")


def _paragraphs(function: Callable[..., object]) -> list[str]:
    """Return the paragraphs of a function's docstring, each as one line."""
    return [" ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n")]
