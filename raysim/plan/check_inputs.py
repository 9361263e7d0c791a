"""Whether the input pipeline, the task and the memory fit the inputs of a set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from raysim.base.errors import Fault, UserCodeError
from raysim.base.ram import memory_fault
from raysim.config import Config, nearest
from raysim.data.arrow import SetInfo
from raysim.data.manifest import Manifest
from raysim.plan.build import feature_shift, input_transform, task_of
from raysim.plan.check_data import or_faults
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS, STANDARD, InputTransform
from raysim.training.tasks import CLASSES, REGRESSION, Task, fits

#: Key of `data` for images only -> values without effect.
FOR_IMAGES = {"resize": None, "crop": None, "channels": None, "augment": "none", "shift": "none"}


def input_faults(config: Config, info: SetInfo) -> list[Fault]:
    """Return faults of an input pipeline that does not fit the set's inputs."""
    data, shape = config.data, info.shape
    if data.normalise == STANDARD and not info.mean:
        text = "the set has no stored mean and deviation; prepare the set again"
        return [Fault("data.normalise", "tokens have no mean; remove the key" if info.vocabulary else text)]
    if not info.is_images:
        text = f"is for images, and {info.name} holds {info.input_type} inputs of shape {shape}; remove the key"
        keys = (key for key, nothing in FOR_IMAGES.items() if getattr(data, key) != nothing)
        faults = [Fault(f"data.{key}", text) for key in keys]
        if data.normalise not in ("none", STANDARD):
            faults.append(Fault("data.normalise", f"{data.normalise!r} is for images; take standard, or drop it"))
        return faults
    augment = data.augment.name
    named = (
        ("data.normalise", data.normalise, [*NORMALISATIONS, STANDARD]),
        ("data.augment", "none" if ":" in augment else augment, [*AUGMENTATIONS]),
    )
    unknown = (each for each in named if each[1] not in each[2])
    faults = [Fault(key, f"unknown name {name!r}. {nearest(name, names)}") for key, name, names in unknown]
    if data.channels is not None and shape[2] not in (1, data.channels):
        faults.append(Fault("data.channels", f"images with {shape[2]} channels cannot get {data.channels}; drop it"))
    channels = data.channels or shape[2]
    statistics, _ = NORMALISATIONS.get(data.normalise, NORMALISATIONS["none"])
    if len(statistics) not in (0, 1, channels):
        text = f"{data.normalise!r} is for {len(statistics)} channels, the inputs have {channels}; set data.channels=3"
        faults.append(Fault("data.normalise", text))
    height, width = (data.resize, data.resize) if data.resize else shape[:2]
    if data.crop is not None and data.crop > min(height, width):
        text = f"{data.crop} is larger than the {height} x {width} images; raise data.resize or lower the crop"
        faults.append(Fault("data.crop", text))
    if faults:
        return faults
    # Not zeros: a function of the user's own may divide by the deviation of an image.
    pixels = torch.randint(256, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trials: dict[str, Callable[[], torch.Tensor]] = {}
    if ":" in augment:
        transform = input_transform(config, info)
        assert isinstance(transform, InputTransform)
        trials["augment"] = partial(transform.by_function, pixels, torch.Generator().manual_seed(0))
    if (shift := feature_shift(config)) is not None:
        trials["shift"] = partial(shift.of_client, pixels, config.num_clients - 1)
    for key, trial in trials.items():
        with torch.random.fork_rng(devices=[]):
            images, try_faults = or_faults(trial, f"data.{key}")
        faults += try_faults
        if images is not None and not bool(torch.isfinite(images).all()):
            text = f"{getattr(data, key).name} returns non-finite images for random pixels; correct the function"
            faults.append(Fault(f"data.{key}", text))
    return faults


#: Task -> type of its targets; a user's own task may read any type.
TARGET_TYPES = {"classes": "int64", "labels": "uint8", "regression": "float32", "tokens": "int32"}


def task_faults(config: Config, info: SetInfo, outputs: tuple[int, ...] | None) -> list[Fault]:
    """Return faults of a task that cannot read the set's targets or the model's outputs.

    Args:
      outputs: shape of the model's outputs for one example; None: the model has faults, and its outputs are
        assumed to fit the targets.
    """
    name = config.task.name if config.task else info.task
    try:
        task = task_of(config, info)
    except (LookupError, UserCodeError) as error:
        return [Fault("task", str(error))]
    if not config.data.scale_targets and name != REGRESSION.name:
        return [Fault("data.scale_targets", f"has no effect: the task is {name}; remove the key")]
    if info.target_type != TARGET_TYPES.get(name, info.target_type):
        text = f"{name} needs {TARGET_TYPES[name]} targets, and {info.name}, prepared for {info.task}, has {info.target_type}"
        return [Fault("task", text)]
    if outputs is None:
        outputs = (*(info.target_shape if info.target_type == "int32" else ()), len(info.classes))
    targets = torch.zeros(2, *info.target_shape, dtype=getattr(torch, info.target_type))
    text = fits(task, torch.zeros(2, *outputs), targets)
    mend = "; choose another model.per: token or sequence" if info.vocabulary else ""
    return [Fault("task", text + mend)] if text else [*_metric_faults(config, task)]


def _metric_faults(config: Config, task: Task) -> Iterator[Fault]:
    """Yield faults for further metrics that the task's scores cannot feed, or with a name already in use."""
    if task.main == CLASSES.main and task.name != "tokens":
        return
    for index, name in enumerate(config.evaluation.metrics):
        key, short = f"evaluation.metrics[{index}]", name.rpartition(":")[2]
        if task.name == "tokens":
            yield Fault(key, "needs targets and logits, which are not kept for tokens; remove the key")
        elif ":" not in name and short != task.main:
            yield Fault(key, f"{name} needs one class a row; remove the metric, or write your own function")
        elif short in (task.main, task.of_part):
            yield Fault(key, f"server/{short} is recorded already; remove the entry, or rename the function")


def memory_faults(config: Config, info: SetInfo, manifest: Manifest | None = None) -> list[Fault]:
    """Return faults for batches beyond this machine's memory, by a lower bound: float32 of resized images.

    Args:
      manifest: None if not known yet; a batch then has at least one example.
    """
    data, shape, kind = config.data, info.shape, "inputs"
    if info.is_images:
        height, width = (data.resize, data.resize) if data.resize else shape[:2]
        shape, kind = (height, width, data.channels or shape[2]), "images"
    entries = math.prod(shape)
    training, tested = (1, 1) if manifest is None else (int(manifest.sizes.max()), len(manifest.test))
    batches = {
        "local.batch_size": min(config.local.batch_size, training),
        "evaluation.batch_size": min(config.evaluation.batch_size, tested),
    }
    key = "data.resize" if manifest is None else ""
    form = " x ".join(map(str, shape[:2]))
    faults = []
    for name, count in batches.items():
        if text := memory_fault(4 * count * entries):
            faults.append(Fault(key or name, f"a batch of {count} {kind} of {form} {text}; lower it, or data.resize"))
    return faults[:1] if key else faults
