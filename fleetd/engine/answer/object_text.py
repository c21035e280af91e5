"""Objects as models write them → JSON, while they are written. Pure.

Right JSON stays as it is, to the letter. Whatever else is written becomes JSON as well: trailing and missing
commas, single quotes, keys and words without quotes, quotes and line ends inside of strings, half a
surrogate, brackets that are not closed. Python's literals and Gemma's objects are the same with other signs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from fleetd import limits
from fleetd.engine.answer.text_feed import BLANKS, Reading, TextFeed, words
from fleetd.text.bounded import is_deeper
from fleetd.text.decoding import from_json

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {
    **{name: name for name in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
}
_NUMBER_CHARS = 64
_NO_BLANKS = re.compile(r"[^ \t\r\n]")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_HEX = frozenset("0123456789abcdefABCDEF")
_REPLACEMENT = "\\ufffd"


class ObjectStyle(msgspec.Struct, frozen=True):
    """How a family writes objects."""

    #: Markers that end the call, also in the middle of an object.
    closers: tuple[str, ...] = ()
    #: The sign after a key of the outermost object.
    colon: str = ":"
    #: The quote around a string without escapes; "" if the family has no such strings.
    quote: str = ""


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string. Texts escaped one by one are the escaped whole."""
    return _JSON.encode(text)[1:-1]


def bare_value(word: str) -> str:
    """The JSON of a value without quotes or brackets: a number, true, false, null, or else a string."""
    if word in _WORDS:
        return _WORDS[word]
    if len(word) <= _NUMBER_CHARS and _LOOSE_NUMBER.fullmatch(word) and math.isfinite(float(word)):
        if _NUMBER.fullmatch(word):
            return word
        digits = word.lstrip("+-")
        return str(int(word)) if digits.isdecimal() else repr(float(word))
    return _JSON.encode(word)


def _blank(text: str) -> str:
    """``text`` with a space for each blank that JSON does not have."""
    return _NO_BLANKS.sub(" ", text)


def object_of(text: str) -> str | None:
    """The JSON of an object that is written somehow; None for a text that is none, or goes on after it."""
    feed, out = TextFeed(), list[str]()
    feed.add(text.strip())
    feed.end()
    if not text.strip().startswith("{"):
        return None
    reading = ObjectReader(feed, out.append, ObjectStyle()).read()
    whole, rest = _finished(reading), _finished(feed.peek())
    return "".join(out) if whole and not rest else None


def strict_object(text: str) -> str:
    """A JSON object that every parser takes: the text itself, its repaired form, or an object that holds the
    text under "arguments"."""
    try:
        value = from_json(text, dict[str, Any])
        if not is_deeper(value, limits.ARGUMENTS_DEPTH + 1):
            return text
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return object_of(text) or _JSON.encode({"arguments": text})


def _finished(reading: Reading[Any]) -> Any:
    """The result of a reading whose text has come whole."""
    try:
        next(reading)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a text that has ended needs no more")


