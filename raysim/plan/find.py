"""What a configuration names: methods, metrics, class mappings, and what there is to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat, TypeVar, cast

import numpy as np

from methods import METHODS
from raysim.config import Config, parse_options, read_config, shipped_folder
from raysim.config import nearest as nearest_name
from raysim.config.renamed import refuse_gone, renamed
from raysim.core.errors import DataError, Fault, OwnCodeError
from raysim.core.hooks import check_calls
from raysim.core.method import Method
from raysim.core.own import own_errors, place_in, place_of, words_of
from raysim.core.own_code import own_function, with_given
from raysim.core.settings import name_and_options
from raysim.training.metrics import METRICS, Metric

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
        name, options = name_and_options(renamed(spec))
        refuse_gone(name, options)
        make = find_method(name)
    except (LookupError, ValueError) as error:
        return [Fault(key, str(error))]
    key = f"{key}.{name}"
    try:
        parsed, faults = parse_options(make, options, key)
        method = None if faults else make(**parsed)
        if isinstance(method, Method):
            check_calls(method)
    except OwnCodeError as error:  # it names its place
        return [Fault(key, str(error))]
    except (Exception, SystemExit) as error:  # a method of the user's own may raise anything
        place = place_in(error)
        text = str(error).removeprefix(f"{name}: ") or words_of(error)  # the key names the method
        return [Fault(key, f"{words_of(error)} in {place}" if place else text)]
    if isinstance(method, Method):
        return method
    text = f"returned {type(method).__name__}; a method's function returns a Method; see {place_of(make)}"
    return faults or [Fault(key, text)]


def find_method(name: str) -> Callable[..., Method]:
    """The function behind a method's name; raises as `find`."""
    return find(name, METHODS, "method")


def find_metric(name: str) -> Metric:
    """The metric of that name; raises as `find`."""
    return find(name, METRICS, "metric")


def find_augmentation(name: str) -> Callable[..., object]:
    """The user's own augmentation behind `module:function`, with its options as its signature; raises LookupError."""
    return with_given(own_function(name, "augmentation"), ("images",), ("generator",))


def find(name: str, known: Mapping[str, T], kind: str) -> T:
    """What a name stands for, or what `module:function` names where it is the user's own.

    Raises:
      LookupError: there is none; says what is known.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise LookupError(
            f"unknown {kind} {name!r}. {nearest_name(name, list(known))}; or module:function for your own"
        )
    return cast("T", own_function(name, kind))


def further_metrics(config: Config) -> dict[str, Metric]:
    """The further metrics of the configuration; `module:function` is called by its function."""
    metrics = {name: find_metric(name) for name in config.evaluation.metrics}
    return {name.rpartition(":")[2]: _own_metric(m) if ":" in name else m for name, m in metrics.items()}


def _own_metric(metric: Metric) -> Metric:
    """A metric of the user's own whose faults name it."""

    def call(labels: np.ndarray, logits: np.ndarray) -> float:
        with own_errors(metric):
            value = metric(labels.copy(), logits.copy())  # it may write into them; other metrics follow
            if not isinstance(value, SupportsFloat):
                text = f"a metric returned {type(value).__name__}"
                raise OwnCodeError(text, place_of(metric), "return one number")
            return float(value)

    return call


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
