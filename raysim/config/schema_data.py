"""The groups `data` and `partition` of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raysim.base.conditions import Condition, applies_above, applies_given, applies_with, applies_without
from raysim.base.settings import Settings, Spec
from raysim.config.keys import Group, Named, group, key, written_as


class ExternalGroup(Group):
    name: str | None = key(None, "prepared set from which the validation set is taken")
    mapping: str | None = key(
        None, "YAML file, or a name in configs/mappings, that maps each class to classes of the external set"
    )
    unique: bool = key(
        True,
        "false: 50 images of each class are in the validation set twice, as in FedVG's code",
        applies=applies_given("data.validation_set.external.name"),
    )


class FromClientsGroup(Group):
    share: float = key(
        0.0,
        "share of the validation set, rounded down, whose classes (and domains) have the proportions of the training rows "
        "of `clients`; the rows are held out like all validation rows",
        ge=0,
        le=1,
    )
    clients: list[Annotated[int, Field(ge=0)]] = key(
        [0],
        "numbers of the clients whose proportions are used, from 0",
        min_length=1,
        applies=applies_above("data.validation_set.from_clients.share", 0),
    )


class ValidationSetGroup(Group):
    subset: float = key(1.0, "fraction of the validation rows that is kept, stratified by class", gt=0, le=1)
    from_clients: FromClientsGroup = group(
        FromClientsGroup, "gives a share of the validation set the class proportions of chosen clients"
    )
    imbalance: float | None = key(
        None, "rho: at most half of the rows are kept, class i in proportion to rho^i (FedVG, E.8, E.9)", gt=0, le=1
    )
    label_noise: float = key(0.0, "fraction of the validation rows with a wrong label", ge=0, le=1)
    order: Literal["stratified", "client"] = key(
        "stratified",
        "order of the validation rows; stratified: every contiguous part has nearly the class proportions of the whole "
        "set; client: client by client, or class by class for an external set",
    )
    external: ExternalGroup = group(ExternalGroup, "a validation set that comes from a second prepared set")


#: `module:function`.
Own = Annotated[str, Field(pattern=r"^[\w.]+:.")]


class DataGroup(Group):
    name: str = key("digits", "name of the prepared set")
    root: str = key(
        "data", "folder with prepared sets, relative to RAYSIM_HOME if set, or a URI such as s3://bucket/data"
    )
    split: Literal["auto", "fraction", "official", "file"] = key(
        "auto",
        "official: the official test rows of the set, and the official validation rows if there are any; fraction: random "
        "rows, in the fractions test and validation; file: the splits in partition.file, which override this key if the "
        "file has splits; auto: official if the set has official test rows and neither test nor split_within_clients is "
        "set, else fraction",
    )
    split_within_clients: bool = key(
        False,
        "true: partition first, then hold out rows inside each client",
        applies=applies_without("data.split", "file"),
    )
    test: float = key(
        0.25, "fraction held out for testing", ge=0, lt=1, applies=applies_with("data.split", "fraction", "auto")
    )
    validation: float = key(
        0.10,
        "fraction that the server holds for validation; with split official, only used if the set has no official "
        "validation rows; if unset, 0 unless a method, a metric or a key of data.validation_set uses validation rows",
        ge=0,
        lt=1,
        applies=applies_without("data.split", "file"),
    )
    fraction: float = key(
        1.0,
        "training rows to use, stratified by class and drawn with partition.seed: a value up to 1 is a fraction, a larger "
        "value is a number of rows",
        gt=0,
        applies=applies_without("data.split_within_clients", True),
    )
    validation_set: ValidationSetGroup = group(ValidationSetGroup, "composition of the server's validation set")
    unseen_clients: float = key(
        0.0,
        "share of the clients, at least one client, that never train and are only scored; these clients get the last "
        "client numbers",
        ge=0,
        lt=1,
        applies=applies_without("partition.scheme", "joint"),
    )
    unseen_choice: Literal["drawn", "first", "last"] | None = key(
        None,
        "choice of the unseen clients; drawn: at random with partition.seed; first, last: the first or last clients in "
        "the order of the scheme; null: last with scheme file, otherwise drawn",
        applies=applies_above("data.unseen_clients", 0),
    )
    test_sets: list[str] = key(
        [], "further prepared sets with the same classes, on which the global model is scored, too"
    )
    stored_size: int | None = key(
        None,
        "height and width to which every image is resized once, before shards are written; data.resize applies to every "
        "batch",
        ge=1,
    )
    normalise: str = key(
        "none",
        "name of the statistics that normalise inputs; standard: mean and standard deviation of the training rows, or of "
        "all rows if the set has no official split",
    )
    scale_targets: bool = key(
        True,
        "regression: the loss uses (y - mean) / deviation, with mean and deviation over the clients' training rows; "
        "metrics keep the target's units",
    )
    resize: int | None = key(None, "height and width of the resized images", ge=1)
    interpolation: Literal["bilinear", "bicubic"] = key(
        "bilinear",
        "interpolation in the resizing of images and of an augmentation's crops",
        applies=applies_given("data.resize") | applies_with("data.augment", "livar-vit"),
    )
    crop: int | None = key(None, "height and width of the central crop, or of the augmentation's crop", ge=1)
    channels: Literal[3] | None = key(None, "3: grey images are repeated to three channels")
    augment: Named = key("none", "augmentation of training batches, by name, or module:function of your own")
    shift: Named = key(
        "none",
        "difference between clients' images: noise, which grows with the client's number, or module:function of your own; "
        "each test and validation row gets the shift of one client",
        applies=applies_without("partition.scheme", "joint"),
    )
    reader: Named | None = key(None, "module:function of your own that prepares the set from `files`")
    files: str | None = key(None, "folder or file that `reader` reads", applies=applies_given("data.reader"))

    @property
    def asks_for_fractions(self) -> bool:
        """Whether `split: auto` is `fraction` here whatever the set has."""
        return self.split_within_clients or "test" in self.model_fields_set


#: Forms of the schemes that have several.
FORMS = {"dirichlet": ("class", "sample", "balanced", "capped"), "quantity": ("dirichlet", "power")}

#: Joint training has one client, with all examples.
NOT_JOINT = applies_without("partition.scheme", "joint")


def _of_scheme(*schemes: str) -> Condition:
    return applies_with("partition.scheme", *schemes)


#: Schemes that come with raysim.
Scheme = Literal[
    "dirichlet",
    "iid",
    "labels",
    "shards",
    "quantiles",
    "quantity",
    "domain",
    "natural",
    "nine_plus_one",
    "file",
    "joint",
]


class PartitionGroup(Group):
    """A union by scheme: each key declares the schemes in which it applies."""

    scheme: Annotated[
        Spec, written_as(Scheme | Own | Annotated[dict[Own, Settings], Field(min_length=1, max_length=1)])
    ] = key("dirichlet", "how examples are divided among clients; joint: a single client has all examples")
    form: Literal["class", "sample", "balanced", "capped", "dirichlet", "power"] | None = key(
        None,
        "with scheme dirichlet: class (null), clients get Dirichlet shares of each class; sample, the client of each "
        "example is drawn; balanced, clients have equal sizes; capped, as class, but a client that already has an equal "
        "share of all examples gets nothing of the next classes. With scheme quantity: dirichlet (null), sizes are "
        "Dirichlet shares; power, sizes fall as rank^(-1/alpha)",
        applies=_of_scheme(*FORMS),
    )
    alpha: float = key(
        0.1,
        "concentration of the Dirichlet distribution; a smaller value makes clients more heterogeneous",
        gt=0,
        applies=_of_scheme("dirichlet", "quantity", "nine_plus_one"),
    )
    num_clients: int = key(20, "number of clients, unseen clients included", ge=1, applies=NOT_JOINT)
    min_samples: int = key(
        1,
        "smallest allowed number of training examples of a client; with data.split_within_clients, held-out examples of "
        "the client included",
        ge=1,
        applies=applies_without("partition.scheme", "nine_plus_one", "joint"),
    )
    shards_per_client: int = key(
        2,
        "number of pieces per client; the set is sorted by class (shards) or by target (quantiles) and cut into equal "
        "pieces; more pieces make clients less heterogeneous",
        ge=1,
        applies=_of_scheme("shards", "quantiles"),
    )
    labels_per_client: int = key(2, "number of classes per client", ge=1, applies=_of_scheme("labels"))
    domains_per_client: int = key(1, "number of domains per client", ge=1, applies=_of_scheme("domain"))
    samples_per_client: int | None = key(
        None, "number of examples per client; null: as many as possible", ge=1, applies=_of_scheme("nine_plus_one")
    )
    file: str | None = key(
        None,
        "CSV, Parquet or JSON file with the columns example, client and optionally split, such as examples.csv of a run; "
        "splits in the file override the settings of data",
        applies=_of_scheme("file"),
    )
    seed: int | None = key(None, "seed of the split and partition; null: the run's seed")
