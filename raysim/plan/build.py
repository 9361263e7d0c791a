"""From a checked plan to servers and trainers.

Actors get a `Recipe` of names and numbers, from which each process builds its own parts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from raysim.base.errors import refuse
from raysim.base.user_code import UserCode, packed, receive
from raysim.base.user_places import user_errors
from raysim.config import CohortGroup, Config, ModelGroup
from raysim.core.layout import Layout, float_buffers, layout_of, norm_names
from raysim.core.method import Method, Partition
from raysim.core.stack import Stack
from raysim.core.timetable import Speeds
from raysim.data.arrow import SetInfo
from raysim.data.federation import Federation
from raysim.data.manifest import Manifest, TargetScale
from raysim.engine.device import accelerator
from raysim.engine.pool import Pool
from raysim.engine.schedule import Phase
from raysim.engine.server import Server
from raysim.engine.trainer import Trainer
from raysim.models import LoraSpec, ModelSpec, build_model, build_skeleton, head_of, prefers_channels_last
from raysim.models.from_transformers import with_whole_path
from raysim.models.pretrained import weights_sha256
from raysim.plan.find import build_methods, find_augmentation, find_shift, find_task, further_metrics, made_task
from raysim.plan.held_weights import HeldWeights
from raysim.plan.timing import speeds_of, timetable_of
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import NORMALISATIONS, STANDARD, ArrayTransform, InputTransform, Transform
from raysim.training.local import LocalSettings, needs_two_examples
from raysim.training.model import state_of
from raysim.training.shift import Shift
from raysim.training.stacked import Stacker
from raysim.training.tasks import REGRESSION, Task, on_scaled_targets

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def cached_by_value(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Cache by pickled arguments, which need no hash; callers share the results and must not change them."""

    @lru_cache(maxsize=256)
    def call_pickled(arguments: bytes) -> Result:
        args, kwargs = pickle.loads(arguments)
        return function(*args, **kwargs)

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return call_pickled(pickle.dumps((args, kwargs)))

    return call


@dataclass(frozen=True)
class Made:
    """Files made for a run on the driver's node: a folder of shards, a file of weights.

    node: Ray's id of the driver's node, from which other nodes fetch the files; empty without Ray.
    """

    shards: str
    node: str = ""
    weights: HeldWeights = field(default_factory=HeldWeights)


@dataclass(frozen=True)
class Recipe:
    """Everything a process needs to build its server or trainer.

    user_code: functions of the user, or the folders of their modules, see `raysim.base.user_code`.
    held_out_every: n, if every n-th row of the held-out sets is used, as in measurements of cost.
    target_scale: see `on_scaled_targets`; None: targets stay as they are.
    speeds: of all clients in simulated time; None without `time`.
    """

    config: Config
    info: SetInfo
    made: Made
    num_threads: int = 1
    wants_gpu: bool = False
    user_code: UserCode = field(default_factory=UserCode)
    held_out_every: int = 1
    target_scale: TargetScale | None = None
    speeds: Speeds | None = None

    @property
    def task(self) -> Task:
        return _scaled_task(self.config, self.info, self.target_scale)

    @property
    def spec(self) -> ModelSpec:
        return with_weights(model_spec(self.config, self.info), self.made)

    def methods(self) -> list[Method]:
        methods, faults = build_methods(self.config.methods)
        # The driver has checked the methods, so after a fault the worker has other code than the driver.
        refuse(faults, "the recipe, in a worker")
        return methods


@dataclass(frozen=True)
class Ready:
    """Prepared inputs of a sweep's trials, for nodes without access to the driver's disk.

    info, manifest: see `Plan`.
    """

    info: SetInfo
    manifest: Manifest
    made: Made


