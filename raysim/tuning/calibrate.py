"""`raysim calibrate`: LIVAR's table from pairs of runs, federated and joint, of one initialisation.

Each pair is two ordinary runs, in `<storage>/<name>/p0-s0/federated` and `.../joint`. The same command resumes
unfinished runs, and fits and draws anew. Only the verb imports this module.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from safetensors.torch import load_file

from methods.livar.calibration import Result, calibration, explain, rows_of_run
from methods.livar.importance import plain_table
from methods.livar.regression import gram, target_coefficients
from raysim.base.errors import ConfigError, Fault, RaysimError, explained, refuse
from raysim.base.progress import Listener
from raysim.base.settings import Raw, Spec
from raysim.base.uri import is_uri
from raysim.config import Config, TuneGroup, located, sound_config
from raysim.config.effects import left_unused, remove
from raysim.folders.files import write_file
from raysim.folders.run_folder import RunFolder
from raysim.plan.check import check
from raysim.plan.held_weights import holds_adapters
from raysim.plan.splitting import uses_validation
from raysim.tuning.calibrate_figures import draw_calibration
from raysim.tuning.outcome import start_sweep
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial, trial_of, with_whole_files

FILE = "calibration.json"

#: The two runs of a partition and seed; the joint run has all examples.
KINDS = ("federated", "joint")

#: Columns of rows.csv.
COLUMNS = [
    *("run", "client", "layer", "importance_a", "importance_b"),
    *("num_examples", "coefficient", "quantile_a", "quantile_b"),
]


def plan_calibration(raw: Raw, source: str) -> Sweep:
    """Return a sweep of two runs for each partition and seed, federated and joint, checked completely; nothing is started.

    Raises:
      ConfigError: every fault of a run; several rounds, joint data, or a first method other than livar.
    """
    config = sound_config(raw, source)
    refuse(_calibration_faults(config), source)
    name, group = config.name or Path(source).stem, config.calibrate
    first = config.seed if config.partition.seed is None else config.partition.seed
    trials: list[SweepTrial] = []
    faults: list[Fault] = []
    for partition, number, kind in itertools.product(range(group.partitions), range(group.seeds), KINDS):
        base = {**raw, "seed": config.seed + number}
        try:
            trials.append(_trial(base, name, f"p{partition}-s{number}/{kind}", first + partition, source))
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    refuse(faults, source)
    sweep_config = Config(name=name, tune=TuneGroup(metric="accuracy"), calibrate=group)
    folder = Path(located(config).storage) / name
    return Sweep(folder, sweep_config, tuple(trials), raw, {}, str(folder))


def _trial(raw: Raw, calibration: str, name: str, partition_seed: int, source: str) -> SweepTrial:
    settings = copy.deepcopy({**raw, "name": f"{calibration}/{name}", "methods": []})
    settings["partition"] = {**(settings.get("partition") or {}), "seed": partition_seed}
    if name.endswith("joint"):  # settings of the federation have no effect in joint training
        settings["partition"]["scheme"] = "joint"
        remove(settings, left_unused(settings, Config, ({"partition": {"scheme": "joint"}}, raw)))
    else:
        settings["methods"] = [*(raw.get("methods") or ["livar"]), "keep_factors"]
    validates = uses_validation(raw)  # both runs of a pair have the same rows
    return trial_of(name, {}, settings, with_whole_files(check(settings, source, validates=validates)))


def _calibration_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of settings that a run may have and a calibration may not."""
    if config.rounds != 1:
        yield Fault("rounds", f"must be 1, got {config.rounds}: clients and joint training start from the same point")
    if is_uri(config.storage):
        text = f"must be a folder here, got {config.storage}: the table is written beside the runs"
        yield Fault("storage", text)
    if config.is_joint:
        yield Fault("partition.scheme", "joint leaves nothing to merge; choose how the clients' data differ")
    first = config.methods[0] if config.methods else Spec.of("livar")
    without = {"components": "head", "layers": "examples", "table": "online"}
    if first.name != "livar" or any(first.options.get(key) == value for key, value in without.items()):
        text = f"must begin with livar, which counts the importances, got {first.written!r}; or remove the key"
        yield Fault("methods", text)
    if holds_adapters(start := config.model.pretrained):
        text = f"{start} holds adapters; eq. 4 needs training that starts without adapters"
        yield Fault("model.pretrained", f"{text}: give weights of a run without model.lora, or default")


