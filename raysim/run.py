"""`raysim run`: from a checked plan to a finished run directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import signal
import subprocess
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save
from torch import Tensor

from raysim.build import Plan, Recipe, fetch_weights, make_server, make_trainer, model_spec
from raysim.check import data_cache
from raysim.config import Config
from raysim.core.errors import ConfigError, Fault, RunExists
from raysim.data.arrow import SetInfo
from raysim.data.describe import partition_table
from raysim.data.federation import build_shards, write_serially
from raysim.data.manifest import Manifest
from raysim.engine.checkpoint import Checkpoint, CheckpointStore
from raysim.engine.metrics import RoundRecord
from raysim.engine.simulation import Interrupted, ServerHandle, Stopped, restore, simulate
from raysim.engine.trainer import SerialPool
from raysim.engine.transport import unpack
from raysim.files import write_file
from raysim.models.trained import trained_tensors
from raysim.record import Recorder
from raysim.resources import resolve_resources
from raysim.run_folder import RunFolder

#: Keys that a resumed run may change: they do not move the result of a round.
FREE_KEYS = ("name", "storage", "resume", "checkpoint", "resources", "labels", "report", "tune", "calibrate", "scale")

#: Parts of groups that it may change for the same reason. Where the data lie does not matter: their checksum does.
FREE_PARTS = {"data": ("root",)}

PACKAGES = ("raysim", "ray", "torch", "torchvision", "timm", "peft", "numpy", "pyarrow", "scikit-learn")


def run_folder(config: Config) -> RunFolder:
    """The run directory, made if it is not there; a fresh one for a run without a name."""
    storage = Path(config.storage).absolute()
    try:
        if config.name is not None:
            (storage / config.name).mkdir(parents=True, exist_ok=True)
            return RunFolder(storage / config.name)
        storage.mkdir(parents=True, exist_ok=True)
        name = time.strftime("run-%Y%m%d-%H%M%S")
        for attempt in itertools.count():
            folder = storage / (name if attempt == 0 else f"{name}-{attempt}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return RunFolder(folder)
    except OSError as error:
        fault = Fault("storage", f"cannot make a run directory ({error}); choose a folder that can be written")
        raise ConfigError([fault], "the configuration") from error
    raise AssertionError("unreachable")


def open_run(plan: Plan, folder: RunFolder) -> tuple[Checkpoint | None, CheckpointStore]:
    """The checkpoint to go on from if the folder holds an unfinished run; else its configuration is written there.

    Raises:
      RunExists: a finished run, or an unfinished one with resume=never or a damaged configuration. ConfigError: an
      unfinished run with another configuration or other data.
    """
    config, name = plan.config, folder.name
    store = CheckpointStore(folder.checkpoints, config.checkpoint.keep_last)
    if folder.status.name == "completed":
        raise RunExists(f"run {name!r} is finished", str(folder.path), "choose another name, or delete that folder")
    now = config.model_dump(mode="json")
    if not folder.config.exists():
        write_file(folder.partition, plan.manifest.to_json().encode())
        write_file(folder.partition_table, partition_csv(plan.manifest, plan.info).encode())
        folder.write_config(now)
        return None, store
    if config.resume == "never":
        raise RunExists(
            f"run {name!r} exists, unfinished, and resume is never",
            str(folder.path),
            "set resume=auto, choose another name, or delete that folder",
        )
    try:
        before = folder.read_config()
        partition = folder.read_json(folder.partition)["checksum"]
    except (OSError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        raise RunExists(
            f"run {name!r} cannot be resumed: its config.yaml or partition.json is damaged ({error})",
            str(folder.path),
            "choose another name, or delete that folder",
        ) from error
    remedy = "set it back, or choose another name"
    faults = [
        Fault(key, f"is {new!r}, but the unfinished run in {folder.path} has {old!r}; {remedy}")
        for key, old, new in changes(before, now)
    ]
    if not faults and partition != plan.manifest.checksum:
        faults.append(
            Fault("data", f"the set changed since the unfinished run in {folder.path} began; choose another name")
        )
    if faults:
        raise ConfigError(faults, f"resuming {name!r}")
    return store.latest(), store


def partition_csv(manifest: Manifest, info: SetInfo) -> str:
    """partition.csv: a row for each client, and one for the validation set."""
    return partition_table(manifest.class_counts, info.classes, manifest.validation_counts)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, now) of what differs between two configurations and may not: the result depends on it."""
    found = []
    for key in now:
        old, new = before.get(key), now[key]
        if key in FREE_KEYS or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in {**old, **new} if name not in FREE_PARTS.get(key, ())]
            pairs = [(f"{key}.{name}", old.get(name), new.get(name)) for name in names]
            found += [pair for pair in pairs if pair[1] != pair[2]]
        else:
            found.append((key, old, new))
    return found


