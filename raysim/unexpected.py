"""Errors that nobody foresaw: one sentence for the terminal, the traceback in a file."""

from __future__ import annotations

import errno
import os
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from raysim.core.uri import masked

#: Where this variable is set, a traceback goes to the terminal as Python prints it.
DEBUG_VARIABLE = "RAYSIM_DEBUG"


def sentence(error: BaseException) -> str:
    """What to tell of an error, after its traceback was put into a file."""
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
    ):
        remedy = "Free space there, or set storage and data.root to folders that can be written"
        return f"cannot write ({masked(str(error))}). {remedy}"
    words = masked(" ".join(str(error).split()))[:500]
    return (
        f"{type(error).__name__}: {words}. This is a fault of raysim, or of a package that it uses{_kept(error)}. "
        f"{DEBUG_VARIABLE}=1 shows it here"
    )


def _kept(error: BaseException) -> str:
    """The place of a file with the traceback, in words; nothing where none can be written."""
    text = masked("".join(traceback.format_exception(error)))
    name = time.strftime(f"raysim-error-%Y%m%d-%H%M%S-{os.getpid()}.txt")
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            (folder / name).write_text(text)
            return f"; its traceback is in {folder / name}"
    return ""
