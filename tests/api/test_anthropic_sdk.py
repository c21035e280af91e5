"""The real anthropic client against the application, as its users call it.

``target`` says where: a scripted daemon here, a live one in tests/live. What needs a script asks for
``script_client``; the rest is about shape and agreement, and holds for any model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from api_fakes import FakeRunner, Step, Target, serve, services
from message_order import MessageOrder, checked

from fleetd import errors, limits
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def connect(target: Target) -> anthropic.Anthropic:
    base_url = target.base_url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=base_url, api_key=target.api_key, max_retries=0, timeout=60)


@pytest.fixture
def messages_client(target: Target) -> Iterator[anthropic.Anthropic]:
    with connect(target) as made:
        yield made


@pytest.fixture
def script_client(scripted: Target) -> Iterator[anthropic.Anthropic]:
    with connect(scripted) as made:
        yield made


def in_order(target: Target, **body: Any) -> MessageOrder:
    """A stream as it is on the wire, event by event."""
    headers = {"Authorization": f"Bearer {target.api_key}", "anthropic-version": "2023-06-01"}
    address = f"{target.base_url}/messages?beta=true"
    given = {"model": target.model, "messages": ASK, "max_tokens": 5, "stream": True, **body}
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", address, json=given, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        assert answer.headers["request-id"]
        events = list(anthropic._streaming.SSEDecoder().iter_bytes(answer.iter_bytes()))
    assert [event.event for event in events[:2]] == ["message_start", "ping"]
    return checked((event.event or "", event.json()) for event in events)


def test_a_stream_says_what_the_whole_message_says(
    messages_client: anthropic.Anthropic, target: Target
) -> None:
    fields: Any = {
        "model": target.model,
        "messages": ASK,
        "max_tokens": 5,
        "extra_body": {"temperature": 0, "seed": 5},
    }
    whole = messages_client.messages.create(**fields)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", target.model)
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert whole.usage.output_tokens <= 5
    with messages_client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    order = in_order(target, temperature=0, seed=5)
    assert order.blocks == [{"type": "text", "text": text}]


def test_the_same_request_in_openais_dialect_gives_the_same_tokens(
    messages_client: anthropic.Anthropic, target: Target
) -> None:
    common: Any = {"max_tokens": 6, "temperature": 0, "seed": 3, "model": target.model}
    headers = {"Authorization": f"Bearer {target.api_key}"}
    body = {"messages": [{"role": "system", "content": "Be brief."}, *ASK], **common}
    theirs = httpx.post(f"{target.base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
    ours = messages_client.messages.create(
        model=target.model,
        max_tokens=6,
        messages=ASK,
        system="Be brief.",
        extra_body={"temperature": 0, "seed": 3},
    )
    assert ours.content[0].type == "text"
    assert ours.content[0].text == theirs["choices"][0]["message"]["content"]
    usage = ours.usage
    read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (read, usage.output_tokens) == (
        theirs["usage"]["prompt_tokens"],
        theirs["usage"]["completion_tokens"],
    )


def test_counting_agrees_with_asking(messages_client: anthropic.Anthropic, target: Target) -> None:
    counted = messages_client.messages.count_tokens(model=target.model, messages=ASK, system="Be brief.")
    asked = messages_client.messages.create(
        model=target.model, messages=ASK, system="Be brief.", max_tokens=1
    ).usage
    assert counted.input_tokens == asked.input_tokens + (asked.cache_read_input_tokens or 0)


def test_unknown_betas_and_fields_are_ignored(messages_client: anthropic.Anthropic, target: Target) -> None:
    ask: Any = {"model": target.model, "messages": ASK, "max_tokens": 5, "extra_body": {"seed": 1}}
    plain = messages_client.messages.create(**ask)
    other = messages_client.beta.messages.create(
        **{**ask, "extra_body": {"seed": 1, "a_new_field": {"on": True}}},
        betas=["of-another-year-2031-01-01"],
    )
    assert [block.text for block in other.content if block.type == "text"] == [
        block.text for block in plain.content if block.type == "text"
    ]


def test_models_in_anthropics_shape(messages_client: anthropic.Anthropic, target: Target) -> None:
    page = messages_client.models.list(limit=1000)
    names = [model.id for model in page]
    assert {target.model, f"claude-fleet-{target.model}"} <= set(names)
    for name in (target.model, "claude-haiku-4-5", f"claude-fleet-{target.model}"):
        assert messages_client.models.retrieve(name).id == name
    assert messages_client.messages.create(
        model=f"claude-fleet-{target.model}", messages=ASK, max_tokens=1
    ).content


def test_errors_are_the_librarys(messages_client: anthropic.Anthropic, target: Target) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        messages_client.messages.create(model="no-such-model-here", messages=ASK, max_tokens=1)
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError) as wrong:
        messages_client.messages.create(model=target.model, messages=ASK, max_tokens=0)
    assert "max_tokens" in str(wrong.value)
    stranger = messages_client.with_options(api_key="wrong-wrong-wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=target.model, messages=ASK, max_tokens=1)
    address = target.base_url.removesuffix("/v1")
    assert httpx.head(address).status_code == 200
    headers = {"x-api-key": target.api_key, "anthropic-version": "2023-06-01"}
    nowhere = httpx.post(f"{address}/v1/v1/messages", headers=headers).json()
    assert nowhere["error"]["type"] == "not_found_error"
    assert "one /v1 too many" in nowhere["error"]["message"]


# ---- With a script ---------------------------------------------------------------------------------------


def test_tools_whole_and_streamed(script_client: anthropic.Anthropic, scripted: Target) -> None:
    fields: Any = {"model": scripted.model, "messages": ASK, "max_tokens": 50, "tools": [WEATHER, WEATHER]}
    whole = script_client.messages.create(**fields)
    assert whole.stop_reason == "tool_use"
    assert [block.input for block in whole.content if block.type == "tool_use"] == [{"city": "Oslo"}] * 2
    with script_client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert final.to_dict()["content"] == whole.to_dict()["content"]
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(script_client.messages.create(**fields, tool_choice=one).content) == 1


def test_thinking_is_a_block_of_its_own(script_client: anthropic.Anthropic, scripted: Target) -> None:
    ask: Any = [{"role": "user", "content": "think"}]
    with script_client.messages.stream(
        model=scripted.model, messages=ask, max_tokens=50, thinking={"type": "adaptive"}
    ) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.usage.output_tokens_details is not None
    assert final.usage.output_tokens_details.thinking_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_and_a_full_queue(
    script_client: anthropic.Anthropic, scripted: Target, stream: bool
) -> None:
    def ask(text: str) -> None:
        script_client.messages.create(
            model=scripted.model, messages=[{"role": "user", "content": text}], max_tokens=5, stream=stream
        )

    with pytest.raises(anthropic.BadRequestError) as long:
        ask("too long")
    assert long.value.status_code == 400
    with pytest.raises(anthropic.APIStatusError) as busy:
        ask("busy")
    assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (529, "1")


def test_an_engine_that_dies_in_the_middle(script_client: anthropic.Anthropic, scripted: Target) -> None:
    with pytest.raises(anthropic.APIError, match="The engine died"):
        with script_client.messages.stream(
            model=scripted.model, messages=[{"role": "user", "content": "die"}], max_tokens=5
        ) as stream:
            stream.get_final_message()


# ---- Silence and time ------------------------------------------------------------------------------------


async def test_pings_fill_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients count events, and not comments."""
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.02)
    monkeypatch.setattr(limits, "STREAM_PROGRESS_S", 0.0)
    enough = asyncio.Event()

    def slow(job: Job) -> Iterable[Step]:
        name = job.request.id
        return [p.Accepted(name, 9), enough, p.Delta(name, "ok"), p.Finished(name, "stop", p.Usage(9, 0, 1))]

    order, pings = MessageOrder(), 0
    async with serve(services(FakeRunner(slow))) as site, site.client() as session:
        ask = {"messages": ASK, "max_tokens": 5, "stream": True}
        async with session.post("/v1/messages", json=ask) as answer:
            async for event in anthropic._streaming.SSEDecoder().aiter_bytes(answer.content.iter_any()):
                order.take(event.event or "", event.json())
                pings += event.event == "ping"
                if pings == 5:
                    enough.set()
    assert order.state == "ended"
    assert order.usage["input_tokens"] == 9


@pytest.mark.one_loop
async def test_headers_do_not_wait_for_a_worker_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.02)
    later = asyncio.Event()

    def busy(job: Job) -> Iterable[Step]:
        return [later, errors.ContextLengthExceeded("prompt is too long: 9 tokens > 8 maximum")]

    async with serve(services(FakeRunner(busy))) as site, site.client() as session:
        ask = {"messages": ASK, "max_tokens": 5, "stream": True}
        async with session.post("/v1/messages", json=ask) as answer:
            assert answer.status == 200
            later.set()
            text = await answer.text()
    assert '"message_start"' in text
    assert 'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"' in text
