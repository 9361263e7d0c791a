"""The composition root: from a configuration to a checked plan, and from a plan to servers and trainers.

Only this module knows all the others. What crosses to actors is a `Recipe`, names and numbers, from which each process
builds its own parts.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from methods import METHODS
from raysim.config import JOB_VARIABLE, CohortGroup, Config, located, parse_config, parse_options, read_config
from raysim.config import nearest as nearest_name
from raysim.core.errors import ConfigError, DataError, Fault, ModelError
from raysim.core.layout import Layout, layout_of
from raysim.core.method import Method
from raysim.core.stack import Stack, conflicts, resources_of
from raysim.data.arrow import ImageSet, SetInfo
from raysim.data.federation import Federation
from raysim.data.manifest import Manifest, PartitionSpec, make_manifest
from raysim.data.partition import SCHEMES
from raysim.data.remote import fetch_set, is_remote
from raysim.data.sources import SOURCES, prepare, set_path
from raysim.data.validation import ValidationSpec
from raysim.engine.plan import Phase, fitting
from raysim.engine.pool import Pool
from raysim.engine.scores import FederationSizes
from raysim.engine.server import Server
from raysim.engine.trainer import Trainer
from raysim.models import (
    LoraSpec,
    ModelSpec,
    build_model,
    build_skeleton,
    find_architecture,
    head_of,
    prefers_channels_last,
    try_model,
)
from raysim.option_files import read_option_files
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS, InputTransform
from raysim.training.local import LocalSettings
from raysim.training.metrics import METRICS, Metric
from raysim.training.model import state_of

BUNDLED = ("digits", "shapes")

#: Class mappings for external validation sets that come with the sources.
MAPPINGS = Path(__file__).parent.parent / "configs" / "mappings"


@dataclass(frozen=True)
class Recipe:
    """Everything a process needs to build its server or trainer.

    shards: folder on the driver's node; shard_host: name of the actor that serves its files to other nodes.
    """

    config: dict[str, Any]
    shards: str
    num_classes: int
    shape: tuple[int, int, int]
    num_threads: int = 1
    wants_gpu: bool = False
    shard_host: str = ""


@dataclass(frozen=True)
class Plan:
    """A configuration that was checked as far as it can be without starting anything."""

    config: Config
    info: SetInfo
    manifest: Manifest
    layout: Layout
    methods: tuple[Method, ...]

    @property
    def keeps_memory(self) -> bool:
        """Whether clients keep anything between rounds."""
        is_personal = bool(self.layout.personal)
        return is_personal or any("client-memory" in method.needs for method in self.methods)

    @property
    def num_rounds(self) -> int:
        return sum(phase.rounds for phase in make_phases(self.config, self.methods))


# --- checking ---------------------------------------------------------------------------------------------------------


def check(raw: Mapping[str, Any], source: str, *, has_room: bool = False) -> Plan:
    """Check a raw configuration completely, without starting Ray or writing a run.

    Args:
      has_room: its resources were reserved already, perhaps on a smaller machine than the one that checked them.
    Raises:
      ConfigError: with every fault found.
    """
    specs: Any = raw.get("methods")
    file_faults: list[Fault] = []
    if isinstance(specs, list):
        specs, file_faults = read_option_files(specs, find_method)
        raw = {**raw, "methods": specs}
    config, faults = parse_config(raw)
    methods, method_faults = build_methods(specs if isinstance(specs, list) else [])
    faults += file_faults + method_faults
    if config is None:  # what is sound is still checked, with defaults for what is not
        config, _ = parse_config(_without(raw, faults))
    if config is None:
        raise ConfigError(faults, source)
    config = located(config)
    faults += [] if has_room else _check_resources(config)
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


def build_methods(specs: Sequence[Any]) -> tuple[list[Method], list[Fault]]:
    """Methods from their configuration: a name, or {name: {option: value}}; a name may be `module:function`."""
    methods, faults = [], []
    for index, item in enumerate(specs):
        key = f"methods[{index}]"
        if isinstance(item, dict) and len(item) == 1:
            ((name, options),) = item.items()
        else:
            name, options = item, {}
        if not isinstance(name, str) or not isinstance(options or {}, dict):
            faults.append(Fault(key, f"must be a name or {{name: {{option: value}}}}, got {item!r}"))
            continue
        try:
            make = find_method(name)
        except LookupError as error:
            faults.append(Fault(key, str(error)))
            continue
        try:
            parsed, bad = parse_options(make, options or {}, f"{key}.{name}")
            faults += bad
            method = None if bad else make(**parsed)
        except Exception as error:  # a method of the user's own may raise anything
            faults.append(Fault(f"{key}.{name}", str(error)))
            continue
        if isinstance(method, Method):
            methods.append(method)
        elif not bad:
            faults.append(
                Fault(f"{key}.{name}", f"returned {type(method).__name__}; a method's function returns a Method")
            )
    return methods, faults


def find_method(name: str) -> Callable[..., Method]:
    """The function behind a method's name, or behind `module:function` for methods that live elsewhere.

    Raises:
      LookupError: there is none; says what is known.
    """
    if name in METHODS:
        return METHODS[name]
    module_name, colon, function = name.partition(":")
    if not colon:
        raise LookupError(
            f"unknown method {name!r}. {nearest_name(name, list(METHODS))}; or module:function for your own"
        )
    try:
        return getattr(importlib.import_module(module_name), function)
    except Exception as error:  # whatever the module's own code raises
        raise LookupError(f"cannot import method {name!r}: {error}; is the module on the Python path?") from error


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


def find_metric(name: str) -> Metric:
    """The metric of that name, or behind `module:function` for one that lives elsewhere.

    Raises:
      LookupError: there is none; says what is known.
    """
    if name in METRICS:
        return METRICS[name]
    module_name, colon, function = name.partition(":")
    if not colon:
        raise LookupError(
            f"unknown metric {name!r}. {nearest_name(name, list(METRICS))}; or module:function for your own"
        )
    try:
        return getattr(importlib.import_module(module_name), function)
    except Exception as error:  # whatever the module's own code raises
        raise LookupError(f"cannot import metric {name!r}: {error}; is the module on the Python path?") from error


def further_metrics(config: Config) -> dict[str, Metric]:
    """The further metrics of the configuration; `module:function` is called by its function."""
    return {name.rpartition(":")[2]: find_metric(name) for name in config.evaluation.metrics}


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


def read_mapping(name: str) -> tuple[tuple[str, str], ...]:
    """(class of the set, class of the external set) pairs of a YAML file, or of a shipped one by its name.

    Raises:
      DataError: no such file, or not a mapping of a class to a list of classes.
    """
    shipped = {file.stem: file for file in sorted(MAPPINGS.glob("*.yaml"))}
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise DataError(f"no such mapping {name!r}", "data.validation_set.external", nearest_name(name, list(shipped)))
    classes = read_config(path)
    if not classes or not all(isinstance(sources, list) and sources for sources in classes.values()):
        raise DataError("not a mapping of classes to lists", str(path), "write it as `dog: [wolf, fox]`")
    return tuple((str(target), str(source)) for target, sources in classes.items() for source in sources)


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


def _check_resources(config: Config) -> list[Fault]:
    """More than this machine has is refused here; what a cluster has is known only once connected."""
    resources = config.resources
    cores = os.cpu_count() or 1
    if resources.backend == "serial" or os.environ.get("RAY_ADDRESS") or resources.trainers == "auto":
        return []
    per_trainer = 1.0 if resources.cpus_per_trainer == "auto" else resources.cpus_per_trainer
    if resources.trainers < 1:
        return [Fault("resources.trainers", f"must be >= 1 or auto, got {resources.trainers}")]
    if resources.trainers * per_trainer > cores:
        return [
            Fault(
                "resources.trainers",
                f"{resources.trainers} trainers with {per_trainer:g} CPUs each need {resources.trainers * per_trainer:g}, "
                f"this machine has {cores}; lower resources.trainers or resources.cpus_per_trainer, or set auto",
            )
        ]
    return []


# A sweep checks hundreds of configurations, with few partitions and models among them, which take 0.1 s and more each.
# Bytes: a specification holds a dictionary, which cannot be a key.


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


def _skeleton(spec: ModelSpec) -> torch.nn.Module:
    """Parameters and their shapes, without values; shared, so not to be changed."""
    return _skeleton_of(pickle.dumps(replace(spec, pretrained=None)))


@lru_cache(maxsize=64)
def _skeleton_of(spec: bytes) -> torch.nn.Module:
    return build_skeleton(pickle.loads(spec))


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
    layout = _layout(spec, methods, channels_last=channels_last, blocks=blocks)
    found = conflicts(methods, resources_of(layout), available, head=head_of(spec))
    return layout, (*found, *_init_faults(methods, layout))


# --- parts, from numbers ----------------------------------------------------------------------------------------------


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


def model_spec(config: Config, num_classes: int, shape: tuple[int, int, int]) -> ModelSpec:
    """The model's view of the configuration; keys of the model group that are not raysim's are its options.

    Args:
      shape: (height, width, channels) of the stored images; the model gets that of the inputs made of them.
    """
    height, width = input_transform(config).output_size(*shape[:2])
    inputs = (height, width, config.data.channels or shape[2])
    options = dict(config.model.model_extra or {})
    return ModelSpec(config.model.name, num_classes, inputs, options, config.model.pretrained, _lora_spec(config))


def _lora_spec(config: Config) -> LoraSpec | None:
    group = config.model.lora
    return None if group is None else LoraSpec(group.rank, group.alpha, tuple(group.targets), group.dropout)


def fetch_weights(plan: Plan) -> None:
    """Fetch the library's pretrained weights, if the run wants them, before all trainers ask for them at once.

    Raises:
      ModelError: they cannot be fetched.
    """
    if plan.config.model.pretrained == "default":
        build_model(model_spec(plan.config, len(plan.info.classes), plan.info.shape), seed=plan.config.seed)


def input_transform(config: Config, *, channels_last: bool = False) -> InputTransform:
    """The input pipeline of the configuration; unknown names (checked elsewhere) count as none."""
    data = config.data
    mean, std = NORMALISATIONS.get(data.normalise, NORMALISATIONS["none"])
    return InputTransform(
        mean=mean,
        std=std,
        channels_last=channels_last,
        resize=(data.resize, data.resize) if data.resize else None,
        crop=(data.crop, data.crop) if data.crop else None,
        channels=data.channels,
        augmentation=AUGMENTATIONS.get(data.augment),
        interpolation=data.interpolation,
    )


def local_settings(config: Config) -> LocalSettings:
    """The local loop's view of the configuration."""
    return LocalSettings(**config.local.model_dump(), num_rounds=config.rounds)


