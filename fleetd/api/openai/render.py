"""Engine events → OpenAI objects. Pure: no clock, no socket.

For each endpoint one class makes the chunks of a stream and one folds the whole reply. Both take events as
``feed(choice index, event)``, from any number of choices in any order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from fleetd.api.generation.answer_blocks import end_reason
from fleetd.api.generation.streamer import Collector, Streamer
from fleetd.api.generation.usage_tally import EngineWork, UsageTally
from fleetd.api.openai import objects as o
from fleetd.api.openai.reports import smart_report, timing_report, usage_object
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.answer.object_text import strict_object
from fleetd.engine.protocol import Delta, Event, Finished, TokenLogprob, ToolCall, ToolCallPiece, TopLogprob
from fleetd.requests.job import Planned

# JSON has no minus infinity; this is what OpenAI sends for "practically impossible".
LEAST_LOGPROB = -9999.0


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What all objects of one reply have in common, and what the client asked to see in them."""

    #: The answer's id.
    id: str
    #: When the request came, in seconds since 1970.
    created: int
    #: The name that the client used.
    model: str
    #: The daemon's version, as ``system_fingerprint``.
    fingerprint: str
    #: How many choices there are, of all prompts together.
    choices: int = 1
    #: How many choices answer each prompt.
    per_prompt: int = 1
    #: A stream ends with a chunk that has the usage.
    include_usage: bool = False
    #: The client asked for log-probabilities.
    logprobs: bool = False
    #: False shows the first tool call only.
    parallel_tools: bool = True
    #: The answer begins with the prompt.
    echo: bool = False
    #: How the prompts are shortened; None reads them whole.
    smart: SmartPrefillPolicy | None = None


# ---- Logprobs --------------------------------------------------------------------------------------------


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_logprobs(items: list[TokenLogprob]) -> o.ChatLogprobs:
    return o.ChatLogprobs(
        [
            o.LogprobItem(
                item.token,
                _finite(item.logprob),
                list(item.raw),
                [o.TopLogprobItem(top.token, _finite(top.logprob), list(top.raw)) for top in item.top],
            )
            for item in items
        ]
    )


def _shown(token: TokenLogprob | TopLogprob) -> str:
    """A token's text. Part of a character is shown by its bytes, as in OpenAI's API."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def text_logprobs(items: list[TokenLogprob], *, opens_prompt: bool = False) -> o.TextLogprobs:
    """The chosen token is always among the top. A prompt's first token has no logprob."""
    known = [not (opens_prompt and i == 0) for i in range(len(items))]
    return o.TextLogprobs(
        tokens=[_shown(item) for item in items],
        token_logprobs=[_finite(item.logprob) if ok else None for item, ok in zip(items, known, strict=True)],
        top_logprobs=[
            {_shown(item): _finite(item.logprob)} | {_shown(top): _finite(top.logprob) for top in item.top}
            if ok
            else None
            for item, ok in zip(items, known, strict=True)
        ],
        text_offset=[item.text_offset for item in items],
    )


# ---- What both endpoints share ---------------------------------------------------------------------------

Choice = TypeVar("Choice")


def _fields(
    reply: ReplyOptions,
    tally: UsageTally,
    usage: o.UsageObject | UnsetType | None = UNSET,
    work: EngineWork | None = None,
) -> dict[str, Any]:
    """The fields of chunks and whole replies of both endpoints. Without ``work`` they hold no reports."""
    return {
        "id": reply.id,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": reply.fingerprint,
        "usage": usage,
        "timings": UNSET if work is None else timing_report(work),
        "smart_prefill": UNSET if work is None else smart_report(tally.smart),
    }


