"""What a search found: the metric of every run along the settings that it drew, where the tables average over these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.reporting.contents import ReportContents
from raysim.reporting.panels import grid, legend
from raysim.reporting.published import number
from raysim.reporting.runs import ReportedRun
from raysim.reporting.tables import text

#: Fewest values of a label that was drawn from a range, and the span from which its axis is logarithmic.
VALUES, SPAN = 5, 20


def space(report: ReportContents) -> Iterator[Figure]:
    """A panel for each ignored label of many numbers and, where there are two of them, one with both and the metric as colour."""
    drawn = [name for name in report.group.ignore if _is_drawn(report.finished, name)]
    if not drawn:
        return
    figure, panels = grid(len(drawn) + (len(drawn) > 1), width=4.0, height=3.0)
    rows = {
        row: [run for run in report.finished if text(run.labels.get(report.group.rows)) == row] for row in report.styles
    }
    for axes, name in zip(panels, drawn, strict=False):
        for row, runs in rows.items():
            points = [
                (x, y)
                for run in runs
                if (x := number(run.labels.get(name))) is not None and (y := report.measure.score(run)) is not None
            ]
            if points:
                style = report.styles[row]
                places, scores = zip(*points, strict=True)
                axes.scatter(places, scores, s=14, color=style.colour, marker=style.marker, label=row, alpha=0.8)
            elif levels := [y for run in runs if (y := report.measure.score(run)) is not None]:
                axes.axhline(
                    sum(levels) / len(levels), color=report.styles[row].colour, linestyle="--", label=f"{row}, mean"
                )
        _scale(axes, report.finished, name, "x")
        axes.set_ylabel(report.measure.axis)
    if len(drawn) > 1:
        _both(panels[-1], report, drawn[0], drawn[1])
    legend(figure, panels)
    yield figure


def _both(axes: Axes, report: ReportContents, across: str, up: str) -> None:
    """The first two labels as a plane: a dot a run, coloured by the metric; a cross is a run that failed."""

    def places(runs: Sequence[ReportedRun]) -> list[tuple[float, float, ReportedRun]]:
        pairs = [(number(run.labels.get(across)), number(run.labels.get(up)), run) for run in runs]
        return [(x, y, run) for x, y, run in pairs if x is not None and y is not None]

    done = [(x, y, score) for x, y, run in places(report.finished) if (score := report.measure.score(run)) is not None]
    x, y, scores = zip(*done, strict=True)
    dots = axes.scatter(x, y, c=scores, s=24, cmap="viridis")
    axes.figure.colorbar(dots, ax=axes, label=report.measure.axis)
    if lost := places([run for run in report.runs if not run.is_finished]):
        axes.scatter(
            [x for x, _, _ in lost], [y for _, y, _ in lost], marker="x", s=24, color="#d62728", label="not finished"
        )
    _scale(axes, report.finished, across, "x")
    _scale(axes, report.finished, up, "y")


def _is_drawn(runs: Sequence[ReportedRun], name: str) -> bool:
    values = {run.labels[name] for run in runs if name in run.labels}
    return len(values) >= VALUES and all(number(value) is not None for value in values)


def _scale(axes: Axes, runs: Sequence[ReportedRun], name: str, axis: str) -> None:
    values = [value for run in runs if (value := number(run.labels.get(name))) is not None]
    if min(values) > 0 and max(values) / min(values) > SPAN:
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    (axes.set_xlabel if axis == "x" else axes.set_ylabel)(name)
