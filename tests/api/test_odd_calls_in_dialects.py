"""Calls that no engine here makes, as a machine of another version may: no dialect fails for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from fleetd.api.anthropic.render import MessageOptions, MessageStream, MessageWhole
from fleetd.api.ollama.render import OllamaReplyOptions, OllamaStream, OllamaWhole
from fleetd.api.openai.render import ChatStream, ChatWhole, ReplyOptions
from fleetd.api.responses import objects
from fleetd.api.responses.render import ResponseOptions, ResponseStream, ResponseWhole
from fleetd.api.responses.tools import ToolTable
from fleetd.engine.protocol import Event, Finished, ToolCall, ToolCallPiece

CHAT = ReplyOptions(id="r", created=1, model="m", fingerprint="f")
MESSAGES = MessageOptions(id="r", model="m")
RESPONSES = ResponseOptions(
    response=objects.Response(id="resp_r", created_at=1, model="m"), tools=ToolTable()
)
OLLAMA = OllamaReplyOptions(
    model="m", chat=True, began=datetime(2026, 1, 1, tzinfo=UTC), elapsed_s=lambda: 1.0
)
DEEP = '{"a": ' + "[" * 2000 + "]" * 2000 + "}"


def plain(found: Any) -> Any:
    return json.loads(msgspec.json.encode(found))


def chat(whole: Any) -> Any:
    return [
        json.loads(c["function"]["arguments"]) for c in whole["choices"][0]["message"].get("tool_calls", [])
    ]


def messages(whole: Any) -> Any:
    return [block["input"] for block in whole["content"]]


def responses(whole: Any) -> Any:
    return [json.loads(item["arguments"]) for item in whole["output"]]


def ollama(whole: Any) -> Any:
    return [call["function"]["arguments"] for call in whole["message"].get("tool_calls", [])]


DIALECTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "chat": (lambda: ChatWhole(CHAT), lambda: ChatStream(CHAT), chat),
    "messages": (lambda: MessageWhole(MESSAGES), lambda: MessageStream(MESSAGES), messages),
    "responses": (lambda: ResponseWhole(RESPONSES), lambda: ResponseStream(RESPONSES), responses),
    "ollama": (lambda: OllamaWhole(OLLAMA), lambda: OllamaStream(OLLAMA), ollama),
}


@pytest.mark.parametrize(
    "arguments", ["", "null", "[1]", "no JSON", '{"a": 1,}', '{"a": NaN}', '"\\ud83d"', DEEP]
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_are_an_object_in_every_dialect(dialect: str, arguments: str) -> None:
    whole, stream, calls = DIALECTS[dialect]
    events: list[Event] = [ToolCall("r", 0, "c", "look", arguments), Finished("r", "tool_calls")]
    made, streamed = whole(), stream()
    for event in events:
        made.feed(0, event)
        plain(streamed.feed(0, event))
    plain(streamed.closing())
    (found,) = calls(plain(made.whole()))
    assert isinstance(found, dict)


@pytest.mark.parametrize("pieces", [["no JSON"], ['{"a": ', "[" * 2000], ["null"], ["{"]])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_pieces_that_are_no_object_fail_no_stream(dialect: str, pieces: list[str]) -> None:
    streamed = DIALECTS[dialect][1]()
    for piece in pieces:
        plain(streamed.feed(0, ToolCallPiece("r", 0, "c", "look", piece)))
    plain(streamed.feed(0, ToolCall("r", 0, "c", "look", "".join(pieces))))
    plain(streamed.feed(0, Finished("r", "tool_calls")))
    plain(streamed.closing())
