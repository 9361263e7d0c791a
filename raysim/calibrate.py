"""`raysim calibrate`: LIVAR's table made anew, from pairs of runs, federated and joint, of one initialisation.

Each pair is two runs like any others, in `<storage>/<name>/p0-s0/federated` and `.../joint`; the same command again runs
what is not finished, and what it makes of them is written anew.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from methods.livar_calibration import Rows, calibration, explain, gram, rows_of_run, target_coefficients, together
from methods.livar_math import TABLES, plain_table
from raysim.build import Plan
from raysim.check import check
from raysim.config import CalibrateGroup, Config, located, parse_config
from raysim.core.errors import ConfigError, DataError, Fault, ModelError
from raysim.files import write_file
from raysim.models.pretrained import read_weights
from raysim.run_folder import RunFolder
from raysim.runner import changes, execute

FILE = "calibration.json"
#: What the paper's own table is called beside another.
PUBLISHED = "LIVAR, table A"


@dataclass(frozen=True)
class Pair:
    """The two runs of one partition and seed: the clients apart, and one client with all their examples."""

    name: str
    federated: Plan
    joint: Plan


@dataclass(frozen=True)
class Calibration:
    """A checked calibration: `<storage>/<name>`, its settings, and the runs that it needs."""

    folder: Path
    settings: CalibrateGroup
    pairs: tuple[Pair, ...]

    @property
    def suffix(self) -> str:
        """Ends the names of what is written: a forest with a third feature (appendix B) stands beside the table's own."""
        return "_count" if self.settings.count_feature else ""

    @property
    def file(self) -> Path:
        """Where the table is written: `calibration.json`, or `calibration_count.json`."""
        return self.folder / f"{Path(FILE).stem}{self.suffix}.json"


# --- planning ---------------------------------------------------------------------------------------------------------


def plan_calibration(raw: Mapping[str, Any], source: str) -> Calibration:
    """All pairs with everything checked: nothing has been started or written.

    Raises:
      ConfigError: every fault; besides those of a run: several rounds, joint data, or methods that do not begin with livar.
    """
    config, faults = parse_config(raw)
    if config is None:
        raise ConfigError(faults, source)
    if faults := _own_faults(config):
        raise ConfigError(faults, source)
    name, group = config.name or Path(source).stem, config.calibrate
    first = config.seed if config.partition.seed is None else config.partition.seed
    pairs: list[Pair] = []
    found: dict[Fault, None] = {}
    for partition in range(group.partitions):
        for number in range(group.seeds):
            place = f"p{partition}-s{number}"
            base = {**raw, "resume": "auto", "seed": config.seed + number}
            try:
                pairs.append(_pair(base, f"{name}/{place}", first + partition, source))
            except ConfigError as error:
                found |= dict.fromkeys(error.faults)
    if found:
        raise ConfigError(list(found), source)
    return Calibration(Path(located(config).storage) / name, group, tuple(pairs))


def _pair(raw: Mapping[str, Any], name: str, partition_seed: int, source: str) -> Pair:
    plans = []
    for kind, methods in (("federated", [*(raw.get("methods") or ["livar"]), "keep_factors"]), ("joint", [])):
        own = copy.deepcopy({**raw, "name": f"{name}/{kind}", "methods": methods})
        own["partition"] = {**(own.get("partition") or {}), "seed": partition_seed}
        if kind == "joint":
            own["partition"]["scheme"] = "joint"
        plans.append(check(own, source))
    return Pair(name.rpartition("/")[2], *plans)


def _own_faults(config: Config) -> list[Fault]:
    group, faults = config.calibrate, []
    if config.rounds != 1:
        faults.append(
            Fault("rounds", f"must be 1, got {config.rounds}: clients and joint training start from one point")
        )
    if config.is_joint:
        faults.append(Fault("partition.scheme", "joint leaves nothing to merge; choose how the clients' data differ"))
    first = config.methods[0] if config.methods else "livar"
    name, chosen = next(iter(first.items())) if isinstance(first, dict) else (first, None)
    chosen = chosen if isinstance(chosen, dict) else {}
    if name != "livar" or chosen.get("components") == "head" or chosen.get("layers") == "examples":
        faults.append(
            Fault("methods", f"must begin with livar, which counts the importances, got {first!r}; or drop it")
        )
    for key in ("cuts_a", "cuts_b"):
        low, high = getattr(group, key)
        if low > high:
            faults.append(Fault(f"calibrate.{key}", f"must rise, got {low:g}, {high:g}"))
    if _starts_with_adapters(config.model.pretrained):
        told = f"{config.model.pretrained} holds adapters; eq. 4 is about what training from none of them adds"
        faults.append(Fault("model.pretrained", f"{told}: give weights of a run without model.lora, or default"))
    return faults


