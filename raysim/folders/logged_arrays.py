"""The arrays in an .npz file, each read when it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from raysim.core.errors import explained


class LoggedArrays(Mapping[str, np.ndarray]):
    """What methods logged in a round, by name. Raises DataError: the file is damaged; also when an array is looked at."""

    def __init__(self, path: Path):
        self._path = path
        with self._sound():
            self._file = np.load(path, allow_pickle=False)
            self._names = tuple(self._file.files)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        with self._sound():
            return np.asarray(self._file[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        self._file.close()

    def _sound(self) -> AbstractContextManager[None]:
        mend = "delete that file; what it holds is lost"
        # Of numpy's header, zip and zlib, each of which has its own.
        return explained(f"{self._path.name} is damaged", self._path.parent, mend, Exception)
