"""Pictures of a run: weights and logged arrays by client, partitions, the confusion matrix."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raysim.base.texts import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


#: Most clients in the picture of a partition: a million take half a minute and cannot be told apart.
MOST_CLIENTS = 2_000


def png(figure: Figure) -> tuple[bytes, tuple[int, int]]:
    """Return (contents of a PNG file of a figure, (width, height) in pixels)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas, content = FigureCanvasAgg(figure), io.BytesIO()
    canvas.print_png(content)
    return content.getvalue(), canvas.get_width_height()


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _name_ticks(axis: Axis, names: Sequence[object], *, most: int = 40, size: int = 7) -> None:
    """Label an axis with as many names as fit; dollar signs are escaped, names on the horizontal axis are rotated."""
    from matplotlib.axis import XAxis

    step = max(1, -(-len(names) // most))
    rotation = 90 if isinstance(axis, XAxis) else 0
    shown = [literal(str(name)) for name in names[::step]]
    axis.set_ticks(range(0, len(names), step), shown, rotation=rotation, fontsize=size)


def confusion_picture(matrix: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: colours are shares of each true class; up to 20 classes also have counts."""
    count = len(classes)
    side = float(np.clip(0.4 * count, 2.4, 12)) + 0.6 + 0.07 * max(map(len, classes))
    figure, axes = _figure(side, side)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    _name_ticks(axes.xaxis, classes)
    _name_ticks(axes.yaxis, classes)
    if count <= 20:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=6, color=color)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(title, fontsize=9)
    return figure


def bar_chart(values: np.ndarray, columns: Sequence[str], title: str) -> Figure:
    """Draw a bar for each number, with as many names as fit."""
    height = 2.6 + 0.05 * max(map(len, columns), default=0)
    figure, axes = _figure(2.5 + 0.3 * min(len(columns), 40), min(height, 8.0))
    axes.bar(range(len(values)), np.where(np.isfinite(values), values, np.nan), color="tab:blue")
    _name_ticks(axes.xaxis, columns)
    axes.set(title=title)
    return figure


def heat_map(
    values: np.ndarray,
    rows: Sequence[object],
    columns: Sequence[str],
    *,
    title: str,
    xlabel: str = "layer",
    is_log: bool = False,
) -> Figure:
    """Draw a (clients, columns) array in colours, with as many names as fit.

    Args:
      is_log: whether colours are on a logarithmic scale, provided that all finite values are above 0.
    """
    from matplotlib.colors import LogNorm, Normalize

    height = 1.6 + 0.16 * len(rows) + 0.05 * max(map(len, columns), default=0)
    figure, axes = _figure(2.5 + 0.45 * min(len(columns), 40), min(12.0, height))
    finite = values[np.isfinite(values)]
    scale = Normalize(vmin=min(0.0, finite.min()) if finite.size else 0.0)
    if is_log and finite.size > 0 and finite.min() > 0:
        scale = LogNorm(finite.min(), finite.max())
    image = axes.imshow(values, aspect="auto", cmap="viridis", norm=scale)
    _name_ticks(axes.yaxis, rows)
    _name_ticks(axes.xaxis, columns)
    axes.set(xlabel=xlabel, ylabel="client", title=title)
    figure.colorbar(image)
    return figure


def partition_pictures(
    class_counts: np.ndarray, validation_counts: np.ndarray | None, classes: Sequence[str]
) -> dict[str, Figure]:
    """Return file name -> picture: `partition`, and `validation` with a server validation set (FedVG, figure A.6).

    Args:
      class_counts: (clients, classes), numbers of examples.
      validation_counts: (classes,), numbers of examples of the validation set, or None.
    """
    pictures = {"partition": class_picture(class_counts, classes)}
    if validation_counts is not None and validation_counts.sum():
        title = f"validation set: {validation_counts.sum()} examples"
        pictures["validation"] = bar_chart(validation_counts, classes, title)
    return pictures


def class_picture(class_counts: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw a dot per client and class, with the number of examples as area (FedVG, figures A.2, A.3).

    The largest dot fills its cell, and only as many names are written as fit, so that 100 clients or 200 classes are
    readable. Of more than MOST_CLIENTS clients, every second, third, ... client is drawn.
    """
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = class_counts.shape
    step = -(-num_clients // MOST_CLIENTS)
    places, classes_ = np.nonzero(class_counts[::step])
    clients = places * step
    counts = class_counts[clients, classes_]
    shown = -(-num_clients // step)
    width = float(np.clip(0.22 * shown, 3, 18))
    height = float(np.clip(0.24 * num_classes, 1.5, 16))
    cell = 72 * min(0.24, width / shown, height / num_classes)  # points
    figure, axes = _figure(width + 2, height + 1)
    areas = np.maximum(0.3, cell**2 * counts / counts.max(initial=1))
    axes.scatter(clients, classes_, s=areas, color="tab:blue", linewidths=0)
    _name_ticks(axes.yaxis, classes, most=int(height / 0.14), size=8)
    title = f"examples per client and class (largest: {counts.max(initial=0)})"
    axes.set(xlabel="client", ylabel="class", title=title if step == 1 else f"{title}, one client in {step}")
    axes.set(xlim=(-1, num_clients), ylim=(-1, num_classes))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
