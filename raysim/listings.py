"""What there is, on the terminal: methods and models with their options, the layer blocks of a model, prepared sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from raysim.core.errors import MethodError
from raysim.terminal import out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from raysim.data.arrow import SetInfo


def print_columns(lines: Mapping[str, str]) -> None:
    """A name and what stands for it on every line."""
    width = max(map(len, lines))
    for name, text in lines.items():
        out.print(f"{name:{width}}  {text}", markup=False)


def print_set(info: SetInfo, out_dir: Path) -> None:
    from raysim.config import home_folder
    from raysim.data.sources import set_path

    in_domains = f", {len(info.domains)} domains" if info.domains else ""
    out.print(
        f"{info.name}: {info.num_examples} images {info.shape}, {len(info.classes)} classes{in_domains}, "
        f"sha256 {info.checksum[:16]}"
    )
    if info.source_checksum:
        out.print(f"source files: sha256 {info.source_checksum[:16]}")
    out.print(f"file: {set_path(home_folder() / out_dir, info.name)}")


def print_functions(functions: Mapping[str, Callable[..., object]]) -> None:
    from raysim.find import describe

    for name, make in functions.items():
        signature, line = describe(make)
        out.print(f"[bold]{name}[/bold]{escape(signature)}\n    {escape(line)}", markup=True)


def print_method(name: str) -> None:
    import inspect

    from raysim.core.own import place_of
    from raysim.find import find_method

    try:
        make = find_method(name)
    except LookupError as error:
        raise MethodError(str(error)) from error
    text = inspect.getdoc(make) or f"no documentation; see {place_of(make)}"
    out.print(f"{name}{inspect.signature(make)}\n\n{text}", markup=False)


def print_blocks(model: str, overrides: list[str], size: int | None, channels: int, classes: int) -> None:
    from raysim.check import inspect_model
    from raysim.config import read_config

    spec, layout, description = inspect_model(model, read_config(None, overrides), size, channels, classes)
    height, width, _ = spec.input_shape
    out.print(f"{model}: {description}", markup=False)
    out.print(
        f"{height} x {width} x {channels} images, {classes} classes: {layout.num_params} parameters, "
        f"{len(layout.params)} layers, {len(layout.blocks)} layer blocks"
    )
    leaves = {block: [leaf for leaf in layout.leaves if leaf.block == block] for block in layout.blocks}
    sizes = {block: sum(leaf.size for leaf in leaves[block] if not leaf.is_buffer) for block in leaves}
    print_columns({block: f"{sizes[block]:>9}  {', '.join(leaf.name for leaf in leaves[block])}" for block in leaves})
