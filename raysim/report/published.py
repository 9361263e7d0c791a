"""Published numbers: read from configs/papers/published, and found by the labels of a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysim.config import nearest
from raysim.core.errors import ConfigError, DataError, Fault

FOLDER = Path(__file__).parents[2] / "configs" / "papers" / "published"

#: Metrics that are accuracies in percent; only these stand beside the accuracy of a run.
ACCURACIES = ("accuracy_pct", "test_accuracy_pct")

Label = str | int | float
COLUMNS = ("paper", "table", "dataset", "model", "method", "setting", "metric", "value", "std")


@dataclass(frozen=True)
class Published:
    """One cell of a published table. `value` is None where the paper prints "-", or text (then see `text`)."""

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

    @property
    def source(self) -> str:
        return f"{self.paper}, table {self.table}" if self.table[:1] in "A123456789" else f"{self.paper}, {self.table}"


def published(name: str) -> list[Published]:
    """The cells of a published table, in the paper's order.

    Args:
      name: a file of configs/papers/published without its ending, or the path of a CSV file of the same form.
    Raises:
      ConfigError: there is no such table. DataError: the file has another form.
    """
    path = Path(name) if name.endswith(".csv") else FOLDER / f"{name}.csv"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.csv"))
        raise ConfigError([Fault("report.published", f"unknown table {name!r}. {nearest(name, known)}")])
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"no column {', '.join(missing)}", str(path), f"the columns are {','.join(COLUMNS)}")
        return [_cell(row) for row in reader]


def _cell(row: Mapping[str, str]) -> Published:
    names = ("paper", "table", "dataset", "model", "method", "metric")
    return Published(
        **{name: row[name] for name in names},
        setting=_setting(row["setting"]),
        value=number(row["value"]),
        std=number(row["std"]),
        text=row["value"] or "-",
    )


def _setting(text: str) -> dict[str, str]:
    """`alpha=0.05;granularity=blockwise` as a mapping; words without a value ("main setting") only describe."""
    return dict(part.split("=", 1) for part in text.split(";") if "=" in part)


def number(text: object) -> float | None:
    """The number that a text holds, or None."""
    try:
        return float(str(text))
    except ValueError:
        return None


def is_same(left: object, right: object) -> bool:
    """Whether two names or values mean the same: numbers by value, texts by their letters and digits.

    "CIFAR-10" is "cifar10" and "FedAvg + FedVG" is "fedavg+fedvg", but "FLFA*" is not "FLFA".
    """
    one, two = number(left), number(right)
    if one is not None and two is not None:
        return abs(one - two) <= 1e-9 * max(abs(one), abs(two))
    return canonical(left) == canonical(right)


def canonical(name: object) -> str:
    return "".join(letter for letter in str(name).casefold() if letter.isalnum() or letter in "+*")


def match(
    cells: Sequence[Published], labels: Mapping[str, Label], *, metrics: Sequence[str] = ACCURACIES
) -> Published | None:
    """The published number of a run's cell, or None.

    A cell matches if dataset, model and method are the same (`is_same`), every key=value of its setting is a label with
    the same value, and the run has no further label: a run with other settings than the paper's is not the paper's run.
    A label may be dotted, `partition.alpha` for alpha, if only one label ends so. Of several cells the first counts.

    Args:
      labels: all labels but the seed.
      metrics: the kinds of numbers that are looked for.
    """
    named = ("dataset", "model", "method")
    if any(name not in labels for name in named):
        return None
    rest = {key: value for key, value in labels.items() if key not in named}
    for cell in cells:
        if cell.metric not in metrics or len(cell.setting) != len(rest):
            continue
        if not all(is_same(getattr(cell, name), labels[name]) for name in named):
            continue
        found = [_label_of(key, rest) for key in cell.setting]
        if len(set(found)) == len(rest) and all(
            key is not None and is_same(rest[key], value)
            for key, value in zip(found, cell.setting.values(), strict=True)
        ):
            return cell
    return None


def _label_of(key: str, labels: Mapping[str, Label]) -> str | None:
    if key in labels:
        return key
    dotted = [name for name in labels if name.endswith(f".{key}")]
    return dotted[0] if len(dotted) == 1 else None