def execute(
    plan: Plan,
    *,
    on_start: Callable[[Path, int, int], None],
    on_round: Callable[[RoundRecord], None],
    wait_s: float = 0.0,
) -> dict[str, Any]:
    """Run a plan to its end and return the summary.

    Args:
      on_start: on_start(run directory, first round, number of rounds).
      on_round: on_round(record) after each round; Stopped, raised there, ends the run unfinished but not failed.
      wait_s: seconds to wait for another process that is still in the run directory.
    Raises:
      RaysimError: what the user can mend; the run directory then holds FAILED with the message.
      Interrupted: a signal ended the run, after a checkpoint if there was a round since the last one.
    """
    folder = run_folder(plan.config)
    with folder.locked(wait_s):
        checkpoint, store = open_run(plan, folder)
        folder.clear_marks()
        try:
            with _server(plan, folder) as server:
                return _rounds(plan, server, folder, checkpoint, store, on_start, on_round)
        except (Interrupted, Stopped):
            raise
        except (KeyboardInterrupt, SystemExit) as error:  # before the first round (Ray's own handler), or a second one
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
            raise Interrupted(number, None) from error
        except BaseException as error:
            folder.mark("FAILED", f"{error}\n\n{traceback.format_exc()}")
            raise


def _rounds(
    plan: Plan,
    server: ServerHandle,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    store: CheckpointStore,
    on_start: Callable[[Path, int, int], None],
    on_round: Callable[[RoundRecord], None],
) -> dict[str, Any]:
    num_rounds = plan.num_rounds
    first_round = 0
    if checkpoint is not None:
        restore(server, checkpoint, store)
        first_round = checkpoint.next_round
    recorder = Recorder(
        folder,
        first_round=first_round,
        num_rounds=num_rounds,
        hyperparameters=hyperparameters(plan.config),
        blocks=plan.layout.blocks,
        classes=plan.info.classes,
    )
    try:
        if first_round == 0:
            recorder.partition(plan.manifest.class_counts, plan.manifest.validation_counts, plan.info.classes)
        on_start(folder.path, first_round, num_rounds)
        simulate(
            server,
            first_round=first_round,
            num_rounds=num_rounds,
            recorder=recorder,
            store=store,
            checkpoint_every_s=plan.config.checkpoint.every_s,
            on_round=on_round,
        )
        write_file(folder.model, save(final_model(plan, server)))
        summary = recorder.summary(
            {
                "methods": plan.config.methods,
                "rounds": num_rounds,
                "num_clients": plan.config.num_clients,
                "params_sha256": server.params_sha256(),
                "partition_sha256": plan.manifest.checksum,
            }
        )
    finally:
        recorder.close()
    folder.mark("COMPLETED")
    return summary


def final_model(plan: Plan, server: ServerHandle) -> dict[str, Tensor]:
    """The state dict of the module as the next round would find it; see `trained_tensors`.

    LIVAR's merged model, of a higher rank than its adapters, is scored but not in here: these are the adapters sent.
    """
    snapshot = server.snapshot()
    return trained_tensors(
        model_spec(plan.config, len(plan.info.classes), plan.info.shape),
        plan.layout,
        seed=plan.config.seed,
        state=unpack(snapshot.state),
        counters=snapshot.counters,
    )


