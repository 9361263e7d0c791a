"""Docstrings as Griffe reads them, for the page of the Python API."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Example):\n)")


class Sections(griffe.Extension):
    """Griffe wants a blank line before each section; ours follow each other without."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
