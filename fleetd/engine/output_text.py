"""From token ids to what a client may see: text that is certain, reasoning set apart, tool calls parsed.

Three filters in a row, each holding back as little as it must:

    token → detokenizer (whole code points) → stop strings → markers (reasoning, tools) → Delta | ToolCall

mlx-lm supplies the detokenizer, the marker machine and the tool-call parsers; the stop filter works on text,
because a stop string need not fall on token boundaries.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from fleetd import limits
from fleetd.engine.protocol import Delta, TokenLogprob, ToolCall, ToolCallPiece
from fleetd.engine.tool_call_text import ToolCallText, WrittenCall, may_be_bare_call, tool_name
from fleetd.engine.tool_formats import HEAD_STATES

AnswerPiece = Delta | ToolCall | ToolCallPiece

# Marker states of mlx-lm's machine and the channel each one's text goes to; "tool" text is collected instead.
_REASONING = "reasoning"
_TOOL = "tool"


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


@dataclass(slots=True)
class AnswerText:
    """The text side of one answer.

    ``initial`` is the marker state the prompt ended in (a template may open the reasoning or, for a required
    tool call, the call itself); ``primed`` is the part of a tool call that was put into the prompt.
    ``follows`` is the token before a plain continuation: detokenizers drop the first space of a text, which
    there belongs to the answer. ``offset`` counts characters shown before the answer (an echoed prompt).
    ``call_pieces``: arguments are reported while they are written. ``min_tokens``: stop strings are looked
    for after so many. ``cut_call``: the answer ended inside a call, which is then no text either.
    """

    request_id: str
    tokenizer: Any
    stops: list[str]
    tools: list[dict[str, Any]] | None = None
    initial: str = "normal"
    primed: str = ""
    follows: int | None = None
    offset: int = 0
    call_pieces: bool = False
    min_tokens: int = 0
    reasoning_tokens: int = 0
    tool_calls: int = 0
    cut_call: bool = False
    _tokens: int = field(init=False, default=0)
    # Characters of ``follows`` in the detokenizer's text.
    _before: int = field(init=False, default=0)
    _detokenizer: Any = field(init=False)
    _stop: StopFilter = field(init=False)
    _machine: Any = field(init=False)
    # The section of tool calls that is being written.
    _tool_text: str = field(init=False)
    # Tokens and log-probabilities that no Delta has reported yet.
    _pending_tokens: int = field(init=False, default=0)
    _pending_logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    # Blank text at the end of what was shown: it is dropped if a tool call follows.
    _blank: str = field(init=False, default="")
    # The section before was closed by a marker, and nothing but blank text has followed.
    _after_marker: bool = field(init=False, default=False)
    _names: list[str] = field(init=False)
    _written: ToolCallText = field(init=False)
    # The text of an answer that may be a call without markers; None once that is decided.
    _opening: str | None = field(init=False, default=None)
    _bare_call: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer
        self._stop = StopFilter(self.stops)
        self._machine = make_text_state_machine(self.tokenizer).make_state(self.initial)
        self._names = [str(each.get("function", {}).get("name", "")) for each in self.tools or ()]
        if self.tools and self._format == "llama3" and not self.primed:
            self._opening = ""
        self._tool_text = ""
        self._begin_calls()
        self._call_text(self.primed)
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
        return self.offset + len(self._detokenizer.text) - self._before

    def push(
        self, token: int, logprob: TokenLogprob | None = None, *, silent: bool = False
    ) -> list[AnswerPiece]:
        """One sampled token. Returns what has become certain.

        ``silent``: it has no text, as an end token that does not end the answer.
        """
        self._tokens += 1
        self._pending_tokens += 1
        if logprob is not None:
            self._pending_logprobs.append(logprob)
        if self._state == _REASONING:
            self.reasoning_tokens += 1
        if silent:
            # Reported at once: text may not come for the rest of the answer.
            return self._delta("reasoning" if self._state == _REASONING else "content", "", force=True)
        self._decode(token)
        text = self._detokenizer.last_segment
        out = self._release(text if self._tokens <= self.min_tokens else self._stop.feed(text))
        return out if self._pending_tokens < limits.UNTOLD_TOKENS else [*out, self._tokens_without_text()]

    def _tokens_without_text(self) -> Delta:
        """Report tokens whose text is held back: a long tool call is progress."""
        tokens, self._pending_tokens = self._pending_tokens, 0
        channel: Literal["content", "reasoning"] = "reasoning" if self._state == _REASONING else "content"
        return Delta(self.request_id, "", channel, tokens)

    def _decode(self, token: int) -> None:
        try:
            self._detokenizer.add_token(token)
        except IndexError:
            pass  # embeddings are padded beyond the tokenizer's last token: such an id has no text

    def finish(self, *, cut: bool = False) -> list[AnswerPiece]:
        """The answer has ended: release what was held back, close what was open.

        ``cut``: it ended before the model ended it, so that a call that is not whole is no text either.
        """
        self._detokenizer.finalize()
        # An unfinished code point at the very end is not text.
        text = self._stop.feed(self._detokenizer.last_segment.rstrip("\ufffd"))
        out = self._release(text + self._stop.flush())
        state, rest, name = TextStateMachine.flush(self._machine)
        self._machine = state
        if rest and name is not None:
            out += self._segments([(name, rest)])
        if self._opening:
            out += self._undecided(cut)
        if self._tool_text:
            out += self._parse_calls(ended=True, cut=cut)
        if not self.tool_calls:
            out += self._delta("content", self._take_blank())
        if self._pending_logprobs or self._pending_tokens:
            out += self._delta("reasoning" if self._state == _REASONING else "content", "", force=True)
        return out

    @property
    def _state(self) -> str | None:
        state: str | None = self._machine[0]
        return state

    def _release(self, text: str) -> list[AnswerPiece]:
        if not text:
            return []
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return self._segments(segments)

    def _segments(self, segments: list[tuple[str, str]]) -> list[AnswerPiece]:
        out: list[AnswerPiece] = []
        for i, (state, text) in enumerate(segments):
            left = i + 1 < len(segments)
            if state == _TOOL or (self._bare_call and state != _REASONING):
                out += self._call_text(text)
                if left:
                    out += self._parse_calls()
            elif state == _REASONING:
                out += self._delta("reasoning", text)
            elif state in HEAD_STATES:
                pass  # which channel follows, for whom: no part of the answer
            else:
                out += self._content(text)
            if left and state in (_TOOL, _REASONING):
                self._after_marker = True
        return out

    @property
    def _format(self) -> str:
        return str(getattr(self.tokenizer, "init_kwargs", {}).get("tool_parser_type") or "")

    def _begin_calls(self) -> None:
        parser, tools = self.tokenizer.tool_parser, self.tools
        self._written = ToolCallText(
            self._format if tools else "", self._names, lambda text: parser(text, tools)
        )

    def _call_text(self, text: str) -> list[AnswerPiece]:
        """More of a section of tool calls."""
        self._tool_text += text
        self._written.feed(text)
        return self._written_calls(self._written)

    def _written_calls(self, written: ToolCallText) -> list[AnswerPiece]:
        out: list[AnswerPiece] = []
        for call in written.calls:
            if call.reported:
                continue
            if self.call_pieces and call.fresh:
                out.append(self._piece(call))
            if call.whole:
                out += self._written_call(call)
        return out

    def _piece(self, call: WrittenCall) -> ToolCallPiece:
        call.call_id = call.call_id or _call_id()
        tokens, self._pending_tokens = self._pending_tokens, 0
        fresh, call.fresh = call.fresh, ""
        return ToolCallPiece(self.request_id, self.tool_calls, call.call_id, call.name, fresh, tokens)

    def _written_call(self, call: WrittenCall) -> list[AnswerPiece]:
        call.reported = True
        found = {"id": call.call_id, "name": call.name, "arguments": call.arguments}
        return self._reported([self._call(0, found)])

    def _undecided(self, cut: bool) -> list[AnswerPiece]:
        """The answer ends before it is known whether it is a call."""
        text, self._opening = self._opening or "", None
        if cut and text.strip():
            self.cut_call = True
            return []
        return self._content(text)

    def _content(self, text: str) -> list[AnswerPiece]:
        """Blank lines around tool calls and after the reasoning are the template's, not the answer's."""
        if self._opening is not None:
            self._opening += text
            is_call = may_be_bare_call(self._opening, self._names)
            if is_call is None:
                return []
            text, self._opening = self._opening, None
            if is_call:
                self._bare_call = True
                return self._call_text(text)
        text = self._take_blank() + text
        if self._after_marker:
            text = text.lstrip("\n")
            if not text.strip():
                self._blank = text
                return []
            self._after_marker = False
        if self.tools:
            shown = text.rstrip()
            self._blank, text = text[len(shown) :], shown
        return self._delta("content", text)

    def _take_blank(self) -> str:
        blank, self._blank = self._blank, ""
        return blank

    def _delta(self, channel: str, text: str, *, force: bool = False) -> list[AnswerPiece]:
        if not text and not force:
            return []
        logprobs, self._pending_logprobs = self._pending_logprobs or None, []
        tokens, self._pending_tokens = self._pending_tokens, 0
        return [
            Delta(
                id=self.request_id,
                text=text,
                channel="reasoning" if channel == "reasoning" else "content",
                tokens=tokens,
                logprobs=logprobs if channel == "content" else None,
            )
        ]

    def _parse_calls(self, *, ended: bool = False, cut: bool = False) -> list[AnswerPiece]:
        """The collected text of one tool-call section → calls; text that is no call is shown, not lost: what
        the model wrote of it.

        ``ended``: with the answer, so that what is not whole stays so.
        """
        text, self._tool_text = self._tool_text, ""
        primed, self.primed = self.primed, ""
        written = self._written
        self._begin_calls()
        if written.calls:
            if not cut and self.stopped_by is None:
                written.close()
            if not written.begun:
                return self._written_calls(written)
            if not ended:  # its arguments are not whole, and the model has closed the section
                return self._written_call(written.calls[-1])
            self.cut_call = True
            return self._reported([])
        if cut and self.tokenizer.tool_call_end:
            # Parsers make a call of less than the model meant to write.
            self.cut_call = True
            return self._reported([])
        try:
            parsed = self.tokenizer.tool_parser(text, self.tools)
            found = parsed if isinstance(parsed, list) else [parsed]
            calls = [self._call(i, call) for i, call in enumerate(found)]
        # Parsers raise whatever their text makes them raise, and what they return need not be a call.
        except Exception:
            calls = []
        if calls:
            return self._reported(calls)
        if cut:
            self.cut_call = True
            return self._reported([])
        return self._delta("content", self._take_blank() + text.removeprefix(primed))

    def _reported(self, calls: list[ToolCall]) -> list[AnswerPiece]:
        """Count calls; blank text and log-probabilities before them are no part of the answer."""
        self._blank = ""
        self.tool_calls += len(calls)
        self._pending_logprobs = []
        return list(calls)

    def _call(self, at: int, call: dict[str, Any]) -> ToolCall:
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str):
            raise TypeError("the name of a tool call is not text")
        return ToolCall(
            id=self.request_id,
            index=self.tool_calls + at,
            call_id=str(call.get("id") or _call_id()),
            name=tool_name(name, self._names),
            arguments=arguments
            if isinstance(arguments, str)
            else json.dumps(arguments, ensure_ascii=False, allow_nan=False),
        )


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
