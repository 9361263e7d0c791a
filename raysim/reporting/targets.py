"""What it took to reach an accuracy: rounds, megabytes and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raysim.core.errors import ConfigError, Fault
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import Extra
from raysim.reporting.metrics import by_round
from raysim.reporting.published import number
from raysim.reporting.render import Entry, Line, accuracy
from raysim.reporting.tables import Cell, Column, Table, heading, mean_and_std, row_of


class Cost(NamedTuple):
    """Up to and with the first evaluated round that reached the target."""

    rounds: int
    megabytes: float
    seconds: float


#: Unit of each number of a cost in a heading.
UNITS = ("rounds", "MB", "s")


def cost(folder: Path, column: str, target: float) -> Cost | None:
    """What a run took until a column of progress.csv reached the target; None if it never did.

    Megabytes are those that clients received and sent; seconds are whole rounds, evaluation included.

    Args:
      target: in the column's own unit, a fraction for accuracies.
    """
    reached = next((index for index, value in by_round(folder, column).items() if value >= target), None)
    if reached is None:
        return None
    rows = [row for row in RunFolder(folder).progress_rows() if int(row["round"]) <= reached]

    def total(name: str) -> float:
        return sum(float(row.get(name) or 0.0) for row in rows)

    return Cost(reached + 1, total("comm/up_mb") + total("comm/down_mb"), total("system/round_s"))


def costs(tables: Sequence[Table], rows: str, target: str | float) -> list[Extra]:
    """A table of the costs for each table: mean and deviation over the seeds that reached the target.

    Args:
      rows: the label of the rows.
      target: accuracy in percent, or the row whose mean accuracy in the same column it is.
    """
    caption = (
        "Up to the first evaluated round at that accuracy on the test set: rounds, megabytes between server and clients, "
        "seconds of whole rounds; mean ± standard deviation over the seeds that reached it, and how many of them did where "
        "not all."
    )
    extras = []
    for table in tables:
        levels: dict[Column, float] = {}
        for column in table.columns:
            if not isinstance(target, str):
                levels[column] = target
            elif (target, column) in table.cells:
                levels[column] = table.cells[target, column].mean
        header = [rows]
        for column, level in levels.items():
            name = f"{heading(table.names, column)}, " if table.names else ""
            header += [f"{name}{level:.2f} %: {unit}" for unit in UNITS]
        lines: list[Line] = []
        for row in table.rows:
            entries = [_entries(table.cells.get((row, c)), table.metric.column, level) for c, level in levels.items()]
            lines.append((row, tuple(itertools.chain(*entries))))
        if levels:
            extras.append(Extra(f"To a target accuracy: {table.title}", caption, header, lines))
    return extras


def target_of(target: str | float | None, tables: Sequence[Table]) -> str | float | None:
    """The target as a number, or the row whose accuracy it is.

    Raises:
      ConfigError: a fraction where percent is meant, or more than all. LookupError: no such row.
    """
    value = number(target)
    if value is None:
        return None if target is None else row_of(str(target), tables)
    if not 1 < value <= 100:
        text = f"must be an accuracy in percent, above 1 and at most 100, or a row, got {target!r}"
        raise ConfigError([Fault("report.target", text)], "the report")
    return value


def _entries(cell: Cell | None, column: str, level: float) -> list[Entry]:
    """The three numbers of a cell."""
    costs = [cost(folder, column, level / 100) for folder in cell.folders.values()] if cell else []
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return [Entry("never" if costs else "-")] * len(UNITS)
    count = f" ({len(reached)} of {len(costs)})" if len(reached) < len(costs) else ""
    return [Entry(accuracy(*mean_and_std(values), digits=1) + count) for values in zip(*reached, strict=True)]