@contextmanager
def _server(plan: Plan, folder: RunFolder) -> Iterator[ServerHandle]:
    """A server with its trainers, serial or on Ray, and the shards they map."""
    config = plan.config
    cache = data_cache(config) / "shards"

    def recipe(shards: Path, num_threads: int, wants_gpu: bool) -> Recipe:
        raw = config.model_dump(mode="json")
        if config.model.pretrained not in (None, "default"):  # actors may have another working directory
            raw["model"]["pretrained"] = str(Path(config.model.pretrained).expanduser().absolute())
        return Recipe(raw, str(shards), len(plan.info.classes), plan.info.shape, num_threads, wants_gpu)

    if config.resources.backend == "serial":
        shards = build_shards(plan.manifest, cache, write_serially)
        asked = config.resources.cpus_per_trainer
        wants_gpu = config.resources.gpus_per_trainer != 0
        ingredients = recipe(shards, threads_of(1.0 if asked == "auto" else asked), wants_gpu)
        _write_environment(
            folder,
            {
                "backend": "serial",
                "trainers": 1,
                "gpus_per_trainer": float(wants_gpu and torch.cuda.is_available()),
                "threads_per_trainer": ingredients.num_threads,
            },
        )
        yield make_server(ingredients, SerialPool(partial(make_trainer, ingredients), plan.keeps_memory))
        return

    fetch_weights(plan)
    from raysim.engine.ray.server import RayServer
    from raysim.engine.ray.session import available, is_in_group, placements, ray_session

    with ray_session():
        from raysim.data.pipeline import write_with_ray_data

        trainers, cpus, gpus = resolve_resources(config, *available(), placements())
        # Ray Data's tasks would wait for CPUs that are not in the group, or would take those of the trainers to come.
        shards = build_shards(plan.manifest, cache, write_serially if is_in_group() else write_with_ray_data)
        host = f"raysim-shards-{uuid.uuid4().hex[:12]}"
        ingredients = replace(recipe(shards, threads_of(cpus), gpus > 0), shard_host=host)
        _write_environment(
            folder,
            {
                "backend": "ray",
                "trainers": trainers,
                "placement": config.resources.placement,
                "cpus_per_trainer": cpus,
                "gpus_per_trainer": gpus,
                "threads_per_trainer": ingredients.num_threads,
            },
        )
        server = RayServer(
            partial(make_server, ingredients),
            partial(make_trainer, ingredients),
            num_trainers=trainers,
            cpus_per_trainer=cpus,
            gpus_per_trainer=gpus,
            keeps_memory=plan.keeps_memory,
            shards=(str(shards), host),
            placement=config.resources.placement,
            is_growing=config.resources.trainers == "auto",
        )
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.close()


def threads_of(cpus: float) -> int:
    """PyTorch threads of a trainer with so many CPUs: at least one."""
    return max(1, int(cpus))


def hyperparameters(config: Config) -> dict[str, Any]:
    """The settings that comparisons are made by, flat, for TensorBoard's hyper-parameter view."""
    flat: dict[str, Any] = {"seed": config.seed, "rounds": config.rounds, "cohort": config.cohort_size}
    flat["methods"] = " + ".join(next(iter(m)) if isinstance(m, dict) else m for m in config.methods) or "fedavg"
    for item in config.methods:
        if isinstance(item, dict):
            ((name, options),) = item.items()
            flat |= {f"{name}.{key}": _plain(value) for key, value in (options or {}).items()}
    for group in ("data", "partition", "model", "local"):
        values = getattr(config, group).model_dump(mode="json")
        values.pop("root", None)  # a place, no setting
        flat |= {f"{group}.{key}": value for key, value in values.items() if isinstance(value, str | int | float)}
    flat |= {f"labels.{key}": value for key, value in config.labels.items()}
    return flat


def _plain(value: Any) -> str | int | float:
    """A value as TensorBoard takes it: lists and the like as text."""
    return value if isinstance(value, str | int | float) else str(value)


def _write_environment(folder: RunFolder, resources: dict[str, Any]) -> None:
    import torch

    facts = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "machine": {
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "resources": resources,
    }
    folder.write_json(folder.environment, facts)


def _git_commit() -> str | None:
    """Commit of the code that runs, with "+" if the tree was changed; None outside a checkout."""
    where = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=10)
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=where, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "") if commit.returncode == 0 else None
