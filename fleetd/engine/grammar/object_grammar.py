"""Arguments in braces with keys without quotes, as Gemma writes them, and as Python's keywords. Pure.

Gemma's objects follow their schema as far as its types, values, properties and lengths go; what else a schema
says of an object is for the tool's own checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fleetd.engine.grammar.lark_rules import LarkRules, choice, quoted
from fleetd.engine.grammar.parameter_lists import listed
from fleetd.engine.grammar.raw_texts import raw_text
from fleetd.engine.grammar.schema_branches import Branches, Schema

# Keys without quotes.
_WORD = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_ANY_WORD = r"/[A-Za-z_][A-Za-z0-9_-]{0,63}/"
_PYTHON_NAME = re.compile(r"[^\W\d]\w*")
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_ANY_TYPES = ("string", "number", "boolean", "null", "array", "object")
# What each kind of number is held to.
_NUMBER_KEYS = (
    "type",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)


class BracesGrammar:
    """The arguments of one tool in braces.

    Args:
        quote: the marker on both sides of a string.
    """

    def __init__(self, rules: LarkRules, schema: Any, quote: str) -> None:
        self._rules = rules
        self._branches = Branches(schema)
        # Two tools may have two schemas under one reference.
        self._key = json.dumps(schema)
        self._quote = quote

    def arguments(self) -> str:
        """The body of what stands between the outermost braces."""
        return choice(map(self._members, self._branches.objects()))

    def text(self, key: str, grammar: str) -> str:
        """The body of one argument whose text is held to a client's grammar, by its name."""
        quote = self._rules.marker(self._quote)
        return f"{self._name(key)} {quote} {grammar} {quote}"

    def _members(self, schema: Schema) -> str:
        parameters, others = self._branches.parameters(schema)
        # Chat templates sort the keys of arguments.
        parameters.sort(key=lambda each: each.key.lower())
        bodies = [
            (f"{self._name(each.key)} {self._value(each.schema)}", each.required) for each in parameters
        ]
        more = "" if others is False else f'{self._rules.terminal(_ANY_WORD)} ":" {self._value(others)}'
        return listed(self._rules, bodies, more, '","')

    def _name(self, key: str) -> str:
        if _WORD.fullmatch(key):
            return quoted(f"{key}:")
        return f'{self._string_of(key)} ":"'

    def _value(self, schema: Any) -> str:
        name, new = self._rules.recursive(f"{self._key} {json.dumps(schema)}")
        if new:
            found = [made for each in self._branches.of(schema) for made in self._branch(each)]
            self._rules.define(name, choice(found))
        return name

    def _branch(self, branch: Schema) -> Iterator[str]:
        if "enum" in branch:
            yield from map(self._constant, branch["enum"])
            return
        match branch.get("type"):
            case "string":
                text = raw_text(self._rules, branch, [self._quote], trims=False)
                yield f"{self._rules.marker(self._quote)} {self._rules.until(text, self._quote)}"
            case "array":
                yield f'"[" {self._items(branch)} "]"'
            case "object":
                yield f'"{{" {self._rules.rule(self._members(branch))} "}}"'
            case "boolean":
                yield '("true" | "false")'
            case "null":
                yield '"null"'
            case None:
                yield choice(self._value({"type": each}) for each in _ANY_TYPES)
            case _:
                yield self._rules.json({key: branch[key] for key in _NUMBER_KEYS if key in branch})

    def _items(self, branch: Schema) -> str:
        least, most = int(branch.get("minItems") or 0), branch.get("maxItems")
        firsts = [self._value(each) for each in branch.get("prefixItems") or ()]
        items = branch.get("items", {})
        if firsts:
            more = "" if items is False else f'("," {self._value(items)})*'
            return ' "," '.join(firsts) + f" {more}"
        if most is not None and int(most) < 1:
            return ""
        item = self._value(items)
        end = "" if most is None else int(most) - 1
        whole = f'{item} ("," {item}){{{max(least - 1, 0)},{end}}}'
        return whole if least else f"({whole})?"

    def _constant(self, value: Any) -> str:
        match value:
            case str():
                return self._string_of(value)
            case list():
                inner = ' "," '.join(map(self._constant, value))
            case dict():
                inner = ' "," '.join(
                    f"{self._name(key)} {self._constant(value[key])}" for key in sorted(value, key=str.lower)
                )
            case _:
                return quoted(json.dumps(value))
        opens, closes = ('"["', '"]"') if isinstance(value, list) else ('"{"', '"}"')
        return f"{opens} {inner} {closes}"

    def _string_of(self, text: str) -> str:
        """A string. Raises ValueError if it has the quote in it."""
        if self._quote in text:
            raise ValueError(f"this model cannot write the text {text!r}")
        quote = self._rules.marker(self._quote)
        return f"{quote} {quoted(text)} {quote}" if text else f"{quote} {quote}"


class KeywordGrammar:
    """The arguments of one tool as keywords of a Python call: values are JSON, but for Python's own words."""

    def __init__(self, rules: LarkRules, schema: Any) -> None:
        self._rules = rules
        self._branches = Branches(schema)

    def arguments(self) -> str:
        """The body of all keywords. Raises ValueError if a required one is no name in Python."""
        return choice(map(self._keywords, self._branches.objects()))

    def text(self, key: str, grammar: str) -> str:
        """The body of one keyword whose text is held to the grammar of its escaped form, by its name."""
        return f'{quoted(key + "=" + chr(34))} {grammar} "\\""'

    def _keywords(self, schema: Schema) -> str:
        parameters, others = self._branches.parameters(schema)
        bodies = []
        for each in parameters:
            if _PYTHON_NAME.fullmatch(each.key):
                bodies.append((f"{quoted(each.key + '=')} {self._value(each.schema)}", each.required))
            elif each.required:
                raise ValueError(f"this model cannot write a parameter named {each.key!r}")
        more = "" if others is False else f'{self._rules.terminal(_ANY_WORD)} "=" {self._value(others)}'
        return listed(self._rules, bodies, more, '", "')

    def _value(self, schema: Any) -> str:
        found = [made for each in self._branches.of(schema) for made in self._branch(each)]
        return self._rules.rule(choice(found))

    def _branch(self, branch: Schema) -> Iterator[str]:
        if "enum" in branch:
            words = [_PYTHON_WORDS.get(json.dumps(value)) for value in branch["enum"]]
            yield from (quoted(word) for word in words if word)
            rest = [value for value, word in zip(branch["enum"], words, strict=True) if not word]
            if rest:
                yield self._rules.json({"enum": rest})
        elif branch.get("type") in ("boolean", "null"):
            yield from (quoted(word) for word in _words_of(branch["type"]))
        elif not branch:
            yield from map(quoted, _PYTHON_WORDS.values())
            yield self._rules.json({"type": ["string", "number", "array", "object"]})
        else:
            yield self._rules.json(self._branches.alone(branch))


def _words_of(kind: str) -> list[str]:
    return ["None"] if kind == "null" else ["True", "False"]
