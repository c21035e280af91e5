"""Every stream of /v1/chat/completions keeps its order, whatever engines send, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from chat_order import ChatOrder, read_chunks
from examples import examples
from generated_answers import SAMPLE_ANSWER as SAMPLE
from generated_answers import answer, is_cut, whole_events
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from fleetd import errors
from fleetd.api.http.openai_dialect import OPENAI
from fleetd.api.openai.render import ChatStream, ChatWhole, ReplyOptions
from fleetd.engine import protocol as p

Fed = list[tuple[int, Any]]


def asked(**fields: Any) -> ReplyOptions:
    return ReplyOptions(id="chatcmpl-1", created=7, model="m", fingerprint="f", **fields)


@st.composite
def replies(draw: st.DrawFn) -> tuple[Fed, ReplyOptions]:
    """The events of several choices, mixed, and what their request asked for."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    each = [answer(rng, cut_calls=True) for _ in range(rng.randint(1, 3))]
    turns = [index for index, events in enumerate(each) for _ in events]
    rng.shuffle(turns)
    left = [iter(events) for events in each]
    fed: Fed = [(index, next(left[index])) for index in turns]
    options = asked(
        choices=len(each),
        per_prompt=len(each),
        include_usage=draw(st.booleans()),
        parallel_tools=draw(st.booleans()),
    )
    return [(index, event) for index, event in fed if not isinstance(event, p.Loading)], options


def stream(fed: Fed, options: ReplyOptions, *, comments_every: int) -> bytes:
    streamer, form = ChatStream(options), OPENAI.stream()
    sent = [form.comment("keepalive 0/0"), *map(form.frame, streamer.opening())]
    for i, (index, event) in enumerate(fed):
        sent += map(form.frame, streamer.feed(index, event))
        if comments_every and i % comments_every == 0:
            sent += [form.comment("keepalive 1/2"), *map(form.frame, streamer.progress())]
    sent += map(form.frame, streamer.closing())
    return b"".join([*sent, form.end()])


def read(pieces: Iterator[bytes]) -> ChatOrder:
    """As OpenAI's library reads it."""
    return read_chunks(event.data for event in SSEDecoder().iter_bytes(pieces))


def agrees(fed: Fed, options: ReplyOptions, comments_every: int) -> None:
    """The stream is in order and says what the whole answer says."""
    order = read(iter([stream(fed, options, comments_every=comments_every)]))
    collector = ChatWhole(options)
    each = {index: [event for i, event in fed if i == index] for index in range(options.choices)}
    for index, events in each.items():
        for event in whole_events(events):
            collector.feed(index, event)
    whole = msgspec.to_builtins(collector.whole())
    assert order.state == "ended"
    assert order.usage == (whole["usage"] if options.include_usage else None)
    for index, choice in enumerate(whole["choices"]):
        message, seen = choice["message"], order.choices[index]
        assert seen.content == (message["content"] or "")
        assert seen.reasoning == message.get("reasoning_content", "")
        events = each[index]
        # A call that is cut is told while it is written, and is no part of a whole answer.
        cut = is_cut(events) and (options.parallel_tools or events[-2].index == 0)
        calls = seen.calls[:-1] if cut else seen.calls
        assert calls == message.get("tool_calls", [])
        assert seen.reason == choice["finish_reason"]
        assert not cut or seen.reason == "length"


@examples(600)
@given(replies(), st.integers(0, 3))
def test_a_stream_keeps_the_order_and_says_what_the_whole_answer_says(
    made: tuple[Fed, ReplyOptions], comments_every: int
) -> None:
    agrees(*made, comments_every)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=10_000, deadline=None)
@given(replies(), st.integers(0, 3))
def test_ten_thousand_streams_keep_the_order(made: tuple[Fed, ReplyOptions], comments_every: int) -> None:
    agrees(*made, comments_every)


def sampled(events: Sequence[Any] = SAMPLE) -> Fed:
    return [(0, event) for event in events]


def test_a_stream_may_be_cut_at_every_byte() -> None:
    data = stream(sampled(), asked(include_usage=True), comments_every=2)
    whole = read(iter([data]))
    assert whole.choices[0].reasoning == "I wonder…"
    assert [call["function"]["arguments"] for call in whole.choices[0].calls] == [
        '{"path": "ü"}',
        '{"path": "b"}',
    ]
    for at in range(1, len(data)):
        assert read(iter([data[:at], data[at:]])) == whole
    assert read(data[i : i + 1] for i in range(len(data))) == whole


@pytest.mark.parametrize("at", range(2, len(SAMPLE)))
def test_a_stream_that_fails_ends_in_an_error(at: int) -> None:
    streamer, form = ChatStream(asked()), OPENAI.stream()
    data = b"".join(
        form.frame(item) for index, event in sampled()[:at] for item in streamer.feed(index, event)
    )
    order = read(iter([data + form.error(errors.EngineDied("It died.", hint="Try again."))]))
    assert order.state == "failed"
    assert order.error["code"] == "engine_died"
