"""The table at the end of a sweep: what it shows, and what it leaves out."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from raysim.cli.printing import best_trials
from raysim.config import TuneGroup
from raysim.tuning.outcome import Outcome


def table_of(count: int, metric: str, num_completed: int = 100, headlines=lambda number: {}, main="accuracy") -> str:
    names = [f"lr={number}" for number in range(count)]
    outcomes = {}
    for number, name in enumerate(names):
        status = "completed" if number < num_completed else "stopped"
        score, last = 0.5 + number / 100, 0.25 + number / 100
        told = {"headlines": headlines(number), "main": main}
        outcomes[name] = Outcome(status, {"lr": number}, score, 3, 1.0, last=last, best=0.75, **told)
    sweep = SimpleNamespace(folder=SimpleNamespace(name="lr"), base=SimpleNamespace(tune=TuneGroup(metric=metric)))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(best_trials(sweep, [SimpleNamespace(name=name) for name in names], outcomes))
    return captured.get()


def test_a_table_that_leaves_trials_out_says_so():
    text = table_of(12, "server/accuracy")
    assert "lr: best 10 of 12 trials, by last accuracy" in text
    assert "2 more in results.csv" in text
    assert sum("0.7500" in line for line in text.splitlines()) == 10


def test_a_whole_table_says_nothing_of_the_kind():
    text = table_of(3, "best_accuracy")
    assert "lr: 3 trials, by best accuracy" in text
    assert "more in" not in text


def test_what_methods_are_for_is_a_column_where_trials_differ_in_it():
    text = table_of(3, "server/accuracy", headlines=lambda number: {"epsilon": 1.5 + number, "megabytes up": 8.0})
    assert "epsilon" in text
    assert "3.5" in text
    assert "megabytes up" not in text  # the same in all trials
    text = table_of(2, "server/accuracy", headlines=lambda number: {"epsilon": 2.5} if number else {})
    assert re.search(r"lr=?.*epsilon", text.splitlines()[2])


def test_the_scores_have_the_name_of_the_main_metric():
    text = table_of(2, "server/rmse", main="rmse")
    assert "lr: 2 trials, by last rmse" in text
    assert "best rmse" in text
    assert "accuracy" not in text


def test_trials_have_a_status_where_one_did_not_come_to_its_end():
    assert "status" not in table_of(3, "best_accuracy")
    text = table_of(3, "best_accuracy", num_completed=2)
    assert "status │" in text.replace("┃", "│")
    assert "stopped" in text


@pytest.mark.parametrize(("metric", "is_shown"), [("server/accuracy", False), ("train/loss", True)])
def test_both_accuracies_are_named_and_rounds_count_from_1(metric, is_shown):
    text = table_of(2, metric)
    header = next(line for line in text.splitlines() if "best round" in line)
    assert "last accuracy" in header
    assert "best accuracy" in header
    assert (metric in header) == is_shown
    row = next(line for line in text.splitlines() if "0.2500" in line)
    assert re.search(r"│ +4 │", row)
    names = [name.strip() for name in re.split("[┃│]", header)]
    assert (
        names.index("its best round" if is_shown else "best round")
        == names.index(metric if is_shown else "best accuracy") + 1
    )
    assert ("lowest first" in text) == is_shown
    assert ("0.5000" in row) == is_shown
