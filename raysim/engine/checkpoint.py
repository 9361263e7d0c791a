"""Checkpoints: written whole or not at all, as safetensors and JSON; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from raysim.core.errors import RaysimError
from raysim.engine.messages import Packed, Snapshot
from raysim.files import sync_folder, write_file

ARRAY = "__array__"


@dataclass(frozen=True)
class Checkpoint:
    """What was restored: the next round to run, the server's snapshot, and where each client's memory lies."""

    next_round: int
    snapshot: Snapshot
    memories: dict[int, Path]


class CheckpointStore:
    """`<run>/checkpoints`: a folder per checkpoint, and client memories beside them, each written once per change."""

    def __init__(self, folder: Path, keep_last: int = 2):
        self.folder = folder
        self.keep_last = keep_last
        self._memories: dict[int, str] = {}

    def save(self, next_round: int, snapshot: Snapshot, memories: Iterable[tuple[int, Packed]]) -> Path:
        """Write a checkpoint after round `next_round - 1`.

        Args:
          memories: (client, packed memory) of each client whose memory changed since the last save; taken one by one.
        """
        for client, memory in memories:
            name = f"memory/client-{client:06d}-{next_round:06d}"
            _write_tree(self.folder / name, memory)
            self._memories[client] = name
        target = self.folder / f"round-{next_round:06d}"
        building = self.folder / f".{target.name}.{os.getpid()}.part"
        shutil.rmtree(building, ignore_errors=True)
        _write_tree(building / "server", vars(snapshot))
        fields = {"next_round": next_round, "memories": self._memories}
        write_file(building / "checkpoint.json", json.dumps(fields).encode())
        shutil.rmtree(target, ignore_errors=True)
        os.rename(building, target)
        sync_folder(self.folder)
        self._prune()
        return target

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or None."""
        complete = self._complete()
        if not complete:
            return None
        folder = complete[-1]
        try:
            fields = json.loads((folder / "checkpoint.json").read_text())
            snapshot = Snapshot(**_read_tree(folder / "server"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RaysimError(
                f"damaged checkpoint ({error})",
                str(folder),
                "delete this folder; the run then resumes from the one before it",
            ) from error
        self._memories = {int(client): name for client, name in fields["memories"].items()}
        return Checkpoint(fields["next_round"], snapshot, {c: self.folder / name for c, name in self._memories.items()})

    def read_memory(self, path: Path) -> Packed:
        """Packed memory of one client."""
        return _read_tree(path)

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("round-*/checkpoint.json"))

    def _prune(self) -> None:
        complete = self._complete()
        for folder in complete[: -self.keep_last]:
            shutil.rmtree(folder)
        used: set[str] = set()
        for folder in complete[-self.keep_last :]:
            used |= set(json.loads((folder / "checkpoint.json").read_text())["memories"].values())
        for path in (self.folder / "memory").glob("client-*.json"):
            if f"memory/{path.stem}" not in used:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)


def _write_tree(path: Path, tree: Packed) -> None:
    """A tree of arrays and JSON values as PATH.safetensors and PATH.json; the JSON, written last, makes it complete."""
    arrays: dict[str, np.ndarray] = {}
    skeleton = _strip(tree, "", arrays)
    write_file(path.with_suffix(".safetensors"), save(arrays))
    write_file(path.with_suffix(".json"), json.dumps(skeleton).encode())


def _read_tree(path: Path) -> Packed:
    arrays = load_file(path.with_suffix(".safetensors"))

    def fill(node: dict[str, Packed]) -> Packed:
        return arrays[node[ARRAY]] if set(node) == {ARRAY} else node

    return json.loads(path.with_suffix(".json").read_text(), object_hook=fill)


def _strip(value: Packed, key: str, arrays: dict[str, np.ndarray]) -> Packed:
    """The tree with a mark {ARRAY: key} in the place of each array, which goes to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays[key] = np.ascontiguousarray(value)
        return {ARRAY: key}
    where = key or "the state"
    if isinstance(value, dict):
        if any(not isinstance(name, str) for name in value):
            raise RaysimError(f"a state dict has keys that are no strings: {list(value)[:3]}", where, "use string keys")
        return {name: _strip(item, f"{key}/{name}", arrays) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strip(item, f"{key}/{index}", arrays) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    remedy = "keep tensors, numbers, strings, lists and dicts only"
    raise RaysimError(f"cannot keep a {type(value).__name__}", where, remedy)
