"""Calls whose parameters stand between tags, as JSON while they are written. Pure.

    Qwen      <function=NAME><parameter=KEY>VALUE</parameter></function>
    MiniMax   <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
    MiniCPM   <function name="NAME"><param name="KEY">VALUE</param></function>
    DeepSeek  as MiniMax, and each parameter says whether it is a string: dsml.py
    GLM       NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>

What a value means is up to the tool's schema. One that can only be a string is told letter by letter, any
other once it is whole. A value may have any tag in it, its own closing one too: that one ends it where a
parameter or the end of the call follows. One that is never closed ends where the call does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

import msgspec

from fleetd import limits
from fleetd.engine.answer.call_reader import CallReader, Outcome, tool_name
from fleetd.engine.answer.object_text import escaped
from fleetd.engine.answer.schema_values import ParameterSchemas
from fleetd.engine.answer.text_feed import BLANKS, Reading, words

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_IN_TAG = re.compile(r"[^<>\n]*")
_ATTRIBUTE = re.compile(r"(\w*)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'=]+))")
_FIRST_VALUE = re.compile(r"=\s*[\"']?([^\s\"']*)")
_NULLS = ("null", "none")
_CDATA, _CDATA_END = words("<![CDATA["), "]]>"

Trims = Literal["blanks", "line ends", "nothing"]


class ParameterText(msgspec.Struct, frozen=True):
    """What a family writes around the value of a parameter: {key} stands for its name, {says} for its type in
    the family's words, and {lf} for a line end that some models leave out."""

    before: str
    #: What ends the value.
    closes: str
    after: str = ""


class TaggedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls."""

    #: The beginnings of the tags before and after a call.
    call: str
    end: str
    #: The beginnings of the tags before and after a parameter.
    param: str
    closes: str
    #: The marker after the last of several calls.
    section_end: str = ""
    #: The end of a tag.
    sep: str = ">"
    #: Blanks around a value that are no part of it: all, one line end on either side, or none.
    trims: Trims = "blanks"
    #: The attribute that tells a value's type, and its word for strings.
    says: tuple[str, str] = ("", "")
    #: A value may stand in a CDATA section.
    cdata: bool = False
    #: The beginning of the tag before all arguments as one JSON object, and the tag after them.
    whole: tuple[str, str] = ("", "")
    writes: ParameterText


class ArgFormat(msgspec.Struct, frozen=True):
    """GLM's way: nothing around a call, and a key in tags of its own."""

    prefix: str
    section_end: str
    #: Blanks around a value are no part of it.
    trims: Trims = "blanks"

    @property
    def writes(self) -> ParameterText:
        tag = f"{self.prefix}arg"
        return ParameterText(f"<{tag}_key>{{key}}</{tag}_key>{{lf}}<{tag}_value>", f"</{tag}_value>", "{lf}")


class TagValue:
    """A value while it is written.

    Args:
        streams: the value is a string, and is told as it comes.
        nullable: the value may be null, so a text that begins like it waits until it is whole.
    """

    def __init__(self, tell: Callable[[str], None], trims: Trims, *, streams: bool, nullable: bool) -> None:
        self._tell = tell
        self._trims = trims
        self._streams = streams
        self._nullable = nullable
        self._begun = False
        # Text that is not told yet: the whole value, or its end, which may be trimmed off.
        self._kept: list[str] = []

    def add(self, text: str) -> None:
        if not self._streams:
            self._kept.append(text)
        elif self._begun:
            self._more(text)
        else:
            self._begin("".join([*self._kept, text]))

    def _begin(self, text: str) -> None:
        begun = self._start(text)
        if not begun or (self._nullable and _begins_null(begun) and len(text) < 64):
            self._kept = [text] if begun or self._trims != "blanks" else []
            return
        self._kept, self._begun = [], True
        self._tell('"')
        self._more(begun)

    def _more(self, text: str) -> None:
        shown = self._end(text)
        if shown:
            self._tell(escaped("".join(self._kept) + shown))
            self._kept = [text[len(shown) :]]
        else:
            self._kept.append(text)
        if self._trims == "line ends" and len(self._kept) > 1:  # only the last line end may be no part of it
            self._tell(escaped("".join(self._kept[:-1])))
            self._kept = self._kept[-1:]

    def state(self) -> tuple[bool, list[str]]:
        return self._begun, list(self._kept)

    def back(self, state: tuple[bool, list[str]]) -> None:
        self._begun, self._kept = state

    def close(self, read: Callable[[str], str]) -> None:
        """End the value; ``read`` gives the JSON of a value that is whole."""
        text = "".join(self._kept)
        if self._begun:
            self._tell(escaped(self._end(text)) + '"')
        else:
            self._tell(read(self._end(self._start(text))))

    def _start(self, text: str) -> str:
        match self._trims:
            case "blanks":
                return text.lstrip()
            case "line ends":
                return text.removeprefix("\n")
            case "nothing":
                return text

    def _end(self, text: str) -> str:
        match self._trims:
            case "blanks":
                return text.rstrip()
            case "line ends":
                return text.removesuffix("\n")
            case "nothing":
                return text