def _starts_with_adapters(pretrained: str | None) -> bool:
    """Whether it is a file of weights with adapters in it; what else is wrong with a file is told by the runs' check."""
    if pretrained in (None, "default"):
        return False
    try:
        with torch.device("meta"):
            return any(".lora_" in name for name in read_weights(Path(pretrained).expanduser()))
    except ModelError:
        return False


# --- runs -------------------------------------------------------------------------------------------------------------


def run_pairs(found: Calibration, say: Callable[[str], None]) -> None:
    """Run what is not finished, one after the other, on one Ray.

    Raises:
      ConfigError: a finished run has other settings, or other data. RaysimError, Interrupted: as a run.
    """
    plans = [(f"{pair.name}/{kind}", getattr(pair, kind)) for pair in found.pairs for kind in ("federated", "joint")]
    waiting = [(name, plan) for name, plan in plans if not _is_finished(plan)]
    if len(waiting) < len(plans):
        say(f"{len(plans) - len(waiting)} of {len(plans)} runs are finished")
    session: Any = contextlib.nullcontext()
    if waiting and waiting[0][1].config.resources.backend == "ray":
        from raysim.engine.ray.session import ray_session

        session = ray_session()
    with session:
        for number, (name, plan) in enumerate(waiting, 1 + len(plans) - len(waiting)):
            summary = execute(plan, on_start=lambda *_: None, on_round=lambda _: None)
            score = "" if summary["accuracy"] is None else f"accuracy {summary['accuracy']:.4f}  "
            say(f"run {number}/{len(plans)}  {name}  {score}{summary['seconds_total']:.1f} s")


def _folder(plan: Plan) -> Path:
    assert plan.config.name is not None
    return Path(plan.config.storage) / plan.config.name


def _is_finished(plan: Plan) -> bool:
    """Whether the run is there, whole, and of this configuration."""
    folder = _folder(plan)
    run = RunFolder(folder)
    if run.status.name != "completed":
        return False
    try:
        before = Config.model_validate(run.read_config()).model_dump(mode="json")
        partition = run.read_json(run.partition)["checksum"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"a finished run is damaged ({error})", str(folder), "delete that folder") from error
    now, remedy = plan.config.model_dump(mode="json"), f"set it back, choose another name, or delete {folder}"
    faults = [
        Fault(key, f"is {new!r}, but the finished run has {old!r}; {remedy}") for key, old, new in changes(before, now)
    ]
    if not faults and partition != plan.manifest.checksum:
        faults = [Fault("data", f"the set changed since that run; choose another name, or delete {folder}")]
    if faults:
        raise ConfigError(faults, "going on with a calibration")
    return True


# --- what they say ----------------------------------------------------------------------------------------------------


def rows_of(found: Calibration) -> Rows:
    """The rows of all pairs, in their order."""
    return together([_rows(number, pair, found.settings) for number, pair in enumerate(found.pairs)])


def _rows(number: int, pair: Pair, settings: CalibrateGroup) -> Rows:
    with np.load(_folder(pair.federated) / "arrays" / "round_00000.npz") as arrays:
        is_active = arrays["keep_factors.num_steps"] > 0
        layers = arrays["livar.importance_a:columns"].tolist()
        importance = np.stack([arrays[f"livar.importance_{factor}"][is_active] for factor in "ab"], axis=2)
        clients = arrays["livar.importance_a:clients"][is_active]
        num_examples = arrays["keep_factors.num_examples"][is_active]
        joint = load_file(RunFolder(_folder(pair.joint)).model)
        coefficients = [
            _target([_stacked(arrays, joint, layer, factor, is_active) for factor in "ab"], settings)
            for layer in layers
        ]
    cuts = (settings.cuts_a, settings.cuts_b)
    return rows_of_run(number, clients, layers, importance, num_examples, np.stack(coefficients, axis=1), cuts)


def _stacked(
    arrays: Mapping[str, np.ndarray], joint: Mapping[str, torch.Tensor], layer: str, factor: str, is_active: np.ndarray
) -> torch.Tensor:
    """(K + 1, ...): the clients' factors and, last, the joint one."""
    own = torch.from_numpy(arrays[f"keep_factors.{layer}.{factor}"][is_active])
    return torch.cat([own, joint[f"{layer}.lora_{factor.upper()}.default.weight"][None]])


