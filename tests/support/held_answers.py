"""Answers that a grammar holds, without a model: one token for each byte, and walks that end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from fleetd.engine.grammar.compiling import json_rule, validated
from fleetd.engine.grammar.schemas import enforceable

END = 256


class _Bytes:
    eos_token_id, bos_token_id = END, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=END + 1)


def held(schema: Any) -> LLMatcher:
    """A matcher of the JSON that a client's schema allows."""
    return validated(
        f"start: {json_rule(json.loads(enforceable(schema, 'schema')))}", byte_tokenizer(), "schema"
    )


def spelled(value: Any) -> str:
    """JSON in the style of held answers."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def takes(matcher: LLMatcher, text: str) -> bool:
    """True if the text is a whole answer."""
    trial, tokens = matcher.deep_copy(), list(text.encode())
    return trial.try_consume_tokens(tokens) == len(tokens) and bool(trial.is_accepting())


def walk(matcher: LLMatcher, rng: random.Random, most: int = 400) -> str | None:
    """A random answer; None if it has not ended after so many bytes. Fails if no token is allowed."""
    matcher, text = matcher.deep_copy(), bytearray()
    for i in range(most):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (matcher.get_error(), bytes(text))
        allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, bytes(text)
        if END in allowed and (allowed == [END] or rng.random() < 0.5):
            return text.decode()
        allowed = [token for token in allowed if token != END]
        closing = [token for token in allowed if token in b'"]},']
        ascii_only = [token for token in allowed if token < 127] or allowed
        shorter = closing and rng.random() < 0.25 + i / most
        token = rng.choice(closing if shorter else ascii_only if rng.random() < 0.7 else allowed)
        assert matcher.consume_token(token)
        text.append(token)
    return None


def is_valid(schema: Any, text: str) -> bool:
    """True if a validator takes the text. Numbers are compared as decimals, as JSON has them."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    with localcontext(prec=1000):  # numbers of any length are divided
        return bool(validator.is_valid(json.loads(text, parse_float=Decimal)))


# ---- Schemas by chance ----------------------------------------------------------------------------------

_LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"const": 1},
    {"const": [1, {"a": None}]},
    {"enum": ["a", "b\n", 2.5, -3, False]},
    {},
    True,
]
_PATTERNS = [
    "^[a-z]+$",
    "a",
    "^a|b$",
    "[^x]",
    r"\d{2,3}",
    "^.{2}$",
    r"\s",
    r"^\S*$",
    "(ab|cd)+",
    "^$",
    "^(a|b)?c$",
]
_PATTERNS += [
    "é",
    r"^[^\n]*$",
    r"[\w-]+@",
    r"\u00e9|\x41",
    "(^a|b$)",
    "x{2}",
    r'^[^"\\]*$',
    ".",
    "^(foo|ba[rz])$",
]
_FORMATS = ["date", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration", "unknown"]
_NAMES = ["a", "b", "kind", 'q"\n', "é"]


def drawn_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of any promised keywords, some of which refer to definitions; often one that is refused."""
    schema = _drawn(rng, rng.randint(1, 4))
    definitions = {name: _drawn(rng, rng.randint(0, 2)) for name in "AB"}
    return {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "$defs": definitions}


def _drawn(rng: random.Random, depth: int) -> Any:
    if depth <= 0 or rng.random() < 0.1:
        return rng.choice([*_LEAVES, {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}])
    kinds = [_number, _string, _string, _array, _object, _object, _object, _composed]
    drawn = dict(rng.choice(kinds)(rng, depth))
    if rng.random() < 0.1:
        drawn |= _composed(rng, depth)
    return drawn


def _some(rng: random.Random, choices: dict[str, Any], chance: float) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in choices.items() if rng.random() < chance)


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    def bound() -> float:
        return rng.choice(
            [rng.randint(-20, 20), round(rng.uniform(-20, 20), 2), rng.uniform(-2, 2), 0, 10**6]
        )

    low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    step = rng.choice([1, 2, 7, 0.5, 0.01, 0.1, 2.5, 12])
    return {
        "type": rng.choice(["integer", "number"]),
        **dict(_some(rng, {low: bound(), high: bound(), "multipleOf": step}, 0.4)),
    }


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    lengths = dict(_some(rng, {"minLength": rng.randint(0, 5), "maxLength": rng.randint(0, 8)}, 0.3))
    forms = dict(_some(rng, {"pattern": rng.choice(_PATTERNS), "format": rng.choice(_FORMATS)}, 0.35))
    return {"type": "string", **(lengths if "format" not in forms else {}), **forms}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    choices = {
        "items": _drawn(rng, depth - 1),
        "prefixItems": [_drawn(rng, depth - 1) for _ in range(rng.randint(1, 2))],
        "minItems": rng.randint(0, 2),
        "maxItems": rng.randint(1, 4),
    }
    return {"type": "array", **dict(_some(rng, choices, 0.5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    choices = {
        "properties": {name: _drawn(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, True, _drawn(rng, depth - 1)]),
    }
    rare = {"minProperties": rng.randint(0, 3), "maxProperties": rng.randint(1, 4), "required": ["a"]}
    rare |= {"patternProperties": {"^a": _drawn(rng, depth - 1)}, "propertyNames": {"enum": ["a", "b"]}}
    return {"type": "object", **dict(_some(rng, choices, 0.7)), **dict(_some(rng, rare, 0.05))}


def _composed(rng: random.Random, depth: int) -> dict[str, Any]:
    options = [_drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    apart = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": option}, "required": ["kind"]}
        for kind, option in zip("xyz", options, strict=False)
    ]
    return rng.choice([{"anyOf": options}, {"allOf": options}, {"oneOf": apart}, {"$ref": "#/$defs/A"}])
