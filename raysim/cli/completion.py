"""Completions of shells and editors: recipes, YAML files, keys, their words, and methods; the JSON schema. Loads no PyTorch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from raysim.base.options import meanings
from raysim.base.settings import Settings
from raysim.config import Config
from raysim.config.faults import options_model
from raysim.config.schema import key
from raysim.config.shipped import recipes

#: Where bash ends a word, so that `paper:fedvg` reaches us as three.
BREAKS = (":", "=")


def complete_call(context: typer.Context, incomplete: str) -> list[str]:
    """Completions of the words of a verb that takes a configuration and settings."""
    before = [context.params.get("config"), *(context.params.get("overrides") or ())]
    return completions([word for word in before if word], incomplete)


def completions(before: Sequence[str], incomplete: str) -> list[str]:
    """What may stand in the place of `incomplete`.

    Args:
      before: the words between the verb and it, as the shell divides them.
    """
    earlier, pieces = list(before), [incomplete]
    if not incomplete and earlier and earlier[-1] in {key for key, _ in _keys(Config)}:
        pieces = ["=", ""]  # typer leaves out a word that is an equals sign; no setting is a key alone
    while earlier and (earlier[-1] in BREAKS or pieces[0] in BREAKS):
        pieces.insert(0, earlier.pop())
    word = "".join(pieces)
    fixed = word if incomplete in BREAKS else "".join(pieces[:-1])
    offered = _setting_words(word) if earlier else configurations(word)
    return [each.removeprefix(fixed) for each in offered]


def configurations(word: str) -> list[str]:
    """Recipes, and the YAML files and folders here, that begin so."""
    names = [name for name, file in recipes().items() if file.stem != "base" and name.startswith(word)]
    if "/" in word:
        return names  # none: the shell completes the path by itself
    paths = sorted(path for path in Path.cwd().glob(f"{word}*") if not path.name.startswith("."))
    files = [path.name for path in paths if path.suffix in (".yaml", ".yml")]
    return [*names, *files, *(f"{path.name}/" for path in paths if path.is_dir())]


def _setting_words(word: str) -> list[str]:
    """Return keys with the given prefix; after `key=`, the allowed words; after `methods=`, a list of methods."""
    if word.startswith("methods="):
        listed, _, begun = word.removeprefix("methods=").lstrip("[").rpartition(",")
        others = [name for name in known_methods() if name.startswith(begun) and name not in listed.split(",")]
        return [f"methods=[{listed}{',' * bool(listed)}{name}]" for name in others]
    key, equals, _ = word.partition("=")
    if equals:
        words = dict(_keys(Config)).get(key, ())
        return [each for each in (f"{key}={value}" for value in words) if each.startswith(word)]
    begun_so = [(name, words) for name, words in _keys(Config) if name.startswith(word)]
    if len(begun_so) == 1:  # with its words at once: behind the only completion the shell would set a blank
        ((key, words),) = begun_so
        return [f"{key}={value}" for value in words] or [f"{key}="]
    return [f"{name}=" for name, _ in begun_so]


def _keys(group: type[BaseModel], above: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return (dotted key, allowed words) of every key."""
    for name, field in group.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        inner = next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)
        if inner is not None:
            yield from _keys(inner, f"{above}{name}.")
            continue
        words = [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
        yield f"{above}{name}", ("true", "false", *words) if bool in parts else tuple(words)


@cache
def known_methods() -> tuple[str, ...]:
    """The names of the methods, as their package lists them; read without an import, which would load PyTorch."""
    package = importlib.util.find_spec("methods")
    if package is None or package.origin is None:
        return ()
    for node in ast.parse(Path(package.origin).read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "GROUPS":
            return tuple(sorted(name.id for name in ast.walk(node.value or node) if isinstance(name, ast.Name)))
    return ()


#: `module:function` of the user's own.
OWN = "^[^:]+:[^:]+$"


class ConfigFile(Config):
    """A configuration of raysim, as a file has it."""

    base: str | None = key(None, "file that this one is laid over, or a recipe's name, as in paper:fedvg/table_A3")


def json_schema() -> Settings:
    """The schema of a file: of all groups and keys, and of the methods with their options."""
    schema = ConfigFile.model_json_schema()
    schema["properties"]["methods"]["items"] = {"$ref": "#/$defs/Method"}
    schema["$defs"]["Method"] = _method_schema()
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "raysim"}


def _method_schema() -> Settings:
    """A method: its name, or {name: {option: value}}."""
    from methods import METHODS  # loads PyTorch

    options = {}
    for name, make in sorted(METHODS.items()):
        of_one = options_model(make).model_json_schema(ref_template="#/$defs/{model}")
        line = (make.__doc__ or "").partition("\n")[0]
        for option, meaning in meanings(make).items():
            of_one["properties"][option]["description"] = meaning
        options[name] = {**of_one, "type": ["object", "null"], "title": name, "description": line}
    one = {"minProperties": 1, "maxProperties": 1, "additionalProperties": False}
    return {
        "anyOf": [
            {"enum": list(options)},
            {"type": "string", "pattern": OWN},
            {"type": "object", "properties": options, "patternProperties": {OWN: {}}, **one},
        ]
    }
