"""The text of an answer → its parts: what it says, what it thinks, and its calls of tools that were offered.

A thought's opener counts at the answer's start only. Without tools no text is a call. What looks like one and
is none comes back to the letter, with its markers. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from fleetd import limits
from fleetd.engine.answer.answer_parts import Channel, Part, Parts, Said
from fleetd.engine.answer.call_formats import CallFormat, CallGrammar
from fleetd.engine.answer.call_reader import CallReader, Outcome, tool_name
from fleetd.engine.answer.object_text import ObjectStyle
from fleetd.engine.answer.text_feed import BLANKS, Reading, TextFeed, Words, words

_LINE_ENDS = re.compile(r"\n*")
_INDENT = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"[\s,;\]})]*")
_HEAD = re.compile(r"[\w.=:/ -]*")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_LANGUAGE = re.compile(r"[\w-]*")
_FENCES = words("```", "~~~")


class HeadText(msgspec.Struct, frozen=True):
    """The heads of an answer's parts, as models write them behind the prompt; {word} stands for one word."""

    thought: str
    #: Of a text that comes before calls.
    note: str
    answer: str
    #: Of calls; "" if each call has its own.
    calls: str
    #: What ends a thought or a note, and begins the next head.
    next: str


class Heads(msgspec.Struct, frozen=True):
    """Heads of channels, as gpt-oss and Muse write them: a head before a text says whom it is for."""

    #: Markers that begin a head.
    begins: tuple[str, ...]
    #: Markers that stand in a head.
    inside: tuple[str, ...]
    #: Markers that end a text, each with what has to follow it.
    after: dict[str, tuple[str, ...]]
    #: Words that make a head the head of a thought.
    thought: tuple[str, ...]
    writes: HeadText


class Markers(msgspec.Struct, frozen=True):
    """What a model writes around the parts of its answers."""

    #: The markers before and after a thought.
    think: tuple[str, str] | None = None
    #: Markers that say nothing: no part of the answer has them.
    dropped: tuple[str, ...] = ()
    calls: CallFormat | None = None
    heads: Heads | None = None

    @property
    def texts(self) -> frozenset[str]:
        """All of them."""
        found = [*(self.think or ()), *self.dropped]
        if self.calls is not None:
            found += [self.calls.start, self.calls.end, *self.calls.begins, *self.calls.inside]
            found.append(self.calls.quote)
        if self.heads is not None:
            found += [*self.heads.begins, *self.heads.inside, *self.heads.after]
        return frozenset(filter(None, found))


