"""Shared parts of figures: colours, a grid of panels, bands, and a legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from raysim.base.texts import literal

#: Okabe and Ito's colours, which colour-blind readers can distinguish, without yellow, which is faint on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"
HATCHES = ("", "///", "...", "xxx")
DASHES = ("-", "--", ":", "-.")

Panel = TypeVar("Panel")

#: Largest number of panels in a figure; more cannot be read on a page.
MOST_PANELS = 12


@dataclass(frozen=True)
class Style:
    """Style of a row in every figure of a report."""

    colour: str
    marker: str
    hatch: str
    dash: str
    width: float = 1.4


Styles = Mapping[str, Style]


def styles_of(rows: Sequence[str], strong: str | None = None) -> dict[str, Style]:
    """Return a style per row: seven colours, then the same colours dashed and hatched. `strong` has a thicker line."""
    styles = {}
    for index, row in enumerate(rows):
        turn, colour = divmod(index, len(COLOURS))
        marker = MARKERS[(colour + turn) % len(MARKERS)]
        hatch, dash = HATCHES[turn % len(HATCHES)], DASHES[turn % len(DASHES)]
        styles[row] = Style(COLOURS[colour], marker, hatch, dash, 2.4 if row == strong else 1.4)
    return styles


def panel_grid(count: int, *, across: int = 4, width: float = 3.1, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels (at least 1), at most `across` in a row, without empty panels."""
    columns = min(across, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.6, width * columns), height * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for axes in panels:
        axes.grid(axis="y", linewidth=0.4, alpha=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def legend(figure: Figure, panels: Sequence[Axes], *, across: int | None = None) -> None:
    """Draw a common legend below all panels; the figure grows by the legend's height."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if not entries:
        return
    if "published" in entries:
        entries["published"] = entries.pop("published")
    inches = [0.085 * len(name) + 0.62 for name in entries]
    fits = max(1, int(figure.get_figwidth() / max(inches)))
    columns = min(across or len(entries), len(entries), fits)
    lines = math.ceil(len(entries) / columns)
    columns = math.ceil(len(entries) / lines)
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.2 * lines)
    figure.legend(
        list(entries.values()), list(map(literal, entries)), loc="outside lower center", ncols=columns, frameon=False
    )


def band(axes: Axes, x: Sequence[float], mean: Sequence[float], std: Sequence[float | None], colour: str) -> None:
    """Draw the standard deviation as a shaded band; draw nothing if all deviations are missing."""
    centre, spread = np.array(mean, dtype=float), np.array(std, dtype=float)  # None becomes NaN
    if not np.isnan(spread).all():
        axes.fill_between(x, centre - spread, centre + spread, color=colour, alpha=0.15, linewidth=0)


def wrap(words: str, width: int = 34) -> str:
    """Return the words in lines of at most `width` letters; a longer word and `alpha = 0.1` are not broken."""
    bound = literal(words).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    return textwrap.fill(bound, width, break_long_words=False).replace("\N{NO-BREAK SPACE}", " ")


def pages(panels: Iterable[Panel]) -> Iterator[list[Panel]]:
    """Yield the panels of each figure, at most `MOST_PANELS` at a time."""
    left = iter(panels)
    while page := list(islice(left, MOST_PANELS)):
        yield page


def rounds_below(axes: Axes) -> None:
    """Label the horizontal axis with whole numbers of rounds."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def zoom(axes: Axes, low: float, high: float, *, name: str) -> None:
    """Begin the axis near the lowest bar if zero would hide differences; the axis label then states the beginning."""
    if low < 0 or high <= 0:
        axes.set_ylabel(name)  # matplotlib's default limits include zero, where bars begin
        return
    span = max(high - low, 0.01 * high)
    step = 5.0 if high > 20 else 10.0 ** math.floor(math.log10(span))
    start = math.floor(max(0.0, low - 0.25 * span) / step) * step
    if start < 0.35 * high:
        start = 0
    axes.set_ylim(start, high + 0.06 * (high - start))
    axes.set_ylabel(wrap(f"{name}; the axis begins at {start:g}" if start else name, 40))


def scale_decreasing(axes: Axes, values: Sequence[float]) -> None:
    """Set the values as ticks, largest on the left; logarithmic if they span more than a factor of 10."""
    places = np.array(sorted(values))
    names = [f"{value:g}" for value in places]
    is_log = places[0] > 0 and places[-1] / places[0] > 10
    if is_log:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, names)
    if len(places) > 1:
        axes.invert_xaxis()
        distances = np.diff(np.log(places) if is_log else places)
        is_crowded = distances.min() < 0.1 * distances.sum()
        axes.tick_params(axis="x", labelrotation=60 if is_crowded else 0)
