"""Answers as three families write them, in the streams and whole answers of every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from corpus import CorpusAnswer, CorpusCase, Family, families, tools
from test_odd_calls_in_dialects import DIALECTS, MESSAGES, plain

from fleetd.api.anthropic.render import MessageStream, MessageWhole
from fleetd.engine.protocol import Event, Finished, ToolCall, ToolCallPiece, Usage

TOKENS = 7
WHOLE_ENDS = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed", "ollama": "stop"}
CUT_ENDS = {"chat": "length", "messages": "max_tokens", "responses": "incomplete", "ollama": "length"}
CASES = [
    pytest.param(family, case, id=f"{name}: {case.name}")
    for name, family in families().items()
    if name in ("qwen", "qwen_coder", "gpt_oss")
    for case in family.case
]
every_case = pytest.mark.parametrize(("family", "case"), CASES)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


class Told(msgspec.Struct):
    """What a client makes of an answer."""

    reasoning: str = ""
    text: str = ""
    #: Names, and arguments as their text.
    calls: list[list[str]] = []
    end: str = ""


def events_of(family: Family, case: CorpusCase, upto: int | None, *, streams: bool) -> list[Event]:
    """The engine's events for an answer; it is cut before byte ``upto``."""
    raw, cut = case.bytes[:upto], upto is not None
    size = 8 if cut else 1
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    seen = CorpusAnswer(family, pieces, tools(), opened=case.opened, cut=cut, streams=streams)
    end = Finished("r", "length" if cut else "tool_calls", Usage(1, 0, TOKENS, 0))
    return [*seen.events, end]


def streamed(dialect: str, events: list[Event]) -> tuple[Told, int]:
    """What a stream makes up, and how many of its objects have text of arguments."""
    make = _MADE.get((dialect, "stream"), DIALECTS[dialect][1])
    stream = make()
    told, pieces = Told(), 0
    items = [
        *stream.opening(),
        *(item for each in events for item in stream.feed(0, each)),
        *stream.closing(),
    ]
    for item in plain(items):
        pieces += _READ[dialect](told, item)
    return told, pieces


def whole(dialect: str, events: list[Event]) -> Told:
    made = _MADE.get((dialect, "whole"), DIALECTS[dialect][0])()
    for each in events:
        made.feed(0, each)
    return _WHOLE[dialect](plain(made.whole()))


# So that an answer of as many tokens has reached its bound.
_MADE: dict[tuple[str, str], Callable[[], Any]] = {
    ("messages", "stream"): lambda: MessageStream(msgspec.structs.replace(MESSAGES, max_tokens=TOKENS)),
    ("messages", "whole"): lambda: MessageWhole(msgspec.structs.replace(MESSAGES, max_tokens=TOKENS)),
}


def _chat(told: Told, item: Any) -> int:
    (choice,) = item["choices"]
    delta, pieces = choice["delta"], 0
    told.reasoning += delta.get("reasoning_content") or ""
    told.text += delta.get("content") or ""
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert call["index"] == len(told.calls)
            told.calls.append([call["function"]["name"], ""])
        told.calls[-1][1] += call["function"]["arguments"]
        pieces += bool(call["function"]["arguments"])
    told.end = choice["finish_reason"] or ""
    return pieces


def _messages(told: Told, item: Any) -> int:
    if item["type"] == "content_block_start" and item["content_block"]["type"] == "tool_use":
        told.calls.append([item["content_block"]["name"], ""])
    elif item["type"] == "message_delta":
        told.end = item["delta"]["stop_reason"]
    elif item["type"] == "content_block_delta":
        delta = item["delta"]
        told.reasoning += delta.get("thinking", "")
        told.text += delta.get("text", "")
        if "partial_json" in delta:
            told.calls[-1][1] += delta["partial_json"]
            return bool(delta["partial_json"])
    return 0


