"""One answer folded from its events: blocks in order (reasoning, text and tool calls), usage and end. Pure.

Dialects whose streams open and close each part of an answer are made from the steps; whole answers from
``blocks``. One block is open at a time, and a change of kind closes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetd.api.generation.usage_tally import UsageTally
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.answer.object_text import strict_object
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Prefill,
    Tokenized,
    ToolCall,
    ToolCallPiece,
    Usage,
)
from fleetd.errors import EngineError
from fleetd.requests.job import Planned

BlockKind = Literal["reasoning", "text", "tool"]
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class AnswerBlock:
    """A part of an answer."""

    #: Its place among the blocks of the answer, from 0.
    index: int
    kind: BlockKind
    #: The id and the function's name of a tool call.
    call_id: str = ""
    name: str = ""
    #: True once all of a tool call has come: its text is a JSON object then.
    whole: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a tool call, as an object."""
        found: dict[str, Any] = msgspec.json.decode(strict_object(self.text))
        return found


class BlockOpened(msgspec.Struct, frozen=True):
    block: AnswerBlock


class BlockText(msgspec.Struct, frozen=True):
    block: AnswerBlock
    text: str


class BlockClosed(msgspec.Struct, frozen=True):
    block: AnswerBlock


BlockStep = BlockOpened | BlockText | BlockClosed


class AnswerSoFar:
    """Args:
    smart: how the prompt is shortened; None reads it whole.
    parallel_tools: False keeps the first tool call only.
    """

    def __init__(self, smart: SmartPrefillPolicy | None = None, *, parallel_tools: bool = True) -> None:
        self.blocks: list[AnswerBlock] = []
        #: Tokens for the client; before the end, only those of the prompt.
        self.usage = Usage()
        #: The last event; None before the end, and for an answer that was cancelled.
        self.finished: Finished | None = None
        #: The block that was open when the answer ended before it was whole.
        self.cut: AnswerBlock | None = None
        self._tally = UsageTally(1, smart)
        self._parallel_tools = parallel_tools
        self._open: AnswerBlock | None = None

    def feed(self, event: Planned | Event) -> list[BlockStep]:
        """What an event adds to the blocks. Raises EngineError for an answer that was cancelled."""
        match event:
            case Planned():
                self._tally.smart.add(0, event.smart)
            case Tokenized() | Accepted():
                self.usage = Usage(prompt_tokens=event.prompt_tokens)
            case Prefill():
                cached = max(self.usage.cached_tokens, event.cached)
                self.usage = Usage(prompt_tokens=self.usage.prompt_tokens, cached_tokens=cached)
            case Finished():
                reason = end_reason(event)
                self._tally.add(0, event)
                self.finished, self.usage = event, self._tally.billed()
                return self.close(cut=reason == "length")
            case Delta(text=text) if text:
                kind: BlockKind = "reasoning" if event.channel == "reasoning" else "text"
                steps: list[BlockStep] = []
                if self._open is None or self._open.kind != kind:
                    steps = self._begin(AnswerBlock(len(self.blocks), kind))
                return [*steps, *self._add(text)]
            case ToolCallPiece() if event.index == 0 or self._parallel_tools:
                return [*self._call(event), *self._add(event.text)]
            case ToolCall() if event.index == 0 or self._parallel_tools:
                steps = self._call(event)
                assert self._open is not None  # noqa: S101  _call has opened it
                streamed = self._open.text
                self._open.whole = True
                left = event.arguments[len(streamed) :] if streamed else strict_object(event.arguments)
                return [*steps, *(self._add(left) if left else ()), *self.close()]
            case _:
                pass
        return []

    def _call(self, event: ToolCallPiece | ToolCall) -> list[BlockStep]:
        """Open the block of a call, unless it is open."""
        if self._open is not None and self._open.kind == "tool" and self._open.call_id == event.call_id:
            return []
        return self._begin(AnswerBlock(len(self.blocks), "tool", event.call_id, event.name))

    def close(self, *, cut: bool = False) -> list[BlockStep]:
        """Close the block that is open, if one is; with ``cut`` before it is whole."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        if cut:
            self.cut = block
        return [BlockClosed(block)]

    def _begin(self, block: AnswerBlock) -> list[BlockStep]:
        steps = self.close()
        self.blocks.append(block)
        self._open = block
        return [*steps, BlockOpened(block)]

    def _add(self, text: str) -> list[BlockStep]:
        assert self._open is not None  # noqa: S101  both callers have opened one
        self._open.pieces.append(text)
        return [BlockText(self._open, text)]


def end_reason(event: Finished) -> EndReason:
    """Why an answer ended. Raises EngineError for one that was cut short: it must not look complete."""
    if event.reason == "cancelled":
        raise EngineError(
            "The answer was cut short: its request was cancelled in the engine.", hint="Try again."
        )
    return event.reason
