"""What a run leaves behind: progress.csv, clients.parquet, arrays/, TensorBoard events, summary.json."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.engine.metrics import RoundRecord

COLUMNS = (
    "server/accuracy",
    "server/loss",
    "train/loss",
    "clients/dropped",
    "comm/up_mb",
    "comm/down_mb",
    "system/trainers",
    "system/nodes",
    "system/sum_mb",
    "system/redone_blocks",
    "system/train_s",
    "system/aggregate_s",
    "system/evaluate_s",
    "system/round_s",
)


class Recorder:
    """Writes every round as it comes. `first_round` > 0 continues a run: later rows of the files are dropped."""

    def __init__(
        self,
        folder: Path,
        *,
        first_round: int,
        num_rounds: int,
        hyperparameters: Mapping[str, Any],
        blocks: Sequence[str],
        classes: Sequence[str] = (),
    ):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.num_rounds, self.blocks, self.classes = folder, num_rounds, list(blocks), list(classes)
        self.hyperparameters = dict(hyperparameters)
        self.rows = [row for row in _read_rows(folder / "progress.csv") if int(row["round"]) < first_round]
        self._columns = list(dict.fromkeys(["round", *COLUMNS, *(name for row in self.rows for name in row)]))
        self._open_progress()
        path = folder / "clients.parquet"
        self._tables = [pq.read_table(path).filter(pc.less(pc.field("round"), first_round))] if path.is_file() else []
        self._board = SummaryWriter(str(folder), purge_step=first_round or None)
        if first_round == 0:
            self._hyperparameters_at_start()

    def write(self, record: RoundRecord) -> None:
        """One round: a row, the clients' rows, the board's points."""
        number = record.round_index
        row = {"round": str(number), **{name: repr(float(value)) for name, value in record.metrics.items()}}
        self.rows.append(row)
        if new := [name for name in row if name not in self._columns]:  # what methods log is known once they did
            self._columns += new
            self._csv.close()
            self._open_progress()
        else:
            self._writer.writerow(row)
            self._csv.flush()
        columns = {"round": np.full(len(record.clients["client"]), number), **record.clients}
        self._tables.append(pa.table(columns))
        for name, value in record.metrics.items():
            self._board.add_scalar(name, value, number)
        if record.weights.size and np.isfinite(record.weights).any():
            self._board.add_histogram("weights/all", record.weights[np.isfinite(record.weights)], number)
        self._write_arrays(record)
        if record.confusion is not None:
            self._write_confusion(record.confusion, number)
        if number == self.num_rounds - 1 or number % max(1, self.num_rounds // 8) == 0:
            self._pictures(record)

    def flush(self) -> None:
        """Make everything so far durable; called before each checkpoint."""
        if self._tables:
            table = pa.concat_tables(self._tables)
            self._tables = [table]
            temporary = self.folder / f".clients.{os.getpid()}.part"
            pq.write_table(table, temporary)
            os.replace(temporary, self.folder / "clients.parquet")
        self._board.flush()

    def partition(self, class_counts: np.ndarray, validation_counts: np.ndarray | None, classes: Sequence[str]) -> None:
        """The partition as a picture, client by class, and the validation set's classes: PNGs and in TensorBoard."""
        for name, figure in partition_pictures(class_counts, validation_counts, classes).items():
            figure.savefig(self.folder / f"{name}.png", dpi=110)
            self._board.add_figure("partition/classes" if name == "partition" else "partition/validation", figure, 0)

    def summary(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return summary.json from the rows and the given facts."""
        seconds = [float(row["system/round_s"]) for row in self.rows]
        result = {
            **facts,
            **judged(self.rows, self.num_rounds),
            "metrics": {name: score for name in self._columns if (score := _last(self.rows, name)) is not None},
            "seconds_total": sum(seconds),
            "seconds_per_round": float(np.mean(seconds)) if seconds else None,
        }
        (self.folder / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
        self._hyperparameters_at_end(result)
        return result

    def close(self) -> None:
        """Flush and close all files."""
        self.flush()
        self._csv.close()
        self._board.close()

    def _hyperparameters_at_start(self) -> None:
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        metrics = {"server/accuracy": None, "hparam/best_accuracy": None, "hparam/mean_last_10pct_accuracy": None}
        experiment, start, _ = hparams(self.hyperparameters, metrics)
        # The view shows the first few columns, those that "differ" in front: what a sweep varies, and not the alphabet.
        labels = [name for name in self.hyperparameters if name.startswith("labels.")] or ["methods", "seed"]
        data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in labels
        data.content = content.SerializeToString()
        for summary in (experiment, start):
            self._board._get_file_writer().add_summary(summary)

    def _hyperparameters_at_end(self, result: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        for name in ("best_accuracy", "mean_last_10pct_accuracy"):
            if result[name] is not None:
                self._board.add_scalar(f"hparam/{name}", result[name], self.num_rounds - 1)
        self._board._get_file_writer().add_summary(hparams(self.hyperparameters, {})[2])

    def _open_progress(self) -> None:
        _write_rows(self.folder / "progress.csv", self.rows, self._columns)
        self._csv = open(self.folder / "progress.csv", "a", newline="")  # noqa: SIM115 (lives as long as the recorder)
        self._writer = csv.DictWriter(self._csv, self._columns)

    def _write_arrays(self, record: RoundRecord) -> None:
        """arrays/round_00012.npz: what methods logged in the round."""
        if record.arrays:
            (self.folder / "arrays").mkdir(exist_ok=True)
            # A type checker takes the names for savez's own keywords; ours have a dot or a colon.
            np.savez_compressed(self.folder / "arrays" / f"round_{record.round_index:05d}.npz", **record.arrays)  # type: ignore[arg-type]

    def _write_confusion(self, matrix: np.ndarray, number: int) -> None:
        """confusion.csv: test examples by true class (row) and predicted class; at the end a picture, here and there."""
        from PIL import Image

        with open(self.folder / "confusion.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["true class", *self.classes])
            writer.writerows([name, *row] for name, row in zip(self.classes, matrix.tolist(), strict=True))
        if number == self.num_rounds - 1:
            pixels = confusion_picture(matrix, self.classes, f"test examples by class, round {number}")
            Image.fromarray(pixels).save(self.folder / "confusion.png")
            self._board.add_image("server/confusion", pixels, number, dataformats="HWC")

    def _pictures(self, record: RoundRecord) -> None:
        """Pictures of the round: heat maps of the weights and of logged arrays by client, bars of the others."""
        number = record.round_index
        if record.weights.size and np.isfinite(record.weights).any():
            kept = record.clients["client"][~record.clients["is_dropped"]]
            title = f"aggregation weights, round {number}"
            figure = heat_map(record.weights, kept.tolist(), self.blocks, title=title, xlabel="layer block")
            self._board.add_figure("weights/client_by_block", figure, number)
        for name, values in record.arrays.items():
            columns = record.arrays.get(f"{name}:columns")
            if ":" not in name and values.ndim == 2 and columns is not None:
                rows = record.arrays[f"{name}:clients"].tolist()
                figure = heat_map(values, rows, columns.tolist(), title=f"{name}, round {number}", is_log=True)
                self._board.add_figure(name.replace(".", "/"), figure, number)
            elif ":" not in name and values.ndim == 1 and values.size:
                names = [str(place) for place in range(values.size)] if columns is None else columns.tolist()
                self._board.add_figure(name.replace(".", "/"), bars(values, names, f"{name}, round {number}"), number)


def judged(rows: Sequence[Mapping[str, str]], num_rounds: int) -> dict[str, float | int | None]:
    """Accuracies of a whole run, from its rows: last, best, mean of the last 10 % of the rounds, and by validation.

    `accuracy_at_best_validation` is the test accuracy of the round with the best validation accuracy, the first of
    several: a choice that does not look at the test set. None for what the rows do not hold.
    """
    scores = _points(rows, "server/accuracy")
    validation = _points(rows, "server/validation_accuracy")
    best = _best(scores)
    chosen = _best(validation)
    late = num_rounds - max(1, math.ceil(num_rounds / 10))
    last = [score for number, score in scores.items() if number >= late]
    return {
        "accuracy": list(scores.values())[-1] if scores else None,
        "best_accuracy": scores.get(best),
        "best_round": best if scores else None,
        "mean_last_10pct_accuracy": float(np.mean(last)) if last else None,
        "best_validation_accuracy": validation.get(chosen),
        "best_validation_round": chosen if validation else None,
        "accuracy_at_best_validation": scores.get(chosen),
    }


def _points(rows: Sequence[Mapping[str, str]], name: str) -> dict[int, float]:
    return {int(row["round"]): float(row[name]) for row in rows if row.get(name)}


def _best(scores: Mapping[int, float]) -> int:
    """The round with the highest score, the first of several; -1 without any."""
    return max(scores, key=lambda number: (scores[number], -number), default=-1)


def _last(rows: Sequence[Mapping[str, str]], name: str) -> float | None:
    """The last value of a metric that says how good the model is; None for others, and for what is no number."""
    values = _points(rows, name) if name.startswith(("server/", "clients/")) else {}
    return next((value for value in [*values.values()][::-1][:1] if math.isfinite(value)), None)


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


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        # A line that a killed process left half-written has no final column.
        return [row for row in csv.DictReader(file) if row.get("system/round_s")]


def _write_rows(path: Path, rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
