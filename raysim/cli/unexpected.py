"""Error messages of the command: one sentence; unexpected errors leave a traceback in a file."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from raysim.base.errors import (
    ConfigError,
    DataError,
    MethodError,
    ModelError,
    RaysimError,
    RunExists,
    SettingIgnored,
    UserCodeError,
)
from raysim.base.uri import masked
from raysim.cli.terminal import err

#: Faults in what the user gave; all other errors are failures of the run.
GIVEN = (ConfigError, DataError, MethodError, ModelError, UserCodeError, RunExists)


def message_and_status(error: Exception) -> tuple[str, int]:
    """Return (message, exit status) of an error."""
    if isinstance(error, RaysimError):
        return f"{type(error).__name__}: {error}", 2 if isinstance(error, GIVEN) else 1
    from raysim.engine.simulation import Interrupted  # loads PyTorch

    if isinstance(error, Interrupted):
        return str(error), 128 + error.signal_number
    return sentence(error), 1


def sentence(error: BaseException) -> str:
    """Return the message of an unexpected error; its traceback is written to a file unless the disk refuses writes."""
    unwritable = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
    if isinstance(error, OSError) and error.errno in unwritable:
        remedy = "Free space, or set storage and data.root to writable folders"
        return f"cannot write ({masked(str(error))}). {remedy}"
    words = masked(" ".join(str(error).split()))[:500].rstrip(".")
    return f"{type(error).__name__}: {words}. The fault is in raysim or a package{_kept(error)}"


def _kept(error: BaseException) -> str:
    """Write the traceback to a file and return the file's path in words; "" if no file can be written."""
    text = masked("".join(traceback.format_exception(error)))
    name = time.strftime(f"raysim-error-%Y%m%d-%H%M%S-{os.getpid()}.txt")
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with suppress(OSError):
            (folder / name).write_text(text)
            return f"; traceback in {folder / name}"
    return ""


def shown_once() -> Callable[..., None]:
    """Return a function that shows warnings: an ignored setting once, as a note; other warnings with their place."""
    lines: set[str] = set()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *place: Any) -> None:
        if category is not SettingIgnored:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
        elif str(message) not in lines:
            lines.add(str(message))
            err.print(f"note: {message}", markup=False)

    return show
