"""From a raw configuration to a checked plan: every fault at once, before anything starts.

Every step returns what it makes, or faults; `check` alone decides whether to continue with the sound parts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from raysim.base.errors import ConfigError, Fault, ModelError, UserCodeError, refuse
from raysim.base.options import text_of
from raysim.base.settings import Settings, Spec
from raysim.config import Config, ModelGroup, located, parse_config, parse_options, sound_config, without
from raysim.core.conflicts import conflicts, resources_of
from raysim.core.layout import Layout
from raysim.core.method import Method, RunSizes
from raysim.core.stack import Stack
from raysim.data.arrow import SetInfo
from raysim.data.manifest import Manifest
from raysim.models import ModelSpec, find_architecture, head_of, output_shape, try_model
from raysim.plan.build import (
    Plan,
    Ready,
    cached_by_value,
    cached_skeleton,
    layout_for,
    model_spec,
    spec_of,
    with_weights,
)
from raysim.plan.check_data import Sets, draw_partition, open_sets, or_faults
from raysim.plan.check_inputs import input_faults, memory_faults, task_faults
from raysim.plan.find import build_methods, check_metrics, check_user_code, logger_faults
from raysim.plan.resources import check_resources
from raysim.plan.splitting import uses_validation, with_split
from raysim.plan.timing import time_faults
from raysim.training.local import needs_two_examples
from raysim.training.tasks import CLASSES


def check(
    raw: Mapping[str, object],
    source: str,
    *,
    has_room: bool = False,
    ready: Ready | None = None,
    validates: bool | None = None,
    reads_weights: bool = True,
) -> Plan:
    """Check a raw configuration completely, without starting Ray or writing a run.

    Args:
      has_room: resources are already reserved, so they are not compared with this machine's.
      ready: inputs prepared before; the files of the data are then neither read nor needed.
      validates: whether validation rows are used; None: decided from this configuration.
      reads_weights: False: weights named by `model.pretrained` are neither read nor fetched, as for an estimate of
        cost.
    Raises:
      ConfigError: with every fault found.
    """
    config, methods, faults = _parse(raw)
    if config is None:
        raise ConfigError(faults, source)
    user_faults = check_user_code(config)
    if user_faults:
        raise ConfigError(faults + user_faults, source)
    faults += [] if has_room else check_resources(config)
    faults += [*check_metrics(config), *logger_faults(config.loggers)]
    sets, data_faults = (ready, []) if ready is not None else or_faults(partial(open_sets, config), "data")
    faults += data_faults
    if sets is None:
        raise ConfigError(faults, source)
    if isinstance(sets, Sets):
        config, split_faults = _split(config, sets, raw, validates)
        faults += split_faults
    info = sets.info
    if config.task is None and info.task != CLASSES.name:
        config = config.model_copy(update={"task": Spec.of(info.task)})
    if size_faults := memory_faults(config, info):
        raise ConfigError(faults + size_faults, source)
    spec = with_weights(model_spec(config, info), ready.made if ready else None)
    draw = partial(draw_partition, config, sets) if isinstance(sets, Sets) else lambda: sets.manifest
    manifest, partition_faults = or_faults(draw, "partition")
    model_faults = _check_model(spec if reads_weights else replace(spec, pretrained=None))
    faults += input_faults(config, info) + model_faults + partition_faults
    faults += task_faults(config, info, None if model_faults else output_shape(spec))
    if faults or manifest is None:
        raise ConfigError(faults, source)
    faults += memory_faults(config, info, manifest)
    faults += stop_faults(config, methods, num_test=len(manifest.test))
    faults += [*training_faults(config, spec, methods), *time_faults(config, methods)]
    sizes = RunSizes(
        config.num_clients,
        config.cohort_size,
        config.rounds,
        len(info.classes),
        tuple(spec.input_shape),
        tuple(method.name for method in methods),
        config.cohort.sampling,
        config.cohort.dropout,
        config.stop.epsilon,
    )
    for index, method in enumerate(Stack(methods).methods):
        if method.fits is not None and (text := method.fits(sizes)):
            faults.append(Fault(f"methods[{index}].{method.name}", text))
    refuse(faults, source)
    available = _available(config, spec, manifest, info)
    layout, texts = _fit(config.methods, config.model, replace(spec, pretrained=None), available)
    if texts or layout is None:
        raise ConfigError([Fault("methods", text) for text in texts], source)
    return Plan(config, info, manifest, layout, tuple(methods), ready)


def check_partition(
    raw: Mapping[str, object], source: str, *, validates: bool | None = None
) -> tuple[SetInfo, Manifest]:
    """Return the partition of a raw configuration, without checking the model. See `check`; raises DataError, too."""
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
    """Return a model's specification, layout, and first line of documentation.

    Args:
      settings: of the config's model group.
      size: height and width of the images, or length of the sequences; None: the size for which the model was made.
      classes: number of classes; for a model that reads tokens also the size of the vocabulary.
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


