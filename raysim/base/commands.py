"""Commands in messages, quoted for the reader's shell and folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(program: str, *words: object) -> str:
    """Return a command line for the current shell: the program, and quoted words.

    Args:
      program: a script of this installation, `raysim` or `tensorboard`.
      words: paths are shown from the current folder on where they lie below it.
    """
    return shlex.join([_shown_name(program), *(shown(word) if isinstance(word, Path) else str(word) for word in words)])


def shown(path: Path) -> str:
    """Return a path relative to the current folder, or unchanged if it lies elsewhere."""
    whole = Path(os.path.abspath(path))
    try:
        below = whole.relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere; or the current folder is gone
        return str(path)
    return f"./{below}" if str(below).startswith("-") else str(below)


def _shown_name(program: str) -> str:
    """Return the program's name if PATH finds this installation, else the program's path."""
    script, there = Path(sys.executable).with_name(program), shutil.which(program)
    if not script.is_file() or (there and Path(there).samefile(script)):
        return program
    return shown(script)
