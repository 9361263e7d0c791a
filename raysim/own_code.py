"""Functions of the user's own as a configuration names them: by `module:function`, or sent by value from a notebook."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from raysim.core.errors import ConfigError, Fault
from raysim.core.settings import Settings

#: Name in the configuration -> function, for those that no module holds.
_BY_VALUE: dict[str, Callable[..., object]] = {}


def named(settings: Mapping[str, object]) -> Settings:
    """Settings with names in place of functions, wherever these stand: as values, in lists, or as keys of their options.

    Dictionaries and lists are new ones, all else is as it was.

    Raises:
      ConfigError: every function that cannot be sent to other processes.
    """
    faults: list[Fault] = []

    def renamed(value: object, key: str) -> object:
        if isinstance(value, Mapping):
            return {renamed(name, key): renamed(each, f"{key}.{name}".strip(".")) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(each, f"{key}[{index}]") for index, each in enumerate(value)]
        if not callable(value):
            return value
        try:
            return name_of(value, key)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    result = cast("Settings", renamed(settings, ""))
    if faults:
        raise ConfigError(faults, "the call")
    return result


def words(settings: object) -> Iterator[str]:
    """Every text in nested settings, keys too: among them are the names of functions."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        yield from words([*settings.keys(), *settings.values()])
    elif isinstance(settings, list | tuple):
        for each in settings:
            yield from words(each)


def name_of(function: Callable[..., object], key: str) -> str:
    """`module:function` where an import finds this very function; else a name under which it travels by value,
    `module:function@digest of its source`.

    Raises:
      ConfigError: it cannot be sent to other processes; `key` is where the configuration has it.
    """
    import cloudpickle

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    if module == "":  # `raysim.methods.fedprox`: one of ours, known by its name
        return name
    if module not in (None, "__main__") and _imported(module, name) is function:
        return f"{module}:{name}"
    if inspect.isfunction(function):  # annotations kept as text would look for names that do not travel
        with contextlib.suppress(NameError):
            function.__annotations__ = inspect.get_annotations(function, eval_str=True)
    try:
        cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it refers to raise
        text = f"{name} cannot be sent to other processes ({error}); let it refer to nothing but values and modules"
        raise ConfigError([Fault(key, text)], "the call") from error
    name = f"{module or '__main__'}:{name}@{_digest(function)}"
    _BY_VALUE[name] = function
    return name


def by_value(name: str) -> Callable[..., object] | None:
    """The function that travels under this name, if one does."""
    return _BY_VALUE.get(name)


def pickled(names: Iterable[str]) -> dict[str, bytes]:
    """Those of the names that travel by value, as bytes for other processes."""
    import cloudpickle

    return {name: cloudpickle.dumps(_BY_VALUE[name]) for name in names if name in _BY_VALUE}


def receive(functions: Mapping[str, bytes]) -> None:
    """Make functions known in this process that `pickled` sent."""
    import pickle

    for name, content in functions.items():
        _BY_VALUE[name] = pickle.loads(content)


def _digest(function: Callable[..., object]) -> str:
    """Eight letters that change with the source: a run does not go on with a function that was edited meanwhile."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt, or no plain function
        code = getattr(function, "__code__", None)
        source = repr((code.co_code, code.co_names, code.co_varnames)) if code else type(function).__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def _imported(module: str, name: str) -> object:
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        return found
    except (ImportError, AttributeError):
        return None
