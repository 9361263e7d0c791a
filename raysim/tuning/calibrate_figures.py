"""Figures of `raysim calibrate`: LIVAR's figures 2 and 3, the table, and the accuracy of the forest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from methods.livar.calibration import Result
from methods.livar.importance import TABLES
from raysim.reporting.panels import legend, panel_grid, styles_of

TITLES = {"importance_a": "$I_A$", "importance_b": "$I_B$", "num_examples": "number of examples $n_i$"}
BINS = ("low", "mid", "high")

#: Number of rows below which the coefficient of a cell is unreliable.
FEW_ROWS = 5

#: Title of the paper's table beside another table.
PUBLISHED = "LIVAR, table A"


def draw_calibration(folder: Path, results: Mapping[str, Result], targets: np.ndarray, predictions: np.ndarray) -> None:
    """Draw shap.png, table.png and prediction.png in a folder, and the same figures in TensorBoard.

    Args:
      results: label -> calibration, the folder's own first.
      targets, predictions: (n,) coefficients of the folder's own rows, and the forest's predictions.
    """
    from torch.utils.tensorboard import SummaryWriter

    own_result = next(iter(results.values()))
    figures = {
        "shap": curves_figure(results),
        "table": table_figure(own_result, {PUBLISHED: TABLES["paper"]}),
        "prediction": prediction_figure(targets, predictions, own_result["oob_r2"]),
    }
    for old in folder.glob("events.out.tfevents.*.calibration"):
        old.unlink()
    with SummaryWriter(str(folder), filename_suffix=".calibration") as board:
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=130)
            board.add_figure(f"calibration/{name}", figure, 0)


def curves_figure(results: Mapping[str, Result]) -> Figure:
    """SHAP value against the feature's quantile, mean and deviation in stretches (LIVAR, figure 2).

    Args:
      results: label -> calibration; the first calibration gives the panels (its features) and the dotted cuts, and the
        curves of all others are drawn over the panels (figure 3).
    """
    own_result = next(iter(results.values()))
    styles = styles_of(list(results), next(iter(results)))
    figure, panels = panel_grid(len(own_result["curves"]), width=4.2, height=3.4)
    # The number of examples, the third feature, has no cuts.
    for axes, name, cuts in zip(panels, own_result["curves"], [*own_result["cuts"], []], strict=False):
        title = TITLES[name]
        for label, result in results.items():
            if name not in result["curves"]:
                continue
            x, mean, std = (np.array(result["curves"][name][key]) for key in ("quantile", "mean", "std"))
            style = styles[label]
            axes.plot(x, mean, style.dash, color=style.colour, lw=style.width, marker=style.marker, ms=3, label=label)
            axes.fill_between(x, mean - std, mean + std, color=style.colour, alpha=0.15, lw=0)
        for cut in cuts:
            axes.axvline(cut, color="0.4", ls=":", lw=1)
        axes.axhline(0, color="0.6", lw=0.8)
        axes.set(xlim=(0, 1), xlabel=f"quantile of {title}", ylabel=f"SHAP value of {title}")
    ends = [axes.get_ylim() for axes in panels]
    for axes in panels:  # one scale: a feature of little effect has a flat curve
        axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    if len(results) > 1:
        legend(figure, panels)
    return figure


def table_figure(result: Result, beside: Mapping[str, Sequence[Sequence[float]]] | None = None) -> Figure:
    """The 3 x 3 table as a heat map, with the number of rows of each cell, and other tables on the same scale.

    Cells of fewer than FEW_ROWS rows are hatched.

    Args:
      beside: title -> table (the paper's table A).
    """
    few = f"; hatched: fewer than {FEW_ROWS} rows" if np.min(result["counts"]) < FEW_ROWS else ""
    tables = {f"raw coefficients, base {result['base']:.4f}{few}": np.array(result["table"])}
    tables |= {title: np.array(values) for title, values in (beside or {}).items()}
    highest = max(values.max() for values in tables.values())
    figure = Figure(figsize=(0.9 + 3.7 * len(tables), 3.8), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for number, (axes, (title, values)) in enumerate(zip(panels, tables.items(), strict=True)):
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=highest)
        for row, column in np.ndindex(3, 3):
            colour = "white" if values[row, column] < highest / 2 else "black"
            text = f"{values[row, column]:.3f}"
            if number == 0:
                count = result["counts"][row][column]
                text += f"\n{count} rows"
                if count < FEW_ROWS:  # predictions of the forest from few rows
                    corner = (column - 0.5, row - 0.5)
                    axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="///", edgecolor="0.45", lw=0))
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        axes.set_xticks(range(3), BINS)
        axes.set_yticks(range(3), BINS)
        axes.set(xlabel=TITLES["importance_b"], ylabel=TITLES["importance_a"])
        axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels)
    return figure


def prediction_figure(targets: np.ndarray, predictions: np.ndarray, oob_r2: float) -> Figure:
    """Plot each row's target coefficient against the forest's prediction."""
    figure = Figure(figsize=(4.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(targets, predictions, "o", ms=3, alpha=0.4, mew=0)
    ends = [min(targets.min(), predictions.min()), max(targets.max(), predictions.max())]
    axes.plot(ends, ends, color="0.4", lw=1)
    axes.set(xlabel="target coefficient (eq. 4)", ylabel="forest", title=f"out-of-bag $R^2$ {oob_r2:.3f}")
    return figure
