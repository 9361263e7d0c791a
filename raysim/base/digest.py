"""Digest of a function: of the source, and of the values captured at the definition."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CellType


def source_digest(function: object) -> str:
    """Eight letters that change with the source of a function, or of a method's hooks, and with the values inside.

    A run does not resume with a function that was edited meanwhile, or that was made with another option.
    """
    whole = hashlib.sha256()
    _add_to(whole, function, frozenset())
    return whole.hexdigest()[:8]


def file_digest_of(function: Callable[..., object]) -> str:
    """Digest of the file that defines a function, helpers included; of the source alone if no file holds it."""
    try:
        return hashlib.sha256(Path(inspect.getfile(inspect.unwrap(function))).read_bytes()).hexdigest()
    except (OSError, TypeError):  # written in a notebook
        return source_digest(function)


def _add_to(whole: hashlib._Hash, value: object, above: frozenset[int]) -> None:
    """Add a value to a digest: functions by source and captured values, other values by content.

    Args:
      above: ids of the values that contain this value, so that a function that refers to itself ends.
    """
    if id(value) not in above:
        content, parts = _parted(value)
        whole.update(content)
        for part in parts:
            _add_to(whole, part, above | {id(value)})


def _parted(value: object) -> tuple[bytes, Iterable[object]]:
    """Return (content of the value itself as bytes, its parts)."""
    if inspect.isfunction(value):
        held = [*_closure(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
        return _source_of(value).encode(), held
    if isinstance(value, partial):
        return b"", (value.func, value.args, value.keywords)
    if isinstance(value, Mapping):
        return b"", value.items()
    if isinstance(value, list | tuple):
        return b"", value
    if isinstance(value, set | frozenset):
        return b"", sorted(value, key=repr)
    if isinstance(value, type):
        return _source_of(value).encode(), ()
    if is_dataclass(value):
        return type(value).__qualname__.encode(), [(field.name, getattr(value, field.name)) for field in fields(value)]
    if inspect.ismethod(value):
        return b"", (value.__func__, value.__self__)
    if inspect.isroutine(value):  # not written in Python
        return f"{value.__module__}.{value.__qualname__}".encode(), ()
    if callable(value):  # an object of a class of the user's own
        return _source_of(type(value)).encode(), getattr(value, "__dict__", {}).items()
    return (repr(value).encode() if isinstance(value, str | int | float | bytes | None) else _sent(value)), ()


def _closure(cells: Iterable[CellType]) -> list[object]:
    """Return the values captured by a function."""
    values: list[object] = []
    for cell in cells:
        with suppress(ValueError):  # not set yet
            values.append(cell.cell_contents)
    return values


def _source_of(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt, or no plain function
        code = getattr(function, "__code__", None)
        return repr((code.co_code, code.co_names, code.co_varnames)) if code else str(function)


def _sent(value: object) -> bytes:
    """Return a value pickled for other processes; the name of the type if pickling fails."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception:  # whatever the objects that it refers to raise
        return type(value).__qualname__.encode()
