"""Checks of what a configuration names as the user's own, and the sets that its readers make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from raysim.config import Config, parse_options, read_config
from raysim.core.errors import ConfigError, DataError, Fault
from raysim.core.own_code import own_function
from raysim.core.settings import Settings, name_and_options
from raysim.data.arrow import ImageSet, SetInfo
from raysim.data.partition import find_scheme
from raysim.data.preprocess import find_preprocess
from raysim.data.reader_api import find_reader, prepare_own
from raysim.data.sources import SOURCES, set_path
from raysim.plan.find import find, find_augmentation, find_metric


def check_own(config: Config) -> list[Fault]:
    """Faults of the user's own functions in the data and partition groups, before any of them is called."""
    faults = own_faults("partition.scheme", config.partition.scheme, find_scheme)
    faults += own_faults("data.augment", config.data.augment, find_augmentation)
    if config.data.reader is not None:
        faults += own_faults("data.reader", config.data.reader, find_reader)
    if config.data.preprocess is not None and config.data.preprocess.own is not None:
        faults += own_faults("data.preprocess.own", config.data.preprocess.own, find_preprocess)
    return faults


def check_metrics(config: Config) -> list[Fault]:
    names = [name.rpartition(":")[2] for name in config.evaluation.metrics]
    taken = ("accuracy", "loss", "balanced_accuracy", "macro_f1", "calibration_error")
    faults = []
    for index, (name, short) in enumerate(zip(config.evaluation.metrics, names, strict=True)):
        key = f"evaluation.metrics[{index}]"
        try:
            find_metric(name)
        except LookupError as error:
            faults.append(Fault(key, str(error)))
        if short in taken or short in names[:index]:
            faults.append(Fault(key, f"server/{short} is there already; drop it, or give the function another name"))
    return faults


def own_faults(key: str, spec: object, find_function: Callable[[str], Callable[..., object]]) -> list[Fault]:
    """What is wrong with a function of the user's own and its options; nothing for other names."""
    try:
        name, options = name_and_options(spec)
        if ":" not in name:
            return [Fault(key, f"{name!r} takes no options; drop them")] if options else []
        return parse_options(find_function(name), options, f"{key}.{name}" if options else key)[1]
    except (LookupError, ValueError) as error:
        return [Fault(key, str(error))]


def open_own_set(config: Config) -> ImageSet:
    """The set that a function of the user's own reads, written if it is not there, or not as that would write it now."""
    data = config.data
    name, options = name_and_options(data.reader)
    if data.name in SOURCES:  # a later run without the reader would take it for the set of that name
        raise DataError(f"{data.name!r} is a set of raysim's own", "", "give what your reader reads another data.name")
    path = set_path(Path(data.root), data.name)
    files = None if data.files is None else Path(data.files)
    prepare_own(data.name, own_function(name, "reader"), path, files, options)
    return ImageSet(path)


def prepare_by_name(
    name: str, save_as: str, root: Path, files: Path | None, words: Sequence[str], *, again: bool
) -> SetInfo:
    """`raysim prepare module:function --as NAME`: a set by a function of the user's own, with options as `key=value`.

    Raises:
      ConfigError: no such function, or wrong options. DataError, OwnCodeError: as `prepare_own`.
    """
    path = set_path(root, save_as)
    if save_as in SOURCES:
        raise DataError(f"{save_as!r} is a set of raysim's own", "", "choose another name for --as")
    options = read_config(None, words)
    if faults := own_faults("reader", {name: options}, find_reader):
        raise ConfigError(faults, "the command line")
    read = own_function(name, "reader")
    return prepare_own(save_as, read, path, files, options, again=again)


def logger_faults(specs: Sequence[object]) -> list[Fault]:
    """Names that no function has, options that it does not take, and a logger that is there already."""
    faults: list[Fault] = []
    for index, spec in enumerate(specs):
        if (first := specs.index(spec)) < index:
            faults.append(Fault(f"loggers[{index}]", f"{spec!r} is loggers[{first}] again; drop one of them"))
        made = find_logger(spec, f"loggers[{index}]")
        faults += made if isinstance(made, list) else []
    return faults


def find_logger(spec: object, key: str) -> tuple[Callable[..., object], Settings] | list[Fault]:
    """(the function that makes a logger, its options), or the faults of the name or the options."""
    name, options = next(iter(spec.items())) if isinstance(spec, dict) and len(spec) == 1 else (spec, None)
    options = options or {}
    if not isinstance(name, str) or not isinstance(options, dict):
        return [Fault(key, f"must be module:function or {{module:function: {{option: value}}}}, got {spec!r}")]
    try:
        make: object = find(name, {}, "logger")
    except LookupError as error:
        return [Fault(key, str(error))]
    if not callable(make):
        return [Fault(key, f"{name!r} is no function; a logger's function returns an object with start, round and end")]
    parsed, faults = parse_options(make, options, f"{key}.{name}")
    return faults or (make, parsed)