@dataclass(frozen=True)
class Plan:
    """A configuration, checked as far as possible without starting anything.

    Attributes:
      info: the set, with the shape of its images after `data.stored_size`.
      ready: inputs prepared before the run; None: the run prepares its inputs.
    """

    config: Config
    info: SetInfo
    manifest: Manifest
    layout: Layout
    methods: tuple[Method, ...]
    ready: Ready | None = None

    @property
    def spec(self) -> ModelSpec:
        return with_weights(model_spec(self.config, self.info), self.ready.made if self.ready else None)

    @property
    def task(self) -> Task:
        return _scaled_task(self.config, self.info, self.target_scale)

    @property
    def target_scale(self) -> TargetScale | None:
        is_scaled = self.config.data.scale_targets and self.config.task == REGRESSION.name
        return self.manifest.target_scale if is_scaled else None

    @property
    def weights_sha256(self) -> str:
        """Digest of the user's own file of weights; "" without a file, or with weights of the library."""
        given, name = self.config.model.pretrained, self.config.model.name
        if self.ready and given not in (None, "default"):
            return self.ready.made.weights.sha256 + weights_sha256(None, name)
        return weights_sha256(given, name)

    @property
    def keeps_memory(self) -> bool:
        """Whether clients keep tensors between rounds."""
        return bool(self.layout.personal) or any("client-memory" in method.needs for method in self.methods)

    @property
    def num_rounds(self) -> int:
        return sum(phase.rounds for phase in make_phases(self.config, self.methods))

    @property
    def depends_on_length(self) -> str:
        """Setting or method by which a round depends on the number of rounds; empty if there is none."""
        if self.config.local.schedule == "cosine":
            return "local.schedule cosine"
        return next((method.name for method in self.methods if method.is_phase), "")

    def recipe(self, made: Made, *, num_threads: int = 1, wants_gpu: bool = False) -> Recipe:
        """Return the recipe for the processes of this run."""
        config, given = self.config, self.config.model.pretrained
        places = {"name": with_whole_path(config.model.name)}  # actors may have another working directory
        if given not in (None, "default"):
            places["pretrained"] = str(Path(given).expanduser().absolute())
        config = config.model_copy(update={"model": config.model.model_copy(update=places)})
        code = packed(config.model_dump(mode="json"))
        speeds = speeds_of(config)
        return Recipe(
            config, self.info, made, num_threads, wants_gpu, code, target_scale=self.target_scale, speeds=speeds
        )


def task_of(config: Config, info: SetInfo) -> Task:
    """Return the task of the configuration, else of the set; raises LookupError for an unknown name."""
    name, options = (config.task.name, config.task.options) if config.task else (info.task, {})
    task = find_task(name)
    return task if isinstance(task, Task) else made_task(task, options)


def _scaled_task(config: Config, info: SetInfo, scale: TargetScale | None) -> Task:
    task = task_of(config, info)
    return task if scale is None else on_scaled_targets(task, *scale)


def main_metric(config: Config) -> str:
    """The main metric of the task of a checked configuration."""
    return task_of(config, SetInfo("", (), (1,), 0, "")).main


def model_spec(config: Config, info: SetInfo) -> ModelSpec:
    """Return the model specification of a configuration; unknown keys of the model group are options of the model.

    Args:
      info: of the stored set; the specification has the shape of the stored inputs.
    """
    data, shape = config.data, info.shape
    if info.is_images:
        height, width = InputTransform(resize=_square(data.resize), crop=_square(data.crop)).output_size(*shape[:2])
        shape = (height, width, data.channels or shape[2])
    return spec_of(config.model, len(info.classes), shape, vocabulary=info.vocabulary)


def with_weights(spec: ModelSpec, made: Made | None) -> ModelSpec:
    """Return the specification with local weights: the file, or a copy from the driver's node."""
    if made is None or not made.weights.path:
        return spec
    if not made.node:
        return replace(spec, pretrained=made.weights.path)
    from raysim.engine.ray.shards import fetched_file

    return replace(spec, pretrained=str(fetched_file(made.weights.path, made.weights.sha256, made.node)))


def spec_of(model: ModelGroup, num_classes: int, input_shape: tuple[int, ...], *, vocabulary: int = 0) -> ModelSpec:
    """Return the model specification for inputs of a given shape; vocabulary, input_shape: see `ModelSpec`."""
    lora = None
    if model.lora is not None:
        lora = LoraSpec(model.lora.rank, model.lora.alpha, tuple(model.lora.targets), model.lora.dropout)
    options, head = dict(model.model_extra or {}), model.head
    return ModelSpec(model.name, num_classes, input_shape, options, model.pretrained, lora, head, vocabulary)


def input_transform(config: Config, info: SetInfo, *, channels_last: bool = False) -> Transform:
    """The input pipeline of the configuration; unknown names (checked elsewhere) are ignored.

    Raises:
      LookupError: an augmentation of the user's own that cannot be used.
    """
    data = config.data
    augment = data.augment
    mean, std = NORMALISATIONS.get(data.normalise, NORMALISATIONS["none"])
    if data.normalise == STANDARD:
        mean, std = info.mean, info.deviation
    if not info.is_images:
        return ArrayTransform(mean, std)
    return InputTransform(
        mean=mean,
        std=std,
        channels_last=channels_last,
        resize=_square(data.resize),
        crop=_square(data.crop),
        channels=data.channels,
        augmentation=AUGMENTATIONS.get(augment.name),
        interpolation=data.interpolation,
        function=partial(find_augmentation(augment.name), **augment.options) if ":" in augment.name else None,
    )


