"""The real openai client's ``responses`` against the application, as its users call it.

``target`` says where: a scripted daemon here, a live one in tests/live. What needs a script asks for
``script_client``; the rest is about shape and agreement, and holds for any model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
from api_fakes import FakeRunner, Step, Target, serve, services
from openai._streaming import SSEDecoder
from response_order import ResponseOrder, checked
from test_openai_sdk import ASK, client, script_client

from fleetd import errors, limits
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

__all__ = ["client", "script_client"]

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes files."}


def in_order(target: Target, **body: Any) -> ResponseOrder:
    """A stream as it is on the wire, event by event."""
    given = {"model": target.model, "input": ASK, "max_output_tokens": 5, "stream": True, **body}
    with (
        httpx.Client(timeout=60, headers={"Authorization": f"Bearer {target.api_key}"}) as http,
        http.stream("POST", f"{target.base_url}/responses", json=given) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        return checked(
            (event.event or "", event.json()) for event in SSEDecoder().iter_bytes(answer.iter_bytes())
        )


def test_a_stream_says_what_the_whole_response_says(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "input": ASK, "max_output_tokens": 5, "temperature": 0}
    whole = client.responses.create(**fields, store=True, extra_body={"seed": 5})
    assert (whole.object, whole.model, whole.to_dict()["store"]) == ("response", target.model, True)
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 5
    with client.responses.stream(**fields, extra_body={"seed": 5}) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    order = in_order(target, temperature=0, seed=5)
    assert order.state == whole.status
    assert order.items[0]["content"][0]["text"] == text
    assert order.response["usage"]["total_tokens"] == whole.usage.total_tokens


def test_input_tokens_are_counted_as_a_response_counts_them(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "instructions": "Be brief.", "input": ASK}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(**fields, max_output_tokens=1).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens > 0
    with pytest.raises(openai.NotFoundError, match="resp_1"):
        client.responses.input_tokens.count(**fields, previous_response_id="resp_1")


def test_a_request_goes_on_from_an_answer_by_its_id(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "max_output_tokens": 4, "temperature": 0}
    first = client.responses.create(**fields, input=ASK)
    more: Any = [{"role": "user", "content": "And then?"}]
    by_id = client.responses.create(**fields, input=more, previous_response_id=first.id)
    said: Any = [each.to_dict() for each in first.output]
    whole = client.responses.create(**fields, input=[*ASK, *said, *more], store=False)
    assert by_id.usage is not None
    assert whole.usage is not None
    assert by_id.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(by_id.id).output_text == by_id.output_text
    client.responses.delete(first.id)
    for gone in (first.id, whole.id):
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(**fields, input=more, previous_response_id=gone)
        assert missing.value.code == "response_not_found"


def test_the_same_request_as_a_chat_gives_the_same_tokens(client: openai.OpenAI, target: Target) -> None:
    chat = client.chat.completions.create(
        model=target.model,
        messages=[{"role": "system", "content": "Be brief."}, *ASK],
        max_tokens=6,
        temperature=0,
        seed=3,
    )
    ours = client.responses.create(
        model=target.model,
        instructions="Be brief.",
        input=ASK,
        max_output_tokens=6,
        temperature=0,
        extra_body={"seed": 3},
    )
    assert ours.output_text == chat.choices[0].message.content
    assert ours.usage is not None
    assert chat.usage is not None
    assert (ours.usage.input_tokens, ours.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


def test_errors_are_the_librarys(client: openai.OpenAI, target: Target) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="no-such-model-here", input="hi", max_output_tokens=1)
    assert missing.value.code == "model_not_found"
    refused: list[dict[str, Any]] = [
        {"conversation": "conv_1"},
        {"background": True},
        {"prompt": {"id": "pmpt_1"}},
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        {"top_logprobs": 2},
        {"extra_body": {"max_tokens": 5}},
    ]
    for fields in refused:
        (name,) = fields.get("extra_body") or fields
        with pytest.raises(openai.BadRequestError, match=name):
            client.responses.create(**{"model": target.model, "input": "hi", **fields})


def test_what_cannot_be_served_is_left_out_with_a_word(client: openai.OpenAI, target: Target) -> None:
    answer = client.responses.create(
        model=target.model,
        input=[{"type": "web_search_call", "id": "ws_1", "status": "completed"}, *ASK],  # type: ignore[list-item]
        tools=[{"type": "web_search"}],
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        prompt_cache_key="k",
        max_output_tokens=2,
    )
    assert answer.tools == []
    warnings: Any = (answer.model_extra or {})["warnings"]
    assert [each.split(":")[0] for each in warnings] == ["tools[0]", "input[0]"]
    assert "'web_search'" in warnings[0]


# ---- With a script ---------------------------------------------------------------------------------------


def test_tools_whole_and_streamed(script_client: openai.OpenAI, scripted: Target) -> None:
    space: Any = {"type": "namespace", "name": "fleet", "description": "Machines.", "tools": [WEATHER]}
    fields: Any = {"model": scripted.model, "input": ASK, "tools": [WEATHER, PATCH, space]}
    whole = script_client.responses.create(**fields)
    assert [item.type for item in whole.output] == ["function_call", "custom_tool_call", "function_call"]
    first, second, third = whole.output
    assert first.type == third.type == "function_call"
    assert second.type == "custom_tool_call"
    assert (json.loads(first.arguments), first.namespace) == ({"city": "Oslo"}, None)
    assert second.input == "Oslo"
    assert (third.name, third.namespace) == ("weather", "fleet")
    assert whole.to_dict()["tools"] == fields["tools"]
    with script_client.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert [each.to_dict()["call_id"] for each in final.output] == ["call_0", "call_1", "call_2"]
    assert len(script_client.responses.create(**fields, parallel_tool_calls=False).output) == 1


def test_reasoning_comes_back_in_the_next_turn() -> None:
    asked: list[p.ChatPrompt] = []

    async def main() -> None:
        def think(job: Job) -> Iterable[Step]:
            assert isinstance(job.request.prompt, p.ChatPrompt)
            asked.append(job.request.prompt)
            name = job.request.id
            end = p.Finished(name, "stop", p.Usage(3, 0, 5, 3))
            return [p.Accepted(name, 3), p.Delta(name, "hm ü", "reasoning", 3), p.Delta(name, "yes"), end]

        async with serve(services(FakeRunner(think))) as site:
            made = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.token, max_retries=0)
            async with made:
                first = await made.responses.create(
                    model="default", input="hi", include=["reasoning.encrypted_content"]
                )
                assert [item.type for item in first.output] == ["reasoning", "message"]
                assert first.usage is not None
                assert first.usage.output_tokens_details.reasoning_tokens == 3
                # Codex sends the text of reasoning back only so.
                items: Any = [item.to_dict() for item in first.output]
                del items[0]["content"]
                user = {"role": "user", "content": "hi"}
                await made.responses.create(model="default", input=[user, *items, {**user, "content": "so?"}])

    asyncio.run(main())
    assert asked[1].messages[0] == asked[0].messages[0]
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm ü"}
    assert asked[1].messages[1:] == [said, {"content": "so?", "role": "user"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_and_a_full_queue(
    script_client: openai.OpenAI, scripted: Target, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        script_client.responses.create(model=scripted.model, input="too long", stream=stream)
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")
    # Codex gives up at 429, and tries again what is 500 or more.
    with pytest.raises(openai.InternalServerError) as busy:
        script_client.responses.create(model=scripted.model, input="busy", stream=stream)
    assert (busy.value.status_code, busy.value.code, busy.value.type) == (503, "overloaded", "server_error")
    assert busy.value.response.headers["Retry-After"] == "1"


def test_an_engine_that_dies_in_the_middle(script_client: openai.OpenAI, scripted: Target) -> None:
    events = list(script_client.responses.create(model=scripted.model, input="die", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The engine died."
    assert last.response.output_text == "half"
    with pytest.raises(openai.APIError):
        script_client.responses.create(model=scripted.model, input="die")


async def test_events_fill_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex counts events, and not comments."""
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.02)
    monkeypatch.setattr(limits, "STREAM_PROGRESS_S", 0.0)
    enough = asyncio.Event()

    def slow(job: Job) -> Iterable[Step]:
        name = job.request.id
        return [p.Accepted(name, 9), enough, p.Delta(name, "ok"), p.Finished(name, "stop", p.Usage(9, 0, 1))]

    order = ResponseOrder()
    async with serve(services(FakeRunner(slow))) as site, site.client() as session:
        async with session.post("/v1/responses", json={"input": "hi", "stream": True}) as answer:
            async for event in SSEDecoder().aiter_bytes(answer.content.iter_any()):
                order.take(event.event or "", event.json())
                if order.progressed == 5:
                    enough.set()
    assert order.state == "completed"


@pytest.mark.one_loop
async def test_a_late_refusal_is_a_failed_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.02)
    later = asyncio.Event()

    def busy(job: Job) -> Iterable[Step]:
        return [later, errors.ContextLengthExceeded("prompt is too long: 9 tokens > 8 maximum")]

    order = ResponseOrder()
    async with serve(services(FakeRunner(busy))) as site, site.client() as session:
        async with session.post("/v1/responses", json={"input": "hi", "stream": True}) as answer:
            assert answer.status == 200
            later.set()
            async for event in SSEDecoder().aiter_bytes(answer.content.iter_any()):
                order.take(event.event or "", event.json())
    assert order.state == "failed"
    assert order.response["error"]["code"] == "context_length_exceeded"
