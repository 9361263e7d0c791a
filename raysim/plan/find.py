"""Objects named by a configuration, found and checked: methods, metrics, class mappings, the user's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import SupportsFloat, TypeVar, cast

import numpy as np

from methods import METHODS
from raysim.base.direction import declare, direction_of
from raysim.base.errors import DataError, Fault, UserCodeError, refuse
from raysim.base.settings import Settings, Spec
from raysim.base.user_code import user_function, with_given
from raysim.base.user_places import place_in, place_of, user_errors, words_of
from raysim.config import Config, parse_options, read_config, shipped_folder, unknown
from raysim.config import nearest as nearest_name
from raysim.core.hooks import check_calls
from raysim.core.method import Method
from raysim.data.arrow import PreparedSet
from raysim.data.partition import find_scheme
from raysim.data.reader_api import find_reader, prepare_user_set
from raysim.data.sources import SOURCES, set_path
from raysim.training.metrics import METRICS, Metric
from raysim.training.shift import SHIFTS
from raysim.training.tasks import TASKS, Task

T = TypeVar("T")

#: Class mappings for external validation sets that come with raysim.
MAPPINGS = shipped_folder("configs") / "mappings"


def build_methods(specs: Sequence[object]) -> tuple[list[Method], list[Fault]]:
    """Methods from their configuration: a name, or {name: {option: value}}; a name may be `module:function`."""
    methods: list[Method] = []
    faults: list[Fault] = []
    for index, spec in enumerate(specs):
        result = _build_method(spec, f"methods[{index}]")
        if isinstance(result, Method):
            methods.append(result)
        else:
            faults += result
    return methods, faults


def _build_method(spec: object, key: str) -> Method | list[Fault]:
    try:
        named = spec if isinstance(spec, Spec) else Spec.of(spec)
        make = find_method(named.name)
    except (LookupError, ValueError) as error:
        return [Fault(key, str(error))]
    key = f"{key}.{named.name}"
    try:
        parsed, faults = parse_options(make, named.options, key)
        method = None if faults else make(**parsed)
        if isinstance(method, Method):
            check_calls(method)
    except UserCodeError as error:  # the error names its place
        return [Fault(key, str(error))]
    except (Exception, SystemExit) as error:  # a method of the user's own may raise anything
        place = place_in(error)
        text = str(error).removeprefix(f"{named.name}: ") or words_of(error)  # the key names the method
        return [Fault(key, f"{words_of(error)} in {place}" if place else text)]
    if isinstance(method, Method):
        return method
    text = f"returned {type(method).__name__}; a method's function returns a Method; see {place_of(make)}"
    return faults or [Fault(key, text)]


def find_method(name: str) -> Callable[..., Method]:
    """Return the function of a method's name; raises as `find`."""
    return find(name, METHODS, "method")


def find_metric(name: str) -> Metric:
    """Return the metric of a name, and register a user metric's direction. Raises as `find`."""
    metric = find(name, METRICS, "metric")
    declare(name.rpartition(":")[2], getattr(metric, "direction", None))
    return metric


def find_augmentation(name: str) -> Callable[..., object]:
    """Return the user's augmentation `module:function`, with its options as signature; raises LookupError."""
    return with_given(user_function(name, "augmentation"), ("images",), ("generator",))


def find_shift(name: str) -> Callable[..., object]:
    """Return the feature shift of a name, with its options as signature; raises as `find`."""
    return with_given(find(name, SHIFTS, "shift"), ("images",), ("client", "num_clients", "generator"))


def find_task(name: str) -> Task | Callable[..., object]:
    """Return the task of a name, or the user's function that makes a task; raises as `find`."""
    return find(name, TASKS, "task")


def made_task(make: Callable[..., object], options: Settings) -> Task:
    """Return the task that a user's function makes.

    Raises:
      UserCodeError: the function fails, or does not return a Task.
    """
    with user_errors(make):
        task = make(**options)
    if not isinstance(task, Task):
        text = f"a task's function returned {type(task).__name__}"
        raise UserCodeError(text, place_of(make), "return a raysim.Task")
    for name in (task.main, task.of_part):
        declare(name, task.direction)
    direction_of(f"server/{task.main}", key=f"the task {task.name}")
    return task


def find(name: str, objects: Mapping[str, T], kind: str) -> T:
    """Return the object of a name, or the user's object of `module:function`.

    Raises:
      LookupError: unknown name; the message has the known names.
    """
    if name in objects:
        return objects[name]
    if ":" not in name:
        raise LookupError(unknown(name, objects, kind))
    return cast("T", user_function(name, kind))


def further_metrics(config: Config) -> dict[str, Metric]:
    """The further metrics of the configuration; `module:function` is called by its function."""
    metrics = {name: find_metric(name) for name in config.evaluation.metrics}
    return {name.rpartition(":")[2]: _user_metric(m) if ":" in name else m for name, m in metrics.items()}


