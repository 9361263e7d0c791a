"""Functions and methods of the user's own as a configuration names them: by `module:function`, or sent by value."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from raysim.base.digest import source_digest
from raysim.base.errors import ConfigError, Fault, UserCodeError, UserNameError, did_you_mean, refuse
from raysim.base.settings import MOST_DEPTH, Settings, leaves
from raysim.base.user_places import is_user_file, place_in, place_of, user_errors, without_partials, words_of

T = TypeVar("T")

#: Names of functions that no module holds: they end with a digest.
BY_VALUE = re.compile(r".+:.+@[0-9a-f]{8}")

#: Name in the configuration -> function, for those that no module holds.
_BY_VALUE: dict[str, Callable[..., object]] = {}


@dataclass(frozen=True)
class UserCode:
    """The user's functions, packed for other processes.

    functions: name -> pickled, of those that travel by value; folders: where the modules of the others lie.
    """

    functions: Mapping[str, bytes] = field(default_factory=dict)
    folders: tuple[str, ...] = ()


def user_function(name: str, kind: str) -> Callable[..., object]:
    """Return the function with the name `module:function`.

    Args:
      kind: purpose of the function, in words.
    Raises:
      UserNameError, a LookupError: the module cannot be imported, or has no such function; says which file and where in it.
    """
    if name in _BY_VALUE:
        return _BY_VALUE[name]
    if BY_VALUE.fullmatch(name):
        text = f"{kind} {name!r} was given from Python as a value, and no file holds it"
        raise UserNameError(text, mend="give the same value to raysim.run again")
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        text = f"{words_of(error)} in {place_in(error) or module_name}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            text = f"there is no module {missing!r} in {Path.cwd()} or on the Python path"
        raise UserNameError(f"cannot import {kind} {name!r}: {text}") from error
    function = getattr(module, attribute, None)
    if callable(function):
        return cast("Callable[..., object]", function)
    file = getattr(module, "__file__", module_name)
    if function is not None:
        raise UserNameError(f"{kind} {name!r} must be a function, got {type(function).__name__}, in {file}")
    hint = did_you_mean(attribute, [key for key in vars(module) if not key.startswith("_")])
    raise UserNameError(f"cannot import {kind} {name!r}: no function {attribute!r} in {file}. {hint}".rstrip(". "))


def takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function takes a keyword argument of that name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def with_given(function: Callable[..., T], needed: Collection[str], offered: Collection[str] = ()) -> Callable[..., T]:
    """Wrap a user's function for calls by keyword; the signature shows the remaining options.

    An error of the function becomes a UserCodeError that names file and function.

    Args:
      needed: arguments that raysim passes and the function must take; offered: arguments that it may take.
    Raises:
      UserNameError: it does not take one of `needed`, or its annotations cannot be read.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise UserNameError(f"{words_of(error)}, in the annotations of {place_of(function)}") from error
    if missing := [name for name in needed if not takes(function, name)]:
        raise UserNameError(f"takes no argument {missing[0]!r}; it gets {', '.join(needed)}; see {place_of(function)}")

    def call(**given: object) -> T:
        taken = {key: value for key, value in given.items() if key not in offered or takes(function, key)}
        with user_errors(function):
            return function(**taken)

    left = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in (*needed, *offered) and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    call.__dict__.update(__signature__=signature.replace(parameters=left), __wrapped__=function)  # for `inspect`
    return call


def module_folder(name: str) -> str | None:
    """Return the folder from which the module of `module:function` was imported; None if not loaded or without a
    file.
    """
    module_name = name.partition(":")[0]
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None or name in _BY_VALUE or not is_user_file(file):
        return None
    return str(Path(file).absolute().parents[module_name.count(".") + (Path(file).name == "__init__.py")])


def refuse_shadows() -> None:
    """Refuse a user's folder that shadows a folder of raysim.

    Raises:
      UserCodeError: names its path.
    """
    home = Path(__file__).resolve().parents[2]
    for name in ("methods", "cluster"):
        spec = importlib.util.find_spec(name)
        file = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        ours = home / name / "__init__.py"  # a wheel has no package `cluster`
        if file is not None and ours.is_file() and file != ours:
            place = file.parent if file.name == "__init__.py" else file
            what = f"{place} stands in the way of raysim's own package {name!r}"
            raise UserCodeError(what, mend="give it another name")


