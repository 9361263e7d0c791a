"""Checkpoints as safetensors and JSON, written atomically; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raysim.base.errors import RaysimError, explained
from raysim.base.untrusted import read_json
from raysim.engine.messages import Packed, Snapshot
from raysim.folders.files import partial_file, sync, write_file

ARRAY = "__array__"

#: Suffixes of the two files of a tree: the arrays, and all other values.
SUFFIXES = (".safetensors", ".json")


#: Version of the file format; checkpoints of another version are not read.
FORM = 2

#: Number of checkpoints that are kept: if the newest is damaged, the previous one is used.
KEPT = 2

#: Names of client memories, below the folder of checkpoints.
MEMORY = re.compile(r"memory/client-\d{6,}-\d{6,}")

#: Errors that reading a damaged file raises.
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read from its files.

    Attributes:
      next_round: the first round to run after a resume.
      memories: client -> path of the client's memory.
      records: checksums of the records of all rounds before `next_round`.
    """

    next_round: int
    snapshot: Snapshot
    memories: dict[int, Path]
    records: Mapping[str, str]


class CheckpointStore:
    """The folder `<run>/checkpoints`: a folder per checkpoint, and client memories, each written once per change.

    checkpoint.json holds a SHA-256 for each tree of files of the checkpoint, and one for its own contents.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._memories: dict[int, str] = {}
        self._digests: dict[str, str] = {}  # SHA-256 of the memories, by name

    def save(
        self,
        next_round: int,
        snapshot: Snapshot,
        memories: Iterable[tuple[int, Packed]],
        records: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Write a checkpoint after round `next_round - 1`.

        Args:
          memories: (client, packed memory) of each client whose memory changed since the last save; read one by one.
          records: checksums of the run's records, stored in the checkpoint.
        """
        for client, memory in memories:
            name = f"memory/client-{client:06d}-{next_round:06d}"
            self._digests[name] = _write_tree(self.folder / name, memory)
            self._memories[client] = name
        target = self.folder / f"round-{next_round:06d}"
        building = partial_file(target)
        digest = _write_tree(building / "server", vars(snapshot))
        used = self._memories.values()
        self._digests = {name: self._digests[name] for name in used}
        fields = {
            "form": FORM,
            "next_round": next_round,
            "memories": {str(client): name for client, name in self._memories.items()},
            "sha256": {"server": digest, **self._digests},
            "records": dict(records),
        }
        write_file(building / "checkpoint.json", json.dumps({**fields, "self": _digest_of(fields)}).encode())
        shutil.rmtree(target, ignore_errors=True)
        os.rename(building, target)
        sync(self.folder)
        self._prune()
        return target

    def latest(self, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there are no checkpoints. Damaged checkpoints are renamed.

        Args:
          say: say(line) is called for each damaged checkpoint.
        Raises:
          RaysimError: there are checkpoints, and all are damaged.
        """
        damages: dict[Path, str] = {}
        for folder in reversed(self._complete()):
            try:
                checkpoint = self._read(folder)
            except DAMAGE as error:
                damages[folder] = f"{folder.name} is damaged ({error})"
                continue
            for damaged, line in damages.items():
                aside = damaged.with_name(f"damaged-{damaged.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(damaged, aside)
                say(f"checkpoint {line}; resuming from the previous checkpoint, {folder.name}")
            return checkpoint
        if damages:
            remedy = "delete the folder; the same command then repeats the run"
            raise RaysimError(f"no checkpoint is whole: {'; '.join(damages.values())}", str(self.folder), remedy)
        return None

    def _read(self, folder: Path) -> Checkpoint:
        fields: Any = read_json(folder / "checkpoint.json")
        if fields["form"] != FORM or fields.pop("self") != _digest_of(fields):
            raise ValueError("checkpoint.json has changed since the checkpoint was written")
        names = {int(client): str(name) for client, name in fields["memories"].items()}
        if strange := [name for name in names.values() if not MEMORY.fullmatch(name)]:
            raise ValueError(f"{strange[0]!r} is not a client memory")
        digests = dict(fields["sha256"])
        snapshot = Snapshot(**_read_tree(folder / "server", digests.pop("server")))
        for name in names.values():
            _verified(self.folder / name, digests[name])
        self._memories, self._digests = names, digests
        memories = {client: self.folder / name for client, name in names.items()}
        return Checkpoint(fields["next_round"], snapshot, memories, fields["records"])

    def read_memory(self, path: Path) -> Packed:
        """Return a client's packed memory from the checkpoint that was read last.

        Raises:
          RaysimError: the file changed since the checkpoint was written.
        """
        with explained("damaged client memory", path, "run the same command again", *DAMAGE, to=RaysimError):
            return _read_tree(path, self._digests[path.relative_to(self.folder).as_posix()])

    @property
    def next_round(self) -> int:
        """The round after the newest checkpoint; 0 without a checkpoint."""
        return int(self._complete()[-1].name.removeprefix("round-")) if self._complete() else 0

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("round-*/checkpoint.json"))

    def _prune(self) -> None:
        complete = self._complete()
        for folder in complete[:-KEPT]:
            shutil.rmtree(folder)
        used: set[str] = set()
        for folder in complete[-KEPT:]:
            used |= set(json.loads((folder / "checkpoint.json").read_text())["memories"].values())
        for path in (self.folder / "memory").glob("client-*.json"):
            if f"memory/{path.stem}" not in used:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)


def _digest_of(fields: object) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _write_tree(path: Path, tree: Packed) -> str:
    """Write a tree of arrays and JSON values as PATH.safetensors and PATH.json. The JSON file is written last: a tree
    with it is complete.

    Returns:
      SHA-256 over both files.
    """
    arrays: dict[str, np.ndarray] = {}
    skeleton = _strip(tree, "", arrays)
    contents = save(arrays), json.dumps(skeleton).encode()
    for suffix, content in zip(SUFFIXES, contents, strict=True):
        write_file(path.with_suffix(suffix), content)
    return _joint_digest(contents)


def _read_tree(path: Path, digest: str) -> Packed:
    values, skeleton = _verified(path, digest)
    arrays = load(values)

    def fill(node: dict[str, Packed]) -> Packed:
        return arrays[node[ARRAY]] if set(node) == {ARRAY} else node

    return json.loads(skeleton, object_hook=fill)


def _verified(path: Path, digest: str) -> tuple[bytes, bytes]:
    """Return the bytes of a tree's two files. Raises ValueError: checksums differ."""
    values, skeleton = (path.with_suffix(suffix).read_bytes() for suffix in SUFFIXES)
    if _joint_digest((values, skeleton)) != digest:
        raise ValueError(f"{path.name} has changed since the checkpoint was written")
    return values, skeleton


def _joint_digest(contents: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for content in contents:
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()


def _strip(value: Packed, key: str, arrays: dict[str, np.ndarray]) -> Packed:
    """Return the tree with each array moved to `arrays` and replaced by {ARRAY: key}."""
    if isinstance(value, np.ndarray):
        arrays[key] = np.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray turns shape () into (1,)
        return {ARRAY: key}
    where = key or "the state"
    if isinstance(value, dict):
        if any(not isinstance(name, str) for name in value):
            raise RaysimError(
                f"a state dict has keys that are not strings: {list(value)[:3]}", where, "use string keys"
            )
        return {name: _strip(item, f"{key}/{name}", arrays) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strip(item, f"{key}/{index}", arrays) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    remedy = "keep tensors, numbers, strings, lists and dicts only"
    raise RaysimError(f"a checkpoint cannot hold a {type(value).__name__}", where, remedy)
