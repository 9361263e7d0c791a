"""Faults of files, as users see them: one DataError with the path and the remedy."""

from __future__ import annotations

import errno
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from raysim.core.errors import DataError


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Errors while a source file is read become a DataError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"not readable ({type(error).__name__}: {error})", str(path), "fetch the file again") from error


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A full disk, a spent quota and a file over the limit become a DataError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        mend = "free some, or choose another folder; nothing was kept"
        raise DataError(f"no space left ({error})", str(folder), mend) from error


def check_range(values: np.ndarray, limit: int, where: str, *, first: int = 0, column: str = "label") -> None:
    """DataError at the first value outside 0..limit-1; its row is counted from `first` and appended to `where`."""
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        mend = f"check the {column}s or the {'class' if column == 'label' else column} names"
        raise DataError(f"{column} {values[wrong[0]]} outside 0..{limit - 1}", f"{where} {first + int(wrong[0])}", mend)
