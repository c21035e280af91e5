"""The real openai client against the application, as its users call it.

``target`` says where: a scripted daemon here, or a live one if FLEETD_TEST_BASE_URL and FLEETD_TEST_API_KEY
are set. Assertions are about shape and agreement, so they hold for any model; what needs a script asks for
``script_client``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from api_fakes import MODEL, Target

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def connect(target: Target, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": target.base_url, "api_key": target.api_key, "max_retries": 0, "timeout": 60, **options}
    )


@pytest.fixture
def client(target: Target) -> Iterator[openai.OpenAI]:
    with connect(target) as made:
        yield made


@pytest.fixture
def script_client(scripted: Target) -> Iterator[openai.OpenAI]:
    with connect(scripted) as made:
        yield made


@pytest.fixture
async def async_client(target: Target) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=60
    ) as made:
        yield made


# ---- Chat ------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, target: Target) -> None:
    assert target.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(target.model).id == target.model


def test_chat(client: openai.OpenAI, target: Target) -> None:
    reply = client.chat.completions.create(model=target.model, messages=ASK, max_tokens=4, seed=1)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens <= 4
    assert reply.usage.prompt_tokens_details is not None
    assert reply.system_fingerprint


def test_stream_says_what_the_whole_reply_says(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "messages": ASK, "max_tokens": 6, "temperature": 0, "seed": 5}
    whole = client.chat.completions.create(**fields)
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_without_usage_always_has_choices(client: openai.OpenAI, target: Target) -> None:
    stream = client.chat.completions.create(model=target.model, messages=ASK, max_tokens=3, stream=True)
    chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_same_seed_says_the_same_and_choice_i_has_seed_plus_i(
    client: openai.OpenAI, target: Target
) -> None:
    def ask(**more: Any) -> list[str | None]:
        reply = client.chat.completions.create(
            model=target.model, messages=ASK, max_tokens=6, temperature=1, **more
        )
        return [choice.message.content for choice in reply.choices]

    three = ask(seed=42, n=3)
    assert len(three) == 3
    assert three == ask(seed=42, n=3)
    assert three[1:2] == ask(seed=43)


def test_n_streams_interleave_by_index(client: openai.OpenAI, target: Target) -> None:
    texts: dict[int, str] = {}
    ends = set()
    for chunk in client.chat.completions.create(
        model=target.model, messages=ASK, max_tokens=4, n=3, seed=1, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            ends.add(choice.index)
    assert set(texts) == ends == {0, 1, 2}
    assert all(texts.values())


def test_logprobs(client: openai.OpenAI, target: Target) -> None:
    reply = client.chat.completions.create(
        model=target.model, messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content
    assert tokens
    for token in tokens:
        assert token.logprob <= 0
        assert token.bytes is not None
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_a_stop_string_is_not_in_the_answer(client: openai.OpenAI, target: Target) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model=target.model, messages=ASK, max_tokens=8, temperature=0, seed=3, **more
        ).choices[0]

    words = ask().message.content.split()
    assert len(words) > 2
    stopped = ask(stop=[words[2]])
    assert words[2] not in stopped.message.content
    assert stopped.finish_reason == "stop"


def test_the_stream_helper_assembles_the_reply(client: openai.OpenAI, target: Target) -> None:
    with client.chat.completions.stream(
        model=target.model, messages=ASK, max_tokens=5, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.current_completion_snapshot  # the final one is refused when max_tokens ended it
    assert "content.delta" in kinds
    assert "content.done" in kinds
    assert final.choices[0].message.content
    assert final.usage is not None


async def test_async(async_client: openai.AsyncOpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "messages": ASK, "max_tokens": 4, "temperature": 0, "seed": 9}
    whole = await async_client.chat.completions.create(**fields)
    text = ""
    async for chunk in await async_client.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
    async with async_client.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == text


async def test_leaving_an_async_stream_early(async_client: openai.AsyncOpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "messages": ASK, "max_tokens": 12}
    stream = await async_client.chat.completions.create(**fields, stream=True)
    async for _ in stream:
        break
    await stream.close()
    again = await async_client.chat.completions.create(**fields)
    assert again.choices


def test_timings_and_headers_are_there_for_who_wants_them(client: openai.OpenAI, target: Target) -> None:
    raw = client.chat.completions.with_raw_response.create(model=target.model, messages=ASK, max_tokens=2)
    assert raw.headers["X-Fleet-Exactness"] == "exact"
    assert raw.headers["X-Request-Id"]
    timings = (raw.parse().model_extra or {})["timings"]
    assert timings["prompt_n"] + timings["cache_n"] > 0
    assert timings["predicted_n"] >= 1


# ---- Tools -----------------------------------------------------------------------------------------------


def test_tool_calls_whole_and_streamed(client: openai.OpenAI, target: Target) -> None:
    if not target.tools:
        pytest.skip("this model has no tool calls")
    fields: Any = {"model": target.model, "messages": ASK, "tools": [TOOL], "tool_choice": "required"}
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.name == "weather"
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in [event.type for event in events]
    again: Any = final.choices[0].message.tool_calls
    assert again[0].function.arguments == call.function.arguments
    # The result goes back in as openai's own objects serialise themselves.
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages: list[Any] = [*ASK, message.to_dict(), result]
    reply = client.chat.completions.create(
        model=target.model, messages=messages, tools=[TOOL], tool_choice="none"
    )
    assert reply.choices[0].message.content


def test_parallel_tool_calls(script_client: openai.OpenAI) -> None:
    tools = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "time"}}]
    for parallel, expected in ((True, 2), (False, 1)):
        with script_client.chat.completions.stream(
            model=MODEL, messages=ASK, tools=tools, parallel_tool_calls=parallel
        ) as stream:
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert calls is not None
        assert len(calls) == expected


def test_reasoning_is_apart_from_the_answer(script_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "think"}]
    message = script_client.chat.completions.create(model=MODEL, messages=messages).choices[0].message
    assert message.content == "yes"
    assert (message.model_extra or {})["reasoning_content"] == "hm"


# ---- Text completions ------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, target: Target) -> None:
    fields: Any = {"model": target.model, "prompt": ["One", "Two"], "n": 2, "max_tokens": 3, "seed": 1}
    reply = client.completions.create(**fields)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    texts: dict[int, str] = {}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in reply.choices}


def test_completions_echo_and_logprobs(client: openai.OpenAI, target: Target) -> None:
    reply = client.completions.create(
        model=target.model, prompt="The cat sat", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    choice = reply.choices[0]
    assert choice.text.startswith("The cat sat")
    assert choice.logprobs is not None
    probabilities: Any = choice.logprobs.token_logprobs
    assert probabilities[0] is None
    assert all(value <= 0 for value in probabilities[1:])
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(probabilities)


# ---- Errors ----------------------------------------------------------------------------------------------


def test_a_wrong_key(target: Target) -> None:
    with connect(target, api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/knows-this")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"max_token": 3}}, "max_token"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"messages": []}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_bad_requests_name_the_parameter(
    client: openai.OpenAI, target: Target, more: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": target.model, "messages": ASK, "stream": stream, **more})
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_does_not_fit(script_client: openai.OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "too long"}]
    with pytest.raises(openai.BadRequestError) as caught:
        script_client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_full_queue_is_a_rate_limit(script_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "busy"}]
    with pytest.raises(openai.RateLimitError) as caught:
        script_client.chat.completions.create(model=MODEL, messages=messages)
    assert caught.value.response.headers["Retry-After"] == "1"


def test_an_engine_that_dies_in_mid_stream_raises(script_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "die"}]
    stream = script_client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="engine died"):
        seen.extend(text for chunk in stream if (text := chunk.choices[0].delta.content))
    assert seen == ["half"]
