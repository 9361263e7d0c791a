"""Functions of the user's own as a configuration names them: by `module:function`, or sent by value from a notebook."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from raysim.core.errors import ConfigError, Fault

#: Name in the configuration -> function, for those that no module holds.
_BY_VALUE: dict[str, Callable[..., object]] = {}


def named_methods(specs: Sequence[object], key: str = "methods") -> list[object]:
    """A list of methods, or of what another key lists, with names in place of functions.

    Raises:
      ConfigError: a function that cannot be sent to other processes.
    """
    named = []
    for index, spec in enumerate(specs):
        options = None
        if isinstance(spec, Mapping) and len(spec) == 1:
            ((spec, options),) = spec.items()
        name = name_of(spec, f"{key}[{index}]") if callable(spec) else spec
        named.append(name if options is None else {name: options})
    return named


def name_of(function: Callable[..., object], key: str) -> str:
    """`module:function` where an import finds this very function; else a name under which it travels by value,
    `module:function@digest of its source`.

    Raises:
      ConfigError: it cannot be sent to other processes; `key` is where the configuration has it.
    """
    import cloudpickle

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
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
