"""Rules and terminals of one Lark grammar in llguidance's dialect, while it is written. Pure.

A terminal is a regular expression over text. A rule may have control tokens as well, which are outside of all
text. The lexer takes the longest terminal that fits, so a text up to a marker that is text itself is one
terminal together with the marker: ``until`` knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fleetd.engine.grammar.compiling import json_rule

#: A terminal of any text.
ANY = "/(?s:.*)/"

_CONTROL = re.compile(r"<\[\d+\]>")
_BLANK = r"/[\s\x1c-\x1f]/"
# What may stand at a place of a marker: a line end or none, a number, a word that is not "self".
_PLACES = {"{lf}": "/\\n?/", "{n}": "/[0-9]{1,3}/", "{word}": "/[A-Za-z0-9_-]+/ & ~/.*self.*/"}
_PLACE = re.compile(f"({'|'.join(map(re.escape, _PLACES))})")


class Spelling(Protocol):
    """How a tokenizer spells markers."""

    def lark(self, text: str, /) -> str:
        """A marker in Lark's notation: ``<[id]>`` for each control token in it, quoted texts for the rest."""
        ...

    def is_token(self, text: str, /) -> bool:
        """True if a marker is one control token, which is outside of all text; a text may still spell it."""
        ...


class LarkRules:
    """A grammar's rules. The same body has the same name, and no name is a client's: grammars of clients are
    nested, with names of their own."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._nested: dict[str, str] = {}
        self._markers: dict[str, str] = {}

    # ---- Names -------------------------------------------------------------------------------------------

    def rule(self, body: str) -> str:
        """The name of a rule."""
        return self._named("r", "", body)

    def lazy(self, terminal: str) -> str:
        """The name of a rule that ends as soon as its one terminal does."""
        return self._named("r", "[lazy]", terminal)

    def terminal(self, body: str) -> str:
        """The name of a terminal."""
        return self._named("T", "", body)

    def recursive(self, key: str) -> tuple[str, bool]:
        """The name of the rule for something that may hold itself, and whether it is new: then its body has
        to be given to ``define``."""
        known = f"= {key}"
        new = known not in self._names
        return self._names.setdefault(known, f"r{len(self._names)}"), new

    def define(self, name: str, body: str) -> None:
        """Give a recursive rule its body."""
        self._lines.append(f"{name}: {body}")

    def _named(self, letter: str, options: str, body: str) -> str:
        key = f"{letter}{options} {body}"
        if key not in self._names:
            self._names[key] = name = f"{letter}{len(self._names)}"
            self._lines.append(f"{name}{options}: {body}")
        return self._names[key]

    def nested(self, lark: str) -> str:
        """The name of a client's grammar, whose own names are its own."""
        return "@" + self._nested.setdefault(lark, f"client_{len(self._nested)}")

    def grammar(self, start: str) -> str:
        """The grammar as llguidance reads it.

        Args:
            start: the body of its first rule.
        """
        whole = "\n".join([f"start: {start}", *self._lines])
        nested = [{"name": name, "lark_grammar": text} for text, name in self._nested.items()]
        return json.dumps({"grammars": [{"lark_grammar": whole}, *nested]}, ensure_ascii=False)

    # ---- Markers and texts -------------------------------------------------------------------------------

    def marker(self, text: str, **fields: str) -> str:
        """A text that has to stand as it is, with control tokens as such; "" for an empty one.

        Args:
            fields: the text that stands for each name in braces.
        """
        for name, value in fields.items():
            text = text.replace(f"{{{name}}}", value)
        if text not in self._markers:
            self._markers[text] = " ".join(
                self.terminal(_PLACES[part]) if part in _PLACES else self.spelling.lark(part)
                for part in _PLACE.split(text)
                if part
            )
        return self._markers[text]

    def text(
        self, without: Iterable[str] = (), *, lines: Iterable[str] = (), also: Sequence[str] = ()
    ) -> str:
        """The name of a terminal of any text, also an empty one.

        Args:
            without: what it does not spell anywhere.
            lines: what none of its lines begins with, in Lark's notation.
            also: other terminals that it has to fit.
        """
        body = [self.terminal(ANY), *also]
        if spelled := " | ".join(map(quoted, _shortest(without))):
            body.append(f"~({body[0]} ({spelled}) {body[0]})")
        if begun := " | ".join(lines):
            body.append(f'~(({body[0]} "\\n")? /[ \\t]*/ ({begun}) {body[0]})')
        return self.terminal(" & ".join(body))

    def until(self, terminal: str, marker: str) -> str:
        """A text and the marker that ends it, which the text does not spell."""
        written = self.marker(marker)
        control = _CONTROL.search(written)
        before = written[: control.start()] if control else written
        if not before.strip():
            return f"{terminal} {written}"
        whole = self.terminal(f"{terminal} {before}")
        return f"{whole} {written[control.start() :]}" if control else self.lazy(whole)

    # ---- JSON --------------------------------------------------------------------------------------------

    def json(self, schema: Any) -> str:
        """The name of a rule of the JSON values that a schema allows, in the one style."""
        return self.rule(json_rule(schema if isinstance(schema, dict) else {}))


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def trimmed() -> str:
    """A terminal of texts without blanks at either end."""
    return f"~({_BLANK} {ANY}) & ~({ANY} {_BLANK})"


def choice(alternatives: Iterable[str]) -> str:
    """One of some bodies."""
    found = list(dict.fromkeys(alternatives))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _shortest(texts: Iterable[str]) -> list[str]:
    """Those of some texts that have none of the others in them."""
    found = sorted({text for text in texts if text}, key=len)
    return [text for at, text in enumerate(found) if not any(other in text for other in found[:at])]
