"""Folders on pyarrow's file systems: list, read, write and delete files, with time limits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
from pyarrow import fs

from raysim.base.errors import DataError, explained
from raysim.base.uri import joined, masked, uri_fault
from raysim.folders.files import partial_file, replaced_file

#: Time limits in seconds for a connection and for an answer, and number of attempts. With pyarrow's defaults, a silent
#: server would block a run for minutes.
CONNECT_S, ANSWER_S, ATTEMPTS = 4.0, 10.0, 2

#: Files transferred in parallel, since a small file costs mainly a round trip.
PARALLEL = 16

#: Stores without folders, which write objects atomically.
OBJECT_STORES = ("s3", "gcs", "abfs")

#: Errors of file systems; ArrowException also if pyarrow was built without a file system.
FAILURES = (OSError, pa.ArrowException)

#: Remedy for a folder that cannot be read.
REMEDY = "correct the URI, or check the server, the credentials and the network (your own S3: AWS_ENDPOINT_URL)"

#: (size in bytes, modification time in ns): a file has changed if either differs.
Stamp = tuple[int, int]


@dataclass(frozen=True)
class RemoteFolder:
    """A folder on a pyarrow file system. Names are relative. Every method may raise FAILURES."""

    system: fs.FileSystem
    path: str
    uri: str

    def below(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.system, f"{self.path}/{name}", joined(self.uri, name))

    def files(self) -> dict[str, Stamp]:
        """Return name -> stamp of all files at any depth; empty if the folder does not exist."""
        infos = self.system.get_file_info(fs.FileSelector(self.path, recursive=True, allow_not_found=True))
        start = len(self.path.rstrip("/")) + 1
        return {info.path[start:]: (info.size, info.mtime_ns or 0) for info in infos if info.type == fs.FileType.File}

    def read(self, name: str) -> bytes | None:
        """Return a small file's content; None if missing."""
        if self.system.get_file_info(f"{self.path}/{name}").type != fs.FileType.File:
            return None
        with self.system.open_input_stream(f"{self.path}/{name}") as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""

        def fill(target: str) -> None:
            with self.system.open_output_stream(target) as file:
                file.write(content)

        self._replace(name, fill)

    def send(self, folder: Path, names: Iterable[str], on_sent: Callable[[str], None] = lambda _: None) -> None:
        """Copy files of a local folder to this folder, each atomically; on_sent(name) is called after each file."""

        def send(name: str) -> None:
            self._replace(name, lambda target: _copy(fs.LocalFileSystem(), str(folder / name), self.system, target))
            on_sent(name)

        _in_parallel(send, names)

    def fetch(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of this folder to a local folder."""

        def fetch(name: str) -> None:
            with replaced_file(folder / name) as copy:
                _copy(self.system, f"{self.path}/{name}", fs.LocalFileSystem(), str(copy))

        _in_parallel(fetch, names)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing files are ignored."""

        def delete(name: str) -> None:
            with suppress(FileNotFoundError):
                self.system.delete_file(f"{self.path}/{name}")

        _in_parallel(delete, names)

    def _replace(self, name: str, fill: Callable[[str], None]) -> None:
        target = f"{self.path}/{name}"
        if self.system.type_name in OBJECT_STORES:
            fill(target)
            return
        self.system.create_dir(target.rpartition("/")[0], recursive=True)
        part = partial_file(Path(target)).as_posix()
        fill(part)
        self.system.move(part, target)


def reached_folder(uri: str) -> RemoteFolder:
    """Return the folder at a URI, which is listed first; for s3 and gcs the existence of the bucket is checked as well.

    Raises:
      DataError: the URI is not understood, a check failed, or the server did not answer in time.
    """
    if fault := uri_fault(uri):
        raise DataError(fault)
    with explained(f"{uri} cannot be read", "", REMEDY, *FAILURES):
        system, path = _limited(uri)
        folder = RemoteFolder(system, path.rstrip("/"), uri)
        # Azure is left out, since pyarrow 26 ends the process if it has no credentials for this request.
        if folder.system.type_name in ("s3", "gcs"):
            bucket = folder.path.partition("/")[0]
            if folder.system.get_file_info(bucket).type == fs.FileType.NotFound:
                raise FileNotFoundError(f"no bucket {bucket!r}")
        folder.system.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    return folder


@lru_cache(maxsize=64)
def _limited(uri: str) -> tuple[fs.FileSystem, str]:
    """Return pyarrow's file system and path for a URI, with time limits where supported."""
    parts = urlsplit(uri)
    query = parse_qs(parts.query)
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in query:
        uri += f"{'&' if parts.query else '?'}retry_limit_seconds={CONNECT_S:g}"
    if parts.scheme != "s3":
        system, path = fs.FileSystem.from_uri(uri)
        return system, path
    endpoints = [os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")]
    if not ({"region", "endpoint_override"} & query.keys() or any(endpoints)):
        # pyarrow asks Amazon for the bucket's region without a time limit.
        try:
            socket.create_connection(("s3.us-east-1.amazonaws.com", 443), CONNECT_S).close()
        except OSError as error:
            raise OSError(f"Amazon's S3: {error}") from error
    system, path = fs.FileSystem.from_uri(uri)
    make, (options,) = system.__reduce__()  # pickling is the only access to all options that pyarrow read from the URI
    limits = {"connect_timeout": CONNECT_S, "request_timeout": ANSWER_S}
    return make({**options, **limits, "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)}), path


def reason(error: BaseException) -> str:
    """Return the first line of a file system's error message, without credentials."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return masked(line if len(line) <= 300 else f"{line[:300]} ...")


def stamps(folder: Path) -> dict[str, Stamp]:
    """Return name -> stamp of the files of a local folder at any depth, except hidden files and folders."""
    by_name: dict[str, Stamp] = {}
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            path = Path(place) / name
            with suppress(OSError):  # a broken link, or a file deleted in the meantime
                if not name.startswith("."):
                    state = path.stat()
                    by_name[path.relative_to(folder).as_posix()] = (state.st_size, state.st_mtime_ns)
    return by_name


def is_hidden(name: str) -> bool:
    """Return whether a file is hidden, or in a hidden folder."""
    return any(part.startswith(".") for part in name.split("/"))


def changed(now: Mapping[str, Stamp], before: Mapping[str, Stamp | None]) -> list[str]:
    """Return names of new or changed files."""
    return [name for name, stamp in now.items() if before.get(name) != stamp]


def _copy(source: fs.FileSystem, path: str, target: fs.FileSystem, other: str) -> None:
    fs.copy_files(path, other, source_filesystem=source, destination_filesystem=target, use_threads=False)


def _in_parallel(act: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(PARALLEL, "files") as workers:
        list(workers.map(act, names))  # the first failure cancels files that have not started
