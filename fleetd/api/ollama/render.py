"""Engine events → Ollama's objects. Pure but for the clock that it is given.

A stream is objects with ``done`` false, each a piece of the answer, and a last one with ``done`` true, the
reason and the figures. An object with an empty piece says that the answer is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from fleetd.api.generation.answer_blocks import (
    AnswerBlock,
    AnswerSoFar,
    BlockClosed,
    BlockStep,
    BlockText,
    end_reason,
)
from fleetd.api.generation.streamer import Collector, Streamer
from fleetd.api.ollama import objects as o
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.protocol import Accepted, Event, Tokenized
from fleetd.requests.job import Planned

_NS = 1_000_000_000


class OllamaReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is written."""

    #: The name that the client used.
    model: str
    #: True for /api/chat's objects, False for /api/generate's.
    chat: bool
    #: When the request came.
    began: datetime
    #: Seconds since then.
    elapsed_s: Callable[[], float]
    #: How the prompt is shortened; None reads it whole.
    smart: SmartPrefillPolicy | None = None


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, as Go writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def reply(
    options: OllamaReplyOptions,
    text: str = "",
    thinking: str = "",
    calls: Sequence[o.OllamaCalled] = (),
    figures: o.OllamaFigures | None = None,
) -> o.OllamaChatReply | o.OllamaTextReply:
    """One object; with ``figures`` the last one."""
    common: dict[str, Any] = {
        "model": options.model,
        "created_at": timestamp(options.began + timedelta(seconds=options.elapsed_s())),
        "done": figures is not None,
        **(msgspec.structs.asdict(figures) if figures is not None else {}),
    }
    if options.chat:
        return o.OllamaChatReply(message=o.OllamaAnswer("assistant", text, thinking, list(calls)), **common)
    return o.OllamaTextReply(response=text, thinking=thinking, **common)


class _OllamaRenderer:
    def __init__(self, options: OllamaReplyOptions) -> None:
        self._options = options
        self._answer = AnswerSoFar(options.smart)
        # Seconds until the prompt was tokenized: the model is loaded then.
        self._loaded_s: float | None = None

    def _take(self, event: Planned | Event) -> list[BlockStep]:
        if isinstance(event, Tokenized | Accepted) and self._loaded_s is None:
            self._loaded_s = self._options.elapsed_s()
        return self._answer.feed(event)

    def _figures(self) -> o.OllamaFigures | None:
        """None before the end."""
        event, usage = self._answer.finished, self._answer.usage
        if event is None:
            return None
        return o.OllamaFigures(
            # Clients find calls in the message; the reason has no word for them.
            done_reason="length" if end_reason(event) == "length" else "stop",
            total_duration=round(self._options.elapsed_s() * _NS),
            load_duration=round((self._loaded_s or 0.0) * _NS),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=round(event.timings.prefill_s * _NS),
            eval_count=usage.completion_tokens,
            eval_duration=round(event.timings.decode_s * _NS),
        )

    def _calls(self) -> list[o.OllamaCalled]:
        tools = [block for block in self._answer.blocks if block.whole]
        return [_called(i, block) for i, block in enumerate(tools)]


class OllamaWhole(_OllamaRenderer, Collector):
    def feed(self, index: int, event: Planned | Event) -> None:
        self._take(event)

    def whole(self) -> msgspec.Struct:
        texts = {
            kind: "".join(block.text for block in self._answer.blocks if block.kind == kind)
            for kind in ("text", "reasoning")
        }
        return reply(self._options, texts["text"], texts["reasoning"], self._calls(), self._figures())


class OllamaStream(_OllamaRenderer, Streamer):
    def feed(self, index: int, event: Planned | Event) -> Sequence[msgspec.Struct]:
        return [item for step in self._take(event) for item in self._pieces(step)]

    def progress(self) -> Sequence[msgspec.Struct]:
        return (reply(self._options),)

    def closing(self) -> Sequence[msgspec.Struct]:
        figures = self._figures()
        return () if figures is None else (reply(self._options, figures=figures),)

    def _pieces(self, step: BlockStep) -> list[msgspec.Struct]:
        match step:
            case BlockText(block=block, text=text) if block.kind == "text":
                return [reply(self._options, text)]
            case BlockText(block=block, text=text) if block.kind == "reasoning":
                return [reply(self._options, thinking=text)]
            case BlockClosed(block=block) if block.whole:
                # Arguments are an object, so a call comes once it is whole.
                return [reply(self._options, calls=self._calls()[-1:])]
            case _:
                return []


def _called(index: int, block: AnswerBlock) -> o.OllamaCalled:
    return o.OllamaCalled(block.call_id, o.OllamaCalledFunction(index, block.name, block.arguments))