def _parse(raw: Mapping[str, object]) -> tuple[Config | None, list[Method], list[Fault]]:
    """Return (configuration, methods, faults); keys with faults have their defaults in the configuration."""
    config, faults = parse_config(raw)
    specs = without(raw, faults).get("methods")  # methods with faults are reported already
    methods, method_faults = build_methods(specs if isinstance(specs, list) else [])
    faults += method_faults
    if config is None:
        config, _ = parse_config(without(raw, faults))
    return (None if config is None else located(config)), methods, faults


def training_faults(config: Config, spec: ModelSpec, methods: Sequence[Method]) -> Iterator[Fault]:
    """Yield faults of training settings: without effect on the network, without a step for any client, or not compilable."""
    if config.local.compile and (names := [method.name for method in methods if method.forward is not None]):
        text = f"{', '.join(names)} replaces operations of layers for each client, which a compiled graph cannot do; set false"
        yield Fault("local.compile", text)
    skeleton = cached_skeleton(spec)
    if config.local.batch_size == 1 and needs_two_examples(skeleton):
        text = f"1 trains nothing: {spec.name} has BatchNorm, which needs 2 examples; raise the batch size, or take another norm"
        yield Fault("local.batch_size", text)


def stop_faults(config: Config, methods: Sequence[Method], *, num_test: int) -> Iterator[Fault]:
    """Yield faults for stop conditions that can never be met, or that would skip a phase method."""
    conditions = config.stop.model_dump(exclude_none=True)
    for name in (each for each in conditions if each != "epsilon"):
        if not config.evaluation.every:
            text = "looks at evaluations, and evaluation.every 0 evaluates only after the last round; raise it, or remove the key"
            yield Fault(f"stop.{name}", text)
        elif not num_test:
            yield Fault(f"stop.{name}", "needs test examples, and the set has none; raise data.test, or remove the key")
    phase = next((method.name for method in methods if method.is_phase), "")
    if conditions and phase:
        text = f"{phase} works after the last round, which must be known in advance; remove one of the two"
        yield Fault("stop", text)


@cached_by_value
def _try_once(spec: ModelSpec, file: tuple[int, int] | None) -> None:
    """file: size and time of the weights; a changed file is checked again."""
    try_model(spec)


def _stamp(pretrained: str | None) -> tuple[int, int] | None:
    try:
        status = os.stat(pretrained or "")
    except (OSError, ValueError):  # no file of weights
        return None
    return status.st_size, status.st_mtime_ns


def _check_model(spec: ModelSpec) -> list[Fault]:
    try:
        architecture = find_architecture(spec.name)
        _, faults = parse_options(architecture.build, spec.options, "model")
        if spec.head is not None and architecture.head:
            faults.append(Fault("model.head", f"{spec.name} has the classifier at {architecture.head}; drop it"))
        if not architecture.head:
            taken = ModelGroup.model_fields.keys() & inspect.signature(architecture.build).parameters.keys()
            texts = (f"option {name!r} is a key of raysim's; rename the option" for name in sorted(taken))
            faults += [Fault("model.name", text) for text in texts]
        if not faults:
            _try_once(spec, _stamp(spec.pretrained))
    except LookupError as error:
        return [Fault("model.name", str(error))]
    except ConfigError as error:
        return list(error.faults)
    except UserCodeError as error:
        return [Fault("model", str(error))]
    except ValueError as error:
        kind, resize = ("images", " and data.resize") if len(spec.input_shape) == 3 else ("inputs", "")
        text = f"cannot be built on {kind} of shape {spec.input_shape} ({error}); check its options{resize}"
        return [Fault("model", text)]
    except ModelError as error:
        return [Fault("model.pretrained", str(error))]
    return faults


def _available(config: Config, spec: ModelSpec, manifest: Manifest, info: SetInfo) -> tuple[str, ...]:
    """Return the needs of methods that this run meets."""
    needs = {
        "classes": info.groups is info.classes,
        "validation-set": len(manifest.validation) > 0,
        "test-set": len(manifest.test) > 0,
        "client-order": config.data.validation_set.order == "client",
        "sgd": config.local.optimizer == "sgd",
        "lora": spec.lora is not None,
        "clock": config.time is not None,
    }
    return ("features", "linear-head", "client-memory", *(need for need, is_there in needs.items() if is_there))


@cached_by_value
def _fit(
    specs: Sequence[Spec], model: ModelGroup, spec: ModelSpec, available: Sequence[str]
) -> tuple[Layout | None, Sequence[str]]:
    """Return (layout of the model under the methods, conflicts)."""
    methods, _ = build_methods(specs)
    try:
        layout = layout_for(model, spec, methods)
        if _has_both_factors(spec, layout):
            available = (*available, "lora-factors")
        reasons = conflicts(methods, resources_of(layout), available, head=head_of(spec))
        return layout, (*reasons, *_init_faults(methods, layout))
    except (ValueError, KeyError) as error:
        return None, (f"do not fit the model ({error})",)


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
