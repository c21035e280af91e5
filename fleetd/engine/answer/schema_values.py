"""What a value means whose text does not say so: the reading of it that its schema allows. Pure.

`3` may be a number or a string, `null` nothing or a word. The readings of a text are tried in order: what it
is as JSON or as one of Python's literals, the text itself, and the string that it quotes. The first that is
valid counts. Schemas are as Pydantic and zod write them, with ``anyOf``, ``allOf``, ``enum`` and ``$ref``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleetd import limits
from fleetd.engine.answer.object_text import bare_value, object_of

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": (int, float),
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
_ALL = frozenset(_KINDS) - {"integer"}
_BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZES: Mapping[type, tuple[str, str]] = {
    str: ("minLength", "maxLength"),
    list: ("minItems", "maxItems"),
    dict: ("minProperties", "maxProperties"),
}


class ParameterSchemas:
    """The schemas of one tool's parameters.

    Args:
        parameters: the tool's, an object's schema; anything else allows anything.
    """

    def __init__(self, parameters: Any) -> None:
        self._root = parameters if isinstance(parameters, dict) else {}
        self._left = 0

    def of(self, key: str) -> Any:
        """A parameter's schema; {} for one that is not declared."""
        for each in self._with_references(self._root):
            properties = each.get("properties")
            if isinstance(properties, dict) and key in properties:
                return properties[key]
        return {}

    def kinds(self, schema: Any) -> frozenset[str]:
        """What a value may be, as far as that is easily told: "null", "boolean", "number", …"""
        self._left = limits.SCHEMA_STEPS
        return self._kinds(schema, limits.JSON_DEPTH)

    def _kinds(self, schema: Any, depth: int) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0 or depth < 0:
            return _ALL
        found = _declared(schema)
        if "$ref" in schema:
            found &= self._kinds(self._referred(schema["$ref"]), depth - 1)
        for each in _list(schema.get("allOf")):
            found &= self._kinds(each, depth - 1)
        for name in ("anyOf", "oneOf"):
            if choices := _list(schema.get(name)):
                found &= frozenset[str]().union(*(self._kinds(each, depth - 1) for each in choices))
        return found

    def read(self, text: str, key: str, *, told: str | None = None) -> str:
        """The JSON of a parameter's value. ``told``: its JSON as the model means it, tried first."""
        schema = self.of(key)
        found = [*([told] if told is not None else ()), *_readings(text)]
        for each in found:
            value: Any = json.loads(each)
            if self.allows(schema, value):
                return self._as_integer(each, value, schema)
        if told is not None:
            return told
        # No reading is valid: the tool's own checks tell the model what is wrong with what it wrote.
        return found[0] if found[0][0] in "{[" else _JSON.encode(text)

    def _as_integer(self, text: str, value: Any, schema: Any) -> str:
        exact = isinstance(value, float) and value.is_integer() and not self.allows(schema, value + 0.5)
        return str(int(value)) if exact and abs(value) < 2**63 else text

    def allows(self, schema: Any, value: Any) -> bool:
        """Whether a value is valid. True where that takes too long to tell."""
        self._left = limits.SCHEMA_STEPS
        return self._allows(schema, value, limits.JSON_DEPTH)

    def _allows(self, schema: Any, value: Any, depth: int) -> bool:
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0 or depth < 0:
            return schema is not False
        deeper = depth - 1
        if "$ref" in schema and not self._allows(self._referred(schema["$ref"]), value, deeper):
            return False
        if not _has_type(schema, value) or not _is_among(schema, value) or not _fits(schema, value):
            return False
        if not all(self._allows(each, value, deeper) for each in _list(schema.get("allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            choices = _list(schema.get(name))
            if choices and not any(self._allows(each, value, deeper) for each in choices):
                return False
        return self._allows_inside(schema, value, deeper)

    def _allows_inside(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        if isinstance(value, list):
            return all(self._allows(schema.get("items"), each, depth) for each in value)
        if not isinstance(value, dict):
            return True
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        others = schema.get("additionalProperties")
        return all(each in value for each in _list(schema.get("required")) if isinstance(each, str)) and all(
            self._allows(known.get(key, others), each, depth) for key, each in value.items()
        )

    def _referred(self, name: Any) -> Any:
        """What "#/$defs/NAME" means; {} for what is not in the schema itself."""
        found: Any = self._root
        for step in str(name).removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        return {} if found is None else found

    def _with_references(self, schema: Any) -> Iterator[dict[str, Any]]:
        """A schema and those that it is made of."""
        waiting = [schema]
        for _ in range(limits.ANSWER_HEAD_CHARS):
            if not waiting:
                return
            each = waiting.pop(0)
            if isinstance(each, dict):
                yield each
                waiting += [self._referred(each["$ref"])] if "$ref" in each else []
                waiting += [part for name in ("allOf", "anyOf", "oneOf") for part in _list(each.get(name))]


def _readings(text: str) -> list[str]:
    """What a text may mean, as JSON."""
    bare, plain = text.strip(), _JSON.encode(text)
    if bare.startswith(("{", "[")):
        return [*_inner(bare), plain]
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'":
        return [plain, *_inner(bare)]
    value = bare_value(bare.lower() if bare.lower() in ("true", "false", "null") else bare)
    return [plain] if value.startswith('"') else [value, plain]


def _inner(text: str) -> list[str]:
    """A value with brackets or quotes around it, if it is one and nothing more."""
    found = json.loads(object_of(f'{{"x": {text}}}') or "{}")
    return [_JSON.encode(found["x"])] if found.keys() == {"x"} else []


def _declared(schema: dict[str, Any]) -> frozenset[str]:
    """What a schema itself says a value may be."""
    found = _ALL
    if (wanted := schema.get("type")) is not None:
        names = {str(each).lower() for each in (wanted if isinstance(wanted, list) else [wanted])}
        names |= {"null"} if schema.get("nullable") is True else set()
        found &= frozenset("number" if name == "integer" else name for name in names)
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            found &= frozenset(kind for value in values for kind in _ALL if _is(kind, value))
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has_type(schema: dict[str, Any], value: Any) -> bool:
    wanted = schema.get("type")
    if wanted is None or (value is None and schema.get("nullable") is True):
        return True
    names = wanted if isinstance(wanted, list) else [wanted]
    return any(_is(str(name).lower(), value) for name in names)


def _is(name: str, value: Any) -> bool:
    kinds = _KINDS.get(name)
    if kinds is None:
        return True  # of a dialect that is not known
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, kinds) and (name != "integer" or _whole(value))


def _whole(number: Any) -> bool:
    return bool(number == int(number))


def _is_among(schema: dict[str, Any], value: Any) -> bool:
    allowed = schema.get("enum")
    if isinstance(allowed, list) and not any(_same(value, each) for each in allowed):
        return False
    return "const" not in schema or _same(value, schema["const"])


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _fits(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return all(
            test(value, schema[name])
            for name, test in _BOUNDS.items()
            if isinstance(schema.get(name), int | float) and not isinstance(schema.get(name), bool)
        )
    least, most = _SIZES.get(type(value), ("", ""))
    return not least or _number(schema.get(least), 0) <= len(value) <= _number(schema.get(most), len(value))


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) else default
