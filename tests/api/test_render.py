"""Objects as OpenAI's clients expect them, byte by byte where it matters."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import msgspec
import pytest
from api_fakes import logprob
from msgspec.structs import replace

from fleetctl.chat.answer import _show
from fleetctl.render.progress_line import Progress
from fleetd.api.generation.progress_comments import ProgressComments
from fleetd.api.generation.usage_tally import EngineWork, UsageTally
from fleetd.api.openai import render
from fleetd.api.openai.reports import timing_report
from fleetd.control.model_change import MemberProgress
from fleetd.control.prefill_trace import Speculated
from fleetd.engine import protocol as p
from fleetd.errors import EngineError

Events = list[p.Event]

REPLY = render.ReplyOptions(id="chatcmpl-1", created=1700000000, model="m", fingerprint="fleetd-0")
DONE = p.Finished("r", "stop", p.Usage(10, 4, 3, 1), p.Timings(0.25, 0.5, 0.1))


def plain(chunks: Any) -> Any:
    return json.loads(msgspec.json.encode(chunks))


def chat_stream(**options: Any) -> render.ChatStream:
    return render.ChatStream(replace(REPLY, **options))


def chat_whole(choices: int = 1, **options: Any) -> render.ChatWhole:
    return render.ChatWhole(replace(REPLY, choices=choices, per_prompt=choices, **options))


def work(*events: p.Finished) -> EngineWork:
    tally = UsageTally(1)
    for index, event in enumerate(events):
        tally.add(index, event)
    return tally.work()


def deltas(stream: render.ChatStream, *events: p.Event) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for event in events for chunk in plain(stream.feed(0, event))]


def test_a_stream_opens_with_the_role_and_ends_with_an_empty_delta() -> None:
    stream = chat_stream()
    assert deltas(stream, p.Accepted("r", 10), p.Prefill("r", 5, 10)) == []
    assert deltas(stream, p.Delta("r", "Hi"), p.Delta("r", "!"), DONE) == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": "!"},
        {},
    ]
    assert stream.closing() == []


def test_an_answer_without_text_still_opens() -> None:
    assert deltas(chat_stream(), DONE) == [{"role": "assistant", "content": ""}, {}]


def test_flushes_without_text_send_nothing() -> None:
    assert deltas(chat_stream(), p.Delta("r", "", tokens=0)) == [{"role": "assistant", "content": ""}]


def test_chunks_have_no_keys_that_were_not_asked_for() -> None:
    (_, chunk) = plain(chat_stream().feed(0, p.Delta("r", "x")))
    assert chunk == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
        "system_fingerprint": "fleetd-0",
        "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
    }


def test_usage_comes_last_without_choices_and_null_before() -> None:
    stream = chat_stream(include_usage=True)
    chunks = plain([*stream.feed(0, p.Delta("r", "x")), *stream.feed(0, DONE)])
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert all(chunk["choices"] for chunk in chunks)
    (last,) = plain(stream.closing())
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_timings_are_llama_cpps() -> None:
    (*_, last) = plain(chat_stream().feed(0, DONE))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"] == {
        "prompt_n": 6,
        "cache_n": 4,
        "prompt_ms": 500.0,
        "prompt_per_second": 12.0,
        "predicted_n": 3,
        "predicted_ms": 100.0,
        "predicted_per_second": 20.0,
        "queue_ms": 250.0,
    }


def test_speeds_of_nothing_are_zero() -> None:
    report = timing_report(work())
    assert (report.prompt_per_second, report.predicted_per_second) == (0.0, 0.0)


def test_tool_calls_stream_as_a_name_then_arguments() -> None:
    events = [p.ToolCall("r", i, f"c{i}", "f", '{"a":1}') for i in range(2)]
    assert deltas(chat_stream(), *events)[1:] == [
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": "", "name": "f"}, "id": "c0", "type": "function"}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":1}'}}]},
        {
            "tool_calls": [
                {"index": 1, "function": {"arguments": "", "name": "f"}, "id": "c1", "type": "function"}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"a":1}'}}]},
    ]


def test_arguments_stream_as_they_are_written_and_no_letter_twice() -> None:
    pieces = [p.ToolCallPiece("r", 0, "c0", "f", text) for text in ('{"a"', ":1")]
    found = deltas(chat_stream(), *pieces, p.ToolCall("r", 0, "c0", "f", '{"a":1}'))[1:]
    calls = [each["tool_calls"][0] for each in found]
    assert [call["function"]["arguments"] for call in calls] == ["", '{"a"', ":1", "}"]
    assert [call.get("id") for call in calls] == ["c0", None, None, None]


@pytest.mark.parametrize(("parallel", "expected"), [(True, 2), (False, 1)])
def test_without_parallel_calls_only_the_first_is_sent(parallel: bool, expected: int) -> None:
    events: Events = [p.ToolCall("r", i, f"c{i}", "f", "{}") for i in range(2)]
    assert len(deltas(chat_stream(parallel_tools=parallel), *events)) == 1 + 2 * expected
    whole = chat_whole(parallel_tools=parallel)
    for event in [*events, p.Finished("r", "tool_calls")]:
        whole.feed(0, event)
    choice = plain(whole.whole())["choices"][0]
    assert len(choice["message"]["tool_calls"]) == expected
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_is_kept_out_of_content() -> None:
    events: Events = [p.Delta("r", "hm", "reasoning"), p.Delta("r", "yes"), DONE]
    assert deltas(chat_stream(), *events)[1:3] == [{"reasoning_content": "hm"}, {"content": "yes"}]
    whole = chat_whole()
    for event in events:
        whole.feed(0, event)
    message = plain(whole.whole())["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm", "refusal": None}


def test_chat_logprobs() -> None:
    event = p.Delta(
        "r", "é", logprobs=[p.TokenLogprob("é", -0.5, "é".encode(), [p.TopLogprob("e", -math.inf, b"e")])]
    )
    (_, chunk) = plain(chat_stream().feed(0, event))
    assert chunk["choices"][0]["logprobs"] == {
        "refusal": None,
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [{"token": "e", "logprob": -9999.0, "bytes": [101]}],
            }
        ],
    }


def test_logprobs_are_null_in_a_whole_reply_that_did_not_ask() -> None:
    whole = chat_whole()
    whole.feed(0, DONE)
    assert plain(whole.whole())["choices"][0]["logprobs"] is None


def test_choices_are_kept_apart_and_prompts_counted_once() -> None:
    whole = chat_whole(choices=2)
    for index, text in ((1, "b"), (0, "a"), (1, "B"), (0, "A")):
        whole.feed(index, p.Delta("r", text))
    whole.feed(1, DONE)
    whole.feed(0, DONE)
    reply = plain(whole.whole())
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["aA", "bB"]
    assert reply["usage"]["prompt_tokens"] == 10
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["timings"]["predicted_ms"] == 100.0


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_cut_short_by_the_engine_never_looks_complete(streamed: bool) -> None:
    cut = p.Finished("r", "cancelled")
    whole = chat_whole()
    with pytest.raises(EngineError):
        chat_stream().feed(0, cut) if streamed else whole.feed(0, cut)


def test_text_completion_chunks() -> None:
    stream = render.TextStream(replace(REPLY, include_usage=True))
    chunks = plain([*stream.feed(0, p.Delta("r", "x")), *stream.feed(0, DONE), *stream.closing()])
    assert [[c["text"] for c in chunk["choices"]] for chunk in chunks] == [["x"], [""], []]
    assert [chunk["usage"] is None for chunk in chunks] == [True, True, False]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("streamed", [True, False])
def test_legacy_logprobs(streamed: bool) -> None:
    events: Events = [
        p.Delta("r", "a b", logprobs=[logprob("a", 0, 1, 0.0), logprob(" b", 1, 1)]),
        p.Delta("r", "c", logprobs=[logprob("c", 3, 2)]),
        DONE,
    ]
    if streamed:
        stream = render.TextStream(replace(REPLY, echo=True))
        made = [plain(stream.feed(0, event))[0]["choices"][0]["logprobs"] for event in events[:2]]
        got = {key: made[0][key] + made[1][key] for key in made[0]}
    else:
        whole = render.TextWhole(replace(REPLY, logprobs=True, echo=True))
        for event in events:
            whole.feed(0, event)
        got = plain(whole.whole())["choices"][0]["logprobs"]
    assert got == {
        "tokens": ["a", " b", "c"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {" b": -0.5}, {"c": -0.5, "c1": -1.5}],
        "text_offset": [0, 1, 3],
    }


def test_tokens_inside_of_a_character_are_named_by_their_bytes() -> None:
    """Not one is U+FFFD, so that no two likely ones are the same."""
    top = [p.TopLogprob("\ufffd", -float(i), bytes([0xF0, 0x9F, i])) for i in range(0x80, 0x85)]
    entry = p.TokenLogprob("\ufffd", -128.0, b"\xf0\x9f\x80", top, 3)
    found = plain([render.text_logprobs([entry])])[0]
    assert found["tokens"] == ["bytes:\\xf0\\x9f\\x80"]
    assert list(found["top_logprobs"][0]) == [f"bytes:\\xf0\\x9f\\x{i:02x}" for i in range(0x80, 0x85)]


def test_a_load_over_machines_says_how_far_each_is_and_fleetctl_shows_it() -> None:
    comments, log = ProgressComments(), io.StringIO()
    members = [
        MemberProgress("Anna; iMac: 2", "reading", 40_000_000, 80_000_000),
        MemberProgress("b", "loaded", 9, 9),
    ]
    comments.feed(0, p.Loading("layers on a, b", 40_000_009, 80_000_009, members))
    said = comments.comment()
    assert said == (
        "loading layers on a, b 40000009/80000009; Anna iMac 2: reading 40000000/80000000; b: loaded 9/9"
    )
    with Progress(log, show_after_s=0) as progress:
        _show(progress, said)
    assert log.getvalue().splitlines()[0] == (
        "model: layers on a, b  40.0 MB of 80.0 MB  (Anna iMac 2 reading 40.0 MB of 80.0 MB, b loaded)"
    )


def test_progress_sums_choices_and_never_shrinks() -> None:
    progress = ProgressComments()
    assert progress.comment() == "keepalive 0/0"
    assert progress.feed(0, p.Loading("warming up\ndata: x", 1, 4))
    assert progress.comment() == "loading warming up data: x 1/4"
    progress.feed(0, p.Accepted("r", 100))
    assert progress.comment() == "keepalive 0/100"
    progress.feed(0, p.Prefill("r", 60, 100))
    progress.feed(0, p.Prefill("r", 40, 100))
    progress.feed(1, p.Prefill("s", 5, 100))
    assert progress.comment() == "keepalive 65/200"
    assert not progress.feed(0, p.Delta("r", "x"))


def test_drafts_are_in_the_timings_where_there_were_any() -> None:
    usage, timings = p.Usage(5, 0, 9), p.Timings(0.0, 0.1, 0.2)
    assert "draft_n" not in plain([timing_report(work(p.Finished("r", "stop", usage, timings)))])[0]
    drafts = [Speculated(16, 8, 5), None, Speculated(16, 4, 1)]
    told = timing_report(
        work(*(p.Finished("r", "stop", usage, timings, speculation=draft) for draft in drafts))
    )
    assert (told.draft_n, told.draft_n_accepted) == (12, 6)
