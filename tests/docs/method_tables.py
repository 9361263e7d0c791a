"""`python -m tests.docs.method_tables` writes the tables of options in docs/methods from the methods themselves.

A table stands between `<!-- options of NAME -->` and `<!-- end of options -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from methods import METHODS
from raysim.core.options import options_of

PAGES = Path(__file__).parents[2] / "docs" / "methods"
BLOCK = re.compile(r"<!-- options of (\w+) -->\n(.*?)<!-- end of options -->", re.DOTALL)
HEAD = "| option | values | default | meaning |\n|---|---|---|---|\n"


def table(name: str) -> str:
    """The table of a method's options; a sentence where it has none."""
    rows = []
    for option in options_of(METHODS[name]):
        cells = (f"`{option.name}`", option.values, f"`{option.default}`", option.meaning)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
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
