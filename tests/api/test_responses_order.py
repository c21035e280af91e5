"""Every stream of /v1/responses keeps the order of events, whatever an engine sends, wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from examples import examples
from generated_answers import SAMPLE_ANSWER, answers, is_cut, whole_events
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from response_order import ResponseOrder, checked

from fleetd import errors
from fleetd.api.responses.bodies import ResponseTool
from fleetd.api.responses.dialect import RESPONSES
from fleetd.api.responses.objects import Response
from fleetd.api.responses.render import ResponseOptions, ResponseStream, ResponseWhole
from fleetd.api.responses.tools import FreeText, ToolTable, free_text
from fleetd.api.responses.translate import carried
from fleetd.engine import protocol as p
from fleetd.requests.job import LOCAL


def options(*, parallel: bool = True, carry: bool = False) -> ResponseOptions:
    tools = ToolTable()
    tools.add(
        [
            ResponseTool("function", "look"),
            ResponseTool("custom", "patch"),
            ResponseTool("namespace", "fleet", tools=[ResponseTool("function", "send")]),
        ]
    )
    begun = Response(id="resp_1", created_at=1, model="m", parallel_tool_calls=parallel)
    return ResponseOptions(response=begun, tools=tools, carry=carry)


class Sent:
    """The bytes of one stream."""

    def __init__(self, asked: ResponseOptions) -> None:
        self.streamer, self.form = ResponseStream(asked), RESPONSES.stream()
        self.pieces: list[bytes] = []

    def add(self, items: Iterable[msgspec.Struct | None]) -> None:
        self.pieces += map(self.form.frame, items)

    def open(self, held: Iterable[msgspec.Struct] = ()) -> None:
        self.pieces.append(self.form.comment("keepalive 0/0"))
        self.add([*self.streamer.opening(), *self.streamer.progress(), *held])

    def play(self, events: Iterable[Any], opened_at: int, progress_every: int) -> None:
        """Feed events; the headers go out behind so many of them, and what those made is held until then."""
        held: list[msgspec.Struct] = []
        for i, event in enumerate(events):
            if i == opened_at:
                self.open(held)
            made = () if isinstance(event, p.Loading) else self.streamer.feed(0, event)
            if i < opened_at:
                held += made
                continue
            self.add(made)
            if progress_every and i % progress_every == 0:
                self.add(self.streamer.progress())

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def read(pieces: Iterator[bytes]) -> ResponseOrder:
    """As OpenAI's library reads it."""
    return checked((event.event or "", event.json()) for event in SSEDecoder().iter_bytes(pieces))


def agrees(events: list[Any], asked: ResponseOptions, opened_at: int, progress_every: int) -> None:
    """The stream is in order and says what the whole answer says; cut short, it ends in a failure."""
    sent = Sent(asked)
    sent.play(events, opened_at, progress_every)
    sent.add(sent.streamer.closing())
    order = read(iter([sent.data + sent.form.end()]))
    collector = ResponseWhole(asked)
    for event in whole_events(events):
        if not isinstance(event, p.Loading):
            collector.feed(0, event)
    whole = msgspec.to_builtins(collector.whole())
    streamed = order.response
    if is_cut(events) and (asked.response.parallel_tool_calls or events[-2].index == 0):
        # A call that is cut is told while it is written, and is no part of a whole answer.
        *rest, cut = streamed["output"]
        assert cut["status"] == "incomplete"
        streamed = {**streamed, "output": rest}
        whole["output"] = [{**item, "status": "completed"} for item in whole["output"]]
    assert streamed == whole
    assert order.progressed
    full = events[-1].reason == "length"
    assert whole["status"] == ("incomplete" if full else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if full else None)
    usage, tokens = whole["usage"], events[-1].usage
    assert (usage["input_tokens"], usage["output_tokens"]) == (tokens.prompt_tokens, tokens.completion_tokens)
    assert usage["input_tokens_details"]["cached_tokens"] == tokens.cached_tokens


def fails(events: list[Any], asked: ResponseOptions, at: int) -> None:
    sent = Sent(asked)
    sent.play(events[:at], 0, 2)
    sent.add([sent.streamer.failure(errors.EngineDied("It died.", hint="Try again."))])
    order = read(iter([sent.data]))
    assert order.state == "failed"
    assert order.response["error"] == {"code": "engine_died", "message": "It died. Try again."}
    assert order.response["output"][: len(order.items)] == order.items
    rest = order.response["output"][len(order.items) :]
    assert [item["status"] for item in rest] == ["incomplete"] * len(rest)
    assert len(rest) <= 1


ASKED = st.builds(
    lambda parallel, carry: options(parallel=parallel, carry=carry), st.booleans(), st.booleans()
)


@examples(600)
@given(answers(cut_calls=True), ASKED, st.integers(0, 3), st.integers(0, 3), st.integers(1, 12))
def test_a_stream_keeps_the_order_and_says_what_the_whole_answer_says(
    events: list[Any], asked: ResponseOptions, opened_at: int, progress_every: int, cut_at: int
) -> None:
    agrees(events, asked, opened_at, progress_every)
    fails(events, asked, min(cut_at, len(events) - 1))