def _user_metric(metric: Metric) -> Metric:
    """Wrap a user's metric so that its errors name it."""

    def call(labels: np.ndarray, logits: np.ndarray) -> float:
        with user_errors(metric):
            value = metric(labels.copy(), logits.copy())  # copies: a metric may write to its arguments
            if not isinstance(value, SupportsFloat):
                raise UserCodeError(f"a metric returned {type(value).__name__}", place_of(metric), "return one number")
            return float(value)

    return call


def read_mapping(name: str) -> tuple[tuple[str, str], ...]:
    """Return (class of the set, class of the external set) pairs of a YAML file or a shipped mapping.

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


def check_user_code(config: Config) -> list[Fault]:
    """Faults of the user's own functions in the data and partition groups, before any of them is called."""
    data = config.data
    specs = (
        ("partition.scheme", config.partition.scheme, find_scheme),
        ("data.augment", data.augment, find_augmentation),
        ("data.shift", data.shift, find_shift),
        ("task", config.task, cast("Callable[[str], Callable[..., object]]", find_task)),
        ("data.reader", data.reader, find_reader),
    )
    return [fault for key, spec, make in specs if spec is not None for fault in user_faults(key, spec, make)]


def check_metrics(config: Config) -> Iterator[Fault]:
    names = [name.rpartition(":")[2] for name in config.evaluation.metrics]
    taken = ("accuracy", "loss", "balanced_accuracy", "macro_f1", "calibration_error")
    for index, (name, short) in enumerate(zip(config.evaluation.metrics, names, strict=True)):
        key = f"evaluation.metrics[{index}]"
        try:
            find_metric(name)
        except LookupError as error:
            yield Fault(key, str(error))
        if short in taken or short in names[:index]:
            yield Fault(key, f"server/{short} is recorded already; remove the entry, or rename the function")


def user_faults(key: str, spec: Spec, find_function: Callable[[str], Callable[..., object]]) -> list[Fault]:
    """Return faults of a user's function and its options.

    Shipped names take no options and are looked up elsewhere, except shifts, which are checked here.
    """
    try:
        if ":" not in spec.name and (find_function is not find_shift or spec == "none"):
            return [Fault(key, f"{spec.name!r} takes no options; remove the options")] if spec.options else []
        return parse_options(find_function(spec.name), spec.options, f"{key}.{spec.name}" if spec.options else key)[1]
    except LookupError as error:
        return [Fault(key, str(error))]


def open_user_set(config: Config, reader: Spec) -> PreparedSet:
    """Return the set of a user's reader, written again if missing or outdated."""
    data = config.data
    if data.name in SOURCES:  # a later run without the reader would read it as raysim's set
        mend = "choose another data.name for the set of your reader"
        raise DataError(f"{data.name!r} is a set of raysim's own", "", mend)
    path = set_path(Path(data.root), data.name)
    files = None if data.files is None else Path(data.files)
    prepare_user_set(data.name, user_function(reader.name, "reader"), path, files, reader.options)
    return PreparedSet(path)


def logger_faults(specs: Sequence[Spec]) -> Iterator[Fault]:
    """Yield faults of loggers: unknown names, unknown options, and duplicates."""
    for index, spec in enumerate(specs):
        if (first := specs.index(spec)) < index:
            yield Fault(f"loggers[{index}]", f"{spec.written!r} is loggers[{first}] again; remove one")
        made = find_logger(spec, f"loggers[{index}]")
        yield from made if isinstance(made, list) else []


def find_logger(spec: Spec, key: str) -> tuple[Callable[..., object], Settings] | list[Fault]:
    """Return (function that makes a logger, options), or faults."""
    try:
        make: Callable[..., object] = find(spec.name, {}, "logger")
    except LookupError as error:
        return [Fault(key, str(error))]
    parsed, faults = parse_options(make, spec.options, f"{key}.{spec.name}")
    return faults or (make, parsed)


#: A method with its options as a configuration has it.
MethodEntry = dict[str, dict[str, object]]


class MethodNames:
    """Methods as functions from options to a configuration entry."""

    def __getattr__(self, name: str) -> Callable[..., MethodEntry]:
        if name not in METHODS:
            raise AttributeError(f"no method {name!r}; known: {', '.join(sorted(METHODS))}")

        def spec(**options: object) -> MethodEntry:
            _, faults = build_methods([{name: options}])
            refuse(faults, f"raysim.methods.{name}")
            return {name: options}

        spec.__doc__ = METHODS[name].__doc__
        options_of = signature(METHODS[name], eval_str=True).replace(return_annotation=MethodEntry)
        vars(spec)["__signature__"] = options_of  # Jupyter completes these options after the bracket
        # Without options, as in `methods=[raysim.methods.fedprox]`, the entry is the name.
        spec.__name__ = spec.__qualname__ = name
        spec.__module__ = ""
        return spec

    def __dir__(self) -> list[str]:
        return sorted(METHODS)


methods = MethodNames()
