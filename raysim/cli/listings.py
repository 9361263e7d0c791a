"""Lists on the terminal: methods and models with options, and the layer blocks of a model."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.markup import escape

from raysim.base.errors import MethodError
from raysim.base.options import options_of, text_of
from raysim.base.user_places import place_of
from raysim.cli.terminal import out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def print_columns(lines: Mapping[str, str]) -> None:
    """Print a name and a description per line."""
    width = max(map(len, lines))
    for name, text in lines.items():
        out.print(f"{name:{width}}  {text}", markup=False)


def print_functions(groups: Mapping[str, Mapping[str, Callable[..., object]]]) -> None:
    """Print a line for each method or model, grouped under titles."""
    width = max(len(name) for functions in groups.values() for name in functions)
    for title, functions in groups.items():
        out.print(f"\n[bold]{escape(title)}[/bold]")
        print_columns({f"  {name:{width}}": text_of(make).partition("\n")[0] for name, make in functions.items()})


def print_function(name: str) -> None:
    """Print a method or model: summary, and each option with default, type and meaning.

    Raises:
      MethodError: there is no such method.
    """
    from raysim.models import MODELS
    from raysim.plan.find import find_method

    try:
        make: Callable[..., object] = MODELS[name].build if name in MODELS else find_method(name)
    except LookupError as error:
        raise MethodError(str(error)) from error
    text = text_of(make).strip() or f"No documentation; see {place_of(make)}"
    out.print(f"[bold]{escape(name)}[/bold]\n{escape(text)}\n")
    options = options_of(make)
    out.print("Options:" if options else "No options.")
    wrapper = textwrap.TextWrapper(min(out.width, 100) - 6, break_on_hyphens=False)
    for option in options:
        default = f" = {option.default}" if option.default else ""
        out.print(f"  [bold]{escape(option.name)}[/bold]{escape(f'{default}   ({option.values})')}")
        meaning = option.meaning or "without a meaning: add a line `NAME: text` under `Args:` in the docstring"
        out.print(textwrap.indent(wrapper.fill(meaning), " " * 6), markup=False)


def print_blocks(model: str, overrides: list[str], size: int | None, channels: int, classes: int) -> None:
    from raysim.config import read_config
    from raysim.plan.check import inspect_model

    spec, layout, description = inspect_model(model, read_config(None, overrides), size, channels, classes)
    inputs = f"{' x '.join(map(str, spec.input_shape))} images, {classes} classes"
    others = "Other images: --size, --channels, --classes"
    if spec.vocabulary:
        inputs, others = f"sequences of {spec.input_shape[0]} of {classes} tokens", "Other sequences: --size, --classes"
    out.print(f"{model}: {description}", markup=False)
    counts = f"{layout.num_params} parameters, {len(layout.params)} layers, {len(layout.blocks)} layer blocks"
    out.print(f"{inputs}: {counts}. {others}")
    leaves = {block: [leaf for leaf in layout.leaves if leaf.block == block] for block in layout.blocks}
    sizes = {block: sum(leaf.size for leaf in leaves[block] if not leaf.is_buffer) for block in leaves}
    print_columns({block: f"{sizes[block]:>9}  {', '.join(leaf.name for leaf in leaves[block])}" for block in leaves})
