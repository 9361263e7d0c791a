"""Reading of files from other people: regular files only, and JSON with bounded depth."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

from raysim.base.errors import DataError


def regular_file(path: Path) -> Path:
    """Return the path of a regular file: reading a pipe would block, and reading a device such as /dev/zero never ends.

    Raises:
      OSError: no file, or not a regular file.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        is_folder = stat.S_ISDIR(mode)
        number = errno.EISDIR if is_folder else errno.EINVAL
        raise OSError(number, os.strerror(number) if is_folder else "a pipe or a device; give a file", str(path))
    return path


def the_one_file(root: Path, ending: str) -> Path:
    """Return the file, or the single file of a folder with the ending. Raises DataError: no file, or several."""
    files = [root] if root.is_file() else sorted(root.glob(f"*{ending}"))
    if len(files) != 1:
        raise DataError(f"{len(files)} {ending} files", str(root), "give the file itself as --root")
    return files[0]


def read_json(path: Path) -> object:
    """Return the value of a JSON file.

    Raises:
      OSError: no file, or not a regular file.
      ValueError: no JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(regular_file(path).read_bytes())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