class AnswerReader:
    """Splits one answer into its parts.

    Args:
        tools: the tools that were offered.
        begins: "reasoning" if the prompt opened a thought.
        either: the answer is a text or calls, never both: a text that begins with no call has none in it.
    """

    def __init__(
        self,
        markers: Markers,
        tools: Sequence[Any],
        begins: Channel = "content",
        *,
        either: bool = False,
    ) -> None:
        #: The answer was cut inside of a text that may have been a call.
        self.half_call = False
        #: The channel of the text that comes next.
        self.channel: Channel = begins
        self._feed = TextFeed()
        self._parts = Parts()
        self._markers = markers
        self._format = markers.calls if tools else None
        style = ObjectStyle() if self._format is None else self._format.style
        self._calls = CallReader(self._feed, self._parts, tools, style)
        self._either = either
        self._lines = words(*self._line_openers())
        # The fence that opened the block of code in which the text is; "" outside of one.
        self._fence = ""
        # The marker that ended a text, before the head of the next.
        self._ended_by = ""
        self._stopped = False
        # A call ended a thought that was not closed: its closing marker may follow.
        self._thought_open = False
        self._reading = self._read(begins)
        next(self._reading)

    def feed(self, text: str) -> list[Part]:
        """The parts that a text completes. Raises EngineError if reading it takes too long."""
        self._feed.add(text)
        return self._go_on()

    def end(self, *, cut: bool, stopped: bool = False) -> list[Part]:
        """The last parts.

        Args:
            cut: the answer ended before the model ended it; what may have become a marker is not told.
            stopped: a stop string ended it: all text before that counts, but for half a call.
        """
        self._stopped = stopped
        self._feed.end(cut=cut or stopped)
        return self._go_on()

    @property
    def work(self) -> int:
        """How many characters were looked at, each as often as it was."""
        return self._feed.looked

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        return self._parts.take()

    def _line_openers(self) -> Iterator[str]:
        for each in () if self._format is None else self._format.lines:
            yield from (each.replace("{name}", name) for name in self._calls.names)

    # ---- Channels ----------------------------------------------------------------------------------------

    def _read(self, begins: Channel) -> Reading[None]:
        think = self._markers.think
        if begins == "reasoning" and think is not None:
            yield from self._thought()
            if self._feed.read == len(think[1]):
                yield from self._late_thought(think[1])
        elif self._markers.heads is not None:
            while (yield from self._text((yield from self._head(self._markers.heads)))):
                pass
        elif self._format is not None and self._format.bare:
            yield from self._bare_calls()
        while think is not None and (yield from self._opened(think[0])):
            yield from self._thought()
        if self._either:
            yield from self._decide()
        yield from self._text("content")

    def _decide(self) -> Reading[None]:
        """Look whether calls come next, or a text in which there are none."""
        form = self._format
        self._say("content", (yield from self._feed.span(BLANKS)))
        while (yield from self._feed.skip(words(*self._markers.dropped))):
            pass
        if form is not None and not (yield from self._feed.starts(words(form.start, *form.begins))):
            self._format = None

    def _opened(self, opener: str) -> Reading[bool]:
        """Whether a thought begins here, behind blanks."""
        self._feed.mark()
        yield from self._feed.span(BLANKS)
        self._feed.lacking = False
        found = yield from self._feed.starts(words(opener))
        blanks = self._feed.taken()
        half = self._feed.cut and self._feed.lacking and not self._stopped and self._feed.drain()
        if not found and not half:
            self._say("content", blanks)
        return bool(found)

    def _thought(self) -> Reading[None]:
        think = self._markers.think
        if think is not None:
            yield from self._feed.skip(words(think[0]))
        yield from self._text("reasoning")
        yield from self._feed.span(_LINE_ENDS)

    def _late_thought(self, closer: str) -> Reading[None]:
        """A thought on one line behind the marker that ends it: some models for whom it was opened begin with
        that marker and write it again where they mean it."""
        if (yield from self._feed.starts(self._lines)):
            return
        self._feed.mark()
        # A call may begin on the same line.
        thought = re.compile(rf"[^<\n{re.escape(self._start[:1])}]*")
        text = yield from self._feed.span(thought, limits.LATE_THOUGHT_CHARS)
        found = yield from self._feed.starts(words(closer))
        self._feed.taken()
        if not text or not found:
            self._say("content", text)
            return
        self._say("reasoning", text)
        self._feed.take(len(found))
        yield from self._feed.span(_LINE_ENDS)

    def _text(self, channel: Channel) -> Reading[bool]:
        """Text of a channel, up to a marker that ends it. False at the end of the answer."""
        think, heads = self._markers.think, self._markers.heads
        at_line = True
        self.channel = channel
        while True:
            if at_line and channel == "content" and self._format is not None:
                at_line = yield from self._line()
                continue
            found = yield from self._feed.until(self._stops(channel), partial(self._say, channel), whole=True)
            at_line = found == "\n"
            if not found:
                rest = self._feed.drain()
                if self._stopped:
                    self._say(channel, rest)
                return False
            ends = heads is not None and found in heads.after
            if found in self._markers.dropped:
                self._feed.take(len(found))
            elif at_line or (self._fence and found != self._start and not ends):
                self._say(channel, self._feed.take(len(found)))
            elif heads is not None and ends:
                if (yield from self._ends_text(channel, found, heads.after[found])):
                    return True
            elif think is not None and found == think[1]:
                self._feed.take(len(found))
                if channel == "reasoning":
                    self.channel = "content"
                    return True
                self._thought_open = False
            elif (yield from self._section(found, channel)):
                self._thought_open |= channel == "reasoning" and think is not None
                self.channel = channel = "content"
                at_line = True

    def _stops(self, channel: Channel) -> Words:
        """What ends a text of this channel, or interrupts it."""
        think, heads, form = self._markers.think, self._markers.heads, self._format
        found = [*self._markers.dropped, *(heads.after if heads is not None else ())]
        if think is not None and (channel == "reasoning" or self._thought_open):
            found.append(think[1])
        if form is not None and (heads is None or form.begins):
            found += [form.start, *form.begins] if channel == "content" else [form.start]
        if form is not None and channel == "content":
            found.append("\n")
        return words(*found)

    def _line(self) -> Reading[bool]:
        """The beginning of a line: of a block of code, or of a call without its opener."""
        indent = yield from self._feed.span(_INDENT)
        self._say("content", indent)
        fence = yield from self._feed.starts(_FENCES)
        if fence:
            self._fence = fence if not self._fence else self._fence.replace(fence, "")
        elif not self._fence and (yield from self._feed.starts(self._lines)):
            return (yield from self._section("", "content"))
        return False

    def _say(self, channel: Channel, text: str) -> None:
        if text:
            self._parts.add(Said(channel, text, self._feed.read - len(text)))

    # ---- Heads -------------------------------------------------------------------------------------------

    def _ends_text(self, channel: Channel, found: str, follows: tuple[str, ...]) -> Reading[bool]:
        """Whether a marker ends a text, which it does before a head and at the end of the answer."""
        self._feed.take(len(found))
        self._feed.lacking = False
        head = yield from self._feed.starts(words(*follows))
        if head or (self._feed.cut and self._feed.lacking) or not (yield from self._feed.peek()):
            self._ended_by = found
            self._fence = ""
            self.channel = "content"
            return True
        self._say(channel, found)
        return False

    def _head(self, heads: Heads) -> Reading[Channel]:
        """The head of a channel, or the call that it begins. What is no head is text."""
        feed, before = self._feed, self._ended_by
        feed.mark()
        self._ended_by, feed.lacking = "", False
        whole = yield from self._whole_head(heads)
        head = feed.taken()
        if not whole:
            if not feed.lacking or (head and not feed.cut):
                self._say("content", before + head)
            else:  # what comes before a text that does not come any more
                feed.drain()
                self.half_call |= feed.cut and self._format is not None and "to=" in head
            return "content"
        if recipient := _RECIPIENT.search(head):
            name = None if self._format is None else tool_name(recipient[1], self._calls.names)
            if name is None:
                self._say("content", before + head)
            else:
                yield from self._headed_call(name, before + head)
            return "content"
        return "reasoning" if any(word in head for word in heads.thought) else "content"

    def _whole_head(self, heads: Heads) -> Reading[bool]:
        if not (yield from self._feed.starts(words(*heads.begins))):
            return False
        for _ in range(limits.ANSWER_HEAD_CHARS):
            yield from self._feed.span(_HEAD, limits.TOOL_NAME_CHARS)
            if (yield from self._feed.skip(words("<|message|>"))):
                return True
            if not (yield from self._feed.skip(words(*heads.inside))):
                return False
        return False

    def _headed_call(self, name: str, head: str) -> Reading[None]:
        def one(calls: CallReader) -> Reading[Outcome]:
            return (yield from calls.arguments(name, may_lack=True))

        if (yield from self._call("", "content", one, head)):
            yield from self._feed.span(BLANKS)
            yield from self._feed.skip(words("<|call|>"))

    # ---- Calls -------------------------------------------------------------------------------------------

    @property
    def _start(self) -> str:
        return "" if self._format is None else self._format.start

    def _bare_calls(self) -> Reading[None]:
        """An answer that is a call from its first sign on, without any marker."""
        blanks = yield from self._feed.span(BLANKS)
        self._say("content", blanks)
        if (yield from self._feed.peek()) == "{":
            yield from self._section("", "content", bare=True)

    def _section(self, opener: str, channel: Channel, *, bare: bool = False) -> Reading[bool]:
        """Calls up to the end of their section. False if there is none, and its text was said.

        Args:
            opener: what begins it; "" for one whose opener is missing.
            bare: such calls need no opener.
        """
        form, feed, parts = self._format, self._feed, self._parts
        assert form is not None  # noqa: S101  no text has an opener without one
        missing = not opener and not bare
        one = _strict_json if not opener and form.lines == ("{",) else form.one
        if missing and form.closed:
            parts.hold()
            feed.mark()
        made, closed = 0, False
        while not closed and (yield from self._call("" if made else opener, channel, one)):
            made += 1
            yield from feed.span(_BETWEEN)
            if (yield from feed.skip(_FENCES)):
                yield from feed.span(BLANKS)
            closed = bool(form.end and (yield from feed.skip(words(form.end))))
        if missing and form.closed:
            text = feed.taken()
            ended = not (yield from feed.peek())
            if not closed and not (ended and (feed.cut or (made and not form.end))):
                parts.drop()
                self._say(channel, text)
                return False
            parts.release()
        if made:
            yield from feed.span(_LINE_ENDS)
        return made > 0

    def _call(self, opener: str, channel: Channel, one: CallGrammar, before: str = "") -> Reading[bool]:
        """One call, whose parts are told from where it is known to be one. False if it is none: what was
        taken is text, behind ``before``."""
        feed, parts, calls = self._feed, self._parts, self._calls
        feed.mark()
        parts.hold()

        def begin() -> None:
            feed.taken()
            parts.release()

        calls.on_call, calls.rest, feed.lacking = begin, "", False
        if opener and opener == self._start:
            feed.take(len(opener))
            yield from feed.span(BLANKS)
            if (yield from feed.skip(_FENCES)):
                yield from feed.span(_LANGUAGE)
                yield from feed.span(BLANKS)
        outcome = yield from one(calls)
        if outcome != "none":
            self._say(channel, calls.rest)
            if outcome == "half" and feed.cut:
                feed.drain()
            return True
        parts.drop()
        text = feed.taken()
        if feed.cut and feed.lacking:
            feed.drain()
            self.half_call = True
        else:
            self._say(channel, before + text)
        return False


def _strict_json(calls: CallReader) -> Reading[Outcome]:
    return (yield from calls.json_call(strict=True))