class ObjectReader:
    """Reads one object, from its opening bracket on; ``tell`` gets it as JSON."""

    def __init__(self, feed: TextFeed, tell: Callable[[str], None], style: ObjectStyle) -> None:
        #: Text that was taken after the object, from the marker on that ended it.
        self.rest = ""
        self._feed = feed
        self._told = tell
        self._style = style
        # A marker that would end the call stands in a string: what follows it waits for the string's end.
        self._held: list[str] | None = None
        # The brackets that are open, and what JSON closes each with.
        self._open: list[tuple[str, str]] = []
        # What comes next: a key, a value, or what is after one. Blanks and a comma wait for what follows.
        self._next = "key"
        self._gap = ""
        self._closers = words(*style.closers)

    def read(self) -> Reading[bool]:
        """Read the object; False if the text ends before it does."""
        self._begin(self._feed.take(1), "{")
        return (yield from self._inside())

    def value(self) -> Reading[bool]:
        """Read any value; False if the text ends before it does."""
        sign = yield from self._feed.peek()
        if not sign or not (yield from self._value(sign)):
            return False
        return (yield from self._inside())

    def _inside(self) -> Reading[bool]:
        while self._open:
            self._gap += _blank((yield from self._feed.span(BLANKS)))
            sign = yield from self._feed.peek()
            if not sign or (yield from self._feed.starts(self._closers)):
                return self._end_early(ended=not sign)
            if not (yield from self._step(sign)):
                return False
        return True

    def _end_early(self, *, ended: bool) -> bool:
        """Close all brackets, as the call or the text has ended before they were closed. False if that would
        make up a value or part of a cut answer."""
        if ended and (self._feed.cut or (self._next == "value" and self._open[-1][1] == "}")):
            return False
        self._gap = ""
        if self._next == "value" and self._open[-1][1] == "}":
            self._tell(" null")
        self._tell("".join(close for _, close in reversed(self._open)))
        self._open.clear()
        return True

    def _step(self, sign: str) -> Reading[bool]:
        """Read the next sign, string or word. False if the text ends inside of it."""
        if sign in _CLOSING.values():
            self._close(self._feed.take(1))
        elif sign == ",":
            self._comma()
        elif self._next == "after":
            self._gap = "," + (self._gap or " ")
            self._next = "key" if self._open[-1][1] == "}" else "value"
        elif self._next == "key":
            return (yield from self._key(sign))
        else:
            return (yield from self._value(sign))
        return True

    def _comma(self) -> None:
        self._feed.take(1)
        in_object = self._open[-1][1] == "}"
        if self._next == "value" and in_object:
            self._put("null")
        elif self._next != "after":
            return  # one that nothing comes before
        self._gap += ","
        self._next = "key" if in_object else "value"

    def _begin(self, sign: str, opens: str) -> None:
        self._put(opens)
        self._open.append((_CLOSING[sign], _CLOSING[opens]))
        self._next = "key" if opens == "{" else "value"

    def _close(self, sign: str) -> None:
        """Close what the bracket closes, and all that is open inside. One that closes nothing is left out."""
        if not any(opened == sign for opened, _ in self._open):
            return
        if self._next == "value" and self._open[-1][1] == "}":
            self._put("null")
        self._tell(self._gap.replace(",", ""))
        self._gap = ""
        while True:
            opened, close = self._open.pop()
            self._tell(close)
            if opened == sign:
                break
        self._next = "after"

    def _put(self, text: str) -> None:
        self._tell(self._gap + text)
        self._gap = ""
        self._next = "after"

    def _key(self, sign: str) -> Reading[bool]:
        style = self._style
        colon = style.colon if len(self._open) == 1 else ":"
        if quote := (yield from self._quote()):
            if not (yield from self._string(quote, key=True)):
                return False
        elif sign == colon:
            self._feed.take(1)
            return True
        else:
            word = yield from self._word(colon)
            if word is None:
                return False
            self._put(_JSON.encode(word))
        self._next = "value"
        if self.rest:
            self._tell(":")
            return True
        self._gap += _blank((yield from self._feed.span(BLANKS)))
        sign = yield from self._feed.peek()
        if sign == colon:
            self._feed.take(1)
            self._tell(f"{self._gap}:")
            self._gap = ""
        elif sign:
            self._tell(":")
            self._gap = " "
            if (yield from self._feed.starts(words(",", "}", "]", ")", *style.closers))):
                self._put("null")
        return bool(sign)

    def _value(self, sign: str) -> Reading[bool]:
        if quote := (yield from self._quote()):
            return (yield from self._string(quote))
        if sign in _CLOSING:
            if len(self._open) >= limits.ARGUMENTS_DEPTH:
                return (yield from self._too_deep())
            self._begin(self._feed.take(1), "{" if sign == "{" else "[")
            return True
        word = yield from self._word()
        if word is None:
            return False
        self._put(bare_value(word))
        return True

    def _word(self, *ends: str) -> Reading[str | None]:
        """A word without quotes; None if the text is cut inside of it."""
        parts: list[str] = []
        stops = words(*(ends or ('"',)), ",", "}", "]", ")", "\n", *self._style.closers)
        found = yield from self._feed.until(stops, parts.append)
        if not found and self._feed.cut:
            return None
        if not parts and found:
            parts.append(self._feed.take(len(found)))  # a sign that belongs nowhere
        return "".join(parts).strip()

    def _too_deep(self) -> Reading[bool]:
        """A value that is nested too deep, as a string."""
        self._put('"')
        depth, in_string = 0, False
        while True:
            signs = words("\\", '"') if in_string else words("{", "}", "[", "]", '"')
            found = yield from self._feed.until(signs, self._tell_escaped)
            if not found:
                return False
            text = self._feed.take(1)
            if found == "\\" and (yield from self._feed.peek()):
                text += self._feed.take(1)
            self._tell_escaped(text)
            in_string ^= found == '"'
            depth += (found in "{[") - (found in "}]")
            if depth == 0:
                self._tell('"')
                return True

    # ---- Strings -----------------------------------------------------------------------------------------

    def _quote(self) -> Reading[str]:
        """Take what a string begins with; "" if none begins here."""
        return (yield from self._feed.skip(words(self._style.quote, '"', "'")))

    def _string(self, quote: str, *, key: bool = False) -> Reading[bool]:
        """A string behind its quote. One that nothing but a marker of the call ends goes as far as that."""
        self._put('"')
        raw = quote == self._style.quote
        signs = words(quote, *self._style.closers, *(() if raw else ("\\",)))
        while True:
            found = yield from self._feed.until(signs, self._tell_escaped, whole=True)
            if found == quote:
                self._feed.take(len(quote))
                gap = yield from self._feed.span(BLANKS)
                ends = yield from self._ends_string(key)
                if self._feed.cut and self._feed.lacking:
                    return self._ends_at_marker()
                if ends:
                    self._release()
                    self._tell('"')
                    self._gap = _blank(gap)
                    return True
                self._tell_escaped(quote + gap)
            elif found and found != "\\":
                self._hold()
                self._tell_escaped(self._feed.take(len(found)))
            elif not found or not self._feed.take(1) or not (yield from self._escape()):
                return self._ends_at_marker()

    def _hold(self) -> None:
        if self._held is None:
            self._held = []
            self._feed.mark()

    def _release(self) -> None:
        if self._held is not None:
            text, self._held = "".join(self._held), None
            self._feed.taken()
            self._tell(text)

    def _ends_at_marker(self) -> bool:
        """The text ends inside of a string, which went as far as the marker in it if the model ended it."""
        if self._held is None:
            return False
        rest, self._held = self._feed.taken(), None
        if self._feed.cut:
            return False
        self.rest = rest
        self._tell('"')
        return True

    def _tell(self, text: str) -> None:
        if self._held is None:
            self._told(text)
        else:
            self._held.append(text)

    def _ends_string(self, key: bool) -> Reading[bool]:
        """Whether what comes after a quote can come after a string: models forget to escape quotes."""
        self._feed.lacking = False
        sign = yield from self._feed.peek()
        if key or not sign or sign in ",}])":
            return True
        return bool((yield from self._feed.starts(self._closers))) or self._feed.lacking

    def _tell_escaped(self, text: str) -> None:
        self._tell(escaped(text))

    def _escape(self) -> Reading[bool]:
        """What follows a backslash. False if the text ends inside of it."""
        sign = yield from self._feed.peek()
        if sign == "u":
            return (yield from self._code(self._feed.take(1)))
        if sign and sign in '"\\/bfnrt':
            self._tell("\\" + self._feed.take(1))
        elif sign == "'":
            self._tell(self._feed.take(1))
        elif sign:
            self._tell("\\\\")
        return bool(sign)

    def _code(self, taken: str) -> Reading[bool]:
        """A character by its number; half of one that has no other half is replaced."""
        high = ""
        while True:
            digits = yield from self._digits()
            if not (yield from self._feed.peek()) and len(digits) < 4:
                return False
            if len(digits) < 4:
                self._tell((_REPLACEMENT if high else "") + escaped("\\" + taken + digits))
                return True
            code = int(digits, 16)
            if high and 0xDC00 <= code <= 0xDFFF:
                self._tell(f"\\u{high}\\u{digits}")
                return True
            if high:
                self._tell(_REPLACEMENT)
            if not 0xD800 <= code <= 0xDFFF:
                self._tell(f"\\u{digits}")
                return True
            if code >= 0xDC00 or not (yield from self._feed.skip(words("\\u"))):
                if code < 0xDC00 and self._feed.cut and not (yield from self._feed.peek()):
                    return False
                self._tell(_REPLACEMENT)
                return True
            high = digits

    def _digits(self) -> Reading[str]:
        digits = ""
        while len(digits) < 4 and (sign := (yield from self._feed.peek())) and sign in _HEX:
            digits += self._feed.take(1)
        return digits
