"""Runs with storage at a URI: a local folder is sent to the URI at every checkpoint.

A run can resume from the URI at any time. Files are sent in this order: records of rounds, files of the checkpoint, the
file that completes the checkpoint, marks; replaced checkpoints are deleted last. Only changed files are sent.
`.holder.json` at the URI names the process that started or resumed the run last. Any other process of the run detects
the new holder at its next checkpoint, and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from raysim.base.errors import ConfigError, DataError, Fault, RaysimError, RunExists, explained
from raysim.base.uri import is_uri, joined
from raysim.config import Config, folder_of
from raysim.folders.files import write_file
from raysim.folders.filesystems import FAILURES, RemoteFolder, Stamp, changed, is_hidden, reached_folder, reason, stamps
from raysim.folders.run_folder import MARKS, RunFolder

Say = Callable[[str], None]

#: At the URI: the holder of the run. In the local folder: the holder, and stamps of the files already sent.
HOLDER = ".holder.json"

#: Seconds before each new attempt after a failure of the file system during a run.
WAITS_S = (2.0, 10.0, 30.0)


def storage_faults(storage: str) -> list[Fault]:
    """Return a fault if the storage is a URI that cannot be reached; otherwise an empty list."""
    try:
        if is_uri(storage):
            reached_folder(storage)
    except DataError as error:
        return [Fault("storage", str(error))]
    return []


def open_run_folder(config: Config, say: Say) -> tuple[RunFolder, StoredRun | None]:
    """Return the local directory of a run and, for a URI, the synchronisation.

    Raises:
      ConfigError: the directory cannot be made, or the storage cannot be reached.
    """
    local = folder_of(config.storage, "runs")
    if not is_uri(config.storage):
        return RunFolder.make(local, config.name), None
    with _as_fault():
        storage = reached_folder(config.storage)
        folder = RunFolder.make(local, config.name, lambda name: bool(storage.below(name).files()))
        return folder, StoredRun(storage.below(folder.path.relative_to(local).as_posix()), folder, say)


@contextmanager
def held(run: StoredRun | None) -> Iterator[None]:
    """Hold a run at a URI, if any: send files at the beginning and, also after an error, at the end of the block."""
    if run is None:
        yield
        return
    run.claim()
    try:
        yield
    except BaseException:
        run.push_once()
        raise
    run.push()


class StoredRun:
    """A run directory at a URI, and the local folder in which the run works.

    Args:
      remote: the run directory at the URI.
      say: prints lines on slow steps.
    """

    def __init__(self, remote: RemoteFolder, folder: RunFolder, say: Say):
        self._remote, self._folder, self._say, self.uri = remote, folder, say, remote.uri
        self._holder_seen: bytes | None = None  # content of HOLDER when last read or written
        self._sent: dict[str, Stamp | None] = {}
        self._is_lost = False  # the storage does not answer, or another process holds the run

    def pull(self) -> None:
        """Update the local folder from the URI, or send unsent local files if no other process has held the run.

        Raises:
          ConfigError: the storage failed.
        """
        with _as_fault():
            self._holder_seen = self._remote.read(HOLDER)
            holder, sent = self._read_state()
            there = self._remote.files()
            is_whole = all((self._folder.path / name).is_file() for name in ALWAYS if name in sent)
            if self._holder_seen is not None and holder == self._holder_seen.decode() and is_whole:
                self._sent = {name: sent.get(name) for name in there if name in sent or _is_ours(name)}
                self._push()  # sends files that an earlier process could not send
            else:
                self._mirror(there)

    def claim(self) -> None:
        """Become the holder, and send local changes.

        Raises:
          ConfigError: the storage failed.
          RunExists: another process became the holder first.
        """
        with _as_fault():
            if self._remote.read(HOLDER) != self._holder_seen:
                remedy = "wait for the process, or choose another name"
                raise RunExists(f"run {self._folder.name!r} was just begun by another process", self.uri, remedy)
            now = time.strftime("%Y-%m-%d %H:%M:%S %z")
            holder = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid(), "since": now}
            if self._holder_seen is not None and (before := _holder(self._holder_seen))["host"] != holder["host"]:
                text = f"{before['host']} (process {before['process']}) held the run since {before['since']}"
                self._say(f"{text}; a process still running on that host ends at the next checkpoint")
            self._holder_seen = json.dumps(holder).encode()
            self._remote.write(HOLDER, self._holder_seen)
            self._push()

    def push(self) -> None:
        """Send files changed since the last call, with a few attempts.

        Raises:
          RaysimError: the storage failed, or another process resumed the run.
        """
        self._is_lost = True
        for wait_s in (*WAITS_S, None):
            try:
                self._push()
                break
            except FAILURES as error:
                if wait_s is None:
                    remedy = "the local folder is complete; the same command on this machine resumes from it"
                    text = f"the storage {self.uri} failed {len(WAITS_S) + 1} times ({reason(error)})"
                    raise RaysimError(text, f"run {self._folder.path}", remedy) from error
                self._say(f"storage {self.uri} failed ({reason(error)}); trying again in {wait_s:g} s")
                time.sleep(wait_s)
        self._is_lost = False

    def push_once(self) -> None:
        """Send changes in a single attempt when a run ends by an error, without raising another error."""
        if not self._is_lost:
            try:
                self._push()
            except (*FAILURES, RaysimError) as error:
                self._say(f"not all of {self._folder.path} was sent to {self.uri} ({reason(error)})")

    def _push(self) -> None:
        holder = self._remote.read(HOLDER)
        if holder != self._holder_seen:
            other = _holder(holder or b"")
            text = f"run {self._folder.name!r} was resumed by {other['host']} (process {other['process']})"
            remedy = "this process ends; run one process at a time"
            what = f"{text} at {other['since']}" if holder else f"run {self._folder.name!r} was deleted"
            raise RaysimError(what, self.uri, remedy)
        now = stamps(self._folder.path)
        news, gone = changed(now, self._sent), [name for name in self._sent if name not in now]
        try:
            self._delete([name for name in gone if name in MARKS])  # first, since the run continues
            self._delete([name for name in gone if _stage(name) == 0])  # records of rounds after the last checkpoint
            for stage in range(NUM_STAGES):
                names = [name for name in news if _stage(name) == stage]
                self._remote.send(self._folder.path, names, lambda name: self._sent.update({name: now[name]}))
            self._delete([name for name in gone if name in self._sent])  # files of a replaced checkpoint
        finally:
            self._write_state()

    def _delete(self, names: Sequence[str]) -> None:
        self._remote.delete(names)
        for name in names:
            del self._sent[name]

    def _mirror(self, there: Mapping[str, Stamp]) -> None:
        """Replace local by remote files; without remote files, a local folder with checkpoints is moved aside."""
        folder = self._folder.path
        (folder / HOLDER).unlink(missing_ok=True)  # first, so that an emptied folder is not taken for the sent state
        aside = folder.with_name(f"{folder.name}.aside-{time.strftime('%Y%m%d-%H%M%S')}")
        if not there and self._folder.checkpoints.is_dir():
            aside.mkdir()
            self._say(f"{self.uri} holds no files of the run; the local ones, with checkpoints, are now in {aside}")
        for path in folder.iterdir():
            if path.name == ".lock":
                continue
            if aside.is_dir():
                path.rename(aside / path.name)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        names = [name for name in there if not is_hidden(name)]
        if names:
            size = sum(there[name][0] for name in names) / 1e6
            self._say(f"fetching {len(names)} files ({size:.1f} MB) from {self.uri}")
        self._remote.fetch(folder, names)
        here = stamps(folder)
        self._sent = {name: here.get(name) for name in there if name in here or _is_ours(name)}

    def _read_state(self) -> tuple[str, dict[str, Stamp]]:
        """Return (holder when files were last sent from this folder, name -> stamp of the sent files)."""
        with suppress(OSError, ValueError):
            state = json.loads((self._folder.path / HOLDER).read_text())
            return state["holder"], {name: tuple(stamp) for name, stamp in state["sent"].items()}
        return "", {}

    def _write_state(self) -> None:
        sent = {name: stamp for name, stamp in self._sent.items() if stamp is not None}
        state = {"holder": (self._holder_seen or b"").decode(), "sent": sent}
        write_file(self._folder.path / HOLDER, json.dumps(state).encode())


#: Stages of sending: records, client memory, other files of a checkpoint, `checkpoint.json`, marks.
NUM_STAGES = 5


def _stage(name: str) -> int:
    """Return the stage in which a file is sent, see NUM_STAGES; `checkpoint.json` completes a checkpoint."""
    if not name.startswith("checkpoints/"):
        return 4 if name in MARKS else 0
    return 1 if name.startswith("checkpoints/memory/") else 3 if name.endswith("/checkpoint.json") else 2


def _holder(content: bytes) -> dict[str, object]:
    """Parse the content of HOLDER; unknown fields are "?"."""
    with suppress(ValueError):
        return {"host": "?", "process": "?", "since": "?", **json.loads(content)}
    return {"host": "?", "process": "?", "since": "?"}


#: Files that no run deletes. If one is missing, the local folder was emptied by hand, which must not empty the storage.
ALWAYS = ("config.yaml", "partition.json", "progress.csv")


def _is_ours(name: str) -> bool:
    """Return whether a file can only have been written by a run; other files may be the user's."""
    is_part = name.rpartition("/")[2].startswith(".") and name.endswith(".part")
    return name in MARKS or is_part or name.startswith(("checkpoints/", "clients.parquet/", "arrays/"))


