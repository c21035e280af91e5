"""From token ids to what a client may see: text that is certain, reasoning set apart, tool calls parsed.

Three filters in a row, each holding back as little as it must:

    token → detokenizer (whole code points) → stop strings → grammar (reasoning, calls) → Delta | ToolCall

mlx-lm supplies the detokenizer. All others work on text, because neither a stop string nor a marker need fall
on token boundaries.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd import limits
from fleetd.engine.answer.answer_parts import CallBegun, CallEnded, CallText, Channel, Part, Said
from fleetd.engine.answer.answer_reader import AnswerReader, Markers
from fleetd.engine.answer.token_bytes import shown_length
from fleetd.engine.answer.tool_formats import markers
from fleetd.engine.protocol import Delta, TokenLogprob, ToolCall, ToolCallPiece

AnswerPiece = Delta | ToolCall | ToolCallPiece


class StopFilter:
    """Cuts text at the first stop string, and never shows the beginning of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to show. After ``hit`` is set nothing more comes."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first wins, as if the text came letter by letter: where tokens end must
            # not matter. Of two that are complete together the longer, so that none of it shows.
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the answer ends without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(s) for s in self._stops) - 1)
        for size in range(longest, 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


class _TokenScore(msgspec.Struct, frozen=True):
    """A token's log-probability, and where its text is in all that was written: [at, end)."""

    entry: TokenLogprob
    at: int
    end: int


@dataclass(slots=True)
class _Call:
    """A call that is being written."""

    name: str
    call_id: str
    pieces: list[str] = field(default_factory=list)
    #: The end of the arguments, which no ToolCallPiece has told yet.
    fresh: str = ""


@dataclass(slots=True)
class AnswerText:
    """The text side of one answer."""

    request_id: str
    tokenizer: Any
    stops: list[str]
    #: The tools that were offered.
    tools: list[dict[str, Any]] | None = None
    #: "reasoning" if the prompt has opened a thought.
    initial: Channel = "content"
    #: The token before a plain continuation: detokenizers drop the first space of a text, which belongs to
    #: the answer there.
    follows: int | None = None
    #: Characters that are shown before the answer (an echoed prompt).
    offset: int = 0
    #: Arguments are reported while they are written.
    call_pieces: bool = False
    #: Tokens after which stop strings are looked for.
    min_tokens: int = 0
    #: The whole answer is text, to the letter.
    plain: bool = False
    #: The answer is a text that is held to a form, or calls of tools, never both.
    either: bool = False
    #: Tokens of reasoning so far.
    reasoning_tokens: int = 0
    #: Calls that are whole so far.
    tool_calls: int = 0
    #: The answer ended inside a call, which is no text either then.
    cut_call: bool = False
    _tokens: int = field(init=False, default=0)
    # Characters of ``follows`` in the detokenizer's text.
    _before: int = field(init=False, default=0)
    _detokenizer: Any = field(init=False)
    _stop: StopFilter = field(init=False)
    _reader: AnswerReader = field(init=False)
    # Tokens that no Delta has reported yet, and their log-probabilities.
    _pending_tokens: int = field(init=False, default=0)
    _scored: deque[_TokenScore] = field(init=False, default_factory=deque)
    # Characters that came through the detokenizer.
    _written: int = field(init=False, default=0)
    # Blank text at the end of what was shown: it is dropped if a tool call follows.
    _blank: list[Said] = field(init=False, default_factory=list)
    _call: _Call | None = field(init=False, default=None)
    # Where the last content ended, in all that was written.
    _shown_up_to: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer
        self._stop = StopFilter(self.stops)
        known = Markers() if self.plain else markers(self.tokenizer)
        self._reader = AnswerReader(known, self.tools or (), self.initial, either=self.either)
        if self.follows is not None:
            self._decode(self.follows)
            if hasattr(self._detokenizer, "_unflushed"):
                self._detokenizer.finalize()  # what it holds back is the prompt's
            self._before = len(self._detokenizer.text)
            _ = self._detokenizer.last_segment

    @property
    def stopped_by(self) -> str | None:
        return self._stop.hit

    @property
    def length(self) -> int:
        """Where the next token's text begins, in characters, before any filter."""
        return self.offset + shown_length(self._detokenizer) - self._before

    def push(
        self, token: int, logprob: TokenLogprob | None = None, *, silent: bool = False
    ) -> list[AnswerPiece]:
        """Take one sampled token; returns the pieces that have become certain. Raises EngineError if reading
        the text takes too long.

        ``silent``: the token has no text, as an end token that does not end the answer.
        """
        self._tokens += 1
        self._pending_tokens += 1
        if self._reader.channel == "reasoning":
            self.reasoning_tokens += 1
        text = ""
        if not silent:
            self._decode(token)
            text = self._detokenizer.last_segment
        if silent and not self._scored:
            # Reported at once: text may not come for the rest of the answer. But tokens whose text is held
            # back come first.
            return [self._delta(self._reader.channel, "", [] if logprob is None else [logprob])]
        if logprob is not None:
            self._scored.append(_TokenScore(logprob, self._written, self._written + len(text)))
        self._written += len(text)
        out = self._release(self._before_stop(text))
        return out if self._pending_tokens < limits.UNTOLD_TOKENS else [*out, self._tokens_without_text()]

    def _before_stop(self, text: str) -> str:
        """Text that is safe to show, of what the newest token has added."""
        return text if self._tokens <= self.min_tokens else self._stop.feed(text)

    def _tokens_without_text(self) -> Delta:
        """Report tokens whose text is held back: a long tool call is progress."""
        return self._delta(self._reader.channel, "")

    def _decode(self, token: int) -> None:
        try:
            self._detokenizer.add_token(token)
        except IndexError:
            pass  # embeddings are padded beyond the tokenizer's last token: such an id has no text

    def finish(self, *, cut: bool = False) -> list[AnswerPiece]:
        """End the answer; returns the pieces that were held back.

        ``cut``: the answer ended before the model ended it: a call that is not whole is no text either then.
        """
        self._detokenizer.finalize()
        # An unfinished code point at the very end is not text.
        text = self._before_stop(self._detokenizer.last_segment.rstrip("\ufffd"))
        out = self._release(text + self._stop.flush())
        out += self._told(self._reader.end(cut=cut, stopped=self.stopped_by is not None))
        self.cut_call |= self._reader.half_call
        if self._blank and not self.tool_calls and not self.cut_call:
            out.append(self._shown(self._blank))
        # Tokens of a character that is not whole have no text.
        left = [each.entry for each in self._scored if each.at == each.end >= self._shown_up_to]
        if left or self._pending_tokens:
            channel = self._reader.channel
            out.append(self._delta(channel, "", left if channel == "content" else []))
        return out

    def _release(self, text: str) -> list[AnswerPiece]:
        return self._told(self._reader.feed(text)) if text else []

    def _told(self, parts: list[Part]) -> list[AnswerPiece]:
        out = [piece for part in parts for piece in self._part(part)]
        return [*out, *self._piece()]

    def _part(self, part: Part) -> list[AnswerPiece]:
        match part:
            case Said():
                return self._said(part)
            case CallBegun(name, call_id):
                # Blank text before a call is no part of the answer.
                self._blank = []
                self._call = _Call(name, call_id or f"call_{uuid.uuid4().hex[:24]}")
            case CallText(text):
                assert self._call is not None  # noqa: S101  it has begun
                self._call.pieces.append(text)
                self._call.fresh += text
            case CallEnded(whole):
                return [*self._piece(), *self._end_call(whole)]
        return []

    def _piece(self) -> list[AnswerPiece]:
        """The end of a call's arguments that no piece has told yet."""
        call = self._call
        if call is None or not call.fresh or not self.call_pieces:
            return []
        tokens, self._pending_tokens = self._pending_tokens, 0
        fresh, call.fresh = call.fresh, ""
        return [ToolCallPiece(self.request_id, self.tool_calls, call.call_id, call.name, fresh, tokens)]

    def _end_call(self, whole: bool) -> list[AnswerPiece]:
        call, self._call = self._call, None
        if call is None or not whole:
            self.cut_call = True
            return []
        index, self.tool_calls = self.tool_calls, self.tool_calls + 1
        return [ToolCall(self.request_id, index, call.call_id, call.name, "".join(call.pieces))]

    def _said(self, said: Said) -> list[AnswerPiece]:
        if not said.text:
            return []
        if said.channel == "reasoning":
            return [self._delta("reasoning", said.text)]
        if not self.tools:
            return [self._shown([said])]
        body = said.text.rstrip()
        if not body:
            self._blank.append(said)
            return []
        shown = [*self._blank, Said(said.channel, body, said.at)]
        tail = _behind(said, said.at + len(body))
        self._blank = [tail] if tail.text else []
        return [self._shown(shown)]

    def _shown(self, texts: list[Said]) -> Delta:
        """Content, with the log-probabilities of its tokens. Those of markers are not told."""
        entries = [entry for said in texts for entry in self._entries(said)]
        return self._delta("content", "".join(said.text for said in texts), entries)

    def _entries(self, said: Said) -> Iterator[TokenLogprob]:
        self._shown_up_to = said.at + len(said.text)
        while self._scored and self._scored[0].at < self._shown_up_to:
            one = self._scored.popleft()
            if one.end > said.at or one.at == one.end == said.at:
                yield one.entry

    def _delta(self, channel: Channel, text: str, logprobs: list[TokenLogprob] | None = None) -> Delta:
        tokens, self._pending_tokens = self._pending_tokens, 0
        told = logprobs if channel == "content" and logprobs else None
        return Delta(id=self.request_id, text=text, channel=channel, tokens=tokens, logprobs=told)


def _behind(said: Said, at: int) -> Said:
    """The part of a text from character ``at`` of the answer on."""
    if said.at >= at:
        return said
    return Said(said.channel, said.text[at - said.at :], at)
