"""Every stream of /v1/messages keeps the order of events, whatever an engine sends, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from anthropic._streaming import SSEDecoder
from examples import examples
from generated_answers import SAMPLE_ANSWER as SAMPLE
from generated_answers import answers, is_cut, whole_events
from hypothesis import given, settings
from hypothesis import strategies as st
from message_order import MessageOrder, checked

from fleetd import errors
from fleetd.api.anthropic.dialect import ANTHROPIC
from fleetd.api.anthropic.render import MessageOptions, MessageStream, MessageWhole
from fleetd.engine import protocol as p


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[Any], MessageOptions]:
    """Events of one answer, and what its request asked for."""
    options = MessageOptions(
        id="msg_1",
        model="m",
        max_tokens=draw(st.none() | st.integers(1, 60)),
        parallel_tools=draw(st.booleans()),
        marked=draw(st.booleans()),
    )
    return draw(answers(cut_calls=True)), options


def frames(events: Sequence[Any], options: MessageOptions, *, opened_at: int, ping_every: int) -> bytes:
    """The bytes of a stream whose headers go out after so many events."""
    streamer, form = MessageStream(options), ANTHROPIC.stream()
    held: list[msgspec.Struct] = []
    sent: list[bytes] = []
    for i, event in enumerate(events):
        if i == opened_at:
            sent += [form.comment("keepalive 0/0"), *map(form.frame, streamer.opening())]
            sent += map(form.frame, held)
        if isinstance(event, p.Loading):
            continue
        items = streamer.feed(0, event)
        if i < opened_at:
            held += items
        else:
            sent += map(form.frame, items)
            if ping_every and i % ping_every == 0:
                sent += [form.comment("keepalive 1/2"), *map(form.frame, streamer.progress())]
    sent += map(form.frame, streamer.closing())
    return b"".join([*sent, form.end()])


def read(pieces: Iterator[bytes]) -> MessageOrder:
    """As Anthropic's library reads it."""
    return checked((event.event or "", event.json()) for event in SSEDecoder().iter_bytes(pieces))


def agrees(events: list[Any], options: MessageOptions, opened_at: int, ping_every: int) -> None:
    """The stream is in order and says what the whole answer says."""
    order = read(iter([frames(events, options, opened_at=opened_at, ping_every=ping_every)]))
    collector = MessageWhole(options)
    for event in whole_events(events):
        if not isinstance(event, p.Loading):
            collector.feed(0, event)
    whole = msgspec.to_builtins(collector.whole())
    assert order.state == "ended"
    # A call that is cut is told while it is written, and is no part of a whole answer.
    cut = order.blocks.pop() if order.cut is not None else None
    assert (cut is not None) == (is_cut(events) and (options.parallel_tools or events[-2].index == 0))
    assert order.blocks == whole["content"]
    assert order.usage == whole["usage"]
    assert order.stop == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    tokens = events[-1].usage
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(whole["usage"][name] for name in parts) == tokens.prompt_tokens


@examples(600)
@given(asked(), st.integers(0, 3), st.integers(0, 3))
def test_a_stream_keeps_the_order_and_says_what_the_whole_answer_says(
    made: tuple[list[Any], MessageOptions], opened_at: int, ping_every: int
) -> None:
    agrees(*made, opened_at, ping_every)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None)
@given(asked(), st.integers(0, 3), st.integers(0, 3))
def test_ten_thousand_streams_keep_the_order(
    made: tuple[list[Any], MessageOptions], opened_at: int, ping_every: int
) -> None:
    agrees(*made, opened_at, ping_every)


def test_a_stream_may_be_cut_at_every_byte() -> None:
    data = frames(SAMPLE, MessageOptions(id="msg_1", model="m"), opened_at=2, ping_every=2)
    whole = read(iter([data]))
    assert [block["type"] for block in whole.blocks] == ["thinking", "text", "tool_use", "tool_use"]
    for at in range(1, len(data)):
        assert read(iter([data[:at], data[at:]])) == whole
    assert read(iter([data[i : i + 1] for i in range(len(data))])) == whole


@pytest.mark.parametrize("at", range(2, len(SAMPLE)))
def test_a_stream_that_fails_ends_in_an_error(at: int) -> None:
    streamer, form = MessageStream(MessageOptions(id="msg_1", model="m")), ANTHROPIC.stream()
    data = b"".join(map(form.frame, streamer.opening()))
    data += b"".join(form.frame(item) for event in SAMPLE[:at] for item in streamer.feed(0, event))
    order = read(iter([data + form.error(errors.EngineDied("It died.", hint="Try again."))]))
    assert order.state == "failed"
    assert order.error == {"type": "api_error", "message": "It died. Try again.", "code": "engine_died"}


def test_an_answer_that_was_cancelled_does_not_look_complete() -> None:
    streamer = MessageStream(MessageOptions(id="msg_1", model="m"))
    with pytest.raises(errors.EngineError):
        streamer.feed(0, p.Finished("r", "cancelled"))
    assert streamer.closing() == ()
