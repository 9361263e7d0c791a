"""Text from other people, made harmless for display: control characters, and cells that a spreadsheet would compute.

Also texts for numbers, lists and rounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast

T = TypeVar("T")

#: Control characters, separators of lines and paragraphs, marks that turn the direction of text, and half characters.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

#: What begins a formula in a spreadsheet.
FORMULA = ("=", "+", "-", "@")


def visible(text: str, *, keep: str = "") -> str:
    r"""Escape control characters as in Python, `\n` or `\x1b`, except characters in `keep`."""
    return CONTROL.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def all_visible(value: T) -> T:
    """Escape control characters in every text of nested lists and mappings, keys included."""
    if isinstance(value, str):
        return cast("T", visible(value))
    if isinstance(value, dict):
        return cast("T", {all_visible(key): all_visible(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return cast("T", list(map(all_visible, value)))
    return value


def cells(row: Iterable[object]) -> Iterator[object]:
    """The cells of a row of a CSV file. Text that a spreadsheet would take for a formula begins with an apostrophe."""
    for value in row:
        text = visible(value) if isinstance(value, str) else value
        yield f"'{text}" if isinstance(text, str) and text.startswith(FORMULA) and number(text) is None else text


def number(value: object) -> float | None:
    """Return the number written in a value; None for other text."""
    try:
        return float(str(value))
    except ValueError:
        return None


def listed(names: Sequence[str], word: str) -> str:
    """Names in a sentence: "a, b and c" with the word "and"."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def literal(name: str) -> str:
    """A name as matplotlib draws it letter by letter: a dollar sign begins no formula."""
    return name.replace("$", r"\$")


def round_name(round_index: int) -> str:
    """`round 1` for the index 0: people count from 1.

    Code, hooks and files have the index, from 0: progress.csv, clients.parquet, arrays, `best_round` of summary.json, what
    loggers receive, TensorBoard's step. Stored runs stay comparable, and a row's number is its place in an array. What is
    printed, drawn or written in a sentence has the number, one more.
    """
    return f"round {round_index + 1}"


#: Largest number of bytes in a name of a file or folder of raysim: file systems take 255, and temporary names are
#: longer.
LONGEST_NAME = 200


def name_fault(name: str, *, has_folders: bool = False) -> str:
    """Return the rule that a name breaks as a name below a folder; empty for a valid name.

    Args:
      has_folders: whether `/` is allowed, as in the names of runs.
    """
    parts = name.split("/") if has_folders else [name]
    if (longest := max(len(part.encode(errors="replace")) for part in parts)) > LONGEST_NAME:
        return f"must have at most {LONGEST_NAME} bytes in a folder's name, got {longest}"
    if all(part not in ("", ".", "..") and part.isprintable() and not {"/", "\\"} & {*part} for part in parts):
        return ""
    form = "names of folders with / between them" if has_folders else "the name of one folder, without / and \\"
    return f"must be {form}: not dots alone, no line ends or other control characters"
