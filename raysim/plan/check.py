"""From a raw configuration to a checked plan: every fault at once, before anything starts.

Every step returns what it makes, or faults; `check` alone decides whether to go on with what is sound.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from raysim.config import (
    Config,
    ModelGroup,
    located,
    nearest,
    parse_config,
    parse_options,
    sound_config,
    without,
)
from raysim.core.errors import ConfigError, Fault, ModelError, OwnCodeError, refuse
from raysim.core.layout import Layout
from raysim.core.memory import memory_fault
from raysim.core.method import Method
from raysim.core.options import text_of
from raysim.core.settings import Settings, name_and_options
from raysim.core.stack import conflicts, resources_of
from raysim.data.arrow import SetInfo
from raysim.data.manifest import Manifest
from raysim.models import ModelSpec, find_architecture, head_of, output_shape, try_model
from raysim.plan.build import (
    Plan,
    Ready,
    cached_by_value,
    cached_skeleton,
    feature_shift,
    input_transform,
    layout_for,
    model_spec,
    spec_of,
    task_of,
    with_weights,
)
from raysim.plan.check_data import Sets, draw_partition, open_sets, or_faults
from raysim.plan.find import build_methods, check_metrics, check_own, logger_faults
from raysim.plan.resources import check_resources
from raysim.plan.splitting import uses_validation, with_split
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS, STANDARD, InputTransform
from raysim.training.local import needs_two_examples
from raysim.training.tasks import CLASSES, fits

T = TypeVar("T")


def check(
    raw: Mapping[str, object],
    source: str,
    *,
    has_room: bool = False,
    ready: Ready | None = None,
    validates: bool | None = None,
) -> Plan:
    """Check a raw configuration completely, without starting Ray or writing a run.

    Args:
      has_room: its resources were reserved already, perhaps on a smaller machine than the one that checked them.
      ready: what was made of its data before; its files are then not looked at, nor needed.
      validates: whether something uses validation rows; None: as this configuration has it.
    Raises:
      ConfigError: with every fault found.
    """
    config, methods, faults = _parse(raw)
    if config is None:
        raise ConfigError(faults, source)
    own_faults = check_own(config)
    if own_faults:
        raise ConfigError(faults + own_faults, source)
    faults += [] if has_room else check_resources(config)
    faults += [*check_metrics(config), *logger_faults(config.loggers)]
    if config.report.figures:
        from raysim.reporting.drawing import figure_faults  # loads matplotlib: only where figures are named

        faults += figure_faults(config.report.figures)
    sets, data_faults = (ready, []) if ready is not None else or_faults(partial(open_sets, config), "data")
    faults += data_faults
    if sets is None:
        raise ConfigError(faults, source)
    if isinstance(sets, Sets):
        config, split_faults = _split(config, sets, raw, validates)
        faults += split_faults
    info = sets.info
    if config.task is None and info.task != CLASSES.name:
        config = config.model_copy(update={"task": info.task})
    if size_faults := memory_faults(config, info):
        raise ConfigError(faults + size_faults, source)
    spec = with_weights(model_spec(config, info), ready.made if ready else None)
    manifest, partition_faults = or_faults(
        lambda: sets.manifest if isinstance(sets, Ready) else draw_partition(config, sets), "partition"
    )
    model_faults = _check_model(spec)
    faults += _check_inputs(config, info) + model_faults + partition_faults
    faults += _check_task(config, info, None if model_faults else output_shape(spec))
    if faults or manifest is None:
        raise ConfigError(faults, source)
    faults += memory_faults(config, info, manifest)
    faults += [
        *stop_faults(config, methods, task_of(config, info).main, num_test=len(manifest.test)),
        *training_faults(config, spec),
    ]
    refuse(faults, source)
    layout, texts = _fit(
        config.methods, config.model, replace(spec, pretrained=None), _available(config, spec, manifest, info)
    )
    if texts or layout is None:
        raise ConfigError([Fault("methods", text) for text in texts], source)
    return Plan(config, info, manifest, layout, tuple(methods), ready)


def check_partition(
    raw: Mapping[str, object], source: str, *, validates: bool | None = None
) -> tuple[SetInfo, Manifest]:
    """The partition of a raw configuration, without a look at its model. `validates` and raises: as `check`; DataError."""
    config = located(sound_config(raw, source))
    sets = open_sets(config)
    config, faults = _split(config, sets, raw, validates)
    refuse(faults, source)
    return sets.info, draw_partition(config, sets)


def _split(config: Config, sets: Sets, raw: Mapping[str, object], validates: bool | None) -> tuple[Config, list[Fault]]:
    """The configuration with its split decided, see `with_split`."""
    is_used = uses_validation(raw) if validates is None else validates
    return with_split(config, sets.images, uses_validation=is_used)


def inspect_model(
    name: str, settings: Settings, size: int | None, channels: int, classes: int
) -> tuple[ModelSpec, Layout, str]:
    """A model by itself: specification, layout, and the first line of its documentation.

    Args:
      settings: of the config's model group.
      size: height and width of the images, or length of the sequences; those that the model was made for, if None.
      classes: for a model that reads tokens also how many different ones there are.
    Raises:
      ConfigError: unknown name, unknown or unfit settings.
    """
    config = sound_config({"model": {**settings, "name": name}}, "the command line")
    try:
        architecture = find_architecture(name)
    except LookupError as error:
        raise ConfigError([Fault("model.name", str(error))], "the command line") from error
    side = size or architecture.size
    reads_tokens = architecture.inputs == "tokens"
    shape = (side,) if reads_tokens else (side, side, channels)
    spec = spec_of(config.model, classes, shape, vocabulary=classes if reads_tokens else 0)
    refuse(_check_model(spec), "the command line")
    return spec, layout_for(config.model, spec, ()), text_of(architecture.build).partition("\n")[0]


# --- the configuration ------------------------------------------------------------------------------------------------


def _parse(raw: Mapping[str, object]) -> tuple[Config | None, list[Method], list[Fault]]:
    """(configuration, methods, faults); where keys have faults, the others still count, with defaults for these."""
    config, faults = parse_config(raw)
    specs = without(raw, faults).get("methods")  # those that hold a fault are known
    methods, method_faults = build_methods(specs if isinstance(specs, list) else [])
    faults += method_faults
    if config is None:
        config, _ = parse_config(without(raw, faults))
    return (None if config is None else located(config)), methods, faults


# --- data -------------------------------------------------------------------------------------------------------------


#: Keys of `data` that are for images alone, and their values that do nothing.
FOR_IMAGES = {"resize": None, "crop": None, "channels": None, "augment": "none", "shift": "none"}


def _check_inputs(config: Config, info: SetInfo) -> list[Fault]:
    """Whether the input pipeline fits the set's inputs."""
    data, shape = config.data, info.shape
    if data.normalise == STANDARD and not info.mean:
        text = "the set has no mean and deviation written down; prepare it again"
        return [Fault("data.normalise", "tokens have no mean; drop it" if info.vocabulary else text)]
    if not info.is_images:
        faults = [
            Fault(
                f"data.{key}",
                f"is for images, and {info.name} holds {info.input_type} inputs of shape {shape}; drop it",
            )
            for key, nothing in FOR_IMAGES.items()
            if getattr(data, key) != nothing
        ]
        if data.normalise not in ("none", STANDARD):
            faults.append(Fault("data.normalise", f"{data.normalise!r} is for images; take standard, or drop it"))
        return faults
    augment, _ = name_and_options(data.augment)
    faults = [
        Fault(f"data.{key}", f"unknown name {name!r}. {nearest(name, list(known))}")
        for key, name, known in (
            ("normalise", data.normalise, {**NORMALISATIONS, STANDARD: ()}),
            ("augment", "none" if ":" in augment else augment, AUGMENTATIONS),
        )
        if name not in known
    ]
    if data.channels is not None and shape[2] not in (1, data.channels):
        faults.append(Fault("data.channels", f"images with {shape[2]} channels cannot get {data.channels}; drop it"))
    channels = data.channels or shape[2]
    statistics, _ = NORMALISATIONS.get(data.normalise, NORMALISATIONS["none"])
    if len(statistics) not in (0, 1, channels):
        text = f"{data.normalise!r} is for {len(statistics)} channels, the inputs have {channels}; set data.channels=3"
        faults.append(Fault("data.normalise", text))
    height, width = (data.resize, data.resize) if data.resize else shape[:2]
    if data.crop is not None and data.crop > min(height, width):
        text = f"{data.crop} is larger than the {height} x {width} images; raise data.resize or lower it"
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
            images, own_faults = or_faults(trial, f"data.{key}")
        faults += own_faults
        if images is not None and not bool(torch.isfinite(images).all()):
            name, _ = name_and_options(getattr(data, key))
            faults.append(Fault(f"data.{key}", f"{name} gives images that are not finite, for random pixels; mend it"))
    return faults


