"""`raysim recipes`: the files that come with raysim, listed and printed."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from raysim.cli.terminal import out, print_table, say
from raysim.config.shipped import KINDS, RECIPES, shipped_file, shipped_files


def show_recipes(name: str | None) -> None:
    """Print the list of all recipes or of a kind, or the text of a file (`raysim recipes`).

    Raises:
      ConfigError: an unknown name.
    """
    if name is not None and name not in KINDS:
        out.out(shipped_file(name).read_text(), end="")
        return
    print_table(listing(*([name] if name else RECIPES)))
    if name is None:
        others = ", ".join(kind for kind in KINDS if kind not in RECIPES)
        say(f"\nFurther files, by `raysim recipes KIND`: {others}")


def listing(*kinds: str) -> Table:
    """Return a table of names and descriptions. Base files, which are not complete recipes, are left out."""
    table = Table("name", "what", box=None, pad_edge=False)
    for kind in kinds:
        for name, file in shipped_files(kind).items():
            if file.stem != "base":
                table.add_row(name, escape(summary(file)))
    return table


def summary(file: Path) -> str:
    """Return a file's description: the first sentence of its first comment or docstring.

    A published table is described by its number of values and its metrics.
    """
    text = file.read_text()
    if file.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        return f"{len(rows)} numbers: {', '.join(dict.fromkeys(row['metric'] for row in rows))}"
    docstring = re.match(r'"""(.*?)"""', text, re.DOTALL)
    lines = text.partition("\n\n")[0].splitlines()
    comments = [line[1:].strip() for line in lines if re.match(r"#(?!!| shellcheck)", line)]
    words = docstring[1] if docstring else "\n".join(comments)
    sentence = re.split(r"(?<=\.)\s|:\n", words, maxsplit=1)[0]
    return " ".join(sentence.split())
