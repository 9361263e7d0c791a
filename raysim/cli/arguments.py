"""Arguments shared by several verbs, with shell completion; heavy imports happen on demand."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Argument, Option


def complete_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions for a word of a verb with a configuration and settings."""
    from raysim.cli.completion import complete_call

    return complete_call(ctx, incomplete)


def complete_methods(incomplete: str) -> list[str]:
    from raysim.cli import completion

    return [name for name in completion.known_methods() if name.startswith(incomplete)]


def shipped_names() -> list[str]:
    from raysim.cli.recipes import file_names

    return file_names()


def configuration(meaning: str) -> Any:
    """The argument of a verb that takes a configuration."""
    return Argument(help=meaning, autocompletion=complete_words)


Overrides = Annotated[
    list[str] | None,
    Argument(
        help="settings as key=value, for example local.lr=0.1", metavar="[a.b=c ...]", autocompletion=complete_words
    ),
]
GridOverrides = Annotated[
    list[str] | None,
    Argument(
        help="settings as key=value; key=1,2,3 makes an axis of a grid",
        metavar="[a.b=c,d ...]",
        autocompletion=complete_words,
    ),
]
Planned = Annotated[bool, Option("--plan", help="print what it will cost and stop; trains a few steps")]
Scaled = Annotated[bool, Option("--scaled", help="lay the file's `scale` settings over it")]
