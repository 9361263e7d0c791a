"""Published numbers: read from configs/papers/published, matched by labels, with the papers' statements."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from raysim.base.errors import ConfigError, DataError, Fault
from raysim.base.texts import number
from raysim.config import nearest, shipped_folder

#: Statements of papers, and their names for data sets and networks, collected by hand.
NAMES = yaml.load(Path(__file__).with_name("papers.yaml").read_text(), yaml.CSafeLoader)

#: Paper -> the metric that it prints (None if not stated), the section, and its words.
STATED: dict[str, dict[str, str | None]] = NAMES["statements"]

#: Name of a data set in papers -> names of the matching prepared sets.
SETS: dict[str, list[str]] = NAMES["sets"]

#: Name of a network in papers -> alternative settings of `model`, one of which has to hold. A recipe's further settings
#: are compared by `changed_settings` in `raysim.reporting.runs`.
NETWORKS: dict[str, list[dict[str, object]]] = NAMES["networks"]

#: Value in `NETWORKS` that matches every setting other than null, for example any file of initial weights.
GIVEN = "given"

FOLDER = shipped_folder("configs") / "papers" / "published"

#: Key of an accuracy in summary.json, computed from `server/accuracy` -> description. Papers publish such accuracies.
WORDS = {
    "best_accuracy": "best accuracy of the evaluated rounds",
    "accuracy": "accuracy after the last round",
    "mean_last_10pct_accuracy": "mean accuracy of the last 10 % of the rounds",
    "accuracy_at_best_validation": "accuracy at the round of the best validation accuracy",
}

#: Metrics that are accuracies in percent; only these stand beside the accuracy of a run.
ACCURACIES = ("accuracy_pct", "test_accuracy_pct")

#: Text columns of a file, which `Published` copies unchanged (`TEXTS`), and all columns (`COLUMNS`).
TEXTS = ("paper", "table", "dataset", "model", "method", "metric")


COLUMNS = (*TEXTS[:5], "setting", "metric", "value", "std")


Label = str | int | float


@dataclass(frozen=True)
class Published:
    """Cell of a published table. `value` is None if the paper prints "-" or words; `text` holds the printed text."""

    paper: str
    table: str
    dataset: str
    model: str
    method: str
    setting: Mapping[str, str]
    metric: str
    value: float | None
    std: float | None
    text: str

    @cached_property
    def labels(self) -> dict[str, str]:
        """Labels that a run needs to match the cell."""
        return {"dataset": self.dataset, "model": self.model, "method": self.method, **self.setting}

    @property
    def source(self) -> str:
        return f"{self.paper}, table {self.table}" if self.table[:1] in "A123456789" else f"{self.paper}, {self.table}"


def published(name: str) -> list[Published]:
    """Return the cells of a published table, in the paper's order.

    Args:
      name: a file of configs/papers/published without its suffix, or the path of a CSV file with the same columns.
    Raises:
      ConfigError: no such table exists. DataError: a column is missing, in the file or in a line.
    """
    path = Path(name) if name.endswith(".csv") else FOLDER / f"{name}.csv"
    if not path.is_file():
        tables = sorted(file.stem for file in FOLDER.glob("*.csv"))
        raise ConfigError([Fault("report.published", f"unknown table {name!r}. {nearest(name, tables)}")])
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"no column {', '.join(missing)}", str(path), f"the columns are {','.join(COLUMNS)}")
        cells = []
        for row in reader:
            if any(row[name] is None for name in COLUMNS if name != "std"):
                what = f"line {reader.line_num} has fewer columns than {len(COLUMNS)}"
                raise DataError(what, str(path), "complete or remove the line; the format has no comments")
            # Parts without "=" ("main setting") are descriptions.
            setting = dict(part.split("=", 1) for part in row["setting"].split(";") if "=" in part)
            texts = {name: row[name] for name in TEXTS} | {"text": row["value"] or "-"}
            cells.append(Published(**texts, setting=setting, value=number(row["value"]), std=number(row["std"] or "")))
        return cells


def statistics(cells: Sequence[Published]) -> str:
    """Return which accuracy each paper prints, in words: "best accuracy of the evaluated rounds (FedVG)"."""
    unnamed = "accuracy of unnamed rounds"
    said = {paper: WORDS[stated["metric"]] if stated["metric"] else unnamed for paper, stated in STATED.items()}
    papers: dict[str, list[str]] = {}  # words -> papers
    for paper in dict.fromkeys(cell.paper for cell in cells):
        papers.setdefault(said.get(paper, "accuracy"), []).append(paper)
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in papers.items())


def is_same(left: object, right: object) -> bool:
    """Return whether two names or values mean the same: numbers are compared by value, texts by `canonical`.

    "CIFAR-10" is "cifar10" and "FedAvg + FedVG" is "fedavg+fedvg", but "FLFA*" is not "FLFA".
    """
    one, two = number(left), number(right)
    if one is not None and two is not None:
        return one == two or abs(one - two) <= 1e-9 * max(abs(one), abs(two))
    return canonical(left) == canonical(right)


def canonical(name: object) -> str:
    """Return the letters (in lower case) and digits of a name, with "+", "*" and decimal points."""
    return "".join(re.findall(r"[^\W_]|[+*]|(?<=\d)\.(?=\d)", str(name).casefold()))


def match(
    cells: Sequence[Published], labels: Mapping[str, Label], *, metrics: Sequence[str] = ACCURACIES
) -> Published | None:
    """Return the published number of a run's cell, or None.

    A cell matches if dataset, model and method are the same (`is_same`), every key=value of its setting is a label with
    the same value, and the run has no further label: a run with other settings than the paper's is not the paper's run.
    A label may be dotted, `partition.alpha` for alpha, if no second label has this ending. The first match is returned.

    Args:
      labels: all labels but the seed.
      metrics: metrics of the cells that may match.
    """
    for cell in cells:
        if cell.metric not in metrics or len(cell.labels) != len(labels):
            continue
        wanted = {_label_of(key, labels): value for key, value in cell.labels.items()}
        if wanted.keys() == labels.keys() and all(is_same(labels[key], wanted[key]) for key in labels):
            return cell
    return None


def _label_of(key: str, labels: Mapping[str, Label]) -> str | None:
    if key in labels:
        return key
    dotted = [name for name in labels if name.endswith(f".{key}")]
    return dotted[0] if len(dotted) == 1 else None


def is_set(printed: object, name: object) -> bool:
    """Return whether a prepared set matches a paper's set; true for names that are not in `SETS`."""
    names = next((each for other, each in SETS.items() if is_same(other, printed)), None)
    return names is None or name in names


def is_network(printed: object, model: Mapping[str, object]) -> bool:
    """Return whether a model's settings match a paper's network; true for names that are not in `NETWORKS`."""
    choices = next((each for other, each in NETWORKS.items() if is_same(other, printed)), None)
    return choices is None or any(_holds(choice, model) for choice in choices)


def _holds(choice: Mapping[str, object], model: Mapping[str, object]) -> bool:
    return all(
        model.get(key) is not None if value == GIVEN else model.get(key) == value for key, value in choice.items()
    )
