"""Grammars become matchers within bounds, and what does not is refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from held_answers import byte_tokenizer, held, takes

from fleetd import limits
from fleetd.engine.grammar.compiling import json_rule, validated
from fleetd.engine.grammar.schemas import enforceable
from fleetd.errors import InvalidValue, UnsupportedParameter


def test_json_stands_in_a_grammar_in_the_style_of_held_answers() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}
    grammar = (
        f'start: "<" value ">" | "[" value "]"\nvalue: {json_rule(json.loads(enforceable(schema, "s")))}'
    )
    matcher = validated(grammar, byte_tokenizer(), "s")
    assert takes(matcher, '<{"a": [1, 2], "b": []}>')
    assert takes(matcher, "[{}]")
    assert not takes(matcher, '<{"a":[1,2]}>')
    assert not takes(matcher, '<{"\\u0061": []}>')


def test_texts_that_mean_something_to_the_notation_of_grammars_are_taken_as_they_are() -> None:
    for text in ('"', "\\", "\n", "//", "#", "%json", "{", "}", "/a/", "é\U0001f600"):
        assert takes(held({"const": text}), json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    "grammar", ["start: [", "start: missing", "", "start: /(/", 'start: %json {"type": 1}']
)
def test_a_malformed_grammar_is_told_in_one_line(grammar: str) -> None:
    with pytest.raises(InvalidValue, match=r"^grammar is malformed") as refused:
        validated(grammar, byte_tokenizer(), "grammar")
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "^b"}]},
        {"enum": ["a", "b"], "pattern": "c"},
        {"type": "object", "properties": {"a": {"enum": ["a"], "pattern": "c"}}, "required": ["a"]},
    ],
)
def test_what_only_the_library_finds_empty_is_told(schema: Any) -> None:
    with pytest.raises(InvalidValue, match="no answer can fit it"):
        held(schema)


def test_a_pattern_whose_lengths_cannot_be_weighed_is_refused_by_name() -> None:
    schema = {"type": "string", "pattern": "^[a-z]+( [a-z]+)*$", "minLength": 100, "maxLength": 2000}
    with pytest.raises(UnsupportedParameter, match="'pattern' with another, or with 'minLength'"):
        held(schema)


def test_a_grammar_that_is_too_large_is_refused() -> None:
    doubling = "\n".join(["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)), 'T60: "a"'])
    with pytest.raises(UnsupportedParameter, match="more time or memory"):
        validated(doubling, byte_tokenizer(), "grammar")


def test_rules_that_refer_to_each_other_too_deep_are_refused_before_the_library_sees_them() -> None:
    """It would end the process."""

    def chain(count: int, name: str) -> str:
        rules = [f"{name}{i}: {name}{i + 1} | /{i}/" for i in range(count)]
        return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "a"'])

    assert takes(validated(chain(limits.GRAMMAR_RULE_DEPTH - 2, "r"), byte_tokenizer(), "grammar"), "a")
    for name in ("r", "T"):
        with pytest.raises(UnsupportedParameter, match="refer to each other more than"):
            validated(chain(10_000, name), byte_tokenizer(), "grammar")


# ---- What would explode ---------------------------------------------------------------------------------


def pattern(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": text, **more}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(count)}}


BOMBS: dict[str, Any] = {
    "repeats of repeats": pattern("^(a{1,1000}){1,100}$"),
    "repeats of alternatives": pattern("^((a|b){1,100}c?){1,100}$"),
    "a late choice": pattern("^(a|b)*a(a|b){20}$"),
    "stars of stars": pattern("^((a*)*)*(a|aa)*$"),
    "a search with a gap": pattern("a.{30}b"),
    "a long literal": {"const": "abcdefghij" * 400},
    "alternatives": {"enum": [f"word number {i * 7919 % 1000003}" for i in range(10_000)]},
    "classes of Unicode": pattern(r"^[\p{L}\p{N}\p{P} ]{1,1000}$"),
    "long strings": {"type": "string", "minLength": 1_000_000},
    "many items": {"type": "array", "items": optional(50), "minItems": 10_000, "maxItems": 10_000},
    "optional properties": optional(256),
    "at least one of them": {**optional(32), "minProperties": 1},
    "a product": {"allOf": [{"anyOf": [optional(i), {"minLength": i}]} for i in range(1, 16)]},
    "intersections of patterns": {"allOf": [pattern(f"^.*x{i}.{{{5 + i}}}y") for i in range(8)]},
    "a small multiple": {"type": "number", "multipleOf": 1e-9},
    "a large multiple within bounds": {
        "type": "integer",
        "multipleOf": 9973,
        "minimum": 123456789,
        "maximum": 10**15,
    },
    "many digits": {
        "anyOf": [{"type": "number", "minimum": i + 0.123456789, "maximum": i + 0.5} for i in range(1000)]
    },
    "options apart": {
        "oneOf": [
            {"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(900)
        ]
    },
    "many patterns": {"anyOf": [pattern(f"^x{i}[a-z]{{1,{i % 50 + 1}}}$") for i in range(1500)]},
    "nested": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}, {}]}}},
    },
}

#: Compiles one schema and walks 300 bytes: prints seconds of CPU and bytes of memory.
MEASURE = """
import json, random, resource, sys, time
from held_answers import byte_tokenizer, held
from fleetd.errors import FleetError
held({"type": "string"}).compute_bitmask()
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    matcher = held(json.load(sys.stdin))
except FleetError:
    matcher = None
compiled, rng, slowest = time.process_time() - began, random.Random(1), 0.0
for _ in range(300 if matcher else 0):
    began = time.process_time()
    mask = matcher.compute_bitmask()
    slowest = max(slowest, time.process_time() - began)
    allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
    if matcher.is_error() or not allowed or not matcher.consume_token(rng.choice(allowed)):
        break
print(compiled, slowest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_what_would_explode_takes_a_second_and_a_hundred_megabytes_at_most(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps(BOMBS[name]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    compiled, mask, memory = map(float, done.stdout.split())
    assert compiled < 1
    assert mask < 0.05
    assert memory * (1 if sys.platform == "darwin" else 1024) < 100e6
