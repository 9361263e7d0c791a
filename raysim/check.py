"""From a raw configuration to a checked plan: every fault at once, before anything starts."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from raysim.build import (
    Plan,
    cached_skeleton,
    layout_for,
    layout_of_model,
    local_settings,
    lora_spec,
    model_spec,
    uses_channels_last,
)
from raysim.config import JOB_VARIABLE, Config, located, parse_config, parse_options
from raysim.config import nearest as nearest_name
from raysim.core.errors import ConfigError, DataError, Fault, ModelError
from raysim.core.layout import Layout
from raysim.core.method import Method
from raysim.core.stack import conflicts, resources_of
from raysim.data.arrow import ImageSet, SetInfo
from raysim.data.manifest import Manifest, PartitionSpec, make_manifest
from raysim.data.partition import SCHEMES
from raysim.data.remote import fetch_set, is_remote
from raysim.data.sources import SOURCES, prepare, set_path
from raysim.data.validation import ValidationSpec
from raysim.find import build_methods, describe, find_metric, read_mapping
from raysim.models import (
    ModelSpec,
    find_architecture,
    head_of,
    try_model,
)
from raysim.resources import check_resources
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS

BUNDLED = ("digits", "shapes")


def check(raw: Mapping[str, Any], source: str, *, has_room: bool = False) -> Plan:
    """Check a raw configuration completely, without starting Ray or writing a run.

    Args:
      has_room: its resources were reserved already, perhaps on a smaller machine than the one that checked them.
    Raises:
      ConfigError: with every fault found.
    """
    specs = raw.get("methods")
    config, faults = parse_config(raw)
    methods, method_faults = build_methods(specs if isinstance(specs, list) else [])
    faults += method_faults
    if config is None:  # what is sound is still checked, with defaults for what is not
        config, _ = parse_config(_without(raw, faults))
    if config is None:
        raise ConfigError(faults, source)
    config = located(config)
    faults += [] if has_room else check_resources(config)
    plan: Plan | None = None
    try:
        images = _open_set(config, config.data.name)
        faults += _check_inputs(config, images.info.shape)
        spec = model_spec(config, len(images.info.classes), images.info.shape)
        faults += _check_model(spec)
        external = config.data.validation_set.external.name
        tests, wrong = _open_tests(config)
        faults += wrong + _check_metrics(config)
        manifest = _manifest(images, partition_spec(config), _open_set(config, external) if external else None, tests)
        if not faults:
            available = {"features", "linear-head", "client-memory"}
            available |= {"validation-set"} if len(manifest.validation) else set()
            available |= {"client-order"} if config.data.validation_set.order == "client" else set()
            local = local_settings(config)
            available |= {"sgd"} if local.optimizer == "sgd" and not local.nesterov else set()
            available |= {"lora"} if spec.lora is not None else set()
            try:
                layout, found = _fit(config, spec, available)
            except (ValueError, KeyError) as error:
                raise ConfigError([Fault("methods", f"do not fit this model ({error})")], source) from error
            faults += [Fault("methods", text) for text in found]
            plan = Plan(config, images.info, manifest, layout, tuple(methods))
    except DataError as error:
        faults.append(Fault("partition" if error.where.startswith("partition ") else "data", str(error)))
    if faults or plan is None:
        raise ConfigError(faults, source)
    return plan


def check_partition(raw: Mapping[str, Any], source: str) -> tuple[Config, SetInfo, Manifest]:
    """The partition of a raw configuration, without a look at its model and methods.

    Raises:
      ConfigError: faults of the configuration. DataError: no such set, or no such partition of it.
    """
    config, faults = parse_config(raw)
    if config is None:
        raise ConfigError(faults, source)
    config = located(config)
    images, external = _open_set(config, config.data.name), config.data.validation_set.external.name
    tests, faults = _open_tests(config)
    if faults:
        raise ConfigError(faults, source)
    manifest = _manifest(images, partition_spec(config), _open_set(config, external) if external else None, tests)
    return config, images.info, manifest


def _without(raw: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    """The configuration without the keys that faults stand at."""
    pruned = copy.deepcopy(dict(raw))
    for fault in faults:
        *parents, last = fault.key.split(".")
        group: Any = pruned
        for parent in parents:
            group = group.get(parent, {}) if isinstance(group, dict) else {}
        if isinstance(group, dict):
            group.pop(last, None)
    return pruned


def data_cache(config: Config) -> Path:
    """Where shards, and copies of remote sets, are kept: beside the prepared sets if these are local."""
    if is_remote(config.data.root):
        return Path(config.storage).absolute() / "cache"
    return Path(config.data.root).absolute()


def _open_set(config: Config, name: str) -> ImageSet:
    if is_remote(config.data.root):
        return ImageSet(set_path(fetch_set(config.data.root, name, data_cache(config)), name))
    root = Path(config.data.root)
    path = set_path(root, name)
    if not path.is_file() and name in BUNDLED:
        try:
            prepare(name, root)
        except OSError as error:
            raise DataError(f"cannot write there ({error})", str(root), "set data.root to a folder of yours") from error
    if not path.is_file() and name not in SOURCES:
        raise DataError(f"no prepared set {name!r}", str(path), nearest_name(name, list(SOURCES)))
    if not path.is_file() and JOB_VARIABLE in os.environ:
        raise DataError(
            f"no prepared set {name!r}",
            str(path),
            f"a job sees the disks of its cluster: run `raysim prepare {name} --out {root}` there, or set data.root to a "
            "folder that the cluster has, or to a URI such as s3://bucket/data",
        )
    return ImageSet(path)


def _open_tests(config: Config) -> tuple[dict[str, ImageSet], list[Fault]]:
    """(further test sets by name, faults)."""
    tests: dict[str, ImageSet] = {}
    faults = []
    for name in config.data.test_sets:
        if name in tests or name == config.data.name:
            faults.append(Fault("data.test_sets", f"{name!r} is tested on already; name it once"))
        else:
            tests[name] = _open_set(config, name)
    return tests, faults


def _check_metrics(config: Config) -> list[Fault]:
    names = [name.rpartition(":")[2] for name in config.evaluation.metrics]
    taken = ("accuracy", "loss", "balanced_accuracy", "macro_f1", "calibration_error")
    faults = []
    for index, (name, short) in enumerate(zip(config.evaluation.metrics, names, strict=True)):
        key = f"evaluation.metrics[{index}]"
        try:
            if not callable(find_metric(name)):
                faults.append(Fault(key, f"{name!r} is no function; a metric is function(labels, logits) -> number"))
        except LookupError as error:
            faults.append(Fault(key, str(error)))
        if short in taken or short in names[:index]:
            faults.append(Fault(key, f"server/{short} is there already; drop it, or give the function another name"))
    return faults


def _check_inputs(config: Config, shape: tuple[int, int, int]) -> list[Fault]:
    """Whether the input pipeline fits images of this shape."""
    data = config.data
    faults = []
    for key, known in (("normalise", list(NORMALISATIONS)), ("augment", list(AUGMENTATIONS))):
        if getattr(data, key) not in known:
            faults.append(
                Fault(f"data.{key}", f"unknown name {getattr(data, key)!r}. {nearest_name(getattr(data, key), known)}")
            )
    if data.channels is not None and shape[2] not in (1, data.channels):
        faults.append(Fault("data.channels", f"images with {shape[2]} channels cannot get {data.channels}; drop it"))
    channels = data.channels or shape[2]
    statistics = NORMALISATIONS.get(data.normalise, NORMALISATIONS["none"])[0]
    if len(statistics) not in (0, 1, channels):
        faults.append(
            Fault(
                "data.normalise",
                f"{data.normalise!r} is for {len(statistics)} channels, the inputs have {channels}; set data.channels=3",
            )
        )
    height, width = (data.resize, data.resize) if data.resize else shape[:2]
    if data.crop is not None and data.crop > min(height, width):
        faults.append(
            Fault(
                "data.crop", f"{data.crop} is larger than the {height} x {width} images; raise data.resize or lower it"
            )
        )
    return faults


def _check_model(spec: ModelSpec) -> list[Fault]:
    try:
        _, faults = parse_options(find_architecture(spec.name).build, spec.options, "model")
        if not faults:
            _try_model(spec)
    except LookupError as error:
        return [Fault("model.name", str(error))]
    except ValueError as error:
        text = f"cannot be built on images of shape {spec.input_shape} ({error}); check its options and data.resize"
        return [Fault("model", text)]
    except ModelError as error:
        return [Fault("model.pretrained", str(error))]
    return faults


def _init_faults(methods: Sequence[Method], layout: Layout) -> list[str]:
    faults = []
    for method in methods:
        if method.init is not None:
            try:
                method.init(torch.zeros(layout.num_params), layout)
            except ValueError as error:
                faults.append(str(error))
    return faults


def _manifest(
    images: ImageSet, spec: PartitionSpec, external: ImageSet | None, tests: Mapping[str, ImageSet]
) -> Manifest:
    made = _manifest_of(
        images.path,
        images.info.checksum,
        spec,
        *((external.path, external.info.checksum) if external else (None, "")),
        tuple((name, test.path, test.info.checksum) for name, test in tests.items()),
    )
    if isinstance(made, DataError):
        raise made
    return made


@lru_cache(maxsize=64)
def _manifest_of(
    path: Path,
    checksum: str,
    spec: PartitionSpec,
    external: Path | None,
    external_checksum: str,
    tests: tuple[tuple[str, Path, str], ...],
) -> Manifest | DataError:
    others = {name: ImageSet(test) for name, test, _ in tests}
    try:
        return make_manifest(ImageSet(path), spec, ImageSet(external) if external else None, others)
    except DataError as error:  # kept as well: to find that no draw succeeds takes ten seconds
        return error


def _try_model(spec: ModelSpec) -> None:
    if spec.pretrained not in (None, "default"):  # a file, which may change
        try_model(spec)
    else:
        _try_model_of(pickle.dumps(spec))


@lru_cache(maxsize=256)
def _try_model_of(spec: bytes) -> None:
    try_model(pickle.loads(spec))


def _fit(config: Config, spec: ModelSpec, available: Collection[str]) -> tuple[Layout, tuple[str, ...]]:
    """(layout of this model under the configured methods, what keeps these from running on it).

    Raises:
      ValueError, KeyError: a method's partition of the parameters is impossible.
    """
    structure = replace(spec, pretrained=None)
    named = (config.methods, structure, uses_channels_last(config, spec), config.model.blocks)
    return _fit_of(pickle.dumps(named), frozenset(available))


@lru_cache(maxsize=256)
def _fit_of(named: bytes, available: frozenset[str]) -> tuple[Layout, tuple[str, ...]]:
    specs, spec, channels_last, blocks = pickle.loads(named)
    methods, _ = build_methods(specs)
    layout = layout_of_model(spec, methods, channels_last=channels_last, blocks=blocks)
    if _has_both_factors(spec, layout):
        available |= {"lora-factors"}
    found = conflicts(methods, resources_of(layout), available, head=head_of(spec))
    return layout, (*found, *_init_faults(methods, layout))


def _has_both_factors(spec: ModelSpec, layout: Layout) -> bool:
    """Whether A and B of every adapter are trained and shared; true without adapters, which is another fault."""
    factors = [name for name, _ in cached_skeleton(spec).named_parameters() if ".lora_" in name]
    shared = {leaf.name for leaf in layout.shared}
    return shared.issuperset(factors)


def partition_spec(config: Config) -> PartitionSpec:
    """The data layer's view of the configuration."""
    part, chosen = config.partition, config.data.validation_set
    assert part.scheme in SCHEMES
    return PartitionSpec(
        scheme=part.scheme,
        form="" if config.is_joint else part.form or "",
        alpha=part.alpha,
        num_clients=config.num_clients,
        min_samples=part.min_samples,
        shards_per_client=part.shards_per_client,
        domains_per_client=part.domains_per_client,
        samples_per_client=part.samples_per_client,
        test=config.data.test,
        validation=config.data.validation,
        split=config.data.split,
        within_clients=config.data.split_within_clients,
        validation_set=ValidationSpec(
            subset=chosen.subset,
            imbalance=chosen.imbalance,
            label_noise=chosen.label_noise,
            order=chosen.order,
            mapping=read_mapping(chosen.external.mapping) if chosen.external.mapping else (),
            unique=chosen.external.unique,
        ),
        seed=config.seed if part.seed is None else part.seed,
    )


def inspect_model(
    name: str, settings: Mapping[str, Any], size: int | None, channels: int, classes: int
) -> tuple[ModelSpec, Layout, str]:
    """A model by itself: specification, layout, and the first line of its documentation.

    Args:
      settings: of the config's model group.
      size: height and width of the images; those that the model was made for, if None.
    Raises:
      ConfigError: unknown name, unknown or unfit settings.
    """
    config, faults = parse_config({"model": {**settings, "name": name}})
    if config is None:
        raise ConfigError(faults, "the command line")
    try:
        side = size or find_architecture(name).size
    except LookupError as error:
        raise ConfigError([Fault("model.name", str(error))], "the command line") from error
    spec = ModelSpec(
        name,
        classes,
        (side, side, channels),
        dict(config.model.model_extra or {}),
        config.model.pretrained,
        lora_spec(config),
    )
    if faults := _check_model(spec):
        raise ConfigError(faults, "the command line")
    return spec, layout_for(config, spec, ()), describe(find_architecture(name).build)[1]
