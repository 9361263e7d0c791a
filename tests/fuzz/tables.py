"""Tables as spreadsheets write them: read as the numbers and words that they hold, or refused in a sentence."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.arrow import PreparedSet
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare, set_path

#: Ways to write a number: name -> text. Those of PLAIN are numbers to every reader, the others to some.
WRITINGS = {
    "repr": repr,
    "whole": lambda value: str(round(value)),
    "exponent": lambda value: f"{value:.6e}",
    "padded": lambda value: f" {value!r} ",
    "comma": lambda value: repr(value).replace(".", ","),
    "thousands": lambda value: f"{value * 1e6:,.0f}",
    "percent": lambda value: f"{value:.1f}%",
    "date": lambda value: f"2024-01-{1 + abs(round(value)) % 28:02d}",
    "day": lambda value: f"{1 + abs(round(value)) % 28:02d}.01.2024",
}
PLAIN = ("repr", "whole", "exponent", "padded")
WORDS = ("yes", "no", "maybe")


def messy_table(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """One or two faults in a table; what is prepared has the plain numbers, one column a word, and no copy of the target."""
    rows = rng.choice((30, 60, 200))
    numbers = np.array([[round(rng.uniform(-9, 9), 3) for _ in range(3)] for _ in range(rows)])
    words, targets = [rng.choice(WORDS) for _ in range(rows)], [rng.randrange(3) for _ in range(rows)]
    plain = {column: rng.choice(PLAIN) for column in range(3)}
    cells = [
        [*(WRITINGS[plain[column]](float(values[column])) for column in range(3)), word, target]
        for values, word, target in zip(numbers, words, targets, strict=True)
    ]
    names, target_text = (
        ["a", "b", "c", "word", "y"],
        rng.choice((str, lambda value: f"{value}.0", lambda value: f"k{value}")),
    )
    for line in cells:
        line[-1] = target_text(line[-1])
    expected = {
        column: np.round(numbers[:, column]) if plain[column] == "whole" else numbers[:, column] for column in range(3)
    }
    for _ in range(rng.choice((1, 1, 2))):
        spoil(rng, cells, names)
    path = here / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=rng.choice(",,;")).writerows([names, *cells])
    options = ReaderOptions(target="y", missing=rng.choice((None, "drop", "mean")))
    info = prepare("table", here / "sets", path, save_as="messy", options=options)
    inputs, found = PreparedSet(set_path(here / "sets", "messy")).whole()
    is_copy = any(len(np.unique(column)) > 1 and np.array_equal(column, found) for column in inputs.T)
    word_columns = [name for name in info.columns if name.startswith("word")]
    has_numbers = len(inputs) != rows or all(
        np.allclose(inputs[:, column], expected[column], rtol=1e-5, atol=1e-5)
        for column in range(3)
        if all(WRITINGS[plain[column]](float(numbers[row, column])) == cells[row][column] for row in range(rows))
    )
    is_few = len(word_columns) <= len(WORDS) + 1  # a typed "?" may be a word of its own
    return (
        has_numbers and is_few and not is_copy and len(info.columns) - len(word_columns) == 3 and len(info.classes) == 3
    )


def spoil(rng: random.Random, cells: list[list[Any]], names: list[str]) -> None:
    """Put one fault into the cells or the names, in place."""
    column, rows = rng.randrange(3), range(len(cells))
    chosen = rng.sample(rows, rng.choice((1, len(cells) // 2, len(cells))))
    fault = rng.choice(("writing", "writing", "writing", "gap", "blank", "twice", "padded name", "same name", "target"))
    if fault == "writing":
        write = WRITINGS[rng.choice(sorted(set(WRITINGS) - set(PLAIN)))]
        for row in chosen:
            cells[row][column] = write(rng.uniform(-9, 9))
    elif fault == "gap":
        for row in chosen:
            cells[row][rng.randrange(4)] = rng.choice(("", "NA", "nan"))
    elif fault == "blank":
        for row in chosen:
            cells[row][3] = f"{cells[row][3]}{rng.choice((' ', '  '))}"
    elif fault in ("twice", "same name"):
        source = 4 if fault == "twice" else column
        names.append(names[source])
        for line in cells:
            line.append(line[source])
    elif fault == "padded name":
        names[rng.choice((column, 3, 4))] += " "
    else:
        for row in chosen:
            cells[row][4] = f"{cells[row][4]} "
