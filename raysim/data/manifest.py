"""The manifest of a partitioned set: rows of clients and held-out sets, from the set's columns, a spec and a seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from raysim.base.errors import DataError
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.data.arrow import PreparedSet, SetInfo
from raysim.data.division import NOBODY, Division, DivisionFile, read_division
from raysim.data.partition import BY_CLASS, OnDrawn, Parts, check_sizes, divide
from raysim.data.rows import cut_at
from raysim.data.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Mix,
    ValidationSpec,
    arrange,
    external_rows,
    split,
    split_officially,
    split_within,
    subset,
)


@dataclass(frozen=True)
class PartitionSpec:
    """Settings of a partition; with the set's checksum they determine the manifest.

    Attributes:
      scheme: a name, or `module:function` of the user's own; options: options of the user's function, as JSON.
      form: form of the scheme; empty for the default form.
      file, file_sha256: path and checksum of the partition file, for the scheme "file".
      test, validation: fractions of the whole set (of each client if `within_clients`), rounded down; for the split
        "official", see `split_officially`.
      fraction: part of the training rows that is used, see `subset`.
      split: "fraction", or "official" for the test rows of the set's official split.
      within_clients: partition all rows first, then hold out rows inside each client (the order of FedVG's code).
      num_unseen: number of clients that never train; they are numbered last.
      unseen_choice: "drawn" at random, or the "first" or "last" clients of the scheme; None is "last" for the scheme
        "file", else "drawn".
    """

    scheme: str = "dirichlet"
    form: str = ""
    alpha: float = 0.1
    num_clients: int = 20
    min_samples: int = 1
    shards_per_client: int = 2
    labels_per_client: int = 2
    domains_per_client: int = 1
    samples_per_client: int | None = None
    file: str = ""
    file_sha256: str = ""
    test: float = 0.25
    validation: float = 0.10
    fraction: float = 1.0
    split: str = "fraction"
    within_clients: bool = False
    num_unseen: int = 0
    unseen_choice: str | None = None
    validation_set: ValidationSpec = field(default_factory=ValidationSpec)
    seed: int = 0
    options: str = ""


#: (mean, deviation) of each number of a target.
TargetScale = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class OtherTest:
    """A further test set: rows of another set, and their labels.

    labels: (n,) int64 in the classes of the partitioned set; None if it has no classes.
    """

    name: str
    path: str
    checksum: str
    rows: np.ndarray
    labels: np.ndarray | None


@dataclass(frozen=True)
class Manifest:
    """Rows of a set: of each training client, of the server's validation set (in order), and of the test set.

    Attributes:
      class_counts: (num_clients, classes) int64 training rows. All counts by class have one column for a set without
        classes.
      validation_labels: (n,) int64 if they differ from the set's labels (noise, or an external set); else None.
      external: (path, checksum) of the set in which `validation` numbers rows; None for the partitioned set.
      validation_counts: (classes,) int64 of the final validation set.
      num_draws: number of draws until every client had enough examples.
      domains: names; domain_counts: (num_clients, domains, classes) int64; test_domains: (n,) int64 domain of each test
        row; the arrays are None for a set without domains.
      test_sizes: (num_clients,) int64 test rows of each client, client after client; None if no client has its own.
      test_sets: further test sets.
      unseen: rows of the clients that never train, client after client; unseen_sizes: (clients,) int64, None without
        unseen clients.
      input_shape: (height, width, channels) to which the images of all rows are resized; empty: the shape in the set.
      target_scale: (mean, population deviation) of the clients' targets, (numbers,) each; None unless float32.
      row_form: types and shapes of rows other than images, since the set's checksum covers only bytes; empty for
      images.
      division: division of all clients, before `spec.validation_set` changes the validation rows.
    """

    set_path: str
    set_checksum: str
    spec: PartitionSpec
    clients: tuple[np.ndarray, ...]
    validation: np.ndarray
    test: np.ndarray
    class_counts: np.ndarray
    division: Division
    input_shape: tuple[int, ...] = ()
    validation_labels: np.ndarray | None = None
    external: tuple[str, str] | None = None
    validation_counts: np.ndarray | None = None
    num_draws: int = 1
    domains: tuple[str, ...] = ()
    domain_counts: np.ndarray | None = None
    test_domains: np.ndarray | None = None
    test_sizes: np.ndarray | None = None
    test_sets: tuple[OtherTest, ...] = ()
    unseen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    unseen_sizes: np.ndarray | None = None
    row_form: str = ""
    target_scale: TargetScale | None = None

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.set_checksum.encode())
        parts = (*self.clients, self.validation, self.test)
        sizes = np.array([len(part) for part in parts])
        rows = np.insert(np.concatenate(parts), np.cumsum(sizes) - sizes, sizes)  # the length precedes each part
        digest.update(rows.astype("<i8").data)
        if self.validation_labels is not None:
            digest.update(b"labels" + self.validation_labels.tobytes())
        if self.external is not None:
            digest.update(b"external" + self.external[1].encode())
        if self.test_sizes is not None:
            digest.update(b"test sizes" + np.ascontiguousarray(self.test_sizes, np.int64).tobytes())
        if self.unseen_sizes is not None:
            for part in (self.unseen_sizes, self.unseen):
                digest.update(b"unseen" + np.ascontiguousarray(part, np.int64).tobytes())
        for other in self.test_sets:
            digest.update(f"test {other.name} {other.checksum}".encode())
            if other.labels is not None:
                digest.update(np.ascontiguousarray(other.labels, np.int64).tobytes())
        if self.row_form:
            digest.update(f"rows {self.row_form}".encode())
        if self.input_shape:
            digest.update(f"shape {self.input_shape}".encode())
        return digest.hexdigest()

    @property
    def sizes(self) -> np.ndarray:
        """(num_clients,) int64 training examples."""
        return self.class_counts.sum(axis=1)

    def to_json(self) -> str:
        """Return the text of `partition.json`, to rebuild and to compare; clients' rows are kept in `examples.csv`."""
        names = ("validation", "validation_labels", "external", "test_sizes", "validation_counts", "num_draws")
        fields = {
            "checksum": self.checksum,
            "set_checksum": self.set_checksum,
            "spec": asdict(self.spec),
            **{name: getattr(self, name) for name in names},
            **({} if self.unseen_sizes is None else {"unseen": self.unseen, "unseen_sizes": self.unseen_sizes}),
            **({"input_shape": self.input_shape} if self.input_shape else {}),
        }
        return json.dumps(fields, default=np.ndarray.tolist) + "\n"


def make_manifest(
    images: PreparedSet,
    spec: PartitionSpec,
    external: PreparedSet | None = None,
    tests: Mapping[str, PreparedSet] = MappingProxyType({}),
) -> Manifest:
    """Split and partition a set: a pure function of its columns (labels, domains, splits) and the spec.

    Args:
      external: the set that provides the validation set; the rows held out by `spec.validation` then stay unused.
      tests: further sets to test on, by name.
    """
    labels, domains, num_classes = images.labels, images.domains, len(images.info.groups)
    draws = [1]
    _check_scheme(spec.scheme, images.info)
    _check_validation(spec.validation_set, images.info, external)
    division = _unseen_last(_divide(images, spec, draws.append), spec)
    seen, unseen = division.without_last(spec.num_unseen)
    clients = cut_at(seen.rows(TRAIN), seen.sizes(TRAIN))
    validation, test = seen.rows(VALIDATION), seen.rows(TEST)
    if not any(map(len, clients)):
        mend = "leave some examples to train on: split train in a partition file, smaller data.test and data.validation"
        raise DataError("no client has an example to train on", f"partition {spec.file or spec.scheme}", mend)
    rng = numpy_generator(derive_seed(spec.seed, "validation-set"))
    targets, origin = labels[validation], None
    if external is not None:
        validation, targets = external_rows(external, images.info.classes, spec.validation_set, rng)
        origin = (str(external.path), external.info.checksum)
    mix = (
        _mix_of(images, clients, validation, spec.validation_set.clients) if spec.validation_set.client_share else None
    )
    validation, targets = arrange(validation, targets, num_classes, spec.validation_set, rng, mix)
    is_own = external is None and (labels[validation] == targets).all()
    manifest = Manifest(
        set_path=str(images.path),
        set_checksum=images.info.checksum,
        spec=spec,
        clients=tuple(clients),
        validation=validation,
        test=test,
        class_counts=_counts(seen, labels, (num_classes,)),
        division=division,
        row_form=_row_form(images.info),
        target_scale=_target_scale(images, clients),
        validation_labels=None if is_own else targets,
        external=origin,
        validation_counts=np.bincount(targets, minlength=num_classes),
        num_draws=draws[-1],
        test_sizes=seen.sizes(TEST) if spec.within_clients or (seen.owners[test] != NOBODY).any() else None,
        test_sets=tuple(other_test(name, other, images) for name, other in tests.items()),
        unseen=unseen,
        unseen_sizes=division.sizes(TRAIN, VALIDATION, TEST)[seen.num_clients :] if spec.num_unseen else None,
    )
    if domains is None:
        return manifest
    names = images.info.domains
    counts = _counts(seen, domains * num_classes + labels, (len(names), num_classes))
    return replace(manifest, domains=names, domain_counts=counts, test_domains=domains[test])


def _check_scheme(scheme: str, info: SetInfo) -> None:
    """Raise DataError if a scheme needs classes or numbers that the set does not have."""
    has_classes = info.groups is info.classes
    has_number = info.target_type == "float32" and math.prod(info.target_shape) == 1
    if scheme in BY_CLASS and not has_classes:
        what = f"{info.name} has no class for each row"
    elif scheme == "quantiles" and not has_number:
        what = f"{info.name} has no number for each row"
    else:
        return
    fit = ["iid", "quantity", *["quantiles"] * has_number, *["dirichlet", "shards"] * has_classes]
    fit += ["domain", "natural"] * bool(info.domains)
    mend = f"set partition.scheme to {', '.join(fit)}, file or a function of your own"
    raise DataError(what, f"partition {scheme}", mend)


def _check_validation(spec: ValidationSpec, info: SetInfo, external: PreparedSet | None) -> None:
    """Raise DataError if the validation set is changed by class, and a set has no classes."""
    given = {"external": external, "imbalance": spec.imbalance, "label_noise": spec.label_noise or None}
    by_class = [name for name, value in given.items() if value is not None]
    for other in [info] if external is None else [info, external.info]:
        if by_class and other.groups is not other.classes:
            what = f"{by_class[0]} goes by class, and {other.name} has no class for each row"
            raise DataError(what, "data.validation_set", f"drop data.validation_set.{by_class[0]}")


def _unseen_last(division: Division, spec: PartitionSpec) -> Division:
    """Return the division with the clients that never train numbered last."""
    choice = spec.unseen_choice or ("last" if spec.scheme == "file" else "drawn")
    if not spec.num_unseen or choice == "last":
        return division
    clients, chosen = np.arange(division.num_clients), np.arange(spec.num_unseen)
    if choice == "drawn":
        rng = numpy_generator(derive_seed(spec.seed, "unseen"))
        chosen = np.sort(rng.choice(clients, spec.num_unseen, replace=False))
    return division.reordered(np.concatenate([np.setdiff1d(clients, chosen), chosen]))


def _divide(images: PreparedSet, spec: PartitionSpec, on_drawn: OnDrawn) -> Division:
    fractions, file = {"test": spec.test, "validation": spec.validation}, None
    rng = numpy_generator(derive_seed(spec.seed, "split"))
    if spec.scheme == "file":
        file = read_division(Path(spec.file), num_examples=len(images), num_clients=spec.num_clients)
        if file.splits is not None:
            division = file.division(spec.num_clients)
            check_sizes(division.sizes(TRAIN, VALIDATION, TEST), spec.min_samples, "file")
            if spec.fraction != 1.0:
                raise DataError("the partition file says which rows train", "data.fraction", "drop data.fraction")
            return division
    if spec.within_clients:
        parts = _partition(images, np.arange(len(images)), spec, on_drawn, file)
        _, validation, test = split_within(parts, **fractions, rng=rng)
        return Division.of(parts, validation, test, len(images))
    if spec.split == "official":
        training, validation, test = split_officially(images.splits, validation=spec.validation, rng=rng)
    else:
        training, validation, test = split(len(images), **fractions, rng=rng)
    if spec.fraction > len(training):
        what = f"{spec.fraction:g} rows, and the training rows are {len(training)}"
        raise DataError(what, "data.fraction", "lower the number, or remove the key")
    fraction_rng = numpy_generator(derive_seed(spec.seed, "fraction"))
    training = training[subset(images.labels[training], spec.fraction, fraction_rng)]
    return Division.of(_partition(images, training, spec, on_drawn, file), validation, test, len(images))


def _mix_of(images: PreparedSet, clients: Sequence[np.ndarray], validation: np.ndarray, chosen: Sequence[int]) -> Mix:
    """Return the mix of the chosen clients' training rows, by class, or by domain and class in a set with domains."""
    num_classes, domains = len(images.info.groups), images.domains
    cells = images.labels if domains is None else domains * num_classes + images.labels
    rows = np.concatenate([clients[client] for client in chosen])
    return Mix(cells[validation], np.bincount(cells[rows], minlength=num_classes * max(1, len(images.info.domains))))


def _target_scale(images: PreparedSet, clients: Sequence[np.ndarray]) -> TargetScale | None:
    """Return (mean, deviation) of the training targets, in float64; None unless float32. A constant has deviation 1."""
    if images.info.target_type != "float32":
        return None
    values = images.targets[np.concatenate(clients)].astype(np.float64)
    values = values.reshape(len(values), -1)
    deviation = values.std(0)
    return tuple(values.mean(0).tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist())


def _row_form(info: SetInfo) -> str:
    parts = (info.input_type, info.shape, info.target_type, info.target_shape)
    return "" if info.is_images else " ".join(map(str, parts))


def _counts(division: Division, cells: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return (num_clients, *shape) int64: training rows of each client in each cell. cells: (n,) cell of each row."""
    size, rows = math.prod(shape), division.splits == TRAIN
    counts = np.bincount(division.owners[rows] * size + cells[rows], minlength=division.num_clients * size)
    return counts.reshape(division.num_clients, *shape)


def other_test(name: str, other: PreparedSet, images: PreparedSet) -> OtherTest:
    """Return the test rows of another set (all rows without an official split), for a model trained on `images`.

    Raises:
      DataError: a class that `images` does not have, other inputs or targets, or no test row.
    """
    info, images_info = other.info, images.info
    classes, where = list(images_info.classes), f"data.test_sets, {name}"
    missing = [cls for cls in info.classes if cls not in classes]
    if missing:
        what = f"{len(missing)} classes are missing in {images_info.name!r}, such as {missing[0]!r}"
        raise DataError(what, where, "take a set whose classes have the same names")
    theirs, ours = ((each.target_type, each.target_shape, each.input_type) for each in (info, images_info))
    if theirs != ours or (not images_info.is_images and info.shape != images_info.shape):
        what = f"inputs of {info.input_type} {info.shape} with targets of {info.target_type} {info.target_shape}"
        raise DataError(what, where, f"take a set with inputs and targets like {images_info.name}")
    if images_info.is_images and info.shape[2] not in (1, images_info.shape[2]):
        what = f"images with {info.shape[2]} channels for a set with {images_info.shape[2]}"
        raise DataError(what, where, "take a set with as many channels, or a grey set")
    splits = other.splits
    rows = np.arange(len(other)) if splits is None else np.flatnonzero(splits == TEST)
    if not len(rows):
        raise DataError("the official split has no test row", where, "take another set")
    if info.columns != images_info.columns and info.columns and images_info.columns:
        what = f"columns {', '.join(info.columns[:8])} for a set with {', '.join(images_info.columns[:8])}"
        raise DataError(
            what, where, "prepare both sets from tables with the same columns, or from one table with splits"
        )
    has_classes = images_info.groups is images_info.classes
    if not has_classes and info.classes != images_info.classes:
        what = f"outputs {', '.join(info.classes[:8])} for a set with {', '.join(images_info.classes[:8])}"
        raise DataError(what, where, f"take a set with the outputs of {images_info.name}, in the same order")
    relabel = np.array([classes.index(cls) for cls in info.classes], np.int64)
    labels = relabel[other.labels[rows]] if has_classes else None
    return OtherTest(name, str(other.path), info.checksum, rows, labels)


def _partition(
    images: PreparedSet, rows: np.ndarray, spec: PartitionSpec, on_drawn: OnDrawn, file: DivisionFile | None
) -> Parts:
    """Return the given rows, partitioned into clients."""
    # Targets are read only if the scheme may use them, since they may be long sequences.
    targets = images.targets if spec.scheme == "quantiles" or ":" in spec.scheme else images.labels
    arguments = {
        **vars(spec),
        "domains": None if images.domains is None else images.domains[rows],
        "targets": targets[rows],
        "owners": None if file is None else file.of(rows),
        "on_drawn": on_drawn,
        "rng": numpy_generator(derive_seed(spec.seed, "partition")),
    }
    parts = divide(images.labels[rows], spec.scheme, spec.form, arguments)
    return cut_at(rows[np.concatenate(parts)], [len(part) for part in parts])
