"""Arguments shared by several verbs; heavy imports happen on demand."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

Overrides = Annotated[
    list[str] | None, Argument(help="settings as key=value, for example local.lr=0.1", metavar="[a.b=c ...]")
]
GridOverrides = Annotated[
    list[str] | None,
    Argument(help="settings as key=value; key=1,2,3 makes an axis of a grid", metavar="[a.b=c,d ...]"),
]
Planned = Annotated[bool, Option("--plan", help="print the expected cost and stop; trains a few steps")]
Scaled = Annotated[bool, Option("--scaled", help="lay the file's `scale` settings over it")]
