"""The schema of a configuration: every key with its type, bounds, default and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Group(BaseModel):
    """A group of keys; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True)


class ExternalGroup(Group):
    name: str | None = Field(None, description="another prepared set that the validation set is taken from")
    mapping: str | None = Field(
        None, description="YAML file with its classes for each class, or the name of one in configs/mappings"
    )
    unique: bool = Field(True, description="false: 50 images of each class twice, as in FedVG's code")


class ValidationSetGroup(Group):
    subset: float = Field(1.0, gt=0, le=1, description="fraction of the validation rows that is kept, stratified")
    imbalance: float | None = Field(
        None, gt=0, le=1, description="rho: half the rows, class i in proportion to rho^i (FedVG, E.8, E.9)"
    )
    label_noise: float = Field(0.0, ge=0, le=1, description="fraction of the validation rows with a wrong label")
    order: Literal["stratified", "client"] = Field(
        "stratified",
        description="order of the validation batches; client: client after client, an external set's class after class",
    )
    external: ExternalGroup = Field(default_factory=ExternalGroup)


class DataGroup(Group):
    name: str = Field("digits", description="which prepared set")
    root: str = Field(
        "data",
        description="folder with prepared sets, relative to RAYSIM_HOME where that is set, or a URI such as s3://bucket/data",
    )
    split: Literal["fraction", "official"] = Field(
        "fraction", description="official: the set's own test rows, and validation rows if it has any"
    )
    split_within_clients: bool = Field(False, description="partition first, then hold out inside each client")
    test: float = Field(0.25, ge=0, lt=1, description="fraction held out for testing; not with split official")
    validation: float = Field(0.10, ge=0, lt=1, description="fraction held by the server for validation")
    validation_set: ValidationSetGroup = Field(default_factory=ValidationSetGroup)
    test_sets: list[str] = Field(
        default_factory=list,
        description="other prepared sets of the same classes, scored beside the set's own test rows",
    )
    normalise: str = Field("none", description="channel statistics that inputs are normalised by, by name")
    resize: int | None = Field(None, ge=1, description="height and width that images are resized to")
    interpolation: Literal["bilinear", "bicubic"] = Field("bilinear", description="how images are resized")
    crop: int | None = Field(None, ge=1, description="height and width of the crop: central, or the augmentation's")
    channels: Literal[3] | None = Field(None, description="3: grey images are repeated to three channels")
    augment: str = Field("none", description="augmentation of training batches, by name")


class PartitionGroup(Group):
    scheme: Literal["dirichlet", "iid", "shards", "quantity", "domain", "natural", "nine_plus_one", "joint"] = Field(
        "dirichlet",
        description="how examples go to clients; joint: one client has all, num_clients and cohort do not count",
    )
    form: Literal["class", "sample", "balanced", "capped", "dirichlet", "power"] | None = Field(
        None, description="form of the scheme; by default dirichlet: class, quantity: dirichlet"
    )
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration; smaller is more heterogeneous")
    num_clients: int = Field(20, ge=1, description="population")
    min_samples: int = Field(
        1, ge=1, description="fewest examples of a client: for training, or in all with data.split_within_clients"
    )
    shards_per_client: int = Field(2, ge=1, description="scheme shards: pieces of the sorted set for each client")
    domains_per_client: int = Field(1, ge=1, description="scheme domain: domains for each client")
    samples_per_client: int | None = Field(
        None, ge=1, description="scheme nine_plus_one: examples of every client; as many as possible if not given"
    )
    seed: int | None = Field(None, description="seed of the split and partition; the run's seed if not given")


#: Forms of the schemes that have several.
FORMS = {"dirichlet": ("class", "sample", "balanced", "capped"), "quantity": ("dirichlet", "power")}


class LoraGroup(Group):
    rank: int = Field(16, ge=1, description="rank of the adapters")
    alpha: float | None = Field(None, gt=0, description="adapters are scaled by alpha / rank; the rank if not given")
    targets: list[str] = Field(
        ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"], min_length=1, description="layers that get adapters"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapters' input while training")


class ModelGroup(Group):
    model_config = ConfigDict(extra="allow")
    name: str = Field("cnn", description="model name; the other keys are its options")
    pretrained: str | None = Field(
        None, description="initial weights: default (the library's own, downloaded) or a .safetensors, .pth or .pt file"
    )
    blocks: Literal["residual", "stage", "width"] = Field(
        "residual", description="what a layer block is; width: neighbouring residual blocks of one output width"
    )
    channels_last: bool | Literal["auto"] = Field("auto", description="memory order of convolutions")
    lora: LoraGroup | None = Field(None, description="train low-rank adapters and the head only; {} for the defaults")


