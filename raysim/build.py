"""From a checked plan to servers and trainers.

What crosses to actors is a `Recipe`, names and numbers, from which each process builds its own parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from raysim.config import CohortGroup, Config
from raysim.core.errors import ConfigError
from raysim.core.layout import Layout, float_buffers, layout_of, norm_names
from raysim.core.method import Method, Partition
from raysim.core.stack import Stack
from raysim.data.arrow import SetInfo
from raysim.data.federation import Federation
from raysim.data.manifest import Manifest
from raysim.engine.plan import Phase
from raysim.engine.pool import Pool
from raysim.engine.scores import FederationSizes
from raysim.engine.server import Server
from raysim.engine.trainer import Trainer
from raysim.find import build_methods, further_metrics
from raysim.models import (
    LoraSpec,
    ModelSpec,
    build_model,
    build_skeleton,
    head_of,
    prefers_channels_last,
)
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS, InputTransform
from raysim.training.local import LocalSettings
from raysim.training.model import state_of


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


def cached_skeleton(spec: ModelSpec) -> torch.nn.Module:
    """Parameters and their shapes, without values; shared, so not to be changed."""
    return _skeleton_of(pickle.dumps(replace(spec, pretrained=None)))


@lru_cache(maxsize=64)
def _skeleton_of(spec: bytes) -> torch.nn.Module:
    return build_skeleton(pickle.loads(spec))


def model_spec(config: Config, num_classes: int, shape: tuple[int, int, int]) -> ModelSpec:
    """The model's view of the configuration; keys of the model group that are not raysim's are its options.

    Args:
      shape: (height, width, channels) of the stored images; the model gets that of the inputs made of them.
    """
    height, width = input_transform(config).output_size(*shape[:2])
    inputs = (height, width, config.data.channels or shape[2])
    options = dict(config.model.model_extra or {})
    return ModelSpec(config.model.name, num_classes, inputs, options, config.model.pretrained, lora_spec(config))


def lora_spec(config: Config) -> LoraSpec | None:
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


def layout_of_model(spec: ModelSpec, methods: Sequence[Method], *, channels_last: bool, blocks: str) -> Layout:
    skeleton = cached_skeleton(spec)
    head = head_of(spec)
    trained = frozenset(name for name, parameter in skeleton.named_parameters() if parameter.requires_grad)
    everything = Partition(trained, trained | float_buffers(skeleton).keys(), head, frozenset(norm_names(skeleton)))
    partition = Stack(methods).partition(everything)
    return layout_of(
        skeleton,
        head=head,
        trained=partition.trained,
        shared=partition.shared,
        channels_last=channels_last,
        blocks=blocks,
    )


def layout_for(config: Config, spec: ModelSpec, methods: Sequence[Method]) -> Layout:
    channels_last = uses_channels_last(config, spec)
    return layout_of_model(spec, methods, channels_last=channels_last, blocks=config.model.blocks)


def _parts(recipe: Recipe) -> tuple[Config, ModelSpec, list[Method], Layout]:
    config = Config.model_validate(recipe.config)
    spec = model_spec(config, recipe.num_classes, recipe.shape)
    methods, faults = build_methods(config.methods)
    if faults:  # checked by the driver, so a worker sees another code than the driver
        raise ConfigError(faults, "the recipe, in a worker")
    return config, spec, methods, layout_for(config, spec, methods)


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