#: Task -> the type of the targets that it reads; one of the user's own reads what it likes.
TARGET_TYPES = {"classes": "int64", "labels": "uint8", "regression": "float32", "tokens": "int32"}


def _check_task(config: Config, info: SetInfo, outputs: tuple[int, ...] | None) -> list[Fault]:
    """Whether the task can read the set's targets and the model's outputs.

    Args:
      outputs: shape of the model's for one example; None: there is no sound model, and they count as the targets need them.
    """
    name, _ = name_and_options(config.task or info.task)
    try:
        task = task_of(config, info)
    except (LookupError, OwnCodeError) as error:
        return [Fault("task", str(error))]
    if info.target_type != TARGET_TYPES.get(name, info.target_type):
        text = f"{name} needs {TARGET_TYPES[name]} targets, and {info.name}, prepared for {info.task}, has {info.target_type}"
        return [Fault("task", text)]
    if outputs is None:
        outputs = (*(info.target_shape if info.target_type == "int32" else ()), len(info.classes))
    targets = torch.zeros(2, *info.target_shape, dtype=getattr(torch, info.target_type))
    text = fits(task, torch.zeros(2, *outputs), targets)
    mend = "; choose another model.per: token or sequence" if info.vocabulary else ""
    return [Fault("task", text + mend)] if text else []