class _Arguments:
    """The parameters of one call that has begun."""

    def __init__(
        self, calls: CallReader, schemas: ParameterSchemas, trims: Trims, *, cdata: bool = False
    ) -> None:
        self.calls = calls
        self._schemas = schemas
        self._trims: Trims = trims
        self._cdata = cdata
        self._count = 0
        calls.tell("{")

    def close(self) -> Outcome:
        self.calls.tell("}")
        return self.calls.end()

    def value(
        self, key: str, closes: str, follows: tuple[str, ...], ends: tuple[str, ...], says: bool | None = None
    ) -> Reading[bool]:
        """One parameter. False if the text ends inside of it.

        Args:
            follows: what comes after a value that has been closed.
            ends: what ends the call; in a value it is text if the value is closed later.
            says: whether the model says that it is a string; None if it does not say.
        """
        calls, feed, schemas, trims = self.calls, self.calls.feed, self._schemas, self._trims
        calls.tell(f"{', ' if self._count else ''}{_JSON.encode(key)}: ")
        self._count += 1
        if self._cdata:
            yield from feed.span(BLANKS)
            if (yield from feed.skip(_CDATA)):
                closes, follows, trims = _CDATA_END, (closes, *ends), "nothing"
        value = self._begun(key, trims, says)

        def read(whole: str) -> str:
            return schemas.read(whole, key, told=_JSON.encode(whole) if says else None)

        signs, state = words(closes, *ends), None
        while True:
            sign = yield from feed.until(signs, value.add, whole=True)
            if not sign:
                break
            feed.take(len(sign))
            if sign == closes:
                gap = yield from feed.span(BLANKS)
                feed.lacking = False
                followed = yield from feed.starts(words(*follows))
                if feed.cut and feed.lacking:
                    break
                if followed or feed.lacking:
                    if state is not None:
                        feed.taken()
                        calls.parts.release()
                    value.close(read)
                    return True
                value.add(sign + gap)
                continue
            if state is None:
                state = value.state()
                calls.parts.hold()
                feed.mark()
            value.add(sign)
        return self._ends_with_call(value, state, read, ends)

    def _begun(self, key: str, trims: Trims, says: bool | None) -> TagValue:
        """A value that begins here."""
        schema = self._schemas.of(key)
        kinds = self._schemas.kinds(schema)
        nullable = "null" in kinds
        # One of a few words is told once it is known which.
        streams = self._schemas.allows(schema, "x") and (
            says is True or (kinds <= {"string", "null"} and (says is None or not nullable))
        )
        return TagValue(self.calls.tell, trims, streams=streams, nullable=nullable and says is None)

    def _ends_with_call(
        self,
        value: TagValue,
        state: tuple[bool, list[str]] | None,
        read: Callable[[str], str],
        ends: tuple[str, ...],
    ) -> bool:
        """The text has ended inside of a value. The value ends before the end of the call that stands in it;
        False if none does."""
        if state is None:
            return False
        calls = self.calls
        calls.parts.drop()
        rest = calls.feed.taken()
        if calls.feed.cut:
            return False
        value.back(state)
        value.close(read)
        calls.left(rest, ends)
        return True


