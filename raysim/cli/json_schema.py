"""The JSON schema of a configuration file, by which editors complete and check YAML."""

from __future__ import annotations

from pydantic.json_schema import GenerateJsonSchema

from methods import METHODS
from raysim.base.options import meanings
from raysim.base.settings import Settings
from raysim.config import Config
from raysim.config.faults import options_model
from raysim.config.schema import key

#: Pattern of a function of the user, `module:function`.
OWN = "^[^:]+:[^:]+$"


class ConfigFile(Config):
    """A configuration of raysim, as a file has it."""

    base: str | None = key(None, "file or recipe, such as paper:fedvg/table_A3, whose settings this file overrides")


def json_schema() -> Settings:
    """Return the schema of a configuration file: all groups and keys, and the methods with their options."""
    schema = ConfigFile.model_json_schema()
    schema["properties"]["methods"]["items"] = {"$ref": "#/$defs/Method"}
    schema["$defs"]["Method"] = _method_schema()
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "raysim"}


def _method_schema() -> Settings:
    """Return the schema of a method: a name, or {name: {option: value}}."""
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