# --- training and stopping --------------------------------------------------------------------------------------------


def training_faults(config: Config, spec: ModelSpec) -> Iterator[Fault]:
    """What would let every client end as it began."""
    if config.local.batch_size == 1 and needs_two_examples(cached_skeleton(spec)):
        text = f"1 trains nothing: {spec.name} has BatchNorm, which needs 2 examples; raise it, or take another norm"
        yield Fault("local.batch_size", text)


def stop_faults(config: Config, methods: Sequence[Method], main: str, *, num_test: int) -> Iterator[Fault]:
    """Conditions that could never be met, or that would leave out a method that works after the last round."""
    conditions = config.stop.model_dump(exclude_none=True)
    for name in conditions:
        if name != "seconds" and not config.evaluation.every:
            text = "looks at evaluations, and evaluation.every 0 has none before the last round; raise that, or drop it"
            yield Fault(f"stop.{name}", text)
        elif name != "seconds" and not num_test:
            yield Fault(f"stop.{name}", "needs test examples, and there are none; raise data.test, or drop it")
    if "accuracy" in conditions and (main != "accuracy" or "score" in conditions):
        text = "and stop.score are two limits of one number; drop one of the two"
        yield Fault(
            "stop.accuracy", text if main == "accuracy" else f"the main metric is {main}; set stop.score instead"
        )
    phase = next((method.name for method in methods if method.is_phase), "")
    if conditions and phase:
        text = f"{phase} works after the last round, so that round must be known; drop one of the two"
        yield Fault("stop", text)


