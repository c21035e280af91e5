"""The calls of tools as a family of models writes them, as rules of a grammar. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from fleetd.engine.answer.call_formats import CallFormat, CallLayout
from fleetd.engine.answer.tagged_calls import ArgFormat, TaggedFormat
from fleetd.engine.grammar.escaped_lark import escaped_lark
from fleetd.engine.grammar.lark_rules import LarkRules, choice, quoted
from fleetd.engine.grammar.object_grammar import BracesGrammar, KeywordGrammar
from fleetd.engine.grammar.schema_branches import moved
from fleetd.engine.grammar.tagged_grammar import TaggedGrammar

#: The one argument of a tool that takes a text.
INPUT = "input"

# Names that every family can write and ``CallReader`` can read.
_NAME = re.compile(r"[^\s<>{}()\[\]\"',;=\\]{1,512}")


class HeldTool(msgspec.Struct, frozen=True):
    """A tool whose calls are held to its schema."""

    name: str
    #: The JSON schema of its parameters; checked before.
    schema: str
    #: The Lark grammar of the text that is its one argument; "" for a tool with other arguments.
    lark: str = ""


class CallGrammar:
    """The calls of some tools.

    Args:
        whole_json: a call of a family that writes JSON is one JSON value for the lexer, with its tool's name.

    Raises ValueError, also where it is made, for a tool that the family cannot write: its name, the name of a
    required parameter, or its grammar.
    """

    def __init__(
        self, rules: LarkRules, form: CallFormat, tools: Sequence[HeldTool], *, whole_json: bool = False
    ) -> None:
        self._rules = rules
        self._form = form
        newer = form.older is None or rules.spelling.is_token(form.newer)
        self._text: CallLayout = form.writes if newer or form.older is None else form.older
        #: What every section of calls begins with.
        self.opener = form.start or form.begins[0]
        self._call = rules.rule(choice(map(self._as_json if whole_json else self._one, tools)))

    def section(self, *, parallel: bool) -> str:
        """The name of the rule of one section of calls, behind its opener."""
        return self._rules.rule(f"{self._inner(parallel=parallel)} {self._end}")

    def behind_opener(self, *, parallel: bool) -> str:
        """The name of the rule of calls and nothing else, behind the opener of the first."""
        inner, marker = self._inner(parallel=parallel), self._rules.marker
        if parallel and self._text.apart:
            next_one = marker(self._form.end + self._text.between + self.opener)
            inner = f"{inner} ({next_one} {inner})*"
        return self._rules.rule(f"{inner} {self._end}")

    def all(self, *, parallel: bool) -> str:
        """The name of the rule of calls and nothing else."""
        opener = self._rules.marker(self.opener)
        return self._rules.rule(
            f"{f'({opener})?' if self._form.bare else opener} {self.behind_opener(parallel=parallel)}"
        )

    @property
    def _end(self) -> str:
        end = self._rules.marker(self._form.end)
        return f"({end})?" if self._form.ends_answer else end

    def _inner(self, *, parallel: bool) -> str:
        marker, text, call = self._rules.marker, self._text, self._call
        if parallel and not text.apart:
            call = f"{call} ({marker(text.between)} {call})*"
        return f"{marker(text.opens)} {call} {marker(text.closes)}"

    def _as_json(self, tool: HeldTool) -> str:
        """A call as one JSON value, in a family that writes its head as the beginning of one."""
        if tool.lark:
            return self._one(tool)
        _check(tool)
        names = re.findall(r'"(\w+)": ', self._text.head)
        arguments = moved(_object(json.loads(tool.schema)), f"#/properties/{names[1]}")
        return self._rules.json(
            {
                "type": "object",
                "properties": {names[0]: {"const": tool.name}, names[1]: arguments},
                "required": names,
                "additionalProperties": False,
            }
        )

    def _one(self, tool: HeldTool) -> str:
        """A call, without its section."""
        _check(tool)
        head = self._text.head if self._form.start else self._text.head.removeprefix(self.opener)
        fields = {"name": tool.name, "json": quoted(tool.name)}
        before = self._rules.marker(head, **fields)
        return f"{before} {self._arguments(tool)} {self._rules.marker(self._text.tail)}"

    def _arguments(self, tool: HeldTool) -> str:
        rules, schema = self._rules, json.loads(tool.schema)
        match self._form.arguments:
            case "json" if tool.lark:
                text = rules.nested(escaped_lark(tool.lark))
                return f"{quoted(f'{{{quoted(INPUT)}: {chr(34)}')} {text} {quoted(chr(34) + '}')}"
            case "json":
                return rules.json(_object(schema))
            case "keywords":
                keywords = KeywordGrammar(rules, schema)
                if tool.lark:
                    return keywords.text(INPUT, rules.nested(escaped_lark(tool.lark)))
                return keywords.arguments()
            case "braces":
                made: BracesGrammar | TaggedGrammar = BracesGrammar(rules, schema, self._form.quote)
            case TaggedFormat() | ArgFormat() as form:
                made = TaggedGrammar(rules, form, schema)
            case _ as never:
                assert_never(never)
        return made.text(INPUT, rules.nested(tool.lark)) if tool.lark else made.arguments()


def _check(tool: HeldTool) -> None:
    if not _NAME.fullmatch(tool.name):
        raise ValueError(f"this model cannot write a tool named {tool.name!r}")


def _object(schema: Any) -> dict[str, Any]:
    """A schema that allows nothing but objects."""
    known = schema if isinstance(schema, dict) else {}
    return known if "type" in known else {**known, "type": "object"}
