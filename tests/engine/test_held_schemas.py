"""Answers that a schema holds are valid by it, and what is not valid is never an answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from held_answers import drawn_schema, held, is_valid, spelled, takes, walk
from jsonschema_rs import Draft202012Validator

from fleetd.engine.grammar.formats import PATTERNS
from fleetd.errors import FleetError

# ---- Keyword by keyword ---------------------------------------------------------------------------------

OBJECT = {"type": "object"}
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
KIND = {"properties": {"kind": {"const": "x"}, "v": {"type": "integer"}}, "required": ["kind"]}
OTHER_KIND = {"properties": {"kind": {"const": "y"}, "v": {"type": "string"}}, "required": ["kind"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}, "required": ["v"]}

#: A schema, values that are valid and answers, values that are not valid.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "true": (True, [None, 1, "a", [1], {"a": [{}]}], []),
    "type": ({"type": "integer"}, [0, -3, 12], [1.5, "1", None, True, [1], {}]),
    "types": ({"type": ["boolean", "null"]}, [True, False, None], [0, "", [], "null"]),
    "number": ({"type": "number"}, [1, -1.5, 1e-7], ["1", None, True]),
    "enum": (
        {"enum": ["a", 1, None, [1], {"a": "b"}]},
        ["a", 1, None, [1], {"a": "b"}],
        ["b", 2, [], [2], {}],
    ),
    "const": ({"const": 'a"\n'}, ['a"\n'], ["a", 'a"', None]),
    "const of a number": ({"const": 2.5}, [2.5], [2, 25, 2.51, "2.5"]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 100], [-4, -100]),
    "maximum": ({"type": "number", "maximum": 1.5}, [1.5, 1.4999, -7, 0], [1.51, 2, 10]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, [0.1, 1, 77.5], [0, -0.1, -5]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 10}, [9, 0, -10], [10, 11, 100]),
    "exclusive, as of draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3, 2]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 7, -21, 700], [1, 8, -20]),
    "multipleOf of a fraction": ({"type": "number", "multipleOf": 0.01}, [0.07, 19.99, 3], [0.001, 1.005]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "éé", "\U0001f600x"], ["", "a", "\U0001f600"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "ab", "\n\n"], ["abc", "\n\n\n"]),
    "pattern": ({"type": "string", "pattern": "b+$"}, ["b", "aabb"], ["", "ba", "a"]),
    "pattern with anchors": (
        {"type": "string", "pattern": "^(ab|c)$"},
        ["ab", "c"],
        ["abc", "xab", "c\n", ""],
    ),
    "pattern and lengths": (
        {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3},
        ["ab", "abc"],
        ["a", "abcd", "AB"],
    ),
    "pattern and enum": ({"enum": ["aa", "ab", 1], "pattern": "b$"}, ["ab", 1], ["aa", 2]),
    "a dot is no end of a line": (
        {"type": "string", "pattern": "^.$"},
        ["a", "é"],
        ["\n", "\r", "\u2028", ""],
    ),
    "format": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "1999-12-31"],
        ["2023-02-29", "2024-13-01"],
    ),
    "format that is not known": ({"type": "string", "format": "cuid2"}, ["anything"], [1]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["a"], [1, None]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "items as a list": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}},
        [[], [1], [1, None]],
        [[None], [1, 1]],
    ),
    "minItems": (
        {"type": "array", "items": {"type": "null"}, "minItems": 2},
        [[None] * 2, [None] * 5],
        [[], [None]],
    ),
    "maxItems": ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None] * 2], [[None] * 3]),
    "properties": (PAIR, [{}, {"a": 1}, {"a": 1, "b": "x"}], [{"a": "x"}, {"b": 1}, {"a": 1, "b": None}]),
    "required": ({**PAIR, "required": ["b"]}, [{"b": ""}, {"a": 1, "b": ""}], [{}, {"a": 1}]),
    "required without a schema": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z"]},
        [{"a": None, "z": 1}, {"z": []}],
        [{}, {"a": None}],
    ),
    "additionalProperties": (
        {**PAIR, "additionalProperties": {"type": "null"}},
        [{"a": 1, "z": None}, {"z": None, "y": None}],
        [{"z": 1}, {"a": None}],
    ),
    "additionalProperties: false": (
        {**PAIR, "additionalProperties": False},
        [{"a": 1}],
        [{"z": 1}, {"a": 1, "": 2}],
    ),
    "additionalProperties: true": ({**PAIR, "additionalProperties": True}, [{"z": 1}], [{"a": "x"}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"x-a": 1}, {"x-a": 1, "x-b": 2}],
        [{"a": 1}, {"x-a": "1"}],
    ),
    "patternProperties with others": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": {"type": "null"},
        },
        [{"x": 1, "y": None}],
        [{"x": None}, {"y": 1}],
    ),
    "propertyNames": (
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
        },
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "propertyNames by a pattern": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-c]+$"},
            "additionalProperties": {"type": "integer"},
        },
        [{}, {"ab": 1}],
        [{"d": 1}, {"a": None}],
    ),
    "minProperties": ({**PAIR, "minProperties": 1}, [{"a": 1}, {"b": ""}, {"a": 1, "b": ""}], [{}]),
    "minProperties of a map": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    "maxProperties": ({**PAIR, "maxProperties": 1}, [{}, {"a": 1}, {"b": ""}], [{"a": 1, "b": ""}]),
    "anyOf": (
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
        [1, "a"],
        [1.5, "ab", None],
    ),
    "anyOf beside properties": (
        {**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": ""}, {"a": 1, "b": ""}],
        [{}, {"a": ""}],
    ),
    "oneOf": (
        {"type": "object", "oneOf": [KIND, OTHER_KIND]},
        [{"kind": "x", "v": 1}],
        [{"kind": "x", "v": ""}, {}],
    ),
    "allOf": (
        {"allOf": [PAIR, {"type": "object", "properties": {"c": {"type": "null"}}, "required": ["c"]}]},
        [{"a": 1, "c": None}, {"c": None}],
        [{}, {"a": 1}, {"a": "", "c": None}],
    ),
    "allOf of numbers": (
        {"allOf": [{"type": "number", "minimum": 2}, {"maximum": 3}]},
        [2, 2.5, 3],
        [1.9, 3.1, 4],
    ),
    "$ref": ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, [None], [1, "null"]),
    "$ref beside keywords": (
        {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}},
        [5, 10],
        [4, 5.5, "a"],
    ),
    "recursion": (
        NODE,
        [{"v": 1}, {"next": {"v": 2}, "v": 1}],
        [{}, {"next": {}, "v": 1}, {"next": None, "v": 1}],
    ),
    "nullable": ({"type": "string", "nullable": True}, ["a", None], [1]),
    "a type that goes without saying": ({"properties": {"a": {"minimum": 3}}}, [{"a": 3}], [{"a": 2}]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_that_are_not_valid_are_never_answers(name: str) -> None:
    schema, valid, invalid = CASES[name]
    matcher = held(schema)
    assert [value for value in valid if not takes(matcher, spelled(value))] == []
    assert [value for value in invalid if takes(matcher, spelled(value))] == []


def test_a_key_is_not_said_again_in_another_spelling() -> None:
    """The second would be the value that a reader keeps."""
    matcher = held({**PAIR, "additionalProperties": True})
    assert takes(matcher, '{"a": 1, "c": "x"}')
    assert not takes(matcher, '{"a": 1, "\\u0061": "x"}')
    assert not takes(matcher, '{"a": 1, "a": "x"}')


def test_white_space_has_one_style() -> None:
    matcher = held({"type": "object", "additionalProperties": {"type": "array", "items": {"type": "null"}}})
    assert takes(matcher, '{"a": [null, null], "b": []}')
    for text in ('{"a":[]}', '{ "a": []}', '{"a": [null,null]}', '{"a": [ ]}', '{"a": []}\n'):
        assert not takes(matcher, text), text


def test_an_object_that_lists_properties_is_closed_unless_it_says_otherwise() -> None:
    assert not takes(held(PAIR), '{"z": 1}')
    assert takes(held({**PAIR, "additionalProperties": {}}), '{"z": 1}')
    assert takes(held(OBJECT), '{"z": 1}')


def test_composed_objects_are_closed_as_a_whole() -> None:
    """Each part alone would forbid the properties of the others."""
    parts = [PAIR, {"properties": {"c": {"type": "null"}}}, {"$ref": "#/$defs/d"}]
    schema = {"allOf": parts, "$defs": {"d": {"type": "object", "properties": {"d": {"type": "null"}}}}}
    assert takes(held(schema), '{"a": 1, "b": "x", "c": null, "d": null}')
    assert not takes(held(schema), '{"a": 1, "e": null}')


def test_keys_come_in_the_order_of_the_schema() -> None:
    base = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    first = held({"allOf": [base], "properties": {"z": {"type": "null"}}})
    assert takes(first, '{"a": null, "b": null, "z": null}')
    assert not takes(first, '{"z": null, "a": null}')
    last = held({"properties": {"z": {"type": "null"}}, "allOf": [base]})
    assert takes(last, '{"z": null, "a": null, "b": null}')


# ---- By chance ------------------------------------------------------------------------------------------


def test_what_formats_make_is_valid() -> None:
    rng = random.Random(7)
    for name in PATTERNS:
        schema = {"type": "string", "format": name}
        matcher = held(schema)
        texts = [walk(matcher, rng) for _ in range(40)]
        strict = Draft202012Validator(schema, validate_formats=True)
        ended = [json.loads(text) for text in texts if text is not None]
        assert [text for text in ended if not strict.is_valid(text)] == [], name
        assert any(texts), name


def _walked(seeds: range) -> Counter[str]:
    """Walks through schemas by chance; fails at the first answer that is not valid."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schema = drawn_schema(rng)
        try:
            matcher = held(schema)
        except FleetError:
            seen["refused"] += 1
            continue
        for _ in range(3):
            text = walk(matcher, rng)
            seen["ended" if text is not None else "long"] += 1
            assert text is None or is_valid(schema, text), (seed, schema, text)
    return seen


def test_answers_by_chance_are_valid_by_the_schema() -> None:
    seen = _walked(range(250))
    assert seen["refused"] < 125
    assert seen["ended"] > 300
    assert seen["long"] < 50


@pytest.mark.long
def test_thousands_of_answers_by_chance_are_valid_by_the_schema() -> None:
    seen = _walked(range(1000, 9000))
    assert seen["ended"] > 10_000
