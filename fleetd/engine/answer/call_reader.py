"""Reads calls of the tools that were offered, as any family writes them. Pure.

A call is none until its tool is known and its arguments have begun: up to then its text may come back. From
there on it is a call, and whatever follows becomes one JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fleetd import limits
from fleetd.engine.answer.answer_parts import CallBegun, CallEnded, CallText, Parts
from fleetd.engine.answer.object_text import ObjectReader, ObjectStyle, object_of
from fleetd.engine.answer.schema_values import ParameterSchemas
from fleetd.engine.answer.text_feed import BLANKS, Reading, TextFeed, words

#: "none": it is no call, and nothing was told of it. "half": the answer ends inside of it.
Outcome = Literal["none", "half", "whole"]

_NAME = re.compile(r"[^\s<>{}()\[\]\"',;=]*")
_CALL_ID = re.compile(r"[\w.:-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function", "tool", "tool_name")
# What an object may have that is a call although nothing says so.
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")


def tool_name(written: str, names: Sequence[str]) -> str | None:
    """The one of ``names`` that a model means: spelled so, or with other capitals or behind a namespace. None
    if it is none of them: what was not offered cannot be called."""
    if written in names:
        return written
    last = re.split(r"[.:/]", written)[-1]
    near = [each for each in names if each == last] or [e for e in names if e.lower() == last.lower()]
    return near[0] if len(near) == 1 else None


class CallReader:
    """Reads calls from a feed into parts.

    Args:
        tools: the tools that were offered, as templates know them.
        style: how objects are written.
    """

    def __init__(self, feed: TextFeed, parts: Parts, tools: Sequence[Any], style: ObjectStyle) -> None:
        self.feed = feed
        self.parts = parts
        self.style = style
        #: Text that was taken with a call and turned out to come after it.
        self.rest = ""
        # Called when a call turns out to be one, before anything is told of it.
        self.on_call: Callable[[], None] = lambda: None
        functions = [each.get("function") or {} for each in tools]
        self._schemas = {str(each.get("name", "")): each.get("parameters") for each in functions}
        self._ids: set[str] = set()
        self.names = [name for name in self._schemas if name]

    def begin(self, name: str, call_id: str = "") -> ParameterSchemas:
        """Tell of a call. The id that a model wrote is left out if it is malformed or another call has it."""
        self.on_call()
        known = bool(_CALL_ID.fullmatch(call_id)) and call_id not in self._ids
        self._ids.add(call_id)
        self.parts.add(CallBegun(name, call_id if known else ""))
        return ParameterSchemas(self._schemas[name])

    def tell(self, text: str) -> None:
        if text:
            self.parts.add(CallText(text))

    def end(self, *, whole: bool = True) -> Outcome:
        self.parts.add(CallEnded(whole))
        return "whole" if whole else "half"

    def name(self) -> Reading[str | None]:
        """The name of a tool that was offered, which comes next."""
        written = yield from self.feed.span(_NAME, limits.TOOL_NAME_CHARS)
        self.half(written, self.names)
        return tool_name(written, self.names)

    def half(self, written: str, known: Sequence[str]) -> None:
        """The text may have been cut inside of a word: only if that is the beginning of a known one."""
        if not any(each.startswith(written) for each in known):
            self.feed.lacking = False

    # ---- Arguments ---------------------------------------------------------------------------------------

    def arguments(self, name: str, call_id: str = "", *, may_lack: bool = False) -> Reading[Outcome]:
        """The arguments of a call: an object, or a text that is one.

        Args:
            may_lack: nothing but a marker that ends the call means none.
        """
        yield from self.feed.span(BLANKS)
        sign = yield from self.feed.peek()
        if sign == "{":
            self.begin(name, call_id)
            return (yield from self.object())
        found: str | None = None
        if sign == '"':
            text = yield from self.value()
            found = None if text is None else object_of(json.loads(text))
        elif (yield from self.feed.skip(words("null", "None"))) or (
            may_lack
            and (not (sign or self.feed.cut) or (yield from self.feed.starts(words(*self.style.closers))))
        ):
            found = "{}"
        if found is None:
            return "none"
        self.begin(name, call_id)
        self.tell(found)
        return self.end()

    def object(self) -> Reading[Outcome]:
        """An object that comes next, as the arguments of the call that has begun."""
        reader = ObjectReader(self.feed, self.tell, self.style)
        whole = yield from reader.read()
        self.left(reader.rest, self.style.closers)
        return self.end(whole=whole)

    def left(self, rest: str, closers: Sequence[str]) -> None:
        """Keep what is left of a text that went on behind the call: without the markers that close it."""
        for each in closers:  # in the order in which they close
            rest = rest.lstrip().removeprefix(each) if rest.lstrip().startswith(each) else rest
        self.rest = rest

    def value(self) -> Reading[str | None]:
        """A value that belongs to no call yet, as JSON; None if the text ends inside of it."""
        told: list[str] = []
        reader = ObjectReader(self.feed, told.append, self.style)
        whole = yield from reader.value()
        return "".join(told) if whole and not reader.rest else None

    # ---- Calls as JSON -----------------------------------------------------------------------------------

    def json_call(self, *, strict: bool = False) -> Reading[Outcome]:
        """``{"name": …, "arguments": {…}}``, its keys in any order, one object around another.

        Args:
            strict: the call has to name its tool first and to have arguments: other objects may be an answer.
        """
        if not (yield from self.feed.skip(words("{"))):
            return "none"
        name, call_id, early, depth = "", "", "", 1
        while depth:
            key = yield from self._key(_KEYS if strict else ())
            if key is None:
                return "none"
            if not key:
                depth -= 1
                continue
            sign = yield from self.feed.peek()
            if sign == "{" and key in _NAMES:
                self.feed.take(1)
                depth += 1
            elif sign == '"' and key in _NAMES and not name:
                known = self.names if strict else ()
                name = tool_name((yield from self._short_text(known)), self.names) or ""
                if not name:
                    return "none"
            elif key in _ARGUMENTS and name:
                outcome = yield from self.arguments(name, call_id)
                return outcome if outcome != "whole" else (yield from self._after_arguments(depth))
            elif strict and key not in _KEYS:
                return "none"
            else:
                text = yield from self.value()
                if text is None or (key in _ARGUMENTS and not text.startswith("{")):
                    return "none"
                if key in _ARGUMENTS:
                    early = text
                elif key == "id":
                    call_id = str(json.loads(text))
                elif strict and text != '"function"':
                    return "none"
        if not name or (strict and not early):
            return "none"
        self.begin(name, call_id)
        self.tell(early or "{}")
        return self.end()

    def _after_arguments(self, depth: int) -> Reading[Outcome]:
        """What else stands in the object of a call that has been told."""
        while depth and not self.rest:
            key = yield from self._key()
            if key is None or (key and (yield from self.value()) is None):
                break
            depth -= not key
        return "whole"

    def _key(self, known: Sequence[str] = ()) -> Reading[str | None]:
        """The next key and the colon after it; "" for the end of the object, None for anything else.
        ``known``: as in ``_short_text``."""
        yield from self.feed.span(_COMMAS)
        if (yield from self.feed.skip(words("}"))):
            return ""
        if (yield from self.feed.peek()) != '"':
            return None
        key = yield from self._short_text(known)
        if not key:
            return None
        yield from self.feed.span(BLANKS)
        if not (yield from self.feed.skip(words(":"))):
            return None
        yield from self.feed.span(BLANKS)
        return key

    def _short_text(self, known: Sequence[str] = ()) -> Reading[str]:
        """A string that is a name; "" for one that is none. ``known``: what half of a string may become;
        anything if it is empty."""
        self.feed.take(1)
        text = yield from self.feed.span(_KEY, limits.TOOL_NAME_CHARS)
        if (yield from self.feed.skip(words('"'))):
            return text
        if known:
            self.half(text, known)
        return ""


_COMMAS = re.compile(r"[\s,]*")
_KEY = re.compile(r"[^\"\\\n]*")
