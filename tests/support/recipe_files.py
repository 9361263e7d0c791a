"""The recipes' files, each read once: their YAML takes longer to read than most of what is asked of them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

from raysim.base.settings import Raw
from raysim.config import read_config

_read = cache(read_config)


def read_recipe(path: Path) -> Raw:
    """The raw configuration of a shipped file, with its base; the caller's own to change."""
    return copy.deepcopy(_read(path))