class LocalGroup(Group):
    lr: float = Field(0.01, gt=0, description="client learning rate; 0.01 is common")
    epochs: float = Field(1.0, gt=0, description="local epochs, may be fractional")
    steps: int | None = Field(None, ge=1, description="local steps, instead of epochs")
    batch_size: int = Field(32, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(0.0, ge=0)
    lr_decay: float = Field(1.0, gt=0, le=1, description="learning-rate factor per round, with schedule exponential")
    schedule: Literal["constant", "exponential", "cosine"] = Field(
        "exponential", description="of the learning rate over the rounds; exponential without lr_decay is constant"
    )
    optimizer: Literal["sgd", "adamw"] = "sgd"
    max_grad_norm: float | None = Field(None, gt=0, description="gradients are scaled down to this L2 norm")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of forward and backward passes; parameters, losses, sums and norms stay float32"
    )


class CohortGroup(Group):
    size: int | None = Field(None, ge=1, description="clients per round")
    fraction: float | None = Field(None, gt=0, le=1, description="clients per round as a fraction of the population")
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that a chosen client never reports")
    stragglers: float = Field(0.0, ge=0, le=1, description="chance that a client does only a share of its local work")
    straggler_work: float = Field(0.2, gt=0, le=1, description="least share of the work that a straggler does")


class EvaluationGroup(Group):
    every: int = Field(1, ge=0, description="rounds between evaluations; 0: only after the last")
    batch_size: int = Field(256, ge=1)
    metrics: list[str] = Field(
        default_factory=list, description="further metrics of the test set: auroc, or module:function of your own"
    )


class CheckpointGroup(Group):
    every_s: float = Field(30.0, ge=0, description="seconds between checkpoints; 0: after every round")
    keep_last: int = Field(2, ge=1)


class ResourcesGroup(Group):
    backend: Literal["ray", "serial"] = "ray"
    trainers: int | Literal["auto"] = Field("auto", description="trainer processes")
    cpus_per_trainer: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="cores and threads of a trainer"
    )
    gpus_per_trainer: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="GPU fraction of a trainer"
    )
    placement: Literal["pack", "spread"] = Field("pack", description="trainers on few nodes, or over many")


class TuneGroup(Group):
    param_space: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="axis -> {Tune's name of a domain: its arguments}, see raysim/sweep.py"
    )
    settings: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict, description="axis -> label -> settings, for axes that choose among labels"
    )
    only: dict[str, dict[str, list[Any]]] = Field(
        default_factory=dict, description="axis -> other axis -> labels of that one with which the axis counts"
    )
    skip_refused: bool = Field(False, description="start the other trials where a check refuses some")
    num_samples: int = Field(1, ge=1, description="draws of the whole space; a grid is repeated for each")
    metric: str = Field(
        "server/accuracy",
        description="what trials are compared by: a column of progress.csv, or an accuracy of summary.json",
    )
    mode: Literal["max", "min"] = "max"
    max_concurrent: int | None = Field(None, ge=1, description="trials at a time; as many as there is room for if null")
    scheduler: Literal["asha", "median"] | None = Field(None, description="what stops trials early")
    grace_rounds: int = Field(1, ge=1, description="rounds that every trial gets before asha or median may stop it")
    reduction_factor: float = Field(4.0, gt=1, description="asha: one trial in so many goes on at each rung")


Quantile = Annotated[float, Field(ge=0, le=1)]


class CalibrateGroup(Group):
    """What `raysim calibrate` makes of pairs of runs (LIVAR's table); a run ignores it."""

    partitions: int = Field(3, ge=1, description="partitions, of consecutive seeds")
    seeds: int = Field(3, ge=1, description="runs on each partition, of consecutive seeds")
    constraint: Literal["nonnegative", "simplex", "box"] = Field(
        "nonnegative", description="of the target coefficients: >= 0, and sum 1, or between 0 and 1"
    )
    ridge: float = Field(
        1e-6, ge=0, description="pull of the coefficients to 1/K, as a share of the mean squared update"
    )
    features: Literal["quantile", "raw"] = Field(
        "quantile", description="importances as ranks inside their run, or as they are"
    )
    count_feature: bool = Field(False, description="the client's number of examples as a third feature")
    trees: int = Field(500, ge=1, description="of the random forest")
    min_leaf: int = Field(5, ge=1, description="fewest rows in a leaf")
    seed: int = Field(0, ge=0, description="of the random forest")
    cuts_a: tuple[Quantile, Quantile] = Field(
        (0.25, 0.50), description="quantiles of I_A below which it is low, above which it is high"
    )
    cuts_b: tuple[Quantile, Quantile] = Field((0.60, 0.80), description="the same of I_B")


