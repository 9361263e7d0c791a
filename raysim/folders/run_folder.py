"""A run directory: files, marks, status, lock, and reading of its contents."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from filelock import FileLock, Timeout

from raysim.base.errors import ConfigError, Fault, RaysimError, RunExists, explained
from raysim.base.settings import Settings
from raysim.base.texts import visible
from raysim.base.untrusted import read_json, regular_file
from raysim.base.user_code import note_of_values
from raysim.folders.files import refuse_changed, replaced_file, seal_again, seal_of, write_file

Mark = Literal["COMPLETED", "STOPPED", "FAILED"]
Name = Literal["completed", "stopped", "failed", "unfinished"]

#: Keys that a resumed run may change, since they do not affect the result of a round.
FREE_KEYS = (
    *("name", "storage", "checkpoint", "resources", "labels", "loggers"),
    *("report", "tune", "calibrate", "scale", "stop"),
)

#: Group -> keys in it that a resumed run may change. The locations of the data and of a partition file have no effect;
#: their checksums are compared instead.
FREE_PARTS = {"data": ("root", "files"), "partition": ("file",)}

#: File that marks the end of a run -> status; the first existing file applies.
MARKS: dict[Mark, Name] = {"COMPLETED": "completed", "STOPPED": "stopped", "FAILED": "failed"}


@dataclass(frozen=True)
class Status:
    """End of a run, if any; message: first line of the mark's file."""

    name: Name
    message: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the run ended, by itself or by a scheduler."""
        return self.name in ("completed", "stopped")


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yield (key, before, now) of differences between configurations that change the result."""
    for key in now:
        old, new = before.get(key), now[key]
        if key in FREE_KEYS or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            free = FREE_PARTS.get(key, ())
            names = [name for name in {**old, **new} if name not in free]
            pairs = ((f"{key}.{name}", old.get(name), new.get(name)) for name in names)
            yield from (pair for pair in pairs if pair[1] != pair[2])
        else:
            yield key, old, new


def written_yaml(text: str) -> Any:
    """Parse YAML written by raysim. Raises yaml.YAMLError, ValueError: the text was not written by raysim."""
    try:
        return yaml.safe_load(text)
    except (RecursionError, TypeError, AttributeError, LookupError, OverflowError) as error:  # of PyYAML for odd texts
        raise ValueError(f"it is none of raysim's ({error})") from error


