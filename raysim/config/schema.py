"""The schema of a configuration: every key with its type, bounds, default and meaning."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator

from raysim.base.conditions import Condition, applies_above, applies_empty, applies_given, applies_with
from raysim.base.direction import BETTER, Direction, direction_of
from raysim.base.settings import Settings, Spec
from raysim.config.keys import Group, Named, group, key
from raysim.config.schema_data import NOT_JOINT, DataGroup, PartitionGroup
from raysim.config.schema_resources import ResourcesGroup, TimeGroup


class LoraGroup(Group):
    rank: int = key(16, "rank of the adapters", ge=1)
    alpha: float | None = key(None, "adapters are scaled by alpha / rank; null: alpha is the rank", gt=0)
    targets: list[str] = key(["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"], "layers that get adapters", min_length=1)
    dropout: float = key(0.0, "dropout of the adapters' input in training", ge=0, lt=1)


class ModelGroup(Group):
    model_config = ConfigDict(extra="allow")
    name: str = key("cnn", "name of the model; further keys of the group are options of the model")
    pretrained: str | None = key(
        None,
        "initial weights: default (the library's pretrained weights, downloaded) or a .safetensors, .pth or .pt file",
    )
    blocks: Literal["residual", "stage", "width"] = key(
        "residual", "definition of a layer block; width: neighbouring residual blocks of one output width"
    )
    head: str | None = key(None, "path of the classifier in a model of your own; null: the last nn.Linear")
    lora: LoraGroup | None = key(None, "train low-rank adapters and the head only; {}: with the defaults of this group")

    @property
    def kind(self) -> tuple[str, bool]:
        """Return (name, has adapters)."""
        return self.name, self.lora is not None


class LocalGroup(Group):
    lr: float = key(0.01, "client learning rate; 0.01 is common", gt=0)
    epochs: float | None = key(1.0, "local epochs; may be a fraction; null if steps is set", gt=0)
    steps: int | None = key(None, "number of local steps, in place of epochs", ge=1)
    batch_size: int = key(32, "examples in a local step", ge=1)
    momentum: float = key(
        0.0,
        "momentum of the client optimiser; the momentum buffer is zero at the start of every round",
        ge=0,
        lt=1,
        applies=applies_with("local.optimizer", "sgd"),
    )
    weight_decay: float = key(
        0.0, "weight decay: added to the gradient with sgd, decoupled from the gradient with adamw", ge=0
    )
    lr_decay: float = key(
        1.0,
        "factor by which the learning rate is multiplied after each round",
        gt=0,
        le=1,
        applies=applies_with("local.schedule", "exponential"),
    )
    schedule: Literal["constant", "exponential", "cosine"] = key(
        "exponential", "learning-rate schedule over the rounds; exponential without lr_decay is constant"
    )
    optimizer: Literal["sgd", "adamw"] = key("sgd", "client optimiser; every round begins with a new state")
    max_grad_norm: float | None = key(None, "largest L2 norm of a gradient; a larger gradient is scaled down", gt=0)
    precision: Literal["float32", "bfloat16"] = key(
        "float32", "precision of forward and backward passes; parameters, losses, sums and norms stay float32"
    )
    compile: bool | Literal["eager", "aot_eager"] = key(
        False,
        "true: torch.compile for forward and backward passes of local steps with batch_size examples, on CUDA as CUDA graphs; "
        "results differ from uncompiled steps by rounding; eager, aot_eager: backends of torch.compile, for debugging",
    )
    stack: Annotated[
        Literal["auto", "off"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads off as false
    ] = key(
        "auto",
        "auto: clients of dense networks train without autograd, several at a time (on a CPU at most 8), if the optimiser is "
        "plain SGD and no method changes local steps; results differ by rounding; off: clients train one by one by autograd; "
        "no effect if compile is set",
    )

    @model_validator(mode="after")
    def _count_by_one(self) -> LocalGroup:
        """The default of epochs applies where neither is given, and does not if steps is given."""
        if self.steps is None and self.epochs is None:
            self.epochs = 1.0
        elif self.steps is not None and "epochs" not in self.model_fields_set:
            self.epochs = None
        return self


class CohortGroup(Group):
    size: int | None = key(None, "clients per round", ge=1)
    fraction: float | None = key(
        None,
        "clients per round as a fraction of the population; if neither size nor fraction is set, all clients take part",
        gt=0,
        le=1,
    )
    sampling: Literal["fixed", "poisson"] = key(
        "fixed",
        "fixed: cohorts of one size; poisson: each client takes part independently, with probability cohort size / "
        "population, so the number of clients varies",
    )
    dropout: float = key(0.0, "probability that a chosen client never reports", ge=0, lt=1)
    stragglers: float = key(0.0, "probability that a client does only a share of the local work", ge=0, le=1)
    straggler_work: float = key(
        0.2,
        "smallest share of the local work that a straggler does",
        gt=0,
        le=1,
        applies=applies_above("cohort.stragglers", 0),
    )


class EvaluationGroup(Group):
    every: int = key(1, "rounds from one evaluation to the next; 0: evaluate only after the last round", ge=0)
    batch_size: int = key(256, "examples in a batch when models are scored", ge=1)
    metrics: list[str] = key([], "further metrics of the test set: auroc, or module:function of your own")


class CheckpointGroup(Group):
    every_s: float = key(30.0, "seconds between checkpoints; 0: after every round", ge=0)


def _is_longer(rounds: object, patience: object) -> bool:
    return isinstance(rounds, int) and isinstance(patience, int) and rounds > patience + 1


def _without_fedavg(methods: list[Spec]) -> list[Spec]:
    """Drop FedAvg from a list of methods, since it has no hook."""
    return [spec for spec in methods if spec.name != "fedavg" or spec.options]


def _has_dp(methods: object, _: object) -> bool:
    return isinstance(methods, list) and any("dp" in (spec if isinstance(spec, dict) else [spec]) for spec in methods)


class StopGroup(Group):
    score: float | None = key(None, "value of the task's main metric, such as the test accuracy, at which the run ends")
    patience: int | None = key(
        None,
        "the run ends after this many rounds without a better score on the test set",
        ge=1,
        applies=Condition("rounds", "larger than patience + 1", _is_longer),
    )
    epsilon: float | None = key(
        None,
        "largest epsilon that method dp may spend; the run ends before exceeding the value",
        gt=0,
        applies=Condition("methods", "that have dp", _has_dp),
    )
    simulated_s: float | None = key(
        None,
        "the run ends at the first evaluation after this many seconds of simulated time",
        gt=0,
        applies=applies_given("time"),
    )


class TuneGroup(Group):
    search: Literal["grid", "random", "sobol", "optuna"] = key(
        "random",
        "choice of values from ranges; random: at random; sobol: spread evenly; optuna: from the results of finished "
        "trials; grid: ranges are refused",
    )
    num_samples: int = key(
        1, "number of trials for each combination of the lists; each trial has different values from the ranges", ge=1
    )
    param_space: dict[str, Settings] = key(
        {},
        "axes of the sweep: axis -> {grid_search: values}, or a range such as {log_uniform: [low, high]}; see "
        "raysim/config/sweep.py",
    )
    settings: dict[str, dict[str, Settings]] = key({}, "settings that labels stand for: axis -> label -> settings")
    only: dict[str, dict[str, list[object]]] = key(
        {},
        "axes that apply in some trials only: axis -> second axis -> labels of the second axis; trials with other labels of "
        "the second axis leave out the first axis",
    )
    fixed: Settings = key(
        {}, "settings of every trial, which override settings of labels; set by --scaled and by the command line"
    )
    skip_refused: bool = key(False, "true: trials that a check refuses are left out, and all remaining trials run")
    metric: str = key(
        "server/accuracy", "number that compares trials: a column of progress.csv, or an accuracy of summary.json"
    )
    max_concurrent: int | None = key(None, "largest number of trials at a time; null: as many as fit", ge=1)
    scheduler: Literal["asha", "median"] | None = key(None, "rule that stops trials early")
    grace_rounds: int = key(
        1, "rounds of a trial before the scheduler may stop the trial", ge=1, applies=applies_given("tune.scheduler")
    )
    callbacks: list[Named] = key(
        [], "callbacks of Ray Tune: module:class, or {module:class: {option: value}}; see docs/sweeps.md"
    )

    @property
    def direction(self) -> Direction:
        """Which values of the metric are better."""
        return direction_of(self.metric, key="tune.metric")


class CalibrateGroup(Group):
    """Settings of `raysim calibrate` (LIVAR's table); a run ignores the group. Every key applies in every
    calibration.
    """

    partitions: int = key(3, "number of partitions, with consecutive seeds", ge=1)
    seeds: int = key(3, "number of runs on each partition, with consecutive seeds", ge=1)
    count_feature: bool = key(False, "true: the client's number of examples is a third feature of the random forest")
    trees: int = key(500, "number of trees of the random forest", ge=1)


class ReportGroup(Group):
    """What `raysim report` makes of the runs; nothing here moves a result.

    A key without a condition applies in every report; a note reports names that no run has.
    """

    metric: str | None = key(
        None,
        "number in the tables: a key of summary.json (accuracy: of the last round), or a column of progress.csv (the last "
        "value, or with the prefix best:, mean: or mean_last_10pct: the best value, the mean, or the mean over the last "
        "10 % of the rounds); null: `tune.metric` of a sweep, accuracy of a run",
        applies=applies_empty("report.metrics"),
    )
    metrics: dict[str, dict[str, str]] = key(
        {},
        "several metrics in one table, as values of a new label: label -> value -> metric; each run has one cell for each value",
        max_length=1,
    )
    mode: Direction | None = key(None, BETTER)
    rows: str = key("method", "label whose values are the rows")
    columns: list[str] = key([], "labels whose values are the columns; empty: every label with several values")
    ignore: list[str] = key(
        [],
        "labels that get neither columns nor tables of their own; runs that differ only in ignored labels are averaged",
    )
    published: list[str] = key([], "tables in configs/papers/published, or CSV files of the same form")
    figures: list[str] | None = key(
        None,
        "names of figures, or module:function of your own; null: bars, lines and curves, as far as the runs have the "
        "numbers",
    )
    baseline: str | None = key(
        None, "row that every other row is tested against; figure gains shows the gains over this row"
    )
    gain: str | None = key(
        None,
        "X: average gain of the rows `Y + X` over the rows `Y`; label=value: the columns with this value are the reference "
        "of the average gain of the columns with any other value of the label",
    )
    time: str | None = key(None, "row; adds a table of the training times of all rows relative to this row")
    target: float | str | None = key(
        None,
        "target accuracy in percent, or a row whose accuracy is the target; adds a table of rounds, megabytes and seconds "
        "until the target is reached",
    )
    against: str | None = key(None, "row that is tested against every other row")


class Config(Group):
    """The whole configuration of a run; see `raysim run --print-config` for every key with its default."""

    name: str | None = key(None, "run name: letters, digits, . _ + = - and /", pattern=r"^[\w.+=-]+(/[\w.+=-]+)*$")
    storage: str = key(
        "runs",
        "folder for run directories, relative to RAYSIM_HOME if set, or a URI such as s3://bucket/runs; see "
        "docs/storage.md",
    )
    task: Named | None = key(
        None,
        "name of the task: classes, labels, regression, tokens, or module:function of your own; null: the task of the "
        "prepared set",
    )
    seed: int = key(0, "seed of every random draw; seed and configuration decide the result", ge=0)
    rounds: int = key(10, "total number of rounds, including the earlier rounds of a resumed run", ge=1)
    on_nonfinite: Literal["error", "skip"] = key(
        "error", "error: a non-finite update of a client ends the run; skip: the round continues without the client"
    )
    methods: Annotated[list[Named], AfterValidator(_without_fedavg)] = key(
        [], "methods, applied in this order; an empty list is fedavg"
    )
    loggers: list[Named] = key([], "functions of your own (module:function) that return a logger")
    data: DataGroup = group(DataGroup, "data set, splits, and transformation of images into inputs")
    partition: PartitionGroup = group(PartitionGroup, "assignment of examples to clients")
    model: ModelGroup = group(ModelGroup, "network and initial weights")
    local: LocalGroup = group(LocalGroup, "the local training of a client")
    cohort: CohortGroup = group(CohortGroup, "which clients take part in a round", applies=NOT_JOINT)
    evaluation: EvaluationGroup = group(EvaluationGroup, "when and how the global model is scored")
    checkpoint: CheckpointGroup = group(CheckpointGroup, "when the state of a run is written")
    stop: StopGroup = group(StopGroup, "conditions that end the run before the last round")
    resources: ResourcesGroup = group(
        ResourcesGroup,
        "where a run computes; the bits of a result depend only on the kind of device and on `cpus_per_trainer`",
    )
    time: TimeGroup | None = key(
        None, "simulated time: speeds of the clients, deadlines; null: rounds take no simulated time"
    )
    labels: dict[str, str | int | float] = key(
        {}, "label -> value, the labels of the run in reports; written by a sweep"
    )
    tune: TuneGroup = group(TuneGroup, "a sweep, for `raysim tune`")
    calibrate: CalibrateGroup = group(CalibrateGroup, "a calibration, for `raysim calibrate`; no effect in a run")
    scale: Settings = key({}, "settings that override the settings in the file if --scaled is given")
    report: ReportGroup = group(ReportGroup, "settings of `raysim report`; no effect in a run")

    @property
    def is_joint(self) -> bool:
        """Whether one client holds all training examples: centralised training."""
        return self.partition.scheme.name == "joint"

    def is_serial(self, *, in_sweep: bool = False) -> bool:
        """Whether a run is one process, without a server and trainers on Ray.

        `resources.backend: auto` is serial where one trainer would do all the work: with `trainers: 1`, one client a round, or
        one core, and in a trial of a sweep that does not ask for more trainers. On a cluster a run is on Ray.

        Args:
          in_sweep: the run is a trial.
        """
        wanted = self.resources
        if wanted.backend != "auto":
            return wanted.backend == "serial"
        if in_sweep:
            return wanted.least == 1
        room = max(wanted.least, (os.cpu_count() or 1) // wanted.cpus)
        return not os.environ.get("RAY_ADDRESS") and min(room, wanted.most, self.cohort_size) <= 1

    @property
    def num_clients(self) -> int:
        """Population: training clients of partition.num_clients, or 1 for joint training."""
        return 1 if self.is_joint else self.partition.num_clients - self.num_unseen

    @property
    def num_unseen(self) -> int:
        """Number of clients that never train: the share data.unseen_clients, at least one if positive."""
        share = 0.0 if self.is_joint else self.data.unseen_clients
        return max(1, int(self.partition.num_clients * share + 1e-9)) if share else 0

    @property
    def cohort_size(self) -> int:
        """Clients per round: cohort.size, else cohort.fraction of the population (at least 1), else all."""
        if self.is_joint:
            return 1
        if self.cohort.size is not None:
            return self.cohort.size
        fraction = 1.0 if self.cohort.fraction is None else self.cohort.fraction
        return max(1, int(self.num_clients * fraction + 1e-9))
