"""Whole runs in a folder of a test, and what they leave there."""

from __future__ import annotations

import csv

import pytest

from raysim.engine.simulation import Stopped
from raysim.running.runner import execute
from tests.support.federations import plan_of


def quietly(plan):
    """The summary of a run of which nobody is told anything on the way."""
    return execute(plan, on_start=lambda *_: None, on_round=lambda _: None)


def a_plan(root, tmp_path, methods=(), **groups):
    """A plan of a run with the name "a"."""
    return plan_of(root, methods, name="a", storage=str(tmp_path), **groups)


def stopped_after(round_index, plan):
    """Run a plan, and end it unfinished after a round."""

    def stop(record):
        if record.round_index == round_index:
            raise Stopped

    with pytest.raises(Stopped):
        execute(plan, on_round=stop)


def rows_of(folder):
    """The rows of progress.csv."""
    with open(folder / "progress.csv") as file:
        return list(csv.DictReader(file))


def timeless(rows):
    """Rows without what is measured in time."""
    return [{k: v for k, v in row.items() if not k.startswith("system/")} for row in rows]