@contextmanager
def _as_fault() -> Iterator[None]:
    """Turn a storage failure before the start into a fault of the configuration."""
    try:
        yield
    except DataError as error:
        raise ConfigError([Fault("storage", str(error))]) from error
    except FAILURES as error:
        text = f"failed ({reason(error)}); check the server, the credentials, the network and the local disk"
        raise ConfigError([Fault("storage", text)]) from error


def run_place(storage: str, name: str) -> str:
    """Return the path or URI of a run or sweep in a storage."""
    return joined(storage, name) if is_uri(storage) else str(Path(storage) / name)


def address(folder: Path, storage: str) -> str:
    """Return the URI of a run's local folder; empty for local storage."""
    if not is_uri(storage):
        return ""
    return joined(storage, folder.relative_to(folder_of(storage, "runs")).as_posix())


def local_copy(place: str | Path) -> Path:
    """Return a folder unchanged; for a URI, an up-to-date local copy without checkpoints.

    Raises:
      DataError: the URI cannot be read, or the place is neither text nor a path.
    """
    if not isinstance(place, str | Path):
        raise DataError(f"expected a folder, got {type(place).__name__}", mend="give a path, or a URI")
    copy = Copy(str(place))
    copy.fetch()
    return copy.folder


def report_folder(places: Sequence[str]) -> Path | None:
    """Return the default folder of a report if the first place is a URI; else None, and `default_folder` applies."""
    if not places or not is_uri(places[0]):
        return None
    return Path("reports") / places[0].partition("?")[0].rstrip("/").rpartition("/")[2]