def _target(factors: Sequence[torch.Tensor], settings: CalibrateGroup) -> np.ndarray:
    inner = gram(*factors)
    return target_coefficients(inner[:-1, :-1], inner[:-1, -1], constraint=settings.constraint, ridge=settings.ridge)


def calibrate(found: Calibration, say: Callable[[str], None], beside: Sequence[Path] = ()) -> dict[str, Any]:
    """Run, fit, explain; write `calibration.json`, `calibration.yaml`, `rows.csv`, pictures and TensorBoard events.

    With calibrate.count_feature all of these have names of their own (`calibration_count.json`), on the same runs.

    Args:
      beside: folders of other calibrations, whose curves are drawn as well.
    Returns:
      What `calibration.json` holds: the same bytes for the same configuration.
    Raises:
      DataError: no calibration in a folder of `beside`. Else as `run_pairs`.
    """
    others: dict[str, Any] = {}
    for folder in beside:
        is_taken = folder.name == found.folder.name or folder.name in others
        others[str(folder) if is_taken else folder.name] = read_calibration(folder)
    run_pairs(found, say)
    rows, group = rows_of(found), found.settings
    say(f"{len(rows)} rows; fitting {group.trees} trees and explaining them")
    explained = explain(
        rows,
        features=group.features,
        count_feature=group.count_feature,
        trees=group.trees,
        min_leaf=group.min_leaf,
        seed=group.seed,
    )
    result = calibration(rows, explained, (group.cuts_a, group.cuts_b))
    result["settings"] = group.model_dump(mode="json")
    write_file(found.file, (json.dumps(result, indent=1) + "\n").encode())
    try:
        text = yaml.safe_dump({"methods": [{"livar": {"table": plain_table(result)}}]}, sort_keys=False)
        note = "# LIVAR with this table: the `base:` of a run's file.\n"
        write_file(found.file.with_suffix(".yaml"), f"{note}{text}".encode())
    except ValueError as error:
        say(f"no YAML of this table, which livar cannot use ({error})")
    write_file(found.folder / f"rows{found.suffix}.csv", _csv(rows, [pair.name for pair in found.pairs]).encode())
    _draw(found, {found.folder.name: result, **others}, rows.coefficients, explained.predictions)
    return result


def rows_beside(table: Sequence[Sequence[float]]) -> list[tuple[str, list[str]]]:
    """(bin of I_A, a cell for each bin of I_B): a coefficient and, in brackets, that of the paper's table A."""
    rows = zip(("low", "mid", "high"), table, TABLES["paper"], strict=True)
    return [
        (f"I_A {name}", [f"{own:.4f} ({theirs:.3f})" for own, theirs in zip(mine, paper, strict=True)])
        for name, mine, paper in rows
    ]


def read_calibration(folder: Path) -> dict[str, Any]:
    """What an earlier calibration left in its folder. Raises DataError if there is none."""
    try:
        return dict(json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"no calibration ({error})", str(folder), "give the folder that holds calibration.json"
        ) from error


def _csv(rows: Rows, pairs: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    names = "importance_a importance_b num_examples coefficient quantile_a quantile_b"
    writer.writerow(["run", "client", "layer", *names.split()])
    for index in range(len(rows)):
        numbers = (*rows.importances[index], rows.num_examples[index], rows.coefficients[index], *rows.quantiles[index])
        start = [pairs[rows.run[index]], int(rows.client[index]), str(rows.layer[index])]
        writer.writerow([*start, *(repr(float(number)) for number in numbers)])
    return text.getvalue()


def _draw(
    found: Calibration, results: Mapping[str, Mapping[str, Any]], targets: np.ndarray, predictions: np.ndarray
) -> None:
    """shap.png, table.png, prediction.png, and the same in TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    from raysim.report.calibration import curves_figure, prediction_figure, table_figure

    own = next(iter(results.values()))
    figures = {
        "shap": curves_figure(results),
        "table": table_figure(own, {PUBLISHED: TABLES["paper"]}),
        "prediction": prediction_figure(targets, predictions, own["oob_r2"]),
    }
    ending = f".calibration{found.suffix}"
    for old in found.folder.glob(f"events.out.tfevents.*{ending}"):
        old.unlink()
    with SummaryWriter(str(found.folder), filename_suffix=ending) as board:
        for name, figure in figures.items():
            figure.savefig(found.folder / f"{name}{found.suffix}.png", dpi=130)
            board.add_figure(f"calibration{found.suffix}/{name}", figure, 0)
