"""Files that stand for options of methods (`raysim.core.options.FromFile`), read and put in their place."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from raysim.core.errors import Fault
from raysim.core.options import FromFile


def read_option_files(specs: Sequence[Any], find: Callable[[str], Callable[..., Any]]) -> tuple[list[Any], list[Fault]]:
    """(the `methods` list with every file's content in its place, faults). An option whose file is at fault is left out.

    Args:
      find: a method's function by its name; LookupError where there is none, of which others tell.
    """
    read: list[Any] = []
    faults: list[Fault] = []
    for index, item in enumerate(specs):
        if isinstance(item, Mapping) and len(item) == 1:
            ((name, options),) = item.items()
            if isinstance(name, str) and isinstance(options, Mapping):
                options, bad = _read(options, _marked(find, name), f"methods[{index}].{name}")
                item, faults = {name: options}, faults + bad
        read.append(item)
    return read, faults


def _marked(find: Callable[[str], Callable[..., Any]], name: str) -> dict[str, FromFile]:
    """Option -> its mark, of those that have one."""
    try:
        parameters = inspect.signature(find(name), eval_str=True).parameters.values()
    except (LookupError, TypeError, ValueError, NameError):  # whoever builds the method says what is wrong
        return {}
    marks = {p.name: [mark for mark in get_args(p.annotation) if isinstance(mark, FromFile)] for p in parameters}
    return {option: found[0] for option, found in marks.items() if found}


def _read(options: Mapping[str, Any], marks: Mapping[str, FromFile], key: str) -> tuple[dict[str, Any], list[Fault]]:
    result, faults = dict(options), []
    for option, mark in marks.items():
        value = result.get(option)
        if not isinstance(value, str) or value in mark.names:
            continue
        del result[option]
        path = Path(value).expanduser()
        if not path.is_file():
            known = " or ".join(mark.names)
            faults.append(Fault(f"{key}.{option}", f"{value!r} is neither {known} nor a file; correct the path"))
            continue
        try:
            result[option] = mark.select(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            faults.append(Fault(f"{key}.{option}", f"{value} cannot be used ({error}); make it again"))
    return result, faults