class Copy:
    """Local view of runs, sweeps or prepared sets at a place: the folder itself, or a local copy for a URI.

    Attributes:
      folder: the local folder; by default, below RAYSIM_CACHE for a URI.
    """

    def __init__(self, place: str, folder: Path | None = None):
        self.folder = folder or folder_of(place, "copies")
        self._remote = reached_folder(place) if is_uri(place) else None
        self._state = self.folder / ".copy.json"

    def fetch(self, below: str = "") -> None:
        """Update the copy, or its folder `below`. Raises DataError: the file system failed."""
        if self._remote is None:
            return
        with self._pairs_of_stamps() as pairs:
            prefix = f"{below}/" if below else ""
            source = self._remote.below(below) if below else self._remote
            there = {prefix + name: stamp for name, stamp in source.files().items()}
            there = {name: stamp for name, stamp in there.items() if _is_read(name)}
            for name in [name for name in pairs if name.startswith(prefix) and name not in there]:
                (self.folder / name).unlink(missing_ok=True)
                del pairs[name]
            here = stamps(self.folder)
            news = [name for name, stamp in there.items() if name not in here or pairs.get(name, [None])[0] != stamp]
            self._remote.fetch(self.folder, news)
            here, now = stamps(self.folder), time.time_ns()
            for name in news:
                # Remote times may be whole seconds, and a recent file could change again with the same stamp.
                is_exact = there[name][1] % 10**9 or now - there[name][1] > 60e9
                pairs[name] = [there[name] if is_exact else None, here[name]]

    def send(self) -> None:
        """Send files written to the copy since the last fetch. Raises DataError: the file system failed."""
        if self._remote is None:
            return
        with self._pairs_of_stamps() as pairs:
            here = stamps(self.folder)
            news = [name for name, stamp in here.items() if pairs.get(name, [None, None])[1] != stamp]
            self._remote.send(self.folder, news)
            pairs |= {name: [None, here[name]] for name in news}

    @contextmanager
    def _pairs_of_stamps(self) -> Iterator[dict[str, list[Stamp | None]]]:
        """Yield file -> stamps (remote, local) of the last synchronisation; changes are saved if the block succeeds."""
        assert self._remote is not None
        mend = "check the server, the credentials, the network and the local disk"
        with explained("cannot copy", self._remote.uri, mend, *FAILURES):
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".copy.lock"):
                pairs: dict[str, list[Stamp | None]] = {}
                with suppress(OSError, ValueError):
                    texts = json.loads(self._state.read_text())
                    pairs = {name: [stamp and tuple(stamp) for stamp in pair] for name, pair in texts.items()}
                yield pairs
                write_file(self._state, json.dumps(pairs).encode())


def _is_read(name: str) -> bool:
    return "checkpoints" not in name.split("/") and not is_hidden(name)