def with_function_names(settings: Mapping[str, object]) -> Settings:
    """Return settings with names in place of functions and methods: in values, in lists, and in keys of options.

    Dictionaries and lists are copied; all other values are unchanged.

    Raises:
      ConfigError: settings that contain themselves; every function that cannot be sent to other processes.
    """
    faults: list[Fault] = []

    def renamed(value: object, key: str, depth: int = 0) -> object:
        if depth > MOST_DEPTH:
            fault = Fault(key[:60], f"lies more than {MOST_DEPTH} groups deep, or in a group that contains itself")
            raise ConfigError([fault], "the call")
        if isinstance(value, Mapping):
            return {
                renamed(name, key) if callable(name) else name: renamed(each, f"{key}.{name}".strip("."), depth + 1)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [renamed(each, f"{key}[{index}]", depth + 1) for index, each in enumerate(value)]
        if isinstance(value, str | int | float | None):
            return value
        is_record = is_dataclass(value) and not isinstance(value, type)  # a method
        if not is_record and not callable(value):
            return value
        try:
            return name_of(partial(_itself, value) if is_record else cast("Callable[..., object]", value), key)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    result = cast("Settings", renamed(settings, ""))
    refuse(faults, "the call")
    return result


def words(settings: object) -> Iterator[str]:
    """Every text in nested settings, keys too: among them are the names of functions."""
    with contextlib.suppress(RecursionError):  # the check of the configuration reports deep nesting
        yield from (value for _, value in leaves(settings) if isinstance(value, str))


def _itself(value: T) -> T:
    """Return a function that returns the given method, for settings that hold a method by value."""
    return value


def note_of_values(settings: object) -> str:
    """Return a sentence about settings that only Python can repeat; empty if every setting can be written to YAML."""
    names = list(dict.fromkeys(text for text in words(settings) if BY_VALUE.fullmatch(text)))
    if not names:
        return ""
    subject = f"{', '.join(names)} {'is a value' if len(names) == 1 else 'are values'} given from Python"
    return f"{subject}; no file holds {'it' if len(names) == 1 else 'them'}, so only the same call from Python resumes"


def name_of(function: Callable[..., object], key: str) -> str:
    """Return `module:function` if an import finds the same function; else a name for sending by value,
    `module:function@digest`.

    Raises:
      ConfigError: it cannot be sent to other processes; `key` is where the configuration has it.
    """
    import cloudpickle

    module, name = _home_of(function)
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
        text = f"{name} cannot be sent to other processes ({error}); let it refer to plain values and modules only"
        raise ConfigError([Fault(key, text)], "the call") from error
    name = f"{module or '__main__'}:{name}@{source_digest(function)}"
    _BY_VALUE[name] = function
    return name


def _home_of(function: Callable[..., object]) -> tuple[str | None, str]:
    """Return (module, qualified name) of a function; for a method by value, the method's name and the module of the
    first hook.
    """
    if isinstance(function, partial) and function.func is _itself:
        (method,) = function.args
        hooks = (getattr(method, field.name) for field in fields(method))
        return next((hook.__module__ for hook in hooks if inspect.isfunction(hook)), None), method.name
    function = without_partials(function)
    return getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)


def packed(settings: object) -> UserCode:
    """Return the user's functions named in settings, packed for other processes."""
    import cloudpickle

    names = sorted({text for text in words(settings) if text in _BY_VALUE or ":" in text})
    functions = {name: cloudpickle.dumps(_BY_VALUE[name]) for name in names if name in _BY_VALUE}
    folders = (module_folder(name) for name in names)
    return UserCode(functions, tuple(dict.fromkeys(folder for folder in folders if folder is not None)))


def receive(code: UserCode) -> None:
    """Unpack the functions sent by `packed` in this process."""
    import pickle

    sys.path.extend(folder for folder in code.folders if folder not in sys.path)
    for name, content in code.functions.items():
        _BY_VALUE[name] = pickle.loads(content)


def _imported(module: str, name: str) -> object:
    with contextlib.suppress(ImportError, AttributeError):
        target: object = importlib.import_module(module)
        for part in name.split("."):
            target = inspect.getattr_static(target, part)
        return target
    return None
