"""`raysim partition`: the partitions of a run or of all trials of a sweep, drawn without training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from raysim.base.errors import DataError, explained
from raysim.base.settings import Settings, differing
from raysim.cli.terminal import LiveLine, out, print_table
from raysim.config import sound_config, sweep
from raysim.data.arrow import SetInfo
from raysim.data.manifest import Manifest
from raysim.folders.run_folder import RunFolder
from raysim.plan.check import check_partition
from raysim.plan.splitting import uses_validation
from raysim.running.pictures import partition_pictures, png
from raysim.running.runner import write_partition


@dataclass(frozen=True)
class DrawnPartition:
    """A partition, named after the sweep's axes; "partition" for a run."""

    name: str
    info: SetInfo
    manifest: Manifest


def draw_and_print(raw: Mapping[str, object], source: str, folder: Path) -> None:
    """Draw partitions, write them below the folder, and print their sizes. Raises as `partitions` and `_write`."""
    with LiveLine() as line:
        line.step(f"drawing the partitions of {source}")
        drawn = partitions(raw, source)
    table = Table(title=escape(f"{source}: {len(drawn)} partitions" if len(drawn) > 1 else source))
    for column in ("", "clients", "examples", "least", "most", "draws", "validation", "test"):
        table.add_column(column, justify="right" if column else "left")
    for each in drawn:
        manifest, sizes = each.manifest, each.manifest.sizes
        counts = (len(sizes), sizes.sum(), sizes.min(), sizes.max())
        _write(each, folder)
        others = (manifest.num_draws, len(manifest.validation), len(manifest.test))
        table.add_row(each.name, *map(str, (*counts, *others)))
    print_table(table)
    out.print(f"partitions: {folder}", markup=False)


def partitions(raw: Mapping[str, object], source: str) -> list[DrawnPartition]:
    """Return the distinct partitions of a file's run, or of the grid of its sweep.

    Raises:
      ConfigError, DataError: a fault in the file, in a trial or in a data set.
    """
    different: dict[str, tuple[Mapping[str, object], SetInfo, Manifest]] = {}
    validates = uses_validation(raw)
    for trial in _trials(raw, source):
        try:
            info, manifest = check_partition(trial.raw, source, validates=validates)
        except DataError as error:
            raise DataError(f"trial {trial.name}: {error.what}", error.where, error.mend) from error
        different.setdefault(manifest.checksum, (trial.values, info, manifest))
    values = [chosen for chosen, _, _ in different.values()]
    axes = differing(values)  # some trials lack an axis, see `tune.only`

    def name(chosen: Mapping[str, object]) -> str:
        telling = {axis: chosen[axis] for axis in axes if axis in chosen}
        return sweep.trial_name(telling, axes) if telling else "partition"

    return [DrawnPartition(name(chosen), info, manifest) for chosen, info, manifest in different.values()]


def _trials(raw: Mapping[str, object], source: str) -> Iterable[sweep.Trial]:
    sound_config({"tune": raw.get("tune") or {}}, source)
    listed = _without_ranges(raw)
    if sweep.axes_as_written(listed):
        return sweep.grid(listed, source)
    return [sweep.Trial("the run", {}, dict(raw))]


def _without_ranges(raw: Mapping[str, object]) -> Settings:
    """Return the file's settings without ranges of the sweep that do not affect partitions."""
    listed = copy.deepcopy(dict(raw))
    tune = listed.get("tune")
    if not isinstance(tune, dict):
        return listed
    left = {
        axis: domain
        for axis, domain in sweep.axes_as_written(listed).items()
        if sweep.is_listed(domain) or sweep.head(axis) in ("data", "partition", "seed")
    }
    only = {axis: others for axis, others in (tune.get("only") or {}).items() if {axis, *others} <= left.keys()}
    listed["tune"] = {**tune, "param_space": left, "only": only}
    return listed


def _write(partition: DrawnPartition, folder: Path) -> Path:
    """Write partition.json, partition.csv, examples.csv, partition.png and validation.png; return their folder.

    Raises:
      DataError: the folder cannot be written.
    """
    target, manifest, info = folder / partition.name, partition.manifest, partition.info
    with explained("cannot write partitions", folder, "give another folder with --out", OSError):
        target.mkdir(parents=True, exist_ok=True)
        files = RunFolder(target)  # named as in a run directory
        write_partition(files, manifest, info)
        for name, figure in partition_pictures(manifest.class_counts, manifest.validation_counts, info.groups).items():
            files.picture(name).write_bytes(png(figure)[0])
    return target