@pytest.mark.long
@settings(max_examples=10_000, deadline=None)
@given(answers(cut_calls=True), ASKED, st.integers(0, 3), st.integers(0, 3), st.integers(1, 12))
def test_ten_thousand_streams_keep_the_order(
    events: list[Any], asked: ResponseOptions, opened_at: int, progress_every: int, cut_at: int
) -> None:
    agrees(events, asked, opened_at, progress_every)
    fails(events, asked, min(cut_at, len(events) - 1))


def test_a_stream_may_be_cut_at_every_byte() -> None:
    sent = Sent(options(carry=True))
    sent.play(SAMPLE_ANSWER, 2, 4)
    sent.add(sent.streamer.closing())
    data = sent.data
    whole = read(iter([data]))
    assert [item["type"] for item in whole.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert whole.items[0]["encrypted_content"] == carried("I wonder…")
    for at in range(1, len(data), 7):
        assert read(iter([data[:at], data[at:]])) == whole
    assert read(iter([data[i : i + 1] for i in range(len(data))])) == whole


def test_calls_have_the_clients_names() -> None:
    collector = ResponseWhole(options())
    calls = [
        ("patch", '{"input": "*** Begin Patch\\n"}'),
        ("patch", '{"patch": "*** Begin Patch\\n"}'),
        ("patch", "not JSON"),
        ("fleet__send", '{"to": "mini"}'),
        ("invented", "{}"),
    ]
    for i, (name, arguments) in enumerate(calls):
        collector.feed(0, p.ToolCall("r", i, f"call_{i}", name, arguments))
    collector.feed(0, p.Finished("r", "tool_calls"))
    items = msgspec.to_builtins(collector.whole())["output"]
    assert [item.get("input") for item in items[:3]] == ["*** Begin Patch\n", "*** Begin Patch\n", "not JSON"]
    assert {item["type"] for item in items[:3]} == {"custom_tool_call"}
    assert [(item["type"], item["name"], item.get("namespace")) for item in items[3:]] == [
        ("function_call", "send", "fleet"),
        ("function_call", "invented", None),
    ]


PATCH = '*** Begin "Patch"\n+\té 😀 C:\\users\n*** End'


@pytest.mark.parametrize("written", [{"input": PATCH}, {"patch": PATCH}, {"input": ""}, PATCH])
def test_a_custom_tools_input_is_told_as_it_is_written(written: Any) -> None:
    """Whatever pieces the arguments come in; what is not the expected object is told when it is whole."""
    arguments = written if isinstance(written, str) else json.dumps(written)
    for size in (1, 2, 5, len(arguments)):
        sent = Sent(options())
        cut = [arguments[i : i + size] for i in range(0, len(arguments), size)] if written != PATCH else []
        pieces = [p.ToolCallPiece("r", 0, "call_0", "patch", piece) for piece in cut]
        call = p.ToolCall("r", 0, "call_0", "patch", arguments)
        sent.play([LOCAL, p.Accepted("r", 5), *pieces, call, p.Finished("r", "tool_calls")], 0, 0)
        sent.add(sent.streamer.closing())
        events = [e.json() for e in SSEDecoder().iter_bytes(iter([sent.data]))]
        told = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
        (item,) = checked((e["type"], e) for e in events).items
        expected = PATCH if written != {"input": ""} else ""
        assert "".join(told) == item["input"] == expected
        as_it_is_written = isinstance(written, dict) and "input" in written and expected
        assert (len(told) > 1) == bool(as_it_is_written and size < len(arguments))


def test_a_custom_tools_input_that_is_cut_says_what_was_written_of_it() -> None:
    for arguments, written in (
        ('{"input": "*** Begin\\n+ a', "*** Begin\n+ a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83d\\ude0', "a"),
        ('{"input": "a\\', "a"),
    ):
        sent = Sent(options())
        pieces = [p.ToolCallPiece("r", 0, "call_0", "patch", piece) for piece in arguments]
        sent.play([LOCAL, p.Accepted("r", 5), *pieces, p.Finished("r", "length")], 0, 0)
        sent.add(sent.streamer.closing())
        order = read(iter([sent.data]))
        assert [(item["input"], item["status"]) for item in order.items] == [(written, "incomplete")]
        assert order.response["status"] == "incomplete"


def test_escapes_that_json_does_not_know_stay_as_they_are() -> None:
    assert free_text('{"input": "C:\\users \\q \\u12 a\nb\\/"}') == "C:\\users \\q \\u12 a\nb/"
    assert free_text('{"input": "\\ud83d\\ude00 \\ud83d \\ude00"}') == "😀 \ufffd \ufffd"


@given(st.text(), st.booleans(), st.integers(1, 9))
def test_any_input_is_read_whatever_pieces_it_comes_in(text: str, plain: bool, size: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=plain)
    reader = FreeText()
    told = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
    assert "".join(told) == reader.text == free_text(arguments) == text


def test_an_answer_that_was_cancelled_does_not_look_complete() -> None:
    streamer = ResponseStream(options())
    with pytest.raises(errors.EngineError):
        streamer.feed(0, p.Finished("r", "cancelled"))
    assert streamer.closing() == ()


def test_a_busy_machine_says_in_a_stream_when_to_try_again() -> None:
    failed = ResponseStream(options()).failure(errors.Overloaded("The queue is full.", retry_after_s=3.2))
    assert failed.response.error is not None
    assert failed.response.error.code == "rate_limit_exceeded"
    assert failed.response.error.message == "The queue is full. Please try again in 3s."
