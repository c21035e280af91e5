"""What of JSON schemas is taken, what is refused and how that is said, and where the bounds are."""

from __future__ import annotations

import json
import random
import string
from contextlib import suppress
from typing import Any

import pytest
from llguidance import LLMatcher

from fleetd import limits
from fleetd.engine.grammar.schema_reading import REFUSED
from fleetd.engine.grammar.schemas import enforceable, lenient
from fleetd.errors import InvalidValue, UnsupportedParameter

WHERE = "response_format.json_schema.schema"


def written(schema: Any) -> Any:
    return json.loads(enforceable(schema, WHERE))


def at(schema: Any) -> dict[str, Any]:
    """A schema inside of another, at properties/tags."""
    return {"type": "object", "properties": {"tags": schema}}


# ---- What is refused ------------------------------------------------------------------------------------

REFUSALS: dict[str, Any] = {
    **{keyword: {keyword: {}} for keyword in REFUSED},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "$ref": {"$ref": "https://example.com/schema"},
    "$id": {"$id": "https://example.com/inner"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "pattern": {"pattern": "(?=a)"},
    "multipleOf": {"multipleOf": 10_007},
    "patternProperties": {"patternProperties": {"^a": True, "^b": True}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "minProperties": {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
    "maxProperties": {
        "type": "object",
        "maxProperties": 1,
        "properties": {"a": {}},
        "additionalProperties": True,
    },
}


@pytest.mark.parametrize("keyword", sorted(REFUSALS))
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name_and_path(keyword: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        enforceable(at(REFUSALS[keyword]), WHERE)
    assert refused.value.message.startswith(f"{WHERE}/properties/tags")
    assert f"keyword '{keyword}' cannot be enforced" in refused.value.message
    assert refused.value.hint
    assert refused.value.param == WHERE


@pytest.mark.parametrize("keyword", sorted(REFUSED - {"$recursiveRef"}))
def test_the_library_enforces_no_keyword_that_is_refused_as_a_whole(keyword: str) -> None:
    """If it learns one, the list of what is refused can be shorter."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", keyword: {}}))
    assert "Unimplemented keys" in LLMatcher.validate_grammar(grammar)


def test_options_of_one_of_that_overlap_are_named() -> None:
    options = [{"const": "a"}, {"type": "string", "maxLength": 3}, {"type": "null"}]
    with pytest.raises(UnsupportedParameter, match="options 0 and 1 may both fit"):
        enforceable({"oneOf": options}, WHERE)


def test_options_of_one_of_may_be_told_apart_by_what_they_refer_to() -> None:
    cat, dog = (
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    )
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": cat, "dog": dog}}
    assert set(written(schema)) == {"anyOf", "$defs"}


def test_options_of_one_of_are_told_apart_before_they_are_closed() -> None:
    """Closed, these two have nothing in common; by the schema, {"a": 1} fits both."""
    options = [
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        for name in ("a", "b")
    ]
    with pytest.raises(UnsupportedParameter, match="oneOf"):
        enforceable({"oneOf": options}, WHERE)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "no value is valid"),
        (1, "a schema is an object"),
        (at([]), "/properties/tags: a schema is an object"),
        (at({"type": "text"}), "/properties/tags/type: it must be one of"),
        (at({"type": []}), "the list is empty"),
        (at({"enum": []}), "/enum: it must be a list"),
        (at({"anyOf": {}}), "/anyOf: it must be a list"),
        (at({"minimum": "1"}), "/minimum: it must be a number"),
        (at({"minimum": float("nan")}), "/minimum: it must be a number"),
        (at({"minLength": -1}), "/minLength: it must be a whole number"),
        (at({"multipleOf": 0}), "/multipleOf: it must be more than 0"),
        (at({"required": "a"}), "/required: it must be a list"),
        (at({"pattern": "(a"}), "/pattern: the pattern is malformed: a \\) is missing"),
        (at({"$ref": "#/$defs/none"}), "nothing there"),
        (at({"$ref": 1}), "/\\$ref: it must be a string"),
        (at({"const": "\ud800"}), "half of a surrogate pair"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "refers to itself without end"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "none that ends"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value is valid"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value is valid"),
        ({"type": "integer", "minimum": 1.1, "maximum": 1.9}, "no value is valid"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "no value is valid"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no value is valid"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "no value is valid"),
    ],
)
def test_what_is_no_schema_or_fits_nothing_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        enforceable(schema, WHERE)


@pytest.mark.parametrize("value", ["\x01", "\x7f", 2**53 + 1, 1e300, {"a\x00": 1}, ["\x1f"]])
def test_constants_that_an_answer_cannot_write_exactly_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match="cannot be written"):
        enforceable({"const": value}, WHERE)


def test_definitions_that_nothing_refers_to_are_not_looked_at() -> None:
    schema = {"type": "null", "$defs": {"unused": {"not": {}}}, "definitions": {"other": 1}}
    assert written(schema) == {"type": "null"}


# ---- What is written ------------------------------------------------------------------------------------


def test_annotations_and_unknown_keywords_are_dropped() -> None:
    said = {
        "title": "T",
        "description": "D",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
    }
    said |= {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "c",
        "$id": "https://example.com/a",
    }
    said |= {"x-guidance": {"whitespace_flexible": True}, "discriminator": {}, "contentEncoding": "base64"}
    assert written({**said, "type": "integer"}) == {"type": "integer"}


def test_a_reference_may_name_the_schema_by_its_id() -> None:
    schema = {
        "$id": "https://example.com/a",
        "$ref": "https://example.com/a#/$defs/n",
        "$defs": {"n": {"type": "null"}},
    }
    assert written(schema) == {"$ref": "#/$defs/s0", "$defs": {"s0": {"type": "null"}}}


def test_bounds_are_rounded_to_fewer_values() -> None:
    assert written({"type": "integer", "exclusiveMinimum": 1.5}) == {"type": "integer", "minimum": 2}
    assert written({"type": "integer", "minimum": -(2**63)}) == {"type": "integer", "minimum": -(2**53)}
    low = written({"type": "number", "exclusiveMinimum": 0.1})["minimum"]
    assert 0.1 < low < 0.1 + 1e-12


# ---- Bounds ---------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(count)}}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (nested, limits.SCHEMA_DEPTH - 2),
        (optional, limits.SCHEMA_OPTIONAL),
        (lambda n: {"required": list(optional(n)["properties"]), **optional(n)}, limits.SCHEMA_PROPERTIES),
        (lambda n: {**optional(n), "minProperties": 1}, limits.SCHEMA_AT_LEAST_ONE),
        (lambda n: {"type": "array", "prefixItems": [True] * n}, limits.SCHEMA_PARTS - 1),
        (lambda n: {"enum": list(range(n))}, limits.SCHEMA_VALUES),
        (lambda n: {"const": "x" * n}, limits.SCHEMA_VALUE_CHARS),
        (lambda n: {"type": "array", "maxItems": n}, limits.SCHEMA_ITEMS),
        (lambda n: {"type": "string", "maxLength": n}, limits.SCHEMA_STRING_CHARS),
        (lambda n: {"type": "string", "pattern": "a" * n}, limits.SCHEMA_PATTERN_CHARS),
        (lambda n: {"type": "string", "pattern": f"^a{{{n - 3}}}$"}, limits.SCHEMA_PATTERN_SIZE),
        (lambda n: {"type": "integer", "multipleOf": n}, limits.SCHEMA_MULTIPLE),
        (lambda n: {"const": n}, limits.SCHEMA_LARGEST),
    ],
)
def test_a_bound_is_kept_to_the_last(make: Any, most: int) -> None:
    enforceable(make(most), WHERE)
    with pytest.raises((InvalidValue, UnsupportedParameter)):
        enforceable(make(most + 1), WHERE)


def test_products_of_alternatives_end() -> None:
    product = [
        {"anyOf": [optional(1), {"type": "array", "minItems": i}, {"minLength": i}]} for i in range(20)
    ]
    with pytest.raises(InvalidValue, match=r"combinations|written out|left out"):
        enforceable({"allOf": product * 20}, WHERE)


def test_references_that_double_end() -> None:
    both = [
        {"properties": {"a": {"$ref": f"#/$defs/d{i}"}, "b": {"$ref": f"#/$defs/d{i}"}}} for i in range(1, 31)
    ]
    definitions = {f"d{i}": {"type": "object", **each} for i, each in enumerate(both)} | {
        "d30": {"type": "null"}
    }
    assert len(enforceable({"$ref": "#/$defs/d0", "$defs": definitions}, WHERE)) < 10_000


# ---- Leniently ------------------------------------------------------------------------------------------


def test_what_cannot_be_enforced_is_left_out_leniently() -> None:
    schema = {
        "type": "object",
        "properties": {"tags": {"type": "array", "uniqueItems": True, "items": {"type": "string"}}},
        "required": ["tags"],
        "additionalProperties": False,
    }
    assert json.loads(lenient(schema)) == {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["tags"],
        "additionalProperties": False,
    }
    assert json.loads(lenient({"oneOf": [{"type": "integer"}, {"type": "number"}]}))["anyOf"]


def test_an_object_stays_open_if_what_is_left_out_may_speak_of_other_properties() -> None:
    schema = {**optional(1), "if": {"required": ["p0"]}, "then": {"required": ["z"]}}
    assert json.loads(lenient(schema)).get("additionalProperties", True) is True


def junk(rng: random.Random, depth: int) -> Any:
    """JSON that looks like a schema here and there."""
    words = [
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "enum",
        "const",
        "pattern",
        "required",
    ]
    words += [
        "minLength",
        "maximum",
        "multipleOf",
        "format",
        "additionalProperties",
        "patternProperties",
        "not",
        "#",
    ]
    if depth <= 0 or rng.random() < 0.3:
        return rng.choice(
            [None, True, 1, -2.5, "object", "string", "#", "#/properties", "^(a", "", [], {}, 1e308]
        )
    if rng.random() < 0.3:
        return [junk(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {
        rng.choice([*words, rng.choice(string.printable)]): junk(rng, depth - 1)
        for _ in range(rng.randint(0, 5))
    }


def test_junk_is_refused_in_words_and_never_breaks_the_lenient_reading() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        schema = junk(rng, 4)
        assert isinstance(json.loads(lenient(schema)), dict)
        with suppress(InvalidValue, UnsupportedParameter):
            enforceable(schema, WHERE)


@pytest.mark.parametrize("nullable", [False, True])
def test_objects_in_objects_take_no_longer_with_each_level(nullable: bool) -> None:
    """As OpenAI's strict mode has them. With twice the time for each level this would not end."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "nullable": nullable}
        schema["additionalProperties"] = False
    assert json.loads(enforceable(schema, "schema"))
    assert json.loads(lenient(schema))
