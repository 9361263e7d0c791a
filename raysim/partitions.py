"""`raysim partition`: the partitions of a run or of all trials of a sweep, drawn without training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim import sweep
from raysim.check import check_partition
from raysim.core.errors import DataError
from raysim.data.arrow import SetInfo
from raysim.data.manifest import Manifest
from raysim.pictures import partition_pictures
from raysim.run import write_partition
from raysim.run_folder import RunFolder


@dataclass(frozen=True)
class Partition:
    """A partition, named after the axes of the sweep that tell it from the others; a run's is called "partition"."""

    name: str
    info: SetInfo
    manifest: Manifest


def partitions(raw: Mapping[str, Any], source: str, *, is_scaled: bool = False) -> list[Partition]:
    """The different partitions of a file's run, or of the grid of its sweep.

    Raises:
      ConfigError, DataError: a fault in the file, in one of its trials or in a set.
    """
    found: dict[str, tuple[dict[str, Any], SetInfo, Manifest]] = {}
    for trial in _trials(raw, source, is_scaled=is_scaled):
        try:
            info, manifest = check_partition(trial.raw, source)
        except DataError as error:
            raise DataError(f"trial {trial.name}: {error.what}", error.where, error.mend) from error
        found.setdefault(manifest.checksum, (trial.values, info, manifest))
    values = [chosen for chosen, _, _ in found.values()]
    known = dict.fromkeys(axis for chosen in values for axis in chosen)  # some trials lack an axis, see `tune.only`
    axes = dict.fromkeys(axis for axis in known if len({repr(chosen.get(axis)) for chosen in values}) > 1)

    def name(chosen: Mapping[str, Any]) -> str:
        told = {axis: chosen[axis] for axis in axes if axis in chosen}
        return sweep.trial_name(told, axes) if told else "partition"

    return [Partition(name(chosen), info, manifest) for chosen, info, manifest in found.values()]


def _trials(raw: Mapping[str, Any], source: str, *, is_scaled: bool) -> Iterator[sweep.Trial]:
    if (raw.get("tune") or {}).get("param_space"):
        yield from sweep.grid(raw, source, is_scaled=is_scaled)
    else:
        yield sweep.Trial("the run", {}, sweep.scaled(raw, source) if is_scaled else dict(raw))


def write(partition: Partition, folder: Path) -> Path:
    """Write partition.json, partition.csv, partition.png and validation.png below the folder; returns where.

    Raises:
      DataError: the folder cannot be written.
    """
    target = folder / partition.name
    manifest = partition.manifest
    try:
        target.mkdir(parents=True, exist_ok=True)
        files = RunFolder(target)  # named as in a run directory
        write_partition(files, manifest, partition.info)
        pictures = partition_pictures(manifest.class_counts, manifest.validation_counts, partition.info.classes)
        for name, figure in pictures.items():
            figure.savefig(files.picture(name), dpi=110)
    except OSError as error:
        raise DataError(f"cannot write partitions ({error})", str(folder), "give another folder with --out") from error
    return target