def feature_shift(config: Config) -> Shift | None:
    """Return the configured shift; raises LookupError for an unknown name."""
    name, options = config.data.shift.name, config.data.shift.options
    if name == "none":
        return None
    is_anew = name == "noise" and bool(options.get("anew"))
    return Shift(partial(find_shift(name), **options), config.num_clients + config.num_unseen, config.seed, is_anew)


def _square(side: int | None) -> tuple[int, int] | None:
    return None if side is None else (side, side)


def local_settings(config: Config) -> LocalSettings:
    """Return the settings of the local loop."""
    group = config.local.model_dump(exclude={"epochs"} if config.local.epochs is None else None)  # local.steps is set
    return LocalSettings(**group, num_rounds=config.rounds)


def make_phases(config: Config, methods: Sequence[Method]) -> list[Phase]:
    """Return the phases: the run's rounds, then a round with all clients and no local step for each phase method."""
    settings = local_settings(config)
    cohort = CohortGroup() if config.is_joint else config.cohort
    training = tuple(method for method in methods if not method.is_phase)
    course = (cohort.dropout, cohort.stragglers, cohort.straggler_work, cohort.sampling)
    main = Phase(training, settings, config.rounds, config.cohort_size, *course)
    return [main, *(Phase((m,), replace(settings, steps=0), 1, config.num_clients) for m in methods if m.is_phase)]


def layout_for(model: ModelGroup, spec: ModelSpec, methods: Sequence[Method]) -> Layout:
    """Return the layout of a model; methods may divide the parameters."""
    skeleton, head = cached_skeleton(replace(spec, pretrained=None)), head_of(spec)
    trained = frozenset(name for name, parameter in skeleton.named_parameters() if parameter.requires_grad)
    everything = Partition(trained, trained | float_buffers(skeleton).keys(), head, frozenset(norm_names(skeleton)))
    partition = Stack(methods).partition(everything)
    return layout_of(
        skeleton,
        head=head,
        trained=partition.trained,
        shared=partition.shared,
        channels_last=prefers_channels_last(spec, skeleton),
        blocks=model.blocks,
    )


#: Parameters and their shapes, without values.
cached_skeleton = cached_by_value(build_skeleton)


def open_federation(recipe: Recipe) -> Federation:
    """Open the shards: memory-mapped locally, or fetched from the driver's node."""
    made = recipe.made
    if not made.node:
        return Federation(Path(made.shards), every=recipe.held_out_every)
    from raysim.engine.ray.shards import shard_fetcher

    return Federation(*shard_fetcher(made.shards, made.node), every=recipe.held_out_every)


def device_of(recipe: Recipe) -> str:
    """Return the type of the device on which a trainer in this process trains."""
    return accelerator(recipe.config.resources.device) if recipe.wants_gpu else "cpu"


@user_errors()
def make_trainer(recipe: Recipe) -> Trainer:
    """Build a trainer in the calling process."""
    receive(recipe.user_code)
    config, spec, methods = recipe.config, recipe.spec, recipe.methods()
    module = build_model(spec, seed=config.seed)
    return Trainer(
        module=module,
        layout=layout_for(config.model, spec, methods),
        head=head_of(spec),
        phases=make_phases(config, methods),
        federation=open_federation(recipe),
        transform=input_transform(config, recipe.info, channels_last=prefers_channels_last(spec, module)),
        task=recipe.task,
        seed=config.seed,
        device=device_of(recipe),
        num_threads=recipe.num_threads,
        evaluation_batch=config.evaluation.batch_size,
        build=partial(build_model, spec),
        keeps_logits=bool(config.evaluation.metrics),
        shift=feature_shift(config),
    )


@user_errors()
def make_server(recipe: Recipe, pool: Pool) -> Server:
    """Build the server in the calling process, at the initial parameters of the seed."""
    receive(recipe.user_code)
    config, spec, methods = recipe.config, recipe.spec, recipe.methods()
    module, layout = build_model(spec, seed=config.seed), layout_for(config.model, spec, methods)
    phases, transform = make_phases(config, methods), input_transform(config, recipe.info)
    stacker = Stacker(module, layout, transform, phases[0].settings, recipe.task)
    return Server(
        pool=pool,
        layout=layout,
        state=state_of(module, layout),
        phases=[replace(phase, least_clients=stacker.least_clients(phase.methods)) for phase in phases],
        federation=open_federation(recipe),
        num_outputs=len(recipe.info.classes),
        seed=config.seed,
        skips_single=needs_two_examples(module),
        on_nonfinite=config.on_nonfinite,
        evaluate_every=config.evaluation.every,
        evaluation_batch=config.evaluation.batch_size,
        metrics=further_metrics(config),
        task=recipe.task,
        timetable=timetable_of(config, recipe.speeds),
    )
