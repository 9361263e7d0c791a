"""YAML as configurations are written: 1e-3 is a number, each key appears once, and no text grows without a bound."""

from __future__ import annotations

import math
import re
from pathlib import Path

import yaml

from raysim.base.errors import Fault
from raysim.base.settings import MOST_DEPTH, leaves
from raysim.base.untrusted import regular_file

#: Largest number of values of a configuration; an alias adds its values wherever it appears. The largest recipe has
#: 700.
MOST_VALUES = 100_000

#: Largest size of a file in bytes. Recipes have a few thousand; PyYAML takes ten seconds for a megabyte.
MOST_BYTES = 2_000_000

#: Bits of a number: more is no floating-point number, and Python prints no integer of more than 4,300 digits.
MOST_BITS = 1000


class _Loader(yaml.CSafeLoader):
    """YAML in which 1e-3 is a number, as everybody expects, and a key that appears twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                text = f"key {key.value!r} appears twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.CSafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(text: str) -> object:
    """Return the value of a YAML text.

    Raises:
      ValueError: no YAML, or nested too deeply; the message has the place.
    """
    try:
        _refuse_depth(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None) or str(error), getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"is not valid YAML: {problem}{place}") from error
    except RecursionError as error:
        raise ValueError(f"is nested too deeply; groups may lie {MOST_DEPTH} deep") from error
    # PyYAML reads tags unchecked: !!int x
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"is not valid YAML: {error}") from error


def _refuse_depth(text: str) -> None:
    """Raise RecursionError before libyaml composes a deeply nested text: its recursion would crash the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 2 * MOST_DEPTH:
            raise RecursionError


def flow_parts(text: str) -> list[str]:
    """Split a text at the top-level commas of a YAML list: not inside brackets, quotes or mappings."""
    try:
        _refuse_depth(f"[{text}]")
        node = yaml.compose(f"[{text}]", Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        return [text]  # the fault is reported when the text is read as a value
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        return [text]
    return [text[part.start_mark.index - 1 : part.end_mark.index - 1].strip() for part in node.value]


def read_yaml(path: Path) -> object:
    """Return the value of a YAML file.

    Raises:
      ValueError: the file cannot be read, or is not UTF-8 text or not YAML; the message has the reason.
    """
    try:
        if (size := regular_file(path).stat().st_size) > MOST_BYTES:
            raise ValueError(f"the file has {size:,} bytes; a configuration has {MOST_BYTES:,} at most")
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}); give a YAML file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return load_yaml(text)


def unfit_values(raw: object) -> list[Fault]:
    """Return faults for values that no key accepts: non-finite numbers, text with NUL, and too many values."""
    faults = []
    try:
        for count, (key, value) in enumerate(leaves(raw)):
            if count > MOST_VALUES:
                return [Fault("file", f"holds more than {MOST_VALUES:,} values; write it without aliases of aliases")]
            if isinstance(value, float) and not math.isfinite(value):
                faults.append(Fault(key, f"must be a finite number, got {value}"))
            elif isinstance(value, str) and "\0" in value:
                faults.append(Fault(key, f"must not hold the character NUL, got {value!r}"))
            elif isinstance(value, int) and value.bit_length() > MOST_BITS:
                text = f"must be a number of at most {MOST_BITS} bits, got one of {value.bit_length()}"
                faults.append(Fault(key, text))
    except RecursionError:
        return [Fault("file", f"is nested too deeply; groups may lie {MOST_DEPTH} deep")]
    return faults