class _ReplyStream(Streamer, Generic[Choice]):
    """Chunks of a streamed reply.

    Per choice: its pieces, the last with the finish reason and the timings. After all choices, only if asked,
    one chunk without choices that has the usage.
    """

    chunk: ClassVar[type[msgspec.Struct]]

    def __init__(self, reply: ReplyOptions) -> None:
        self._reply = reply
        self._tally = UsageTally(reply.per_prompt, reply.smart)

    def feed(self, index: int, event: Planned | Event) -> list[msgspec.Struct]:
        if isinstance(event, Planned):
            self._tally.smart.add(index, event.smart)
            return []
        if not isinstance(event, Finished):
            return [self._chunk([piece]) for piece in self._pieces(index, event)]
        self._tally.add(index, event)
        *before, last = self._last(index, end_reason(event))
        return [*(self._chunk([piece]) for piece in before), self._chunk([last], self._tally.work_of(index))]

    def closing(self) -> list[msgspec.Struct]:
        if not self._reply.include_usage:
            return []
        return [self._chunk([], self._tally.work(), usage_object(self._tally.billed()))]

    @abstractmethod
    def _pieces(self, index: int, event: Event) -> list[Choice]:
        """What an event adds to a choice, one piece per chunk."""

    @abstractmethod
    def _last(self, index: int, reason: o.FinishReason) -> list[Choice]:
        """The last pieces of a choice; the last of them has the reason."""

    def _chunk(
        self, choices: Sequence[Choice], work: EngineWork | None = None, usage: o.UsageObject | None = None
    ) -> msgspec.Struct:
        # Null before the usage comes, and absent where it never comes.
        shown = usage if self._reply.include_usage else UNSET
        return self.chunk(choices=list(choices), **_fields(self._reply, self._tally, shown, work))