def make_phases(config: Config, methods: Sequence[Method]) -> list[Phase]:
    """The rounds of the run, then one round with all clients and no local step for each method that is a phase."""
    settings = local_settings(config)
    cohort = CohortGroup() if config.is_joint else config.cohort
    main = Phase(
        tuple(m for m in methods if not m.is_phase),
        settings,
        config.rounds,
        config.cohort_size,
        cohort.dropout,
        cohort.stragglers,
        cohort.straggler_work,
    )
    last = LocalSettings(**{**vars(settings), "steps": 0})
    return [main, *(Phase((m,), last, 1, config.num_clients) for m in methods if m.is_phase)]


def uses_channels_last(config: Config, spec: ModelSpec) -> bool:
    """Whether convolutions lie channels-last in this run."""
    wanted = config.model.channels_last
    return prefers_channels_last(spec) if wanted == "auto" else wanted


def _layout(spec: ModelSpec, methods: Sequence[Method], *, channels_last: bool, blocks: str) -> Layout:
    skeleton = _skeleton(spec)
    head = head_of(spec)
    partition = Stack(methods).partition((name for name, p in skeleton.named_parameters() if p.requires_grad), head)
    return layout_of(
        skeleton,
        head=head,
        trained=partition.trained,
        shared=partition.shared,
        channels_last=channels_last,
        blocks=blocks,
    )


