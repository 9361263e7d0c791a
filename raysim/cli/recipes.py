"""`raysim recipes`: the files that come with raysim, listed, printed and copied."""

from __future__ import annotations

import csv
import filecmp
import re
import shutil
from pathlib import Path

import yaml
from rich.markup import escape
from rich.table import Table

from raysim.base.errors import ConfigError, Fault, explained, refuse
from raysim.cli.terminal import out, print_table, say
from raysim.config.shipped import KINDS, RECIPES, kind_folder, shipped_file, shipped_files


def show(name: str | None, target: str | None, *, is_copy: bool) -> None:
    """Print the list of all recipes or of a kind, or the text of a file; or copy files (`raysim recipes`).

    Raises:
      ConfigError, DataError: in the same cases as `copy`; a target without `is_copy`.
    """
    if target is not None and not is_copy:
        raise ConfigError([Fault(target, "a file or folder has effect with --copy only; add it")], "the command line")
    if is_copy:
        if name is None:
            raise ConfigError([Fault("--copy", "needs the name of a file or kind first")], "the command line")
        for path in copy(name, target):
            say(f"copied: {path}")
    elif name is None or name in KINDS:
        print_table(listing(*([name] if name else RECIPES)))
        if name is None:
            others = ", ".join(kind for kind in KINDS if kind not in RECIPES)
            say(f"\nFurther files, by `raysim recipes KIND`: {others}")
    else:
        out.out(shipped_file(name)[1].read_text(), end="")


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


def copy(name: str, target: str | None) -> list[Path]:
    """Copy a file with the files of its `base` chain, or all files of a kind; return the copies.

    Args:
      name: name of a file, with or without its kind; or a kind.
      target: file or folder of the copy; by default the name of the file, or of the kind's folder, in the working
        directory.
    Raises:
      ConfigError: unknown name, or a different file exists already. DataError: a copy cannot be written.
    """
    copies = _copies_of_kind(name, target) if name in KINDS else _copies_of_file(name, target)
    others = [path for path, file in copies.items() if path.exists() and not filecmp.cmp(path, file, shallow=False)]
    text = "exists with different content; give another file or folder after --copy"
    refuse((Fault(str(path), text) for path in others), f"a copy of {name}")
    with explained("cannot write a copy", "", "give another file or folder after --copy", OSError):
        for path, file in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, path)
    return list(copies)


def _copies_of_kind(kind: str, target: str | None) -> dict[Path, Path]:
    """Return copy -> file for a kind; the copies have the same subfolders as the files."""
    folder = Path(target or kind_folder(kind).name)
    return {folder / file.relative_to(kind_folder(kind)): file for file in shipped_files(kind).values()}


def _copies_of_file(name: str, target: str | None) -> dict[Path, Path]:
    full, file = shipped_file(name)
    path = Path(target or file.name)
    path = path / file.name if path.is_dir() or (target or "").endswith("/") else path
    copies = {path: file}
    for base in _bases(file) if full.partition(":")[0] in RECIPES else []:
        if copies.setdefault(path.parent / base.name, base) is not base:
            raise ConfigError([Fault(path.name, f"is the name of the base of {full}; choose another")], "the call")
    return copies


def _bases(file: Path) -> list[Path]:
    """Return the base files of a file, nearest first."""
    base = yaml.safe_load(file.read_text()).get("base")
    return [file.parent / base, *_bases(file.parent / base)] if base else []
