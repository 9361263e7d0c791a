"""Pictures of a run: weights and logged arrays by client, partitions, the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def confusion_picture(matrix: np.ndarray, classes: Sequence[str], title: str) -> np.ndarray:
    """(height, width, 3) uint8: shares of each true class, with the counts where there is room; drawn once for all uses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count, longest = len(classes), max(map(len, classes))
    side = float(np.clip(0.4 * count, 2.4, 12))
    margin = 0.6 + 0.07 * longest
    figure = Figure(figsize=(side + margin + 0.3, side + margin + 0.4), dpi=100)
    width, height = figure.get_size_inches()
    axes = figure.add_axes((margin / width, margin / height, side / width, side / height))
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    places = range(0, count, -(-count // 40))
    axes.set_xticks(places, [classes[place] for place in places], rotation=90, fontsize=7)
    axes.set_yticks(places, [classes[place] for place in places], fontsize=7)
    if count <= 20:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=6, color=color)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(title, fontsize=9)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def bars(values: np.ndarray, columns: Sequence[str], title: str) -> Any:
    """A matplotlib figure of one bar for each number; as many names are written as fit."""
    from matplotlib.figure import Figure

    width = 2.5 + 0.3 * min(len(columns), 40)
    height = 2.6 + 0.05 * max(map(len, columns), default=0)
    figure = Figure(figsize=(width, min(height, 8.0)), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(values)), values.astype(float), color="tab:blue")
    step = -(-len(columns) // 40)
    axes.set_xticks(range(0, len(columns), step), list(columns)[::step], rotation=90, fontsize=7)
    axes.set(title=title)
    return figure


def heat_map(
    values: np.ndarray,
    rows: Sequence[Any],
    columns: Sequence[str],
    *,
    title: str,
    xlabel: str = "layer",
    is_log: bool = False,
) -> Any:
    """A matplotlib figure of a (clients, columns) array; as many names are written as fit.

    Args:
      is_log: colour by the logarithm where all finite values are above 0.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    width, height = 2.5 + 0.45 * min(len(columns), 40), 1.6 + 0.16 * len(rows)
    figure = Figure(figsize=(width, min(12.0, height + 0.05 * max(map(len, columns), default=0))), layout="constrained")
    axes = figure.add_subplot()
    finite = values[np.isfinite(values)]
    by_log = is_log and finite.size > 0 and finite.min() > 0
    lowest = min(0.0, finite.min()) if finite.size else 0.0
    scale: dict[str, Any] = {"norm": LogNorm(finite.min(), finite.max())} if by_log else {"vmin": lowest}
    image = axes.imshow(values, aspect="auto", cmap="viridis", **scale)
    step = max(1, len(rows) // 40)
    axes.set_yticks(range(0, len(rows), step), [str(row) for row in rows[::step]], fontsize=7)
    step = -(-len(columns) // 40)
    axes.set_xticks(range(0, len(columns), step), list(columns)[::step], rotation=90, fontsize=7)
    axes.set(xlabel=xlabel, ylabel="client", title=title)
    figure.colorbar(image)
    return figure


def partition_pictures(
    class_counts: np.ndarray, validation_counts: np.ndarray | None, classes: Sequence[str]
) -> dict[str, Any]:
    """File name -> figure: `partition`, and `validation` where the server holds a validation set (FedVG, figure A.6).

    Args:
      class_counts: (clients, classes); validation_counts: (classes,).
    """
    pictures = {"partition": class_picture(class_counts, classes)}
    if validation_counts is not None and validation_counts.sum():
        pictures["validation"] = bars(validation_counts, classes, f"validation set: {validation_counts.sum()} examples")
    return pictures


def class_picture(class_counts: np.ndarray, classes: Sequence[str]) -> Any:
    """A matplotlib figure: one dot per client and class, its area the number of examples (FedVG, figures A.2, A.3).

    The largest dot fills its cell, and only as many names are written as fit, so that 100 clients or 200 classes read.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes_ = np.nonzero(class_counts)
    counts = class_counts[clients, classes_]
    num_clients, num_classes = class_counts.shape
    width = float(np.clip(0.22 * num_clients, 3, 18))
    height = float(np.clip(0.24 * num_classes, 1.5, 16))
    cell = 72 * min(0.24, width / num_clients, height / num_classes)  # points
    figure = Figure(figsize=(width + 2, height + 1), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(clients, classes_, s=np.maximum(0.3, cell**2 * counts / counts.max()), color="tab:blue", linewidths=0)
    step = max(1, int(np.ceil(0.14 * num_classes / height)))
    axes.set_yticks(range(0, num_classes, step), list(classes)[::step], fontsize=8)
    axes.set(xlabel="client", ylabel="class", title=f"examples per client and class (largest: {counts.max()})")
    axes.set_xlim(-1, num_clients)
    axes.set_ylim(-1, num_classes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
