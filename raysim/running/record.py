"""Records of a run: progress.csv, clients.parquet, arrays/, TensorBoard events, summary.json."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from raysim.base.direction import best_round, direction_of, is_due, main_of
from raysim.base.settings import Settings
from raysim.base.texts import cells, round_name
from raysim.config import StopGroup
from raysim.engine.round_metrics import RoundRecord
from raysim.folders.files import sync
from raysim.folders.records import record_chain
from raysim.folders.run_folder import RunFolder
from raysim.running.board import Board
from raysim.running.pictures import bar_chart, confusion_picture, heat_map, partition_pictures, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Columns of progress.csv of every run, after the main metric.
COLUMNS = (
    *("server/loss", "train/loss", "clients/dropped", "comm/up_mb", "comm/down_mb"),
    *("system/trainers", "system/nodes", "system/sum_mb", "system/redone_blocks"),
    *("system/train_s", "system/aggregate_s", "system/evaluate_s", "system/round_s"),
)


class Recorder:
    """Writes the records of every round.

    Args:
      first_round: first round of this process, above 0 for a resumed run: rows from this round on are dropped.
      blocks: names of the layer blocks.
      classes: names of the classes.
      main: the task's main metric.
      evaluate_every: rounds between evaluations, see `judged`.
      on_row: on_row(row of progress.csv) is called after each round.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        first_round: int,
        blocks: Sequence[str],
        classes: Sequence[str] = (),
        main: str = "accuracy",
        evaluate_every: int = 1,
        on_row: Callable[[Mapping[str, str]], None] = lambda _: None,
    ):
        self.folder, self.blocks, self.classes = folder, list(blocks), list(classes)
        self._evaluate_every, self._on_row = evaluate_every, on_row
        self._last: RoundRecord | None = None
        self.rows, self.main = folder.progress_rows(before=first_round), main
        names = (name for row in self.rows for name in row)
        self._columns = list(dict.fromkeys(["round", f"server/{main}", *COLUMNS, *names]))
        self._open_progress()
        folder.drop_clients(first_round)
        self._chain = record_chain(folder, first_round)
        self._tables: list[pa.Table] = []  # client rows since the last flush
        self._arrays: list[Path] = []  # files of arrays since the last flush
        self._confusion: np.ndarray | None = None  # newest confusion matrix since the last flush
        self._board = Board(folder.path, first_round)

    def write(self, record: RoundRecord) -> None:
        """Write a round: row of progress.csv, clients' rows, arrays, TensorBoard events."""
        number = record.round_index
        # Names from another process are new strings in each round, half of the memory of a row: interning shares them.
        values = {intern(name): repr(float(value)) for name, value in record.metrics.items()}
        row = {"round": str(number), **values}
        self.rows.append(row)
        self._chain.add_row(self.folder.progress.name, row)
        if new := [name for name in row if name not in self._columns]:  # a method's metrics are known once it logs them
            self._columns += new
            self._csv.close()
            self._open_progress()
        else:
            self._writer.writerow(row)
            self._csv.flush()
        self._tables.append(self.folder.client_table(number, record.clients))
        self._board.points(number, record.metrics)
        if record.weights.size and np.isfinite(record.weights).any():
            self._board.histogram("weights/all", number, record.weights[np.isfinite(record.weights)])
        if record.arrays:
            self._arrays.append(self.folder.write_arrays(number, record.arrays))
        if record.confusion is not None:
            self._confusion = record.confusion
        self._last = record
        self._on_row(row)

    def draw(self, class_counts: np.ndarray, validation_counts: np.ndarray | None) -> None:
        """Draw partition, validation set and last round, as PNG files and for TensorBoard.

        Args:
          class_counts, validation_counts: see `partition_pictures`.
        """
        tags = {"partition": "partition/classes", "validation": "partition/validation"}
        for name, figure in partition_pictures(class_counts, validation_counts, self.classes).items():
            self._show(tags[name], 0, figure, self.folder.picture(name))
        if (record := self._last) is None:  # no round was run since the run was resumed
            return
        number = record.round_index
        for tag, figure in self._pictures(record):
            self._show(tag, number, figure)
        if record.confusion is not None:
            title = f"test examples by class, {round_name(number)}"
            figure = confusion_picture(record.confusion, self.classes, title)
            self._show("server/confusion", number, figure, self.folder.picture("confusion"))

    def flush(self) -> Mapping[str, str]:
        """Make everything durable before a checkpoint; return checksums for the checkpoint."""
        if self._tables:
            self._chain.add_file(self.folder.clients.name, self.folder.append_clients(pa.concat_tables(self._tables)))
            self._tables = []
        for path in self._arrays:
            sync(path)
            self._chain.add_file(self.folder.arrays.name, path)
        if self._arrays:
            sync(self.folder.arrays)
            self._arrays = []
        os.fsync(self._csv.fileno())
        if self._confusion is not None:
            self._write_confusion(self._confusion)
            self._confusion = None
        self._board.flush()
        return self._chain.links

    def summary(self, facts: Mapping[str, object], hyperparameters: Mapping[str, object]) -> Settings:
        """Write summary.json from rows and given facts, and return its contents. hyperparameters: for TensorBoard."""
        seconds = [float(row["system/round_s"]) for row in self.rows]
        scores = judged(self.rows, len(self.rows), self.main, every=self._evaluate_every)
        result = {
            **facts,
            **scores,
            "metrics": {name: score for name in self._columns if (score := _last(self.rows, name)) is not None},
            "seconds_total": sum(seconds),
            "seconds_per_round": float(np.mean(seconds)) if seconds else None,
        }
        self.folder.write_json(self.folder.summary, result)
        names = (self.main, f"best_{self.main}", f"mean_last_10pct_{self.main}")
        final = {f"hparam/{name}": scores[name] for name in names}
        self._board.hyperparameters(hyperparameters, len(self.rows) - 1, final)
        return result

    def close(self) -> None:
        """Flush and close all files."""
        try:
            self.flush()
            self._csv.close()
            self._board.close()
        except FileNotFoundError:
            if self.folder.config.is_file():
                raise  # if config.yaml is missing, the run directory was deleted, which another error reports

    def _open_progress(self) -> None:
        self.folder.write_progress(self.rows, self._columns)
        self._csv = open(self.folder.progress, "a", newline="")  # noqa: SIM115 (lives as long as the recorder)
        self._writer = csv.DictWriter(self._csv, self._columns)

    def _write_confusion(self, matrix: np.ndarray) -> None:
        """Write confusion.csv: test examples by true class (row) and predicted class (column)."""
        with open(self.folder.confusion, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(cells(["true class", *self.classes]))
            writer.writerows(cells([name, *row]) for name, row in zip(self.classes, matrix.tolist(), strict=True))

    def _pictures(self, record: RoundRecord) -> Iterator[tuple[str, Figure]]:
        """Yield (tag, figure): heat maps of weights and of logged arrays by client, bar charts of logged vectors."""
        number = record.round_index
        if record.weights.size and np.isfinite(record.weights).any():
            kept = record.clients["client"][~record.clients["is_dropped"]].tolist()
            title = f"aggregation weights, {round_name(number)}"
            figure = heat_map(record.weights, kept, self.blocks, title=title, xlabel="layer block")
            yield "weights/client_by_block", figure
        for name, values in record.arrays.items():
            columns, title = record.arrays.get(f"{name}:columns"), f"{name}, {round_name(number)}"
            tag = name.replace(".", "/")
            if ":" in name or not values.size:  # a name with a colon holds row or column names of another array
                continue
            if values.ndim == 2 and columns is not None:
                rows = record.arrays[f"{name}:clients"].tolist()
                yield tag, heat_map(values, rows, columns.tolist(), title=title, is_log=True)
            elif values.ndim == 1:
                names = map(str, range(values.size) if columns is None else columns)
                yield tag, bar_chart(values, list(names), title)

    def _show(self, tag: str, number: int, figure: Figure, file: Path | None = None) -> None:
        """Write a figure for TensorBoard, and to a file if given; the figure is encoded once."""
        content, size = png(figure)
        if file is not None:
            file.write_bytes(content)
        self._board.picture(tag, number, content, size)


def judged(
    rows: Sequence[Mapping[str, str]], num_rounds: int, main: str | None = None, *, every: int = 1
) -> dict[str, float | int | None]:
    """Return the scores of a run from its rows: last, best, mean of the last 10 % of the rounds, and by validation.

    `accuracy_at_best_validation` is the test accuracy of the first round with the best validation accuracy, a choice
    that does not depend on the test set. A value is None if the rows do not have it.

    Args:
      main: the main metric; None: the main metric in the rows, see `main_of`.
      every: rounds between evaluations; 0: only the last round is evaluated. Other rounds are ignored.
    """
    main = main or main_of(rows[0] if rows else ())
    rows = [row for row in rows if is_due(int(row["round"]) + 1, every, num_rounds)]
    scores, validation = _points(rows, f"server/{main}"), _points(rows, f"server/validation_{main}")
    best, chosen = best_round(scores, main), best_round(validation, main)
    late = num_rounds - max(1, math.ceil(num_rounds / 10))
    last = [score for number, score in scores.items() if number >= late]
    return {
        main: list(scores.values())[-1] if scores else None,
        f"best_{main}": None if best is None else scores[best],
        "best_round": best,
        f"mean_last_10pct_{main}": float(np.mean(last)) if last else None,
        f"best_validation_{main}": None if chosen is None else validation[chosen],
        "best_validation_round": chosen,
        f"{main}_at_best_validation": None if chosen is None else scores.get(chosen),
    }


#: Column of progress.csv -> heading in tables of finished runs.
HEADLINES = dict.fromkeys(("dp/epsilon", "local_dp/epsilon", "dp_sgd/epsilon"), "epsilon") | {
    "attack/success": "attack success"
}


def headlines(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return heading -> number: last epsilon, attack success and number of chosen clients, and megabytes up in all."""
    columns = dict.fromkeys(name for row in rows for name in row)
    names = {name: HEADLINES.get(name, name) for name in columns if name in HEADLINES or name.endswith("/chosen")}
    numbers = {heading: list(points.values())[-1] for name, heading in names.items() if (points := _points(rows, name))}
    return numbers | {"megabytes up": sum(_points(rows, "comm/up_mb").values())}


def reason_to_stop(stop: StopGroup, rows: Sequence[Mapping[str, str]], every: int) -> str:
    """Return the reason to stop after the given rounds; empty to continue. Depends on the records only.

    A run ends after an evaluation, so that its last model is scored; if only the last round is evaluated (`every` 0),
    the run may end after any round. `stop.epsilon` is never exceeded: it may end a run before the first evaluation.

    Args:
      rows: rows of progress.csv, from the first round on.
      every: rounds between evaluations.
    """
    if not rows or stop == StopGroup():
        return ""
    behind = len(rows) % every if every else 0  # number of rounds since the last evaluation
    if stop.epsilon is not None and (reason := _reason_to_save(stop.epsilon, rows[-1], max(1, every) - behind)):
        return reason
    if behind:
        return ""
    main = main_of(rows[-1])  # the last row is evaluated; the first row may lack the column
    scores, wanted = judged(rows, len(rows), main, every=every), stop.score
    best, reached, last_round = scores[f"best_{main}"], scores["best_round"], int(rows[-1]["round"])
    sign = 1 if direction_of(main) == "max" else -1
    if wanted is not None and best is not None and sign * best >= sign * wanted:
        return f"{main} {best:.4f} in {round_name(int(reached or 0))}: {wanted:g} was asked for"
    since = next(iter(_points(rows, f"server/{main}")), last_round) if reached is None else int(reached)
    if stop.patience is not None and last_round - since >= stop.patience:
        better = "no number" if best is None else f"no better {main} than {best:.4f}"
        return f"{better} for {last_round - since} rounds"
    if stop.simulated_s is not None and (now_s := float(rows[-1]["time/simulated_s"])) >= stop.simulated_s:
        return f"{now_s:g} s of simulated time: {stop.simulated_s:g} were asked for"
    return ""


def _reason_to_save(allowed: float, row: Mapping[str, str], more: int) -> str:
    """Return the reason to stop if `more` rounds would exceed the allowed epsilon, else "". row: the last row."""
    spent, after_one = float(row["dp/epsilon"]), float(row["dp/next_epsilon"])
    # Epsilon is concave in the number of rounds (a minimum of lines), so that the linear estimate is an upper bound.
    if spent + more * (after_one - spent) <= allowed:
        return ""
    return f"epsilon {spent:.4g} is spent: {allowed:g} is allowed, and the next evaluation would come to more"


def _points(rows: Sequence[Mapping[str, str]], name: str) -> dict[int, float]:
    return {int(row["round"]): float(row[name]) for row in rows if row.get(name)}


def _last(rows: Sequence[Mapping[str, str]], name: str) -> float | None:
    """Return the last value of a `server/`, `clients/` or `dp/` metric; None for others, and if it is not finite."""
    *_, last = [math.nan, *_points(rows, name).values()]
    return last if name.startswith(("server/", "clients/", "dp/")) and math.isfinite(last) else None