class ReportGroup(Group):
    """What `raysim report` makes of the runs; nothing here moves a result."""

    metric: str = Field(
        "best_accuracy",
        description="what the tables hold: a key of summary.json, or a column of progress.csv (its last value; with best: or "
        "mean_last_10pct: before it the best one, or the mean of the last 10 % of the rounds)",
    )
    metrics: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        max_length=1,
        description="label -> value -> metric, instead of one metric: each run gives a cell for each value of the label",
    )
    mode: Literal["max", "min"] = Field("max", description="which values of the metric are better")
    rows: str = Field("method", description="label whose values are the rows")
    columns: list[str] = Field(
        default_factory=list, description="labels whose values are the columns; every label that varies if empty"
    )
    ignore: list[str] = Field(
        default_factory=list, description="labels that make neither columns nor tables, though they vary"
    )
    published: list[str] = Field(
        default_factory=list, description="tables in configs/papers/published, or CSV files of that form"
    )
    figures: list[str] | None = Field(
        None,
        description="which figures, by the names in raysim/report/drawing.py; by default bars, lines and curves where they "
        "make sense",
    )
    baseline: str | None = Field(None, description="row that gains are counted from")
    gain: str | None = Field(
        None,
        description="X: average gain of the rows `Y + X` over `Y`; label=value: of columns over those with that value",
    )
    time: str | None = Field(None, description="row whose training time is 1 in a table of relative times")
    target: float | str | None = Field(
        None,
        description="accuracy in percent, or a row whose accuracy it is: rounds, megabytes and seconds until there",
    )
    against: str | None = Field(None, description="row that is tested against every other one")
    client: int | None = Field(None, ge=0, description="client with the bold line in figure weights")


class Config(Group):
    """The whole configuration of a run; see `raysim run --print-config` for every key with its default."""

    name: str | None = Field(
        None, pattern=r"^[\w.+=-]+(/[\w.+=-]+)*$", description="run name: letters, digits, . _ + = - and /"
    )
    storage: str = Field("runs", description="folder for run directories, relative to RAYSIM_HOME where that is set")
    seed: int = Field(0, ge=0)
    rounds: int = Field(10, ge=1)
    resume: Literal["auto", "never"] = "auto"
    on_nonfinite: Literal["error", "skip"] = "error"
    methods: list[str | dict[str, Any]] = Field(default_factory=list, description="methods, applied in this order")
    data: DataGroup = Field(default_factory=DataGroup)
    partition: PartitionGroup = Field(default_factory=PartitionGroup)
    model: ModelGroup = Field(default_factory=ModelGroup)
    local: LocalGroup = Field(default_factory=LocalGroup)
    cohort: CohortGroup = Field(default_factory=CohortGroup)
    evaluation: EvaluationGroup = Field(default_factory=EvaluationGroup)
    checkpoint: CheckpointGroup = Field(default_factory=CheckpointGroup)
    resources: ResourcesGroup = Field(default_factory=ResourcesGroup)
    labels: dict[str, str | int | float] = Field(
        default_factory=dict, description="what this run is called in tables, as a sweep writes it"
    )
    tune: TuneGroup = Field(default_factory=TuneGroup, description="a sweep, for `raysim tune`; a run ignores it")
    calibrate: CalibrateGroup = Field(
        default_factory=CalibrateGroup, description="a calibration, for `raysim calibrate`; a run ignores it"
    )
    scale: dict[str, Any] = Field(default_factory=dict, description="settings laid over the file with --scaled")
    report: ReportGroup = Field(default_factory=ReportGroup)

    @property
    def is_joint(self) -> bool:
        """Whether one client holds all training examples: centralised training."""
        return self.partition.scheme == "joint"

    @property
    def num_clients(self) -> int:
        """The population: partition.num_clients, or 1 for joint training."""
        return 1 if self.is_joint else self.partition.num_clients

    @property
    def cohort_size(self) -> int:
        """Clients per round: cohort.size, else cohort.fraction of the population (at least 1), else everybody."""
        if self.is_joint:
            return 1
        if self.cohort.size is not None:
            return self.cohort.size
        fraction = 1.0 if self.cohort.fraction is None else self.cohort.fraction
        return max(1, int(self.num_clients * fraction + 1e-9))
