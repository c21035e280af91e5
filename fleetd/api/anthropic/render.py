"""Engine events → Anthropic objects. Pure: no clock, no socket.

A stream is ``message_start``, per block ``content_block_start``, deltas and ``content_block_stop``, then
``message_delta`` with the stop reason and the usage, and ``message_stop``. A ``ping`` may come anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd.api.anthropic import objects as o
from fleetd.api.generation.answer_blocks import (
    AnswerBlock,
    AnswerSoFar,
    BlockClosed,
    BlockOpened,
    BlockStep,
    BlockText,
    end_reason,
)
from fleetd.api.generation.streamer import Collector, Streamer
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.protocol import Event
from fleetd.requests.job import Planned

# Clients send a thinking block back only with a signature.
SIGNATURE = "ZmxlZXRk"


class MessageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is written."""

    #: The answer's id.
    id: str
    #: The name that the client used.
    model: str
    #: The bound on the answer's tokens; None is what the context holds.
    max_tokens: int | None = None
    #: False shows the first tool call only.
    parallel_tools: bool = True
    #: The client marks what is to be cached: prompt tokens that are not in the cache count as put into it.
    marked: bool = False
    #: How the prompt is shortened; None reads it whole.
    smart: SmartPrefillPolicy | None = None


class _MessageRenderer:
    def __init__(self, options: MessageOptions) -> None:
        self._options = options
        self._answer = AnswerSoFar(options.smart, parallel_tools=options.parallel_tools)

    def _end(self) -> o.MessageEnd | None:
        """None before the end."""
        event = self._answer.finished
        if event is None:
            return None
        match end_reason(event):
            case "tool_calls":
                return o.MessageEnd("tool_use", None)
            case "length":
                wanted = self._options.max_tokens
                full = wanted is None or event.usage.completion_tokens < wanted
                return o.MessageEnd("model_context_window_exceeded" if full else "max_tokens", None)
            case "stop":
                return o.MessageEnd("end_turn" if event.stop is None else "stop_sequence", event.stop)

    def _counted(self) -> o.MessageUsage:
        usage = self._answer.usage
        anew = max(0, usage.prompt_tokens - usage.cached_tokens)
        created = anew if self._options.marked else 0
        return o.MessageUsage(
            input_tokens=anew - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=o.ThinkingTokens(usage.reasoning_tokens),
        )

    def _message(self, content: list[o.AnswerContent]) -> o.MessageReply:
        end = self._end()
        return o.MessageReply(
            id=self._options.id,
            model=self._options.model,
            content=content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=self._counted(),
        )


class MessageWhole(_MessageRenderer, Collector):
    def feed(self, index: int, event: Planned | Event) -> None:
        self._answer.feed(event)

    def whole(self) -> o.MessageReply:
        blocks = [block for block in self._answer.blocks if block.kind != "tool" or block.whole]
        return self._message([_content(block) for block in blocks])


class MessageStream(_MessageRenderer, Streamer):
    def opening(self) -> Sequence[msgspec.Struct]:
        return (o.MessageStart(self._message([])),)

    def feed(self, index: int, event: Planned | Event) -> Sequence[msgspec.Struct]:
        return [item for step in self._answer.feed(event) for item in _events(step)]

    def progress(self) -> Sequence[msgspec.Struct]:
        return (o.PingEvent(),)

    def closing(self) -> Sequence[msgspec.Struct]:
        end = self._end()
        return () if end is None else (o.MessageDelta(end, self._counted()), o.MessageStop())


def _events(step: BlockStep) -> list[msgspec.Struct]:
    block = step.block
    match step:
        case BlockOpened():
            return [o.ContentBlockStart(block.index, _empty(block))]
        case BlockText(text=text):
            return [o.ContentBlockDelta(block.index, _piece(block, text))]
        case BlockClosed():
            stop = o.ContentBlockStop(block.index)
            if block.kind == "reasoning":
                return [o.ContentBlockDelta(block.index, o.SignaturePiece(SIGNATURE)), stop]
            return [stop]


def _piece(block: AnswerBlock, text: str) -> o.AnswerPiece:
    match block.kind:
        case "text":
            return o.TextPiece(text)
        case "reasoning":
            return o.ThinkingPiece(text)
        case "tool":
            return o.InputPiece(text)


def _empty(block: AnswerBlock) -> o.AnswerContent:
    match block.kind:
        case "text":
            return o.TextContent("")
        case "reasoning":
            return o.ThinkingContent("", "")
        case "tool":
            return o.ToolUseContent(block.call_id, block.name, {})


def _content(block: AnswerBlock) -> o.AnswerContent:
    match block.kind:
        case "text":
            return o.TextContent(block.text)
        case "reasoning":
            return o.ThinkingContent(block.text, SIGNATURE)
        case "tool":
            return o.ToolUseContent(block.call_id, block.name, block.arguments)
