"""Docstrings as Griffe reads them, for the page of the Python API."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Example):\n)")


class Sections(griffe.Extension):
    """Griffe wants a blank line before each section, and examples in the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = SECTION.sub("\n\n", obj.docstring.value)
            obj.docstring.value = text.replace("\n\nExample:\n", "\n\nExamples:\n")