@dataclass(slots=True)
class _ChoiceText:
    """One choice, as far as it has come."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[o.MessageToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: o.FinishReason = "stop"


class _WholeReply(Collector):
    """Folds a reply that is not streamed."""

    def __init__(self, reply: ReplyOptions) -> None:
        self._reply = reply
        self._answers = [_ChoiceText() for _ in range(reply.choices)]
        self._tally = UsageTally(reply.per_prompt, reply.smart)

    def feed(self, index: int, event: Planned | Event) -> None:
        answer = self._answers[index]
        match event:
            case Planned():
                self._tally.smart.add(index, event.smart)
            case Delta():
                self._add_text(answer, event)
            case ToolCall() if event.index == 0 or self._reply.parallel_tools:
                function = o.FunctionCall(event.name, strict_object(event.arguments))
                answer.tool_calls.append(o.MessageToolCall(event.call_id, "function", function))
            case Finished():
                answer.reason = end_reason(event)
                self._tally.add(index, event)
            case _:
                pass

    def _add_text(self, answer: _ChoiceText, event: Delta) -> None:
        answer.text.append(event.text)
        answer.logprobs += event.logprobs or ()

    def _fields(self) -> dict[str, Any]:
        return _fields(self._reply, self._tally, usage_object(self._tally.billed()), self._tally.work())


# ---- /v1/chat/completions --------------------------------------------------------------------------------


class ChatStream(_ReplyStream[o.ChunkChoice]):
    """Per choice: the role with empty content, deltas, then an empty delta with the finish reason."""

    chunk = o.ChatChunk

    def __init__(self, reply: ReplyOptions) -> None:
        super().__init__(reply)
        self._started: set[int] = set()
        # Characters of the arguments that were sent, by choice and call.
        self._streamed_chars: dict[tuple[int, int], int] = {}

    def _pieces(self, index: int, event: Event) -> list[o.ChunkChoice]:
        match event:
            case Delta():
                return self._opening(index) + _delta(index, event)
            case ToolCallPiece() | ToolCall():
                shown = event.index == 0 or self._reply.parallel_tools
                return self._opening(index) + (self._call(index, event) if shown else [])
            case _:
                return []

    def _call(self, index: int, event: ToolCallPiece | ToolCall) -> list[o.ChunkChoice]:
        """First the name, then the arguments as they come."""
        streamed = self._streamed_chars.get((index, event.index))
        pieces = []
        if streamed is None:
            function = o.FunctionDelta("", event.name)
            pieces.append(o.ToolCallDelta(event.index, function, event.call_id, "function"))
        if isinstance(event, ToolCallPiece):
            text = event.text
        else:
            text = event.arguments[streamed:] if streamed else strict_object(event.arguments)
        self._streamed_chars[index, event.index] = (streamed or 0) + len(text)
        if text:
            pieces.append(o.ToolCallDelta(event.index, o.FunctionDelta(text)))
        return [o.ChunkChoice(index, o.ChoiceDelta(tool_calls=[piece]), None) for piece in pieces]

    def _last(self, index: int, reason: o.FinishReason) -> list[o.ChunkChoice]:
        return [*self._opening(index), o.ChunkChoice(index, o.ChoiceDelta(), reason)]

    def _opening(self, index: int) -> list[o.ChunkChoice]:
        if index in self._started:
            return []
        self._started.add(index)
        return [o.ChunkChoice(index, o.ChoiceDelta(role="assistant", content=""), None)]


def _delta(index: int, event: Delta) -> list[o.ChunkChoice]:
    if event.channel == "reasoning":
        if not event.text:
            return []
        return [o.ChunkChoice(index, o.ChoiceDelta(reasoning_content=event.text), None)]
    if not event.text and not event.logprobs:
        return []
    logprobs = chat_logprobs(event.logprobs) if event.logprobs is not None else UNSET
    return [o.ChunkChoice(index, o.ChoiceDelta(content=event.text), None, logprobs)]


class ChatWhole(_WholeReply):
    def _add_text(self, answer: _ChoiceText, event: Delta) -> None:
        if event.channel == "reasoning":
            answer.reasoning.append(event.text)
        else:
            super()._add_text(answer, event)

    def whole(self) -> o.ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return o.ChatCompletion(choices=choices, **self._fields())

    def _choice(self, index: int, answer: _ChoiceText) -> o.ChatChoice:
        text, reasoning = "".join(answer.text), "".join(answer.reasoning)
        message = o.ReplyMessage(
            "assistant",
            None if answer.tool_calls and not text else text,
            reasoning or UNSET,
            answer.tool_calls or UNSET,
        )
        logprobs = chat_logprobs(answer.logprobs) if self._reply.logprobs else None
        return o.ChatChoice(index, message, answer.reason, logprobs)


# ---- /v1/completions -------------------------------------------------------------------------------------


class TextStream(_ReplyStream[o.TextChoice]):
    """Per choice: text as it comes, then an empty text with the finish reason."""

    chunk = o.TextCompletion

    def __init__(self, reply: ReplyOptions) -> None:
        super().__init__(reply)
        self._opens_prompt = set(range(reply.choices)) if reply.echo else set[int]()

    def _pieces(self, index: int, event: Event) -> list[o.TextChoice]:
        if not isinstance(event, Delta) or not (event.text or event.logprobs):
            return []
        logprobs = None
        if event.logprobs is not None:
            logprobs = text_logprobs(event.logprobs, opens_prompt=index in self._opens_prompt)
            self._opens_prompt.discard(index)
        return [o.TextChoice(index, event.text, None, logprobs)]

    def _last(self, index: int, reason: o.FinishReason) -> list[o.TextChoice]:
        return [o.TextChoice(index, "", reason)]


class TextWhole(_WholeReply):
    """What a model marks as reasoning is text here, and tool calls are left out."""

    def whole(self) -> o.TextCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return o.TextCompletion(choices=choices, **self._fields())

    def _choice(self, index: int, answer: _ChoiceText) -> o.TextChoice:
        logprobs = None
        if self._reply.logprobs:
            logprobs = text_logprobs(answer.logprobs, opens_prompt=self._reply.echo)
        return o.TextChoice(index, "".join(answer.text), answer.reason, logprobs)