def _layout_of(config: Config, spec: ModelSpec, methods: Sequence[Method]) -> Layout:
    channels_last = uses_channels_last(config, spec)
    return _layout(spec, methods, channels_last=channels_last, blocks=config.model.blocks)


def _parts(recipe: Recipe) -> tuple[Config, ModelSpec, list[Method], Layout]:
    config = Config.model_validate(recipe.config)
    spec = model_spec(config, recipe.num_classes, recipe.shape)
    methods, faults = build_methods(config.methods)
    if faults:  # checked by the driver, so a worker sees another code than the driver
        raise ConfigError(faults, "the recipe, in a worker")
    return config, spec, methods, _layout_of(config, spec, methods)


def open_federation(recipe: Recipe) -> Federation:
    """The shards as this process can reach them: mapped where they are, or fetched from the driver's node."""
    if not recipe.shard_host:
        return Federation(Path(recipe.shards))
    from raysim.engine.ray.shards import shard_fetcher

    return Federation(*shard_fetcher(recipe.shards, recipe.shard_host))


def make_trainer(recipe: Recipe) -> Trainer:
    """A trainer in the process that calls this."""
    config, spec, methods, layout = _parts(recipe)
    channels_last = uses_channels_last(config, spec)
    return Trainer(
        module=build_model(spec, seed=config.seed),
        layout=layout,
        head=head_of(spec),
        phases=make_phases(config, methods),
        federation=open_federation(recipe),
        transform=input_transform(config, channels_last=channels_last),
        num_classes=recipe.num_classes,
        seed=config.seed,
        device="cuda" if recipe.wants_gpu and torch.cuda.is_available() else "cpu",
        num_threads=recipe.num_threads,
        evaluation_batch=config.evaluation.batch_size,
        build=partial(build_model, spec),
        keeps_logits=bool(config.evaluation.metrics),
    )


