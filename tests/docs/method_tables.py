"""`python -m tests.docs.method_tables` writes the tables of options in docs/methods from the methods themselves.

A table stands between `<!-- options of NAME -->` and `<!-- end of options -->`. Names, values and defaults come from the
signature of the method's function, meanings from the section "Args" of its documentation.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from methods import METHODS

PAGES = Path(__file__).parents[2] / "docs" / "methods"
BLOCK = re.compile(r"<!-- options of (\w+) -->\n(.*?)<!-- end of options -->", re.DOTALL)
#: What a function says that leaves its options to another one's documentation.
AS_IN = re.compile(r"[Oo](?:ther o)?ptions (?:and errors )?as in `(\w+)`")
#: The meaning of an option that the function's documentation explains in its text, and the page in its own.
IN_THE_TEXT = "see the text"
#: What YAML calls them.
WORDS = {"None": "null", "True": "true", "False": "false"}
HEAD = "| option | values | default | meaning |\n|---|---|---|---|\n"


def meanings(make: Callable[..., object]) -> dict[str, str]:
    """Option -> what the function's documentation says of it; options that share an entry share its text."""
    text = inspect.getdoc(make) or ""
    section = re.search(r"^Args:\n((?:  .*\n?)+)", text, re.MULTILINE)
    known: dict[str, str] = {}
    if other := AS_IN.search(text):
        known |= meanings(METHODS[other[1]])
    for entry in re.split(r"^(?=\S)", textwrap.dedent(section[1]) if section else "", flags=re.MULTILINE):
        names, _, words = entry.partition(":")
        known |= dict.fromkeys((name.strip() for name in names.split(",")), " ".join(words.split()))
    return known


def values_of(hint: object) -> str:
    """The values that an annotation allows, in words."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return ", ".join(values_of(part) for part in get_args(hint))
    if get_origin(hint) is list:
        inside = get_args(hint)[0]
        return "list of lists of numbers" if get_origin(inside) is list else f"list of {values_of(inside)}"
    known = {NoneType: "`null`", bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return "mapping" if get_origin(hint) is dict else known[hint]  # type: ignore[index]


def table(name: str) -> str:
    """The table of a method's options; a sentence where it has none."""
    make = METHODS[name]
    hints, known = get_type_hints(make), meanings(make)
    rows = []
    for option in inspect.signature(make).parameters.values():
        default = WORDS.get(str(option.default), option.default)
        words = known.get(option.name, IN_THE_TEXT).replace("|", "\\|")
        rows.append(f"| `{option.name}` | {values_of(hints[option.name])} | `{default}` | {words} |\n")
    return HEAD + "".join(rows) if rows else "No options.\n"


def written(page: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(
        lambda block: f"<!-- options of {block[1]} -->\n\n{table(block[1])}\n<!-- end of options -->", page
    )


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
