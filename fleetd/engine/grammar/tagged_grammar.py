"""Arguments between tags: strings as they are, all other values as JSON. Pure.

A JSON value may have a closing tag in one of its strings; the reader of answers knows which tag closes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fleetd.engine.answer.tagged_calls import ArgFormat, TaggedFormat
from fleetd.engine.grammar.lark_rules import LarkRules, choice, quoted
from fleetd.engine.grammar.parameter_lists import listed
from fleetd.engine.grammar.raw_texts import raw_text
from fleetd.engine.grammar.schema_branches import Branches, Schema

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# Keys that a tag can name.
_KEY = re.compile(r"[^\s<>\"'=]+")
_VALUE_TYPES = ("number", "boolean", "object", "array", "null")
_OPENS_CDATA, _ENDS_CDATA = "<![CDATA[", "]]>"


class TaggedGrammar:
    """The arguments of one tool."""

    def __init__(self, rules: LarkRules, form: TaggedFormat | ArgFormat, schema: Any) -> None:
        self._rules = rules
        self._writes = form.writes
        self._trims = form.trims == "blanks"
        self._says, self._cdata = ("", ""), False
        if isinstance(form, TaggedFormat):
            self._says, self._cdata = form.says, form.cdata
        self._branches = Branches(schema)

    def arguments(self) -> str:
        """The body of all parameters. Raises ValueError if a required one has a name that no tag can have."""
        return choice(map(self._object, self._branches.objects()))

    def text(self, key: str, grammar: str) -> str:
        """The body of one parameter whose text is held to a client's grammar, by its name."""
        writes, marker = self._writes, self._rules.marker
        before = marker(writes.before, key=key, says=self._says[1])
        return f"{before} {grammar} {marker(writes.closes + writes.after)}"

    def _object(self, schema: Schema) -> str:
        parameters, others = self._branches.parameters(schema)
        bodies = []
        for each in parameters:
            if _KEY.fullmatch(each.key):
                bodies.append((self._parameter(each.key, each.schema), each.required))
            elif each.required:
                raise ValueError(f"this model cannot write a parameter named {each.key!r}")
        return listed(self._rules, bodies, "" if others is False else self._parameter("", others))

    def _parameter(self, key: str, schema: Any) -> str:
        """One parameter; any whose name is none of the schema's if ``key`` is ""."""
        rules, writes = self._rules, self._writes
        return rules.rule(
            choice(
                f"{self._before(key, says)} {value} {rules.marker(writes.after)}"
                for says, value in self._values(schema)
            )
        )

    def _before(self, key: str, says: str) -> str:
        rules = self._rules
        if key:
            return rules.marker(self._writes.before, key=key, says=says)
        before, after = self._writes.before.split("{key}")
        name = rules.terminal(r"/[A-Za-z_][\w.-]{0,63}/")
        return f"{rules.marker(before)} {name} {rules.marker(after, says=says)}"

    # ---- Values ------------------------------------------------------------------------------------------

    def _values(self, schema: Any) -> list[tuple[str, str]]:
        """What the tag says of the type, and the body of the value with what closes it, for each way to write
        a value."""
        branches = self._branches.of(schema)
        if not any(each == {} or each.get("type") == "string" or "enum" in each for each in branches):
            kinds = {self._word(each["type"]) for each in branches}
            if len(kinds) == 1:
                return [(kinds.pop(), self._json(schema))]
        found = [made for each in branches for made in self._branch(each)]
        if not found:
            raise ValueError("this model cannot write any of the values that a parameter may have")
        # Any text may be a number or an object as well, and is read as what the schema allows.
        free = list(self._strings({}))
        return found if self._says[0] or free[0] not in found else free

    def _branch(self, branch: Schema) -> Iterator[tuple[str, str]]:
        if "enum" in branch:
            for value in branch["enum"]:
                yield from self._constant(value)
        elif not branch or branch["type"] == "string":
            yield from self._strings(branch)
            if not branch:
                for kind in _VALUE_TYPES if self._says[0] else ():
                    yield self._word(kind), self._json({"type": kind})
        else:
            yield self._word(branch["type"]), self._json(branch)

    def _strings(self, schema: Schema) -> Iterator[tuple[str, str]]:
        for text in self._texts(schema):
            yield self._word("string"), self._rules.until(text, self._writes.closes)

    def _texts(self, schema: Schema) -> list[str]:
        """The terminals of the strings that a schema allows."""
        closes = self._writes.closes.strip()
        text = raw_text(self._rules, schema, [closes], trims=self._trims and not self._cdata)
        if not self._cdata:
            return [text]
        plain = raw_text(self._rules, schema, [closes, "<", "&", "\n"], trims=True)
        inner = raw_text(self._rules, schema, [closes, _ENDS_CDATA], trims=False)
        return [plain, self._rules.terminal(f"{quoted(_OPENS_CDATA)} {inner} {quoted(_ENDS_CDATA)}")]

    def _constant(self, value: Any) -> Iterator[tuple[str, str]]:
        text = value if isinstance(value, str) else _JSON.encode(value)
        closes = self._writes.closes
        if closes.strip() not in text and (not self._trims or text == text.strip()):
            written = f"{quoted(text)} " if text else ""
            yield self._word(_type_of(value)), written + self._rules.marker(closes)

    def _json(self, schema: Any) -> str:
        alone = self._branches.alone(schema)
        return f"{self._rules.json(alone)} {self._rules.marker(self._writes.closes)}"

    def _word(self, kind: str) -> str:
        """The family's word for a type; "" if its tags say nothing of types."""
        attribute, string = self._says
        if not attribute:
            return ""
        if kind == "string":
            return string
        return "false" if string == "true" else kind.replace("integer", "number")


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
    return "array" if isinstance(value, list) else "object"
