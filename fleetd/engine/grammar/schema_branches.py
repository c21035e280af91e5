"""A JSON schema as alternatives that each have one type, for families that do not write JSON. Pure.

References, ``allOf`` and what stands beside them are put together key by key: the last of two that say
different things about the same keyword counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from fleetd import limits

Schema = dict[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# Keywords that say what type a schema without one is about.
_ABOUT = {
    "properties": "object",
    "additionalProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
}
_CHOICES = ("anyOf", "oneOf")
_ROOT = "#/$defs/root"


class Parameter(msgspec.Struct, frozen=True):
    """A property of an object."""

    key: str
    schema: Any
    required: bool


class Branches:
    """Looks into one schema.

    Args:
        root: the whole schema, which references are about.
    """

    def __init__(self, root: Any) -> None:
        self.root: Schema = root if isinstance(root, dict) else {}

    def of(self, schema: Any) -> list[Schema]:
        """The alternatives of a part of the schema: each has "enum" or one "type", or is {} for anything."""
        return list(self._split(schema, limits.JSON_DEPTH))

    def objects(self) -> list[Schema]:
        """The alternatives of the whole schema that are objects; any object if it has none."""
        found = [each for each in self.of(self.root) if each.get("type", "") == "object"]
        return found or [{"type": "object"}]

    def _split(self, schema: Any, depth: int) -> Iterator[Schema]:
        if not isinstance(schema, dict) or depth < 0:
            yield {}
            return
        schema = self._joined(schema, depth)
        for name in _CHOICES:
            if isinstance(choices := schema.get(name), list) and choices:
                base = {key: value for key, value in schema.items() if key != name}
                for each in choices:
                    yield from self._split(_merged(base, each) if isinstance(each, dict) else base, depth - 1)
                return
        if "const" in schema or isinstance(schema.get("enum"), list):
            yield {"enum": [schema["const"]] if "const" in schema else schema["enum"]}
            return
        types = schema.get("type", next((_ABOUT[key] for key in schema if key in _ABOUT), None))
        names = types if isinstance(types, list) else [types]
        if schema.get("nullable") is True and types is not None:
            names = [*names, "null"]
        for name in dict.fromkeys(names):
            yield {**schema, "type": name} if name in _TYPES else {}

    def _joined(self, schema: Schema, depth: int) -> Schema:
        """A schema with what its reference and its ``allOf`` say."""
        found: Schema = {}
        for key, value in schema.items():
            parts = [self.referred(value)] if key == "$ref" else value if key == "allOf" else None
            if not isinstance(parts, list):
                found = _merged(found, {key: value})
                continue
            for each in parts:
                if isinstance(each, dict) and depth > 0:
                    found = _merged(found, self._joined(each, depth - 1))
        return found

    def referred(self, name: Any) -> Any:
        """What "#/$defs/NAME" means; {} for what is not in the schema itself."""
        found: Any = self.root
        for step in str(name).removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            at = int(step) if isinstance(found, list) and step.isdecimal() else None
            if at is not None:
                found = found[at] if at < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return {} if found is None else found

    def alone(self, schema: Any) -> Any:
        """A part of the schema as a schema of its own, with what its references are about."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {**moved(schema, _ROOT), "$defs": {"root": moved(self.root, _ROOT)}}

    def parameters(self, schema: Schema) -> tuple[list[Parameter], Any]:
        """The properties of an object, and the schema of others that it may have; False if it may not."""
        declared = schema.get("properties")
        declared = declared if isinstance(declared, dict) else {}
        required = [each for each in schema.get("required") or () if isinstance(each, str)]
        others = schema.get("additionalProperties", {})
        found = [Parameter(key, value, key in required) for key, value in declared.items()]
        found += [Parameter(key, others, True) for key in dict.fromkeys(required) if key not in declared]
        # Models do not make up parameters unless a tool asks for them.
        open_ended = others is not False and (not declared or (isinstance(others, dict) and bool(others)))
        return found, (others if isinstance(others, dict) else {}) if open_ended else False


def _merged(one: Schema, other: Schema) -> Schema:
    found = {**one, **other}
    for key in ("properties", "required"):
        if key in one and key in other:
            both = (one[key], other[key])
            if all(isinstance(each, dict) for each in both):
                found[key] = {**both[0], **both[1]}
            elif all(isinstance(each, list) for each in both):
                found[key] = [*both[0], *both[1]]
    return found


def moved(schema: Any, root: str) -> Any:
    """A schema for a place in another one, ``root``, where its references find what they are about."""
    match schema:
        case {"$ref": str(name)} if name.startswith("#"):
            return {**{key: moved(value, root) for key, value in schema.items()}, "$ref": root + name[1:]}
        case dict():
            return {key: moved(value, root) for key, value in schema.items()}
        case list():
            return [moved(each, root) for each in schema]
    return schema
