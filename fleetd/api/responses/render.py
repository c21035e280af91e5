"""Engine events → objects of the Responses dialect. Pure: no clock, no socket.

A stream is ``response.created``, ``response.in_progress``, per item its events from ``output_item.added`` to
``output_item.done``, and ``response.completed``, ``incomplete`` or ``failed``. Another ``in_progress`` may
come anywhere between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

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
from fleetd.api.http.dialect import BUSY
from fleetd.api.responses import objects as o
from fleetd.api.responses.tools import FreeText, ToolTable, free_text
from fleetd.api.responses.translate import carried
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.protocol import Event, Usage
from fleetd.errors import FleetError
from fleetd.requests.job import Planned


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is written."""

    #: The answer before anything of it is known.
    response: o.Response
    #: The client's tools, by the names that the model knows.
    tools: ToolTable
    #: The reasoning is given a second time, as ``encrypted_content``.
    carry: bool = False
    #: Is called with the whole answer before that is sent.
    keep: Callable[[o.Response], None] = lambda response: None
    #: How the prompt is shortened; None reads it whole.
    smart: SmartPrefillPolicy | None = None


class _ResponseRenderer:
    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._answer = AnswerSoFar(options.smart, parallel_tools=options.response.parallel_tool_calls)

    def _response(self) -> o.Response:
        """The answer as far as it is known."""
        answer = self._answer
        output = [self._item(block, self._status(block)) for block in answer.blocks]
        if answer.finished is None:
            return replace(self._options.response, output=output)
        full = end_reason(answer.finished) == "length"
        return replace(
            self._options.response,
            status="incomplete" if full else "completed",
            incomplete_details=o.IncompleteDetails("max_output_tokens") if full else None,
            usage=_usage(answer.usage),
            output=output,
        )

    def _ended(self) -> o.Response:
        found = self._response()
        self._options.keep(found)
        return found

    def _status(self, block: AnswerBlock) -> o.ItemStatus:
        """The status of an item that is closed."""
        return "incomplete" if block is self._answer.cut else "completed"

    def _id(self, block: AnswerBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "tool": "fc"}[block.kind]
        return f"{prefix}_{self._options.response.id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: AnswerBlock, status: o.ItemStatus) -> o.Item:
        """An item; one that is in progress has no content yet."""
        begun = status == "in_progress"
        text, name = "" if begun else block.text, self._id(block)
        match block.kind:
            case "text":
                content = [] if begun else [o.OutputText(text)]
                return o.MessageItem(id=name, status=status, content=content)
            case "reasoning":
                return o.ReasoningItem(
                    id=name,
                    status=status,
                    content=[] if begun else [o.ReasoningText(text)],
                    encrypted_content=carried(text) if self._options.carry and not begun else None,
                )
            case "tool":
                tool = self._options.tools.called(block.name)
                common: dict[str, Any] = {
                    "id": name,
                    "status": status,
                    "call_id": block.call_id,
                    "name": tool.name,
                    "namespace": tool.namespace or UNSET,
                }
                if tool.custom:
                    return o.CustomCallItem(input="" if begun else free_text(text), **common)
                return o.FunctionCallItem(arguments=text, **common)


class ResponseWhole(_ResponseRenderer, Collector):
    def feed(self, index: int, event: Planned | Event) -> None:
        self._answer.feed(event)

    def whole(self) -> o.Response:
        return self._ended()


class ResponseStream(_ResponseRenderer, Streamer):
    def __init__(self, options: ResponseOptions) -> None:
        super().__init__(options)
        # By the block's index: inputs of custom tools that are being written.
        self._inputs: dict[int, FreeText] = {}

    def opening(self) -> Sequence[msgspec.Struct]:
        return (o.ResponseCreated(response=self._options.response),)

    def feed(self, index: int, event: Planned | Event) -> Sequence[msgspec.Struct]:
        return [item for step in self._answer.feed(event) for item in self._events(step)]

    def progress(self) -> Sequence[msgspec.Struct]:
        return (o.ResponseInProgress(response=self._options.response),)

    def closing(self) -> Sequence[msgspec.Struct]:
        if self._answer.finished is None:
            return ()
        found = self._ended()
        kind = o.ResponseIncomplete if found.status == "incomplete" else o.ResponseCompleted
        return (kind(response=found),)

    def failure(self, error: FleetError) -> o.ResponseFailed:
        self._answer.close(cut=True)
        return o.ResponseFailed(response=replace(self._response(), status="failed", error=_error(error)))

    def _events(self, step: BlockStep) -> list[o.Event]:
        match step:
            case BlockOpened(block=block):
                return self._opened(block)
            case BlockText(block=block, text=text):
                return self._delta(block, text)
            case BlockClosed(block=block):
                return self._closed(block)

    def _opened(self, block: AnswerBlock) -> list[o.Event]:
        added = o.ItemAdded(output_index=block.index, item=self._item(block, "in_progress"))
        if block.kind == "tool":
            return [added]
        return [added, o.PartAdded(part=_part(block, ""), **self._at(block))]

    def _delta(self, block: AnswerBlock, text: str) -> list[o.Event]:
        match block.kind:
            case "text":
                return [o.TextDelta(delta=text, **self._at(block))]
            case "reasoning":
                return [o.ReasoningDelta(delta=text, **self._at(block))]
            case "tool" if self._options.tools.called(block.name).custom:
                more = self._inputs.setdefault(block.index, FreeText()).feed(text)
                return [o.CustomInputDelta(delta=more, **self._at(block))] if more else []
            case "tool":
                return [o.ArgumentsDelta(delta=text, **self._at(block))]

    def _closed(self, block: AnswerBlock) -> list[o.Event]:
        item = self._item(block, self._status(block))
        done = o.ItemDone(output_index=block.index, item=item)
        at = self._at(block)
        match item:
            case o.MessageItem():
                text: o.Event = o.TextDone(text=block.text, **at)
                return [text, o.PartDone(part=_part(block, block.text), **at), done]
            case o.ReasoningItem():
                text = o.ReasoningDone(text=block.text, **at)
                return [text, o.PartDone(part=_part(block, block.text), **at), done]
            case o.FunctionCallItem():
                return [o.ArgumentsDone(name=item.name, arguments=block.text, **at), done]
            case o.CustomCallItem():
                streamed = self._inputs.pop(block.index, FreeText())
                # Arguments of another form than the expected one are read when they are whole.
                left: list[o.Event] = [] if streamed.begun else [o.CustomInputDelta(delta=item.input, **at)]
                return [*left, o.CustomInputDone(input=item.input, **at), done]

    def _at(self, block: AnswerBlock) -> _Place:
        return {"item_id": self._id(block), "output_index": block.index}


class _Place(TypedDict):
    item_id: str
    output_index: int


def _part(block: AnswerBlock, text: str) -> o.Part:
    return o.OutputText(text) if block.kind == "text" else o.ReasoningText(text)


def _usage(usage: Usage) -> o.ResponseUsage:
    return o.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=o.InputDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=o.OutputDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _error(error: FleetError) -> o.ResponseError:
    """An error in a stream. Codex waits as long as it reads that it should."""
    if not isinstance(error, BUSY):
        return o.ResponseError(error.code, str(error))
    wait_s = max(1.0, error.retry_after_s or 0)
    return o.ResponseError("rate_limit_exceeded", f"{error} Please try again in {wait_s:.0f}s.")