def memory_faults(config: Config, info: SetInfo, manifest: Manifest | None = None) -> list[Fault]:
    """Batches of inputs that this machine cannot hold, by a lower bound: float32 of the images as they are resized.

    Args:
      manifest: None: it is not known yet, and a batch has one example at least.
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
    texts = {name: memory_fault(4 * count * entries) for name, count in batches.items()}
    return [
        Fault(
            key or name,
            f"a batch of {batches[name]} {kind} of {form} {text}; lower it, or data.resize",
        )
        for name, text in texts.items()
        if text
    ][: 1 if key else None]


# --- the model, and the methods on it ---------------------------------------------------------------------------------

_try_once = cached_by_value(try_model)


def _check_model(spec: ModelSpec) -> list[Fault]:
    is_file = spec.pretrained not in (None, "default")  # which may change between two checks
    try:
        architecture = find_architecture(spec.name)
        _, faults = parse_options(architecture.build, spec.options, "model")
        if spec.head is not None and architecture.head:
            faults.append(Fault("model.head", f"{spec.name} has its classifier at {architecture.head}; drop it"))
        if not architecture.head:
            taken = ModelGroup.model_fields.keys() & inspect.signature(architecture.build).parameters.keys()
            faults += [
                Fault("model.name", f"its option {name!r} is a key of raysim's; rename it") for name in sorted(taken)
            ]
        if not faults:
            (try_model if is_file else _try_once)(spec)
    except LookupError as error:
        return [Fault("model.name", str(error))]
    except ConfigError as error:
        return list(error.faults)
    except OwnCodeError as error:
        return [Fault("model", str(error))]
    except ValueError as error:
        kind, resize = ("images", " and data.resize") if len(spec.input_shape) == 3 else ("inputs", "")
        text = f"cannot be built on {kind} of shape {spec.input_shape} ({error}); check its options{resize}"
        return [Fault("model", text)]
    except ModelError as error:
        return [Fault("model.pretrained", str(error))]
    return faults


def _available(config: Config, spec: ModelSpec, manifest: Manifest, info: SetInfo) -> tuple[str, ...]:
    """What methods may need and this run has."""
    local = config.local
    needs = {
        "classes": info.groups is info.classes,
        "features": True,
        "linear-head": True,
        "client-memory": True,
        "validation-set": len(manifest.validation) > 0,
        "test-set": len(manifest.test) > 0,
        "client-order": config.data.validation_set.order == "client",
        "sgd": local.optimizer == "sgd" and not local.nesterov,
        "lora": spec.lora is not None,
    }
    return tuple(need for need, is_there in needs.items() if is_there)


@cached_by_value
def _fit(
    specs: Sequence[str | Settings], model: ModelGroup, spec: ModelSpec, available: Sequence[str]
) -> tuple[Layout | None, Sequence[str]]:
    """(layout of this model under these methods, what keeps them from running on it)."""
    methods, _ = build_methods(specs)
    try:
        layout = layout_for(model, spec, methods)
        if _has_both_factors(spec, layout):
            available = (*available, "lora-factors")
        return layout, (
            *conflicts(methods, resources_of(layout), available, head=head_of(spec)),
            *_init_faults(methods, layout),
        )
    except (ValueError, KeyError) as error:
        return None, (f"do not fit this model ({error})",)


def _has_both_factors(spec: ModelSpec, layout: Layout) -> bool:
    """Whether A and B of every adapter are trained and shared; true without adapters, which is another fault."""
    factors = [name for name, _ in cached_skeleton(spec).named_parameters() if ".lora_" in name]
    return {leaf.name for leaf in layout.shared}.issuperset(factors)


def _init_faults(methods: Sequence[Method], layout: Layout) -> Iterator[str]:
    for method in methods:
        try:
            if method.init is not None:
                method.init(torch.zeros(layout.num_params), layout)
        except ValueError as error:
            yield str(error)