def run_pairs(plan: Sweep, listener: Listener) -> None:
    """Run unfinished runs as trials of a sweep, in parallel as far as resources allow.

    Raises:
      ConfigError: a finished run has other settings, or other data. RaysimError: a run failed. Interrupted: a signal.
    """
    count = len(plan.trials)
    plan.folder.mkdir(parents=True, exist_ok=True)
    if num_finished := sum(end.is_finished for end in start_sweep(plan).values()):
        listener.say(f"{num_finished} of {count} runs are finished")
    if num_finished == count:
        return
    from raysim.tuning.driver import run_sweep  # Tune

    _, outcomes = run_sweep(plan, listener)
    if failed := [f"{name}: {end.message}" for name, end in outcomes.items() if not end.is_finished]:
        mend = "the same command resumes unfinished runs"
        raise RaysimError(f"{len(failed)} of {count} runs failed: {'; '.join(failed)}", str(plan.folder), mend)


def rows_of(plan: Sweep) -> pd.DataFrame:
    """Return the rows of all pairs, in order; see `rows_of_run`."""
    pairs = dict.fromkeys(trial.name.partition("/")[0] for trial in plan.trials)
    return pd.concat([_rows(plan.folder, pair) for pair in pairs], ignore_index=True)


def _rows(folder: Path, pair: str) -> pd.DataFrame:
    federated, run = (RunFolder(folder / pair / kind) for kind in KINDS)
    logged = federated.arrays / "round_00000.npz"
    run.check_unchanged(run.model)
    federated.check_unchanged(logged)
    joint = load_file(run.model)
    with np.load(logged) as arrays:
        is_active = arrays["keep_factors.num_steps"] > 0
        layers = arrays["livar.importance_a:columns"].tolist()

        def factors(layer: str, factor: str) -> torch.Tensor:
            """Return (K + 1, ...): the factors of the clients and, last, of the joint run."""
            clients = torch.from_numpy(arrays[f"keep_factors.{layer}.{factor}"][is_active])
            return torch.cat([clients, joint[f"{layer}.lora_{factor.upper()}.default.weight"][None]])

        def coefficients(layer: str) -> np.ndarray:
            inner = gram(factors(layer, "a"), factors(layer, "b"))
            return target_coefficients(inner[:-1, :-1], inner[:-1, -1])

        return rows_of_run(
            pair,
            arrays["livar.importance_a:clients"][is_active],
            layers,
            np.stack([arrays[f"livar.importance_{factor}"][is_active] for factor in "ab"], axis=2),
            arrays["keep_factors.num_examples"][is_active],
            np.stack([coefficients(layer) for layer in layers], axis=1),
        )


def run_calibration(plan: Sweep, listener: Listener, beside: Sequence[Path] = ()) -> Result:
    """Run, fit and explain; write `calibration.json`, `calibration.yaml`, `rows.csv`, pictures and TensorBoard events.

    The files are in `result_folder`; the runs are the same with and without calibrate.count_feature.

    Args:
      beside: folders of other calibrations, whose curves are drawn as well.
    Returns:
      Content of `calibration.json`: the same bytes for the same configuration.
    Raises:
      DataError: no calibration in a folder of `beside`. Else as `run_pairs`.
    """
    others: dict[str, Result] = {}
    for folder in beside:
        is_taken = folder.name == plan.folder.name or folder.name in others
        others[str(folder) if is_taken else folder.name] = read_calibration(folder)
    run_pairs(plan, listener)
    rows, group = rows_of(plan), plan.base.calibrate
    listener.say(f"{len(rows)} rows; fitting {group.trees} trees and explaining the forest")
    explanation = explain(rows, trees=group.trees, count_feature=group.count_feature)
    result = calibration(rows, explanation, group.model_dump(mode="json"))
    out = result_folder(plan)
    out.mkdir(exist_ok=True)
    file = out / FILE
    write_file(file, (json.dumps(result, indent=1) + "\n").encode())
    try:
        text = yaml.safe_dump({"methods": [{"livar": {"table": plain_table(result)}}]}, sort_keys=False)
        note = "# LIVAR with this table: the `base:` of a run's file.\n"
        write_file(file.with_suffix(".yaml"), f"{note}{text}".encode())
    except ValueError as error:
        listener.say(f"no YAML of the table, which livar cannot use ({error})")
    table = rows.to_csv(columns=COLUMNS, index=False, lineterminator="\r\n")
    write_file(out / "rows.csv", table.encode())
    results = {plan.folder.name: result, **others}
    draw_calibration(out, results, rows["coefficient"].to_numpy(), explanation.predictions)
    return result


def result_folder(plan: Sweep) -> Path:
    """Return the folder of a calibration's result: its own, or `count` in it for a forest with a third feature."""
    return plan.folder / "count" if plan.base.calibrate.count_feature else plan.folder


def read_calibration(folder: Path) -> Result:
    """Return the stored result of an earlier calibration. Raises DataError if missing."""
    with explained("no calibration", folder, "give the folder that holds calibration.json", OSError, ValueError):
        result: Result = json.loads((folder / FILE).read_text())
    return result
