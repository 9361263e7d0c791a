"""What a report holds, before it is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raysim.config import ReportGroup
from raysim.reporting.metrics import ReportMetric
from raysim.reporting.panels import Styles, styles_of
from raysim.reporting.published import Published
from raysim.reporting.render import Line
from raysim.reporting.runs import ReportedRun
from raysim.reporting.significance import Comparison
from raysim.reporting.tables import Cell, Table, all_rows


@dataclass(frozen=True)
class Extra:
    """A further table: its heading, a sentence on what it holds, and its lines."""

    title: str
    caption: str
    header: Sequence[str]
    lines: Sequence[Line]


@dataclass(frozen=True)
class ReportContents:
    """Everything that a report says.

    Attributes:
      theirs: cells of the published tables that were asked for.
      subject, baseline: rows of the group's `against` and `baseline`, if the tables have them.
      others: for each table the same runs by the other of last and best accuracy, if it is one of these.
      extras: further tables beside those of the metric.
      changed: what of the published numbers' recipe was changed, see `raysim.reporting.recipes`.
      printed: what the published numbers are.
      by_table: tests over tables; by_seed: title of a table -> tests over its seeds.
    """

    group: ReportGroup
    runs: Sequence[ReportedRun]
    tables: Sequence[Table]
    theirs: Sequence[Published]
    subject: str | None
    baseline: str | None
    by_table: Sequence[Comparison]
    by_seed: Mapping[str, Sequence[Comparison]]
    notes: Sequence[str]
    others: Sequence[Extra] = ()
    extras: Sequence[Extra] = ()
    changed: Sequence[str] = ()
    printed: str = ""

    @property
    def finished(self) -> list[ReportedRun]:
        return [run for run in self.runs if run.is_finished]

    @property
    def measure(self) -> ReportMetric:
        return self.tables[0].metric

    @property
    def metric(self) -> str:
        """The metric in words."""
        if not self.runs:
            return f"as published, {self.printed}"
        named = [
            f"{value}: {ReportMetric(name).words}"
            for every in self.group.metrics.values()
            for value, name in every.items()
        ]
        return "; ".join(named) or self.measure.words

    @property
    def heading(self) -> str:
        """The metric as a heading, with its unit."""
        if not self.runs:
            return f"{self.metric[0].upper()}{self.metric[1:]}, in %"
        title = self.measure.title
        is_name = self.measure.words == self.measure.name  # of a column, which is no sentence
        return title if is_name else title[0].upper() + title[1:]

    @property
    def cells(self) -> list[Cell]:
        return [cell for table in self.tables for cell in table.cells.values()]

    @cached_property
    def styles(self) -> Styles:
        """How each row is drawn, in all figures alike; the subject's line is thicker."""
        return styles_of(all_rows(self.tables), self.subject)
