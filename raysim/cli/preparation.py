"""`raysim prepare`: list the known sets, or convert a set and print a configuration for it."""

from __future__ import annotations

from pathlib import Path

import yaml

from raysim.base.commands import shown
from raysim.base.progress import Lines
from raysim.cli.listings import print_columns
from raysim.cli.terminal import LiveLine, err, out, say
from raysim.config import path_to_write
from raysim.data.arrow import SetInfo, is_prepared
from raysim.data.facts import FACTS
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import SOURCES, prepare, set_path


def prepare_and_print(
    name: str | None, files: Path | None, root: Path, options: ReaderOptions, *, again: bool, save_as: str | None
) -> None:
    """Convert a set to Arrow and report the result; without a name, list the known sets.

    Args:
      files: folder (or file) with the source files; root: folder for prepared sets, relative to the home folder.
    Raises:
      DataError: in the same cases as `prepare`.
    """
    if name is None:
        out.print("`raysim prepare NAME --root FILES` converts a set to Arrow. Known sets:")
        print_columns(_known_sets(path_to_write(root)))
        return
    path = set_path(path_to_write(root), save_as or name)
    is_there = is_prepared(path) and not again
    with LiveLine() as line:
        line.step(f"preparing {save_as or name}")
        parts: dict[str, Lines] = {}

        def progress(part: str, done: int, total: int | None) -> None:
            if part not in parts:
                parts[part] = Lines(f"preparing {save_as or name}, {part}", line.step)
            parts[part].progress(done, total)

        info = prepare(
            name, path_to_write(root), files, again=again, save_as=save_as, options=options, on_progress=progress
        )
    if is_there:
        unread = f"; {files} is not read" if files is not None and str(files.absolute()) != info.read_from else ""
        origin = f" from {info.read_from}" if info.read_from else ""
        err.print(f"note: {shown(path)} was made before{origin}{unread}; --again repeats the preparation", markup=False)
    _print_set(info, root)


def _known_sets(root: Path) -> dict[str, str]:
    """Return name -> description of each set; larger sizes of a set are named in the line of the smallest size.

    Args:
      root: folder of prepared sets.
    """
    lines: dict[str, str] = {}
    for name, source in SOURCES.items():
        smallest, _, size = name.rpartition("_")
        if size.isdigit() and smallest in SOURCES:
            lines[smallest] += f", {name}"
            continue
        marks = ["prepared"] * set_path(root, name).is_file()
        marks += ["--download fetches it"] * ("download" in source.options)
        lines[name] = source.description + (f" ({', '.join(marks)})" if marks else "")
    return {name: line.replace(f", {name}_", f"; larger: {name}_", 1) for name, line in lines.items()}


def _print_set(info: SetInfo, root: Path) -> None:
    """Print a prepared set, and a configuration for training on it.

    Args:
      root: folder as given by the user, which is the value of `data.root` in a run from the same folder.
    """
    in_domains = f", {len(info.domains)} domains" if info.domains else ""
    inputs = f"{info.num_examples} {'images' if info.is_images else 'inputs'} {info.shape}"
    say(f"{info.name}: {inputs}, {_outputs(info)}{in_domains}, sha256 {info.checksum[:16]}")
    if info.name in FACTS and info.read_from:  # older versions neither checked nor recorded sources
        parts = "examples, classes, pixels" if info.is_images and not info.resize else "examples, classes"
        out.print(f"checked: {parts} as in {FACTS[info.name].source}", markup=False)
    if info.reading:
        out.print(f"columns: {info.reading}", markup=False)
    if info.left_out:
        out.print(f"left out: {info.left_out}", markup=False)
    if info.resize:
        out.print(f"resized: {info.resize}")
    if info.source_checksum:
        out.print(f"source files: sha256 {info.source_checksum[:16]}")
    out.print(f"file: {shown(set_path(path_to_write(root), info.name))}", markup=False)
    group = {"name": info.name, "root": str(root)}
    if info.input_type == "float32":
        group["normalise"] = "standard"
    text = yaml.safe_dump({"data": group}, sort_keys=False, default_flow_style=None, width=10_000)
    out.print(f"In a configuration:\n{text}", end="", markup=False)


def _outputs(info: SetInfo) -> str:
    """Return a description of a set's targets."""
    if info.task == "regression":
        return f"regression of {', '.join(info.classes)}"
    return f"{len(info.classes)} {'outputs' if ':' in info.task else info.task}"
