"""What another machine's answer may come to; each attack ends in ProtocolError and is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from fakes import answer
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Loading,
    Prefill,
    TextPrompt,
    Timings,
    Tokenized,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    TopLogprob,
    Usage,
)
from fleetd.errors import ProtocolError
from fleetd.requests.job import LOCAL, Job
from fleetd.requests.remote import messages, remote
from fleetd.requests.remote.answer_check import AnswerCheck
from fleetd.requests.remote.messages import RanAt

TOKEN = Delta("r", "word ")


def asked(**fields: Any) -> Generate:
    return Generate("r", TextPrompt("one two"), **fields)


def check(events: Iterable[Any], context_tokens: int = 0, **fields: Any) -> None:
    checked = AnswerCheck(asked(**fields), context_tokens)
    for event in events:
        checked(event)


def entry(best: int = 0, **fields: Any) -> TokenLogprob:
    top = [TopLogprob("a", -1.0, b"a")] * best
    return TokenLogprob(**{"token": "a", "logprob": -1.0, "raw": b"a", "top": top, **fields})


def test_an_honest_answer_passes() -> None:
    check([event for event in answer() if isinstance(event, Accepted | Prefill | Delta | Finished)])
    check(
        [
            Loading("reading", 1, 2),
            RanAt(("mini",), exact=True),
            Tokenized("r", 500),
            Accepted("r", 500),
            *(Prefill("r", done, 500) for done in range(0, 501, 100)),
            # It went on alone, from what was verified.
            Prefill("r", 200, 500),
            # Text is held back, then given at once; a token has a long text.
            Delta("r", "", tokens=3),
            Delta("r", " " * 128, tokens=1, logprobs=[entry(2)] * 4),
            Delta("r", "tail", tokens=0),
            ToolCallPiece("r", 0, "call_1", "look", '{"a"'),
            ToolCall("r", 0, "call_1", "look", '{"a": 1}'),
            ToolCall("r", 1, "call_2", "look", "{}"),
            Finished("r", "tool_calls", Usage(500, 100, 8, 2)),
        ],
        max_tokens=9,
        top_logprobs=2,
    )


def test_an_echoed_prompt_is_text_without_tokens() -> None:
    echoed = [Accepted("r", 2), Delta("r", "one two", tokens=0, logprobs=[entry()] * 2)]
    check([*echoed, Finished("r", "length", Usage(2))], echo=True, max_tokens=0, top_logprobs=0)


@pytest.mark.parametrize(
    ("events", "fields"),
    [
        pytest.param([TOKEN] * 9, {"max_tokens": 8}, id="more tokens than were asked for"),
        pytest.param([TOKEN] * 9, {"context_tokens": 8}, id="more tokens than its context"),
        pytest.param([Delta("r", "x" * 30_000)], {"max_tokens": 8}, id="30 kB in a token"),
        pytest.param([Delta("r", "x" * 900)] * 40, {"max_tokens": 8}, id="each a little long"),
        pytest.param([Delta("r", "", tokens=0)] * 40, {}, id="empty deltas"),
        pytest.param([Delta("r", "x", tokens=0)] * 40, {}, id="text without tokens"),
        pytest.param([Accepted("r", 1)] * 40, {}, id="accepts again and again"),
        pytest.param([Tokenized("r", 1)] * 40, {}, id="tokenizes again and again"),
        pytest.param([RanAt(("a",))] * 40, {}, id="moves again and again"),
        pytest.param([Prefill("r", 1, 4)] * 40, {}, id="prefills again and again"),
        pytest.param([Prefill("r", 5, 4)], {}, id="prefills more than the prompt"),
        pytest.param([Prefill("r", 0, 2**31 - 1)], {}, id="a prompt longer than any context"),
        pytest.param([ToolCall("r", 1, "c", "n", "{}")], {}, id="the second tool call first"),
        pytest.param([ToolCall("r", 0, "c", "n", "{}")] * 2, {}, id="a tool call twice"),
        pytest.param(
            [ToolCall("r", 0, "c", "n", "{}"), ToolCallPiece("r", 0, "c", "n", "{")],
            {},
            id="more of a whole call",
        ),
        pytest.param([ToolCallPiece("r", 0, "c", "n", "", 0)] * 40, {}, id="empty pieces"),
        pytest.param([ToolCallPiece("r", 0, "c", "n", "x")] * 9, {"max_tokens": 8}, id="pieces without end"),
        pytest.param([ToolCallPiece("r", 0, "c", "n", "x" * 10**6)] * 9, {}, id="endless pieces"),
        pytest.param([ToolCall("r", i, "c", "n", "x" * 10**6) for i in range(9)], {}, id="endless arguments"),
        pytest.param([ToolCall("r", i, "c", "n", "") for i in range(limits.TOOLS + 1)], {}, id="many calls"),
        pytest.param([Delta("r", "a", logprobs=[entry()])], {}, id="logprobs that were not asked for"),
        pytest.param([Delta("r", "a", logprobs=[entry()] * 40)], {"top_logprobs": 0}, id="many logprobs"),
        pytest.param([Delta("r", "a", logprobs=[entry(3)])], {"top_logprobs": 2}, id="many alternatives"),
        pytest.param(
            [Delta("r", "a", logprobs=[entry(token="x" * 2000)])], {"top_logprobs": 0}, id="a long token"
        ),
        pytest.param(
            [Delta("r", "a", logprobs=[entry(raw=b"x" * 9000)])], {"top_logprobs": 0}, id="long raw bytes"
        ),
        pytest.param(
            [Accepted("r", 1), Finished("r", "stop", Usage(1, 0, 9))],
            {"max_tokens": 8},
            id="usage beyond max_tokens",
        ),
        pytest.param(
            [Accepted("r", 1), TOKEN, Finished("r", "stop", Usage(1, 0, 99))],
            {},
            id="usage beyond what it sent",
        ),
        pytest.param(
            [Accepted("r", 5), TOKEN, Finished("r", "stop", Usage(6, 0, 1))],
            {},
            id="another prompt at the end",
        ),
        pytest.param(
            [TOKEN, Finished("r", "stop", Usage(6, 0, 1))], {}, id="a prompt that it never accepted"
        ),
        pytest.param([Accepted("r", 5), Accepted("r", 6)], {}, id="another prompt half way"),
        pytest.param([Accepted("r", 80_000)], {}, id="a prompt longer than what was sent"),
        pytest.param([Accepted("r", 5), Prefill("r", 5, 6)], {}, id="prefills more than it accepted"),
        pytest.param([Accepted("r", 5), Loading("reading")], {}, id="loads after it has accepted"),
        pytest.param(
            [Accepted("r", 1), Finished("r", "stop", Usage(1, 2))], {}, id="more cached than prompt"
        ),
        pytest.param(
            [Accepted("r", 9), Finished("r", "stop", Usage(9, 2), Timings(restored_tokens=3))],
            {},
            id="more restored than cached",
        ),
        pytest.param(
            [Accepted("r", 1), Finished("r", "stop", Usage(1, 0, 1, 2))], {}, id="more reasoning than answer"
        ),
        pytest.param(
            [Delta("r", "a", tokens=0, logprobs=[entry()] * 9)] * 9,
            {"top_logprobs": 0},
            id="a few logprobs again and again",
        ),
        pytest.param(
            [Delta("r", "a", logprobs=[entry(2, raw=b"x" * 4000)])] * 40,
            {"top_logprobs": 2},
            id="every token is the longest",
        ),
    ],
)
def test_attack_an_answer_without_bounds(events: list[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="was ended"):
        check(events, **fields)


def test_attack_loading_for_ever() -> None:
    checked = AnswerCheck(asked())
    for _ in range(limits.LOADING_EVENTS):
        checked(Loading("reading"))
    with pytest.raises(ProtocolError, match="loads without end"):
        checked(Loading("reading"))


def test_the_steps_of_reading_an_image_have_a_bound() -> None:
    messages = [{"role": "user", "content": "", "images": [(0, b"GIF")] * 2}]
    request = Generate("r", ChatPrompt(messages=messages))
    checked = AnswerCheck(request)
    checked(Accepted("r", 600))
    steps = [Prefill("r", 0, 600, image_steps=step) for step in range(4000)]
    for step in steps[: 2 * 600]:
        checked(step)

    def crawl() -> None:
        for step in steps:
            checked(step)

    with pytest.raises(ProtocolError, match="prefills without end"):
        crawl()


ENTRIES = st.builds(
    TokenLogprob,
    st.text(max_size=9),
    st.just(-1.0),
    st.binary(max_size=4200),
    st.lists(st.builds(TopLogprob, st.text(max_size=9), st.just(-1.0), st.binary(max_size=4200)), max_size=3),
)
EVENTS = st.one_of(
    st.builds(
        Delta,
        st.just("r"),
        st.text(max_size=3000),
        tokens=st.integers(0, 5),
        logprobs=st.none() | st.lists(ENTRIES, max_size=20),
    ),
    st.builds(Prefill, st.just("r"), st.integers(0, 2000), st.integers(0, 2000)),
    st.builds(Tokenized, st.just("r"), st.integers(0, 100)),
    st.builds(Accepted, st.just("r"), st.integers(0, 100)),
    st.builds(ToolCall, st.just("r"), st.integers(0, 3), st.just("c"), st.just("n"), st.text(max_size=99)),
)


@given(st.lists(EVENTS, max_size=60), st.integers(0, 50), st.integers(0, 3))
def test_whatever_passes_is_bounded_by_what_was_asked_for(events: list[Any], most: int, best: int) -> None:
    checked = AnswerCheck(asked(max_tokens=most, top_logprobs=best))
    passed = []
    for event in events:
        try:
            checked(event)
        except ProtocolError:
            break
        passed.append(event)
    deltas = [event for event in passed if isinstance(event, Delta)]
    assert sum(delta.tokens for delta in deltas) <= most
    assert sum(len(delta.text) for delta in deltas) <= (most + 16) * limits.TOKEN_CHARS
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert len(entries) <= most + 16
    bound = 4 * (most + 64) * limits.TOKEN_CHARS + 2 * (most + 32) * (1 + best) * limits.LOGPROB_CHARS
    assert sum(len(msgspec.msgpack.encode(event)) for event in passed) < bound


class Flood:
    """The other side of a stream: it never ends an answer."""

    def __init__(self) -> None:
        self.sent = 0
        self.cancelled = False

    async def receive(self) -> bytes:
        self.sent += 1
        return messages.encode(Delta("r", "x" * 30_000))

    def end(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True


async def test_attack_deltas_without_end_are_cancelled_at_once() -> None:
    flood = Flood()
    job = Job("m", asked(max_tokens=8), "client", "chat")
    answered = remote.RemoteJob(lambda method, body: flood, job, "m", "", LOCAL).events()
    with pytest.raises(ProtocolError, match="more text"):
        async for _ in answered:
            pass
    assert flood.sent <= 2
    assert flood.cancelled
