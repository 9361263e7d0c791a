"""All figures of a report: to add one, write a function and name it in `FIGURES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from raysim.base.errors import Fault
from raysim.config import nearest
from raysim.reporting import figures, maps, traces
from raysim.reporting.contents import ReportContents


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
      draw: yields the figures of a report: one, one for each table or cell, or none if the runs do not hold what it shows.
      caption: what stands below it in report.md.
      missing: why there is none, if there is none.
      papers: the figures of papers that it is: FedVG's without a prefix.
    """

    draw: Callable[[ReportContents], Iterator[Figure]]
    caption: str
    missing: str
    papers: tuple[str, ...] = ()


#: Name in `report.figures` -> the kind of figure.
FIGURES = {
    "bars": Kind(
        figures.bars,
        "Means; error bars are the standard deviation, a diamond is the published mean.",
        f"no table holds a number, or there are more than {figures.MOST_GROUPS} columns",
        ("figure_1",),
    ),
    "lines": Kind(
        figures.lines,
        "The metric as heterogeneity grows from left to right; shaded: standard deviation.",
        "no column label has two numbers or more",
        ("figure_3",),
    ),
    "ranks": Kind(
        figures.ranks,
        "Means, the best on top; error bars are the standard deviation, the line is the baseline.",
        "no table holds a number",
    ),
    "curves": Kind(
        traces.curves,
        "By round, on the test set; shaded: standard deviation over seeds.",
        "no run recorded the metric by round",
    ),
    "integration": Kind(
        figures.integration,
        "Base methods dashed, with the addition solid; shaded: standard deviation (grey: base method).",
        "no column label has two numbers, or no row is another one with an addition, such as FedProx + FedVG beside FedProx",
        ("figure_5",),
    ),
    "imbalance": Kind(
        figures.imbalance,
        "Accuracy over the class imbalance ratio of the validation set; shaded: standard deviation.",
        "no column label rho",
        ("figure_7",),
    ),
    "weights": Kind(
        traces.weights,
        "Aggregation weight of each client; dotted: equal weights.",
        "no run recorded clients",
        ("figure_8",),
    ),
    "strategies": Kind(
        figures.strategies,
        "Strategies of aggregation; error bars are the standard deviation.",
        "no run has a label granularity",
        ("figure_9",),
    ),
    "norms": Kind(
        traces.norms,
        f"Gradient norms, client by layer, at the first and the last round that logged them; of {traces.MOST_MAPS} cells at "
        "most.",
        "no run logged gradient norms",
        ("figure_A1",),
    ),
    "premise": Kind(
        traces.premise,
        "Accuracy of each client's model on the test rows against its validation gradient, all seeds together; the title has "
        "their mean rank correlation over rounds and seeds. FedVG presumes -1.",
        "no run logged premise; add diagnostics with measures: [premise] to its methods",
    ),
    "representation": Kind(
        traces.representation,
        "Distances of the classifier's inputs on the test set; shaded: standard deviation over seeds.",
        "no run logged distances of features; add diagnostics to its methods",
        ("flfa_figure_2",),
    ),
    "drift": Kind(
        traces.drift_reduction,
        "By how much local drift is below that of the row named, in runs with the same seed; above 0: less drift.",
        "no two rows logged drift with the same seed; add diagnostics to their methods",
        ("flfa_figure_3",),
    ),
    "agreement": Kind(
        traces.agreement,
        "How many layers have which agreement S of the updates in the first round, all seeds together; g1 of each.",
        "no run logged agreement in its first round; add diagnostics or flfa to its methods",
        ("flfa_figure_4",),
    ),
    "selection": Kind(
        traces.selection,
        "How often FLFA chose a layer of each layer block; a diamond is the published percentage.",
        "no run logged which layers FLFA chose",
        ("flfa_table_13",),
    ),
    "map": Kind(
        maps.maps,
        "Left: mean gain of each pair over the one of the baseline, by seed; bold: its 95 % interval leaves out 0. "
        "Right: what that gain is beyond the sum of the gains that row and column have alone. Grey: no run.",
        "it needs report.baseline, report.gain as label=value, and that label as the only column label",
    ),
    "gains": Kind(
        maps.gains,
        "Mean gain of each row over the baseline in the same column, by seed: blue is better, red worse. Bold: its 95 % interval "
        "leaves out 0.",
        "it needs report.baseline and two columns or more",
    ),
    "space": Kind(
        maps.space,
        "Every run along the settings that were drawn from ranges; a cross is a run that did not finish.",
        "no label in report.ignore has five numbers or more",
    ),
    "spectrum": Kind(
        traces.spectrum,
        "Singular values of the global classifier's weight, relative to the largest, when last logged.",
        "no run logged singular values; add diagnostics to its methods",
        ("univarfl_figure_1",),
    ),
}

#: Every name that `report.figures` may hold -> the kind's own name.
NAMES = {name: own for own, kind in FIGURES.items() for name in (own, *kind.papers)}

#: Drawn where nothing else is asked for, as far as the runs hold them.
DEFAULT = ("bars", "lines", "curves")


def figure_faults(names: Sequence[str]) -> list[Fault]:
    """The names in `report.figures` that no figure has."""
    return [
        Fault(f"report.figures[{place}]", f"unknown figure {name!r}. {nearest(name, list(NAMES))}")
        for place, name in enumerate(names)
        if name not in NAMES
    ]


def kinds(names: Sequence[str] | None) -> list[str]:
    """The kinds' own names, each once; those drawn by default for None."""
    return list(dict.fromkeys(NAMES[name] for name in (DEFAULT if names is None else names)))


def draw(report: ReportContents, *, on_missing: Callable[[str, str], None]) -> dict[str, Figure]:
    """File name -> figure, for the figures asked for: `norms` for one figure of a kind, `norms_1` and so on for several.

    Args:
      on_missing: on_missing(kind, reason) for a figure that was asked for and that the runs do not hold.
    """
    drawn: dict[str, Figure] = {}
    for name in kinds(report.group.figures):
        found = list(FIGURES[name].draw(report))
        if not found and report.group.figures is not None:
            on_missing(name, FIGURES[name].missing)
        drawn |= {name if len(found) == 1 else f"{name}_{number}": figure for number, figure in enumerate(found, 1)}
    return drawn


def captions(names: Iterable[str]) -> dict[str, str]:
    """File name of a figure -> what stands below it."""
    return {name: FIGURES[name.partition("_")[0]].caption for name in names}