def _responses(told: Told, item: Any) -> int:
    kind = item["type"]
    if kind == "response.output_item.added" and item["item"]["type"] == "function_call":
        told.calls.append([item["item"]["name"], ""])
    elif kind == "response.function_call_arguments.delta":
        told.calls[-1][1] += item["delta"]
        return 1
    elif kind == "response.output_text.delta":
        told.text += item["delta"]
    elif kind == "response.reasoning_text.delta":
        told.reasoning += item["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        told.end = item["response"]["status"]
    return 0


def _ollama(told: Told, item: Any) -> int:
    message = item["message"]
    told.reasoning += message.get("thinking") or ""
    told.text += message["content"]
    for call in message.get("tool_calls") or []:
        told.calls.append([call["function"]["name"], json.dumps(call["function"]["arguments"])])
    told.end = item.get("done_reason", "")
    return 0


_READ: dict[str, Callable[[Told, Any], int]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "ollama": _ollama,
}


def _whole_chat(found: Any) -> Told:
    (choice,) = found["choices"]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
    text = message["content"] or ""
    return Told(message.get("reasoning_content", ""), text, calls, choice["finish_reason"])


def _whole_messages(found: Any) -> Told:
    told = Told(end=found["stop_reason"])
    for block in found["content"]:
        told.reasoning += block.get("thinking", "")
        told.text += block.get("text", "")
        if block["type"] == "tool_use":
            told.calls.append([block["name"], json.dumps(block["input"])])
    return told


def _whole_responses(found: Any) -> Told:
    told = Told(end=found["status"])
    for item in found["output"]:
        text = "".join(part["text"] for part in item.get("content", []))
        told.reasoning += text if item["type"] == "reasoning" else ""
        told.text += text if item["type"] == "message" else ""
        if item["type"] == "function_call":
            told.calls.append([item["name"], item["arguments"]])
    return told


def _whole_ollama(found: Any) -> Told:
    told = Told()
    _ollama(told, found)
    return told


_WHOLE: dict[str, Callable[[Any], Told]] = {
    "chat": _whole_chat,
    "messages": _whole_messages,
    "responses": _whole_responses,
    "ollama": _whole_ollama,
}


def expected(case: CorpusCase, end: str) -> Told:
    parts = case.expected
    texts = {kind: "".join(part[1] for part in parts if part[0] == kind) for kind in ("thinks", "says")}
    calls = [[part[1], part[2]] for part in parts if part[0] == "calls"]
    return Told(texts["thinks"], texts["says"], calls, end)


def read(told: Told) -> Told:
    return msgspec.structs.replace(told, calls=[[name, json.loads(text)] for name, text in told.calls])


@every_case
@every_dialect
def test_an_answer_is_the_same_in_a_stream_and_whole(dialect: str, family: Family, case: CorpusCase) -> None:
    events = events_of(family, case, None, streams=True)
    told, pieces = streamed(dialect, events)
    meant = expected(case, WHOLE_ENDS[dialect])
    assert read(told) == meant
    assert read(whole(dialect, events_of(family, case, None, streams=False))) == meant
    assert dialect == "ollama" or pieces == sum(isinstance(each, ToolCallPiece) for each in events)


def cuts(case: CorpusCase) -> Iterator[int]:
    yield from range(0, len(case.bytes), 1 + len(case.bytes) // 20)


@every_case
@every_dialect
def test_an_answer_that_is_cut_says_so_and_tells_no_half_of_a_call(
    dialect: str, family: Family, case: CorpusCase
) -> None:
    meant = expected(case, CUT_ENDS[dialect])
    for upto in cuts(case):
        events = events_of(family, case, upto, streams=True)
        made = sum(isinstance(each, ToolCall) for each in events)
        told, _ = streamed(dialect, events)
        asked = whole(dialect, events_of(family, case, upto, streams=False))
        for each in (told, asked):
            assert each.end == meant.end
            assert meant.text.startswith(each.text.rstrip())
            assert meant.reasoning.startswith(each.reasoning.rstrip())
            assert read(msgspec.structs.replace(each, calls=each.calls[:made])).calls == meant.calls[:made]
        assert len(asked.calls) == made
        # A stream has told of a call that is not whole before it ended: its arguments are no object.
        for name, half in told.calls[made:]:
            assert [name] == [meant.calls[made][0]]
            with pytest.raises(ValueError, match=r"."):
                json.loads(half)