class RunFolder:
    """Paths and contents of a run's files. No file stays open; each access reads the file again."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.json"
        self.partition = path / "partition.json"
        self.partition_table = path / "partition.csv"
        self.examples = path / "examples.csv"
        self.weights = path / "pretrained.sha256"
        self.progress = path / "progress.csv"
        self.clients = path / "clients.parquet"
        self.arrays = path / "arrays"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.confusion = path / "confusion.csv"
        self.seal = path / "records.sha256"

    @staticmethod
    def make(storage: Path, name: str | None, is_taken: Callable[[str], bool] = lambda name: False) -> RunFolder:
        """Return the directory of a run below `storage`, created if missing; without a name, a new name is chosen.

        Args:
          is_taken: returns whether a new name is in use elsewhere, as at a URI.
        Raises:
          ConfigError: the directory cannot be made.
        """
        fresh, attempt = time.strftime("run-%Y%m%d-%H%M%S"), 0
        storage = storage.absolute()
        try:
            if name is not None:
                (storage / name).mkdir(parents=True, exist_ok=True)
                return RunFolder(storage / name)
            storage.mkdir(parents=True, exist_ok=True)
            while True:
                path = storage / (f"{fresh}-{attempt}" if attempt else fresh)
                with suppress(FileExistsError):
                    if not is_taken(path.name):
                        path.mkdir()
                        return RunFolder(path)
                attempt += 1
        except OSError as error:
            fault = Fault("storage", f"cannot make a run directory ({error}); choose a writable folder")
            raise ConfigError([fault], "the configuration") from error

    @staticmethod
    def below(path: Path) -> list[RunFolder]:
        """Return all runs at or below a folder, sorted by path; hidden folders, checkpoints and arrays are skipped."""
        runs = []
        for folder, inner, _ in os.walk(path):
            inner[:] = [name for name in inner if name not in ("checkpoints", "arrays") and not name.startswith(".")]
            if (files := RunFolder(Path(folder))).is_run:
                runs.append(files)
        return sorted(runs, key=lambda files: files.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_run(self) -> bool:
        """Whether a run began here: the folder has a configuration or a mark."""
        return self.config.exists() or any((self.path / mark).exists() for mark in MARKS)

    def picture(self, name: str) -> Path:
        return self.path / f"{name}.png"

    @property
    def status(self) -> Status:
        for mark, name in MARKS.items():
            path = self.path / mark
            if path.is_file():  # a folder with the name of a mark is ignored
                text = path.read_text(errors="replace")
                message = (text if mark == "COMPLETED" else text.strip()).partition("\n")[0]
                return Status(name, visible(message))
        return Status("unfinished")

    def mark(self, mark: Mark, message: str = "") -> None:
        """Write COMPLETED, STOPPED or FAILED. COMPLETED also seals the results with their SHA-256."""
        if mark == "COMPLETED":
            message = f"{message}\n{self._seal()}"
        write_file(self.path / mark, message.encode())

    def seal_records(self) -> None:
        """Write `records.sha256` for a run that a scheduler ends, before the run is marked as STOPPED."""
        write_file(self.seal, self._seal().encode())

    def _seal(self) -> str:
        results = (self.config, self.progress, self.confusion, self.summary, self.model)
        return seal_of(self.path, [*results, *self.client_parts(), *self.array_files().values()])

    def check_unchanged(self, *paths: Path) -> None:
        """Raise DataError if results of a finished run have changed, see `refuse_changed`; unfinished runs pass."""
        if (seal := self._sealed_in()) is not None:
            refuse_changed(self.path, seal, paths)

    def _sealed_in(self) -> Path | None:
        """Return the path of the file with the seal of a finished run; None without a seal."""
        place = {"completed": self.path / "COMPLETED", "stopped": self.seal}.get(self.status.name)
        return place if place is not None and place.is_file() else None

    def clear(self, *marks: Mark) -> None:
        """Remove marks and the seal, before the run resumes."""
        for path in (self.seal, *(self.path / mark for mark in marks)):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, wait_s: float = 0.0, *, kind: str = "run") -> Iterator[None]:
        """Hold the directory for this process alone.

        Raises:
          RunExists: another process holds the directory for longer than `wait_s` seconds.
        """
        try:
            lock = FileLock(self.path / ".lock").acquire(timeout=wait_s)
        except Timeout as error:
            remedy = "wait for the process, or choose another name"
            raise RunExists(f"{kind} {self.name!r} is running", str(self.path), remedy) from error
        with lock:
            yield

    def remove_leftovers(self) -> None:
        """Remove partial files and folders of killed processes; the caller must hold the lock."""
        for path in self.path.rglob(".*.part"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def read_config(self) -> Settings:
        """Read the run's configuration. Raises OSError, ValueError, yaml.YAMLError; DataError: it was changed."""
        self.check_unchanged(self.config)
        return dict(written_yaml(regular_file(self.config).read_text()))

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write the complete configuration; Python values are replaced by names, with a note at the top."""
        note = note_of_values(config)
        head = f"# {note}.\n" if note else ""
        write_file(self.config, (head + yaml.safe_dump(dict(config), sort_keys=False)).encode())
        if (seal := self._sealed_in()) is not None:  # labels and `report` of a finished run may change
            seal_again(self.path, seal, self.config)

    def read_json(self, path: Path) -> Settings:
        """Read a JSON file of the run. Raises OSError, ValueError; DataError: changed after the run finished."""
        self.check_unchanged(path)
        content: Any = read_json(path)
        return dict(content)

    def write_json(self, path: Path, content: Mapping[str, object]) -> None:
        write_file(path, (json.dumps(content, indent=1) + "\n").encode())

    def results(self) -> list[Path]:
        """Return paths of results: all but configuration, checkpoints, marks, hidden files and TensorBoard events."""
        others = {self.config, self.checkpoints, *(self.path / mark for mark in MARKS)}
        hidden = (".", "events.out")
        return [p for p in sorted(self.path.iterdir()) if p not in others and not p.name.startswith(hidden)]

    def progress_rows(self, before: int | None = None) -> list[dict[str, str]]:
        """Return the complete rows of progress.csv for rounds below `before`; empty without the file.

        Raises:
          RaysimError: the file is damaged, or has changed after the run finished.
        """
        if not self.progress.is_file():
            return []
        self.check_unchanged(self.progress)
        what, remedy = f"{self.progress.name} is damaged", "restore the file, or delete the folder and repeat the run"
        with explained(what, self.path, remedy, ValueError, TypeError, KeyError, csv.Error, to=RaysimError):
            with open(self.progress, newline="") as file:
                rows = [row for row in csv.DictReader(file, strict=True) if row.get("system/round_s")]
            for row in rows:
                for value in row.values():
                    float(value or 0)
            return [row for row in rows if before is None or int(row["round"]) < before]

    def write_progress(self, rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
        with replaced_file(self.progress) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

    @staticmethod
    def client_table(round_index: int, columns: Mapping[str, np.ndarray]) -> pa.Table:
        """Return a table with the rows of a round, from columns of numbers or booleans."""
        size = max(map(len, columns.values()), default=0)
        everything = {"round": np.full(size, round_index), **columns}
        return pa.table({name: _column(values) for name, values in everything.items()})

    def append_clients(self, table: pa.Table) -> Path:
        """Write rows of one or more rounds (column "round") durably as a new part; return the path."""
        rounds = table.column("round")
        first, last = pc.min(rounds).as_py(), pc.max(rounds).as_py()
        part = self.clients / f"rounds-{first:06d}-{last:06d}.parquet"
        with replaced_file(part) as temporary:
            pq.write_table(table, temporary)
        return part

    def client_parts(self) -> list[Path]:
        """Return the paths of the parts of clients.parquet, in the order of rounds."""
        return sorted(self.clients.glob("rounds-*.parquet"))

    def client_rows(self) -> pa.Table | None:
        """Return all parts as one table in the order of rounds; None without parts. Raises DataError: changed."""
        parts = self.client_parts()
        self.check_unchanged(*parts)
        return pa.concat_tables([pq.read_table(part) for part in parts], promote_options="default") if parts else None

    def drop_clients(self, first_round: int) -> None:
        """Delete rows of rounds from `first_round` on."""
        for part in self.client_parts():
            table = pq.read_table(part)
            kept = table.filter(pc.less(table.column("round"), first_round))
            if len(kept) < len(table):
                part.unlink()
                if len(kept):
                    self.append_clients(kept)

    def write_arrays(self, round_index: int, arrays: Mapping[str, np.ndarray]) -> Path:
        """Write arrays/round_00012.npz, the arrays logged in a round; return the path."""
        self.arrays.mkdir(exist_ok=True)
        path = self.arrays / f"round_{round_index:05d}.npz"
        # A type checker confuses the names with keywords of savez; our names contain a dot or a colon.
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        return path

    def array_files(self) -> dict[int, Path]:
        """Return round -> path of the arrays, for rounds with arrays, in order."""
        paths = {int(path.stem.removeprefix("round_")): path for path in self.arrays.glob("round_*.npz")}
        return dict(sorted(paths.items()))

    def logged_arrays(self) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """Yield (round, logged arrays) of each round with arrays. Raises DataError: a file is damaged or was changed."""
        for index, path in self.array_files().items():
            self.check_unchanged(path)
            mend = "delete the file, whose contents are lost"
            # Any Exception, since numpy's header, zip and zlib each raise their own errors.
            with (
                explained(f"{path.name} is damaged", path.parent, mend, Exception),
                np.load(path, allow_pickle=False) as file,
            ):
                arrays = dict(file)
            yield index, arrays


def _column(values: np.ndarray) -> pa.Array:
    """Convert an array to Arrow without `pa.array`, which would import pandas (0.3 s in the first round)."""
    kind = pa.from_numpy_dtype(values.dtype)
    content = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(content)])