def make_server(recipe: Recipe, pool: Pool) -> Server:
    """The server in the process that calls this, at the initial parameters of the seed."""
    config, spec, methods, layout = _parts(recipe)
    module = build_model(spec, seed=config.seed)
    federation = open_federation(recipe)
    return Server(
        pool=pool,
        layout=layout,
        state=state_of(module, layout),
        phases=make_phases(config, methods),
        sizes=sizes_of(federation),
        seed=config.seed,
        skips_single=any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules()),
        on_nonfinite=config.on_nonfinite,
        evaluate_every=config.evaluation.every,
        metrics=further_metrics(config),
    )


def sizes_of(federation: Federation) -> FederationSizes:
    """The federation in numbers, as the server needs it."""
    shared = [part.name for part in fields(FederationSizes) if part.name != "examples"]
    return FederationSizes(federation.sizes, **{name: getattr(federation, name) for name in shared})


def resolve_resources(
    config: Config, cpus: float, gpus: float, rooms: Sequence[tuple[float, float]] = ()
) -> tuple[int, float, float]:
    """(trainers, CPUs per trainer, GPUs per trainer) on so many CPUs and GPUs; without a GPU everything runs on CPUs.

    `auto`: one CPU a trainer, as many trainers as CPUs; with GPUs at most four trainers on each.

    Args:
      rooms: (CPUs, GPUs) of each node, or bundle, where there are several: no trainer lies on two.
    Raises:
      ConfigError: more was asked for than there is.
    """
    wanted = config.resources
    per_cpu = 1.0 if wanted.cpus_per_trainer == "auto" else float(wanted.cpus_per_trainer)
    asked_gpu = wanted.gpus_per_trainer
    share = 0.0
    if gpus and asked_gpu:
        share = 0.25 if asked_gpu == "auto" else float(asked_gpu)
    places = [room for room in rooms or [(cpus, gpus)] if room[1] or not share]
    fits = [fitting(room_cpus, room_gpus, per_cpu, share) for room_cpus, room_gpus in places]
    trainers = max(1, sum(fits)) if wanted.trainers == "auto" else wanted.trainers
    per_gpu = 0.0
    if gpus and asked_gpu == "auto":
        each = -(-trainers // int(gpus)) if gpus >= 1 else trainers / gpus
        if wanted.trainers == "auto":  # the fullest GPU decides
            each = max([each, *(-(-n // int(room[1])) for n, room in zip(fits, places, strict=True) if room[1] >= 1)])
        per_gpu = 1.0 if each <= 1 else int(1e4 / each) / 1e4
    elif gpus:
        per_gpu = float(asked_gpu)
    faults = []
    if trainers * per_cpu > cpus + 1e-9:
        faults.append(
            Fault(
                "resources.trainers",
                f"{trainers} trainers with {per_cpu:g} CPUs each need more than the {cpus:g} CPUs that Ray offers this job",
            )
        )
    if trainers * per_gpu > gpus + 1e-9:
        faults.append(
            Fault(
                "resources.gpus_per_trainer",
                f"{trainers} trainers with {per_gpu:g} GPUs each need more than the {gpus:g} GPUs that Ray offers this job",
            )
        )
    if faults:
        raise ConfigError(faults, "the resources")
    return trainers, per_cpu, per_gpu


def describe(make: Callable[..., Any]) -> tuple[str, str]:
    """(options, first line of the documentation) of a method's or a model's function."""
    function = make.func if isinstance(make, partial) else make
    signature = inspect.signature(make, eval_str=True)
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    shown = signature.replace(parameters=options, return_annotation=signature.empty)
    return str(shown), (inspect.getdoc(function) or "").partition("\n")[0]


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
        _lora_spec(config),
    )
    if faults := _check_model(spec):
        raise ConfigError(faults, "the command line")
    return spec, _layout_of(config, spec, ()), describe(find_architecture(name).build)[1]
