"""The JSON Schema (draft-07) of a config file, for editors: made from the classes of `schema`.

An editor sees one key at a time, so rules between keys are left to `dpkit check`. What is written
here is shipped as ``dpkit/config/dpkit.schema.json``.
"""

from __future__ import annotations

import enum
import inspect
from typing import TYPE_CHECKING, Any, get_args

import attrs

from dpkit.config.checks import CLASS_PATH, Between, MadeOf, model_name, policy_name
from dpkit.config.schema import EXTENDS, Config, may_be_absent, table_of
from dpkit.config.server import LISTEN, VARIABLE, listen_address, variable_with_keys
from dpkit.config.show import plain_default
from dpkit.config.units import DURATION, SIZE, Bytes, Seconds
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from attrs import Attribute

    Schema = dict[str, Any]

_BASE: Schema = {
    "type": "string",
    "minLength": 1,
    "description": "Another TOML file, relative to this one: it says what this one leaves out.",
}
_MODELS = ["smollm2-135m", "echo", "cost:h100-8b", "./directory", "./file.gguf", "pkg.mod:Class"]
_SHAPES: dict[Any, str] = {listen_address: LISTEN, variable_with_keys: VARIABLE}
_PATTERNS: dict[Any, str] = {Seconds: DURATION, Bytes: SIZE}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema() -> Schema:
    """The schema of a whole file."""
    whole = _table(Config)
    # A file that extends another may leave its engines to it.
    whole["anyOf"] = [{"required": [key]} for key in (*whole.pop("required"), EXTENDS)]
    whole["properties"] = {EXTENDS: _BASE, **whole["properties"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "dpkit",
        "description": "A cluster of LLM inference engines, declared for dpkit.",
        **{key: value for key, value in whole.items() if key != "description"},
    }


def _table(table: type) -> Schema:
    fields = attrs.fields(table)
    required = [of.name for of in fields if of.default is attrs.NOTHING]
    return {
        "description": " ".join(inspect.cleandoc(table.__doc__ or "").split()),
        "type": "object",
        "additionalProperties": False,
        "properties": {of.name: _key(of) for of in fields},
        **({"required": required} if required else {}),
    }


def _key(attribute: Attribute[Any]) -> Schema:
    nested = table_of(attribute)
    if nested is not None:
        one = _table(nested)
        alone = attribute.type is nested or may_be_absent(attribute)
        return one if alone else {"type": "array", "minItems": 1, "items": one}
    default = plain_default(attribute)
    return {
        "description": attribute.metadata["why"],
        **_value(attribute),
        **({} if default is None else {"default": default}),
    }


def _value(attribute: Attribute[Any]) -> Schema:
    kind: Any = attribute.type
    if type(None) in get_args(kind):  # TOML has no null: what may be left out is left out
        kind = get_args(kind)[0]
    if kind in _PATTERNS:
        return {"type": "string", "pattern": _PATTERNS[kind]}
    if issubclass(kind, enum.StrEnum):
        return {"type": "string", "enum": [str(member) for member in kind]}
    check = getattr(attribute.validator, "validator", attribute.validator)  # within `optional`
    return {"type": _TYPES[kind], **_limits(check)}


def _limits(check: object) -> Schema:
    if isinstance(check, Between):
        return {"minimum": check.low, "maximum": check.high}
    if isinstance(check, MadeOf):
        return {"pattern": f"^({check.pattern})$"}
    if check in _SHAPES:
        return {"pattern": f"^({_SHAPES[check]})$"}
    if check is policy_name:
        names = [str(name) for name in PolicyName]
        return {"anyOf": [{"enum": names}, {"pattern": f"^{CLASS_PATH}$"}]}
    if check is model_name:
        return {"minLength": 1, "examples": _MODELS}
    return {}
