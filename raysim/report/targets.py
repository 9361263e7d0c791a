"""What it took to reach an accuracy: rounds, megabytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raysim.core.errors import ConfigError, Fault
from raysim.report.contents import Extra
from raysim.report.metrics import by_round
from raysim.report.render import Entry, Line
from raysim.report.tables import Cell, Column, Table, heading, mean_and_std
from raysim.run_folder import RunFolder


@dataclass(frozen=True)
class Cost:
    """Up to and with the first evaluated round that reached the target."""

    rounds: int
    megabytes: float
    seconds: float


#: Of each number of a cost: its name, its unit in a heading, and its decimals.
QUANTITIES = (("rounds", "rounds", 1), ("megabytes", "MB", 1), ("seconds", "s", 1))


def cost(folder: Path, column: str, target: float) -> Cost | None:
    """What a run took until a column of progress.csv reached the target; None if it never did.

    Megabytes are those that clients received and sent; seconds are whole rounds, evaluation included.

    Args:
      target: in the column's own unit, a fraction for accuracies.
    """
    reached = next((index for index, value in by_round(folder, column) if value >= target), None)
    if reached is None:
        return None
    rows = [row for row in RunFolder(folder).progress_rows() if int(row["round"]) <= reached]
    names = ("comm/up_mb", "comm/down_mb")
    megabytes = sum(float(row.get(name) or 0.0) for row in rows for name in names)
    return Cost(reached + 1, megabytes, sum(float(row.get("system/round_s") or 0.0) for row in rows))


def costs(tables: Sequence[Table], rows: str, target: str | float) -> list[Extra]:
    """A table of the costs for each table: mean and deviation over the seeds that reached the target.

    Args:
      rows: the label of the rows.
      target: accuracy in percent, or the row whose mean accuracy in the same column it is.
    """
    extras = []
    for table in tables:
        levels = {column: level for column in table.columns if (level := _level(table, column, target)) is not None}
        header = [rows]
        for column, level in levels.items():
            name = f"{heading(table.names, column)}, " if table.names else ""
            header += [f"{name}{level:.2f} %: {unit}" for _, unit, _ in QUANTITIES]
        lines: list[Line] = []
        for row in table.rows:
            entries = [_entries(table.cells.get((row, c)), table.metric.column, level) for c, level in levels.items()]
            lines.append((row, tuple(entry for three in entries for entry in three)))
        if levels:
            caption = (
                "Up to the first evaluated round at that accuracy on the test set: rounds, megabytes between server and "
                "clients, seconds of whole rounds; mean ± standard deviation over the seeds that reached it, and how many "
                "of them did where not all."
            )
            extras.append(Extra(f"To a target accuracy: {table.title}", caption, header, lines))
    return extras


def percent(target: str | float) -> float:
    """The target as a number.

    Raises:
      ConfigError: a fraction where percent is meant, or more than all.
    """
    value = float(target)
    if not 1 < value <= 100:
        text = f"must be an accuracy in percent, above 1 and at most 100, or a row, got {target!r}"
        raise ConfigError([Fault("report.target", text)], "the report")
    return value


def _level(table: Table, column: Column, target: str | float) -> float | None:
    if isinstance(target, str):
        cell = table.cells.get((target, column))
        return cell.mean if cell is not None else None
    return target


def _entries(cell: Cell | None, column: str, level: float) -> list[Entry]:
    """The three numbers of a cell."""
    found = [cost(folder, column, level / 100) for folder in cell.folders.values()] if cell is not None else []
    reached = [one for one in found if one is not None]
    if not reached:
        return [Entry("never" if found else "-")] * len(QUANTITIES)
    count = f" ({len(reached)} of {len(found)})" if len(reached) < len(found) else ""
    entries = []
    for name, _, digits in QUANTITIES:
        mean, std = mean_and_std([getattr(one, name) for one in reached])
        told = f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")
        entries.append(Entry(told + count))
    return entries
