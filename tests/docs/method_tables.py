"""`python -m tests.docs.method_tables` writes what the pages say of methods in tables, from the methods themselves.

In docs/methods tables of options stand between `<!-- options of NAME -->` and `<!-- end of options -->`; in docs/methods.md
the table of tasks stands between `<!-- methods by task -->` and `<!-- end of methods by task -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from methods import METHODS
from raysim.base.options import options_of
from raysim.training.tasks import TASKS

PAGES = Path(__file__).parents[2] / "docs" / "methods"
TASK_PAGE = PAGES.with_suffix(".md")
BLOCK = re.compile(r"<!-- options of (\w+) -->\n(.*?)<!-- end of options -->", re.DOTALL)
TASK_BLOCK = re.compile(r"<!-- methods by task -->\n(.*?)<!-- end of methods by task -->", re.DOTALL)
HEAD = "| option | values | default | meaning |\n|---|---|---|---|\n"

#: Method -> the options with which it reads no classes, as the table shows them.
WITHOUT_CLASSES: dict[str, Mapping[str, object]] = {
    "livar": {"components": "lora"},
    "univarfl": {"lam": 0},
    "diagnostics": {"measures": ["drift", "agreement", "spectrum"]},
}

#: Needs that the table leaves out: the run always meets them, or the columns say them.
UNSAID = {"classes", "features", "linear-head", "client-memory"}


def table(name: str) -> str:
    """The table of a method's options; a sentence where it has none."""
    rows = []
    for option in options_of(METHODS[name]):
        cells = (f"`{option.name}`", option.values, f"`{option.default}`", option.meaning)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return HEAD + "".join(rows) if rows else "No options.\n"


def options_on(name: str, task: str) -> Mapping[str, object] | None:
    """Options with which a method runs on a task; None: it does not."""
    if task == "classes" or "classes" not in METHODS[name]().needs:
        return {}
    options = WITHOUT_CLASSES.get(name)
    return options if options is not None and "classes" not in METHODS[name](**options).needs else None


def task_table() -> str:
    """Every method against every task, and what else it needs."""
    rows = [
        f"| method | {' | '.join(f'`{task}`' for task in TASKS)} | further needs |\n",
        "|---" * (len(TASKS) + 2) + "|\n",
    ]
    for name in METHODS:
        cells = [_cell(options_on(name, task)) for task in TASKS]
        needs = ", ".join(sorted(METHODS[name]().needs - UNSAID))
        rows.append(f"| `{name}` | {' | '.join(cells)} | {needs} |\n")
    return "".join(rows)


def _cell(options: Mapping[str, object] | None) -> str:
    if options is None:
        return "no"
    said = ", ".join(f"{key}: {value}" for key, value in options.items()).replace("'", "")
    return f"with `{said}`" if said else "yes"


def written(page: str) -> str:
    """The page with its tables made anew."""
    page = TASK_BLOCK.sub(
        lambda block: f"<!-- methods by task -->\n\n{task_table()}\n<!-- end of methods by task -->", page
    )
    return BLOCK.sub(
        lambda block: f"<!-- options of {block[1]} -->\n\n{table(block[1])}\n<!-- end of options -->", page
    )


def main() -> None:
    for path in (TASK_PAGE, *sorted(PAGES.glob("*.md"))):
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