def _begins_null(text: str) -> bool:
    """Whether a text may become a word for null."""
    word = text.strip().lower()
    return any(null.startswith(word) for null in _NULLS)


def _attributes(calls: CallReader, sep: str) -> Reading[dict[str, str] | None]:
    """Take the attributes and the end of a tag whose name was taken; None if the text ends before."""
    text = yield from calls.feed.span(_IN_TAG, limits.TOOL_NAME_CHARS)
    if not (yield from calls.feed.skip(words(sep))) and not (yield from calls.feed.peek()):
        return None
    found = {name: next(filter(None, values), "") for name, *values in _ATTRIBUTE.findall(text)}
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found.items()}


def _named(attributes: dict[str, str] | None) -> str:
    return next(
        (attributes[name] for name in ("", "name", "tool", "key") if attributes and name in attributes), ""
    )


def tagged_call(calls: CallReader, form: TaggedFormat) -> Reading[Outcome]:
    """Read one call, from its tag on."""
    feed = calls.feed
    if not (yield from feed.skip(words(form.call))):
        return "none"
    feed.mark()
    name = tool_name(_named((yield from _attributes(calls, form.sep))), calls.names)
    tag = feed.taken()
    if name is None:
        if begun := _FIRST_VALUE.search(tag):
            calls.half(begun[1], calls.names)
        return "none"
    yield from feed.span(BLANKS)
    if (yield from feed.skip(words(form.whole[0]))):
        yield from _attributes(calls, form.sep)
        outcome = yield from calls.arguments(name)
        for tag in (form.whole[1], form.end):
            yield from feed.span(BLANKS)
            yield from feed.skip(words(tag))
        return outcome
    signs = words(form.param, form.end, form.section_end)
    if not (yield from feed.starts(signs)):
        return "none"
    made = _Arguments(calls, calls.begin(name), form.trims, cdata=form.cdata)
    while not calls.rest:
        sign = yield from feed.until(signs, lambda _between: None)
        if sign != form.param:
            feed.take(len(sign) if sign == form.end else 0)
            if not sign and feed.cut:
                break
            return made.close()
        feed.take(len(sign))
        attributes = yield from _attributes(calls, form.sep)
        if attributes is None:
            break
        said = attributes.get(form.says[0])
        says = None if said is None or not form.says[0] else said == form.says[1]
        ends = tuple(filter(None, (form.end, form.section_end)))
        if not (yield from made.value(_named(attributes), form.closes, (form.param, *ends), ends, says)):
            break
    else:
        return made.close()
    return calls.end(whole=False)


def arg_call(calls: CallReader, form: ArgFormat) -> Reading[Outcome]:
    """Read one call in GLM's way, from its name on."""
    feed, tag = calls.feed, f"{form.prefix}arg"
    name = yield from calls.name()
    if name is None:
        return "none"
    yield from feed.span(BLANKS)
    if (yield from feed.peek()) == "{":
        return (yield from calls.arguments(name))
    signs = words(f"<{tag}_key>", form.section_end)
    if not (yield from feed.starts(signs)):
        return "none"
    made = _Arguments(calls, calls.begin(name), form.trims)
    while not calls.rest:
        sign = yield from feed.until(signs, lambda _between: None)
        if sign != f"<{tag}_key>":
            if not sign and feed.cut:
                break
            return made.close()
        feed.take(len(sign))
        key: list[str] = []
        yield from feed.until(words(f"</{tag}_key>", "\n", f"<{tag}_value>"), key.append)
        yield from feed.skip(words(f"</{tag}_key>"))
        yield from feed.span(_BLANKS_AS_WRITTEN)
        if not (yield from feed.skip(words(f"<{tag}_value>"))):
            if not (yield from feed.peek()):
                break
            continue
        ends = (form.section_end,)
        closes = f"</{tag}_value>"
        if not (yield from made.value("".join(key).strip(), closes, (f"<{tag}_key>", *ends), ends)):
            break
    else:
        return made.close()
    return calls.end(whole=False)


# Some write the line end between a key and its value as two signs.
_BLANKS_AS_WRITTEN = re.compile(r"[\s\\n]*")
