"""Every stream of Ollama's dialect keeps its order, whatever an engine sends, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from examples import examples
from generated_answers import SAMPLE_ANSWER as SAMPLE
from generated_answers import answers
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_order import FIGURES, read_lines

from fleetd import errors
from fleetd.api.ollama.dialect import OLLAMA
from fleetd.api.ollama.render import OllamaReplyOptions, OllamaStream, OllamaWhole
from fleetd.engine import protocol as p


def asked(chat: bool = True) -> OllamaReplyOptions:
    return OllamaReplyOptions(
        model="m", chat=chat, began=datetime(2026, 1, 1, tzinfo=UTC), elapsed_s=lambda: 0.25
    )


def lines(events: Sequence[Any], options: OllamaReplyOptions, *, progress_every: int) -> bytes:
    streamer, form = OllamaStream(options), OLLAMA.stream()
    sent = [form.comment("keepalive 0/0"), *map(form.frame, streamer.progress())]
    for i, event in enumerate(events):
        if isinstance(event, p.Loading):
            continue
        sent += map(form.frame, streamer.feed(0, event))
        if progress_every and i % progress_every == 0 and i < len(events) - 1:
            sent += map(form.frame, streamer.progress())
    sent += map(form.frame, streamer.closing())
    return b"".join([*sent, form.end()])


def agrees(events: list[Any], options: OllamaReplyOptions, progress_every: int) -> None:
    """The stream is in order and says what the whole answer says."""
    order = read_lines([lines(events, options, progress_every=progress_every)])
    collector = OllamaWhole(options)
    for event in events:
        if not isinstance(event, p.Loading):
            collector.feed(0, event)
    whole = msgspec.to_builtins(collector.whole())
    said = whole["message"] if options.chat else {**whole, "content": whole["response"]}
    assert order.state == "ended"
    assert order.text == said["content"]
    assert order.thinking == said.get("thinking", "")
    if options.chat:
        assert order.calls == said.get("tool_calls", [])
    assert order.end == {name: whole[name] for name in FIGURES if name in whole}
    usage = events[-1].usage
    assert whole.get("prompt_eval_count", 0) == usage.prompt_tokens
    assert whole.get("eval_count", 0) == usage.completion_tokens
    assert whole["total_duration"] == 250_000_000


@examples(600)
@given(answers(), st.integers(0, 3))
def test_a_stream_keeps_the_order_and_says_what_the_whole_answer_says(
    events: list[Any], progress_every: int
) -> None:
    agrees(events, asked(), progress_every)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None)
@given(answers(), st.integers(0, 3))
def test_ten_thousand_streams_keep_the_order(events: list[Any], progress_every: int) -> None:
    agrees(events, asked(), progress_every)


@examples(40)
@given(st.lists(st.text(max_size=12), max_size=6), st.integers(0, 3))
def test_a_stream_of_generate_too(texts: list[str], progress_every: int) -> None:
    middle = [p.Delta("r", text, "content" if i % 2 else "reasoning") for i, text in enumerate(texts)]
    end = p.Finished("r", "length", p.Usage(5, 0, 9))
    agrees([p.Accepted("r", 5), *middle, end], asked(chat=False), progress_every)


def test_a_stream_may_be_cut_at_every_byte() -> None:
    data = lines(SAMPLE, asked(), progress_every=2)
    whole = read_lines([data])
    assert whole.thinking == "I wonder…"
    assert [call["function"]["arguments"] for call in whole.calls] == [{"path": "ü"}, {"path": "b"}]
    for at in range(1, len(data)):
        assert read_lines([data[:at], data[at:]]) == whole
    assert read_lines([data[i : i + 1] for i in range(len(data))]) == whole


@pytest.mark.parametrize("at", range(2, len(SAMPLE)))
def test_a_stream_that_fails_ends_in_an_error(at: int) -> None:
    streamer, form = OllamaStream(asked()), OLLAMA.stream()
    data = b"".join(form.frame(item) for event in SAMPLE[:at] for item in streamer.feed(0, event))
    order = read_lines([data + form.error(errors.EngineDied("It died.", hint="Try again."))])
    assert order.state == "failed"
    assert order.error == {"error": "It died. Try again.", "code": "engine_died"}


def test_an_answer_that_was_cancelled_does_not_look_complete() -> None:
    streamer = OllamaStream(asked())
    with pytest.raises(errors.EngineError):
        streamer.feed(0, p.Finished("r", "cancelled"))
    assert streamer.closing() == ()
