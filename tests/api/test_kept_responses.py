"""Answers of /v1/responses that are kept: a request goes on from one by its id, or names its items."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from api_fakes import FakeRunner, Site, Step, serve, services

from fleetd import limits
from fleetd.api.kept_answers import KeptAnswers
from fleetd.api.responses.bodies import InputItem
from fleetd.api.responses.kept import KeptResponses
from fleetd.api.responses.kept import answer as answer_of
from fleetd.api.responses.kept import item as item_of
from fleetd.api.responses.kept import keep as keep_response
from fleetd.api.responses.objects import FunctionCallItem, MessageItem, OutputText, Response
from fleetd.engine import protocol as p
from fleetd.errors import EngineDied, ResponseNotFound
from fleetd.requests.job import Job

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATCH: Any = {"type": "custom", "name": "patch"}


def think_call_and_answer(job: Job) -> Iterable[Step]:
    """Reasoning and two calls, then an answer once a tool has said something."""
    name = job.request.id
    yield p.Accepted(name, 5)
    yield p.Delta(name, "Hm. ", "reasoning")
    if any(each["role"] == "tool" for each in job.request.prompt.messages):  # type: ignore[union-attr]
        yield p.Delta(name, "4 °C.")
        yield p.Finished(name, "stop", p.Usage(5, 0, 3, 1))
        return
    yield p.Delta(name, "I look.")
    yield p.ToolCall(name, 0, "call_a", "weather", '{"city": "Oslo"}')
    yield p.ToolCall(name, 1, "call_b", "patch", '{"input": "*** a"}')
    yield p.Finished(name, "tool_calls", p.Usage(5, 0, 9, 1))


@dataclass
class HandClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def kept(clock: HandClock) -> KeptResponses:
    return KeptAnswers(monotonic=clock)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(think_call_and_answer)


@pytest.fixture
async def site(runner: FakeRunner, kept: KeptResponses) -> AsyncIterator[Site]:
    async with serve(services(runner, kept_responses=kept)) as made:
        yield made


async def answered(site: Site, *, streamed: bool = False, status: int = 200, **body: Any) -> dict[str, Any]:
    """The response; of a stream, the one in its last event."""
    fields = {"tools": [WEATHER, PATCH], **body, "stream": streamed}
    async with site.client() as session, session.post("/v1/responses", json=fields) as answer:
        text = await answer.text()
        assert answer.status == status, text
        if streamed:
            *_, last = (line for line in text.splitlines() if line.startswith("data: "))
            found = json.loads(last.removeprefix("data: "))["response"]
        else:
            found = json.loads(text)
        assert isinstance(found, dict)
        return found


async def asked(
    site: Site, path: str, status: int = 200, method: str = "GET", **query: Any
) -> dict[str, Any]:
    async with site.client() as session, session.request(method, path, params=query) as answer:
        assert answer.status == status, await answer.text()
        found = await answer.json()
        assert isinstance(found, dict)
        return found


RESULTS = [
    {"type": "function_call_output", "call_id": "call_a", "output": "4 °C"},
    {"type": "custom_tool_call_output", "call_id": "call_b", "output": "done"},
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop_by_ids_reads_what_the_whole_conversation_reads(
    site: Site, runner: FakeRunner, streamed: bool
) -> None:
    """Three turns by ``previous_response_id``, by ``item_reference``, and with everything sent again."""
    question: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Oslo?"},
    ]
    more = [{"role": "user", "content": "And now?"}]
    first = await answered(site, streamed=streamed, input=question)
    second = await answered(site, streamed=streamed, input=RESULTS, previous_response_id=first["id"])
    await answered(site, streamed=streamed, input=more, previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    assert [item["type"] for item in first["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call",
    ]  # fmt: skip

    def named(answer: dict[str, Any]) -> list[Any]:
        return [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]

    bare = [{"id": item["id"]} for item in second["output"]]
    await answered(site, input=[*question, *named(first), *RESULTS, *bare, *more])
    await answered(site, input=[*question, *first["output"], *RESULTS, *second["output"], *more])
    by_id, by_reference, whole = [job.request.prompt for job in runner.jobs[2:]]
    assert by_id == by_reference == whole
    assert isinstance(whole, p.ChatPrompt)
    assert [each["role"] for each in whole.messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
    assert whole.messages[2]["reasoning_content"] == "Hm. "
    assert [call["id"] for call in whole.messages[2]["tool_calls"]] == ["call_a", "call_b"]


async def test_instructions_and_tools_are_those_of_each_request(site: Site, runner: FakeRunner) -> None:
    first = await answered(site, input="Oslo?", instructions="Be brief.")
    await answered(site, input=RESULTS, previous_response_id=first["id"], tools=[], instructions="Be long.")
    prompt = runner.jobs[1].request.prompt
    assert isinstance(prompt, p.ChatPrompt)
    assert [each["content"] for each in prompt.messages if each["role"] == "system"] == ["Be long."]
    assert prompt.tools is None


async def test_input_tokens_are_counted_with_what_came_before(site: Site, runner: FakeRunner) -> None:
    first = await answered(site, input="Oslo?")
    body = {"input": RESULTS, "previous_response_id": first["id"]}
    async with site.client() as session, session.post("/v1/responses/input_tokens", json=body) as answer:
        assert answer.status == 200
    prompt = runner.jobs[1].request.prompt
    assert isinstance(prompt, p.ChatPrompt)
    assert [each["role"] for each in prompt.messages] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_library_gets_an_answer_its_input_and_forgets_it(site: Site, streamed: bool) -> None:
    first = await answered(site, streamed=streamed, input="Oslo?", metadata={"a": "b"})
    made = await answered(site, streamed=streamed, input=RESULTS, previous_response_id=first["id"])
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.token, max_retries=0) as client:
        assert (await client.responses.retrieve(made["id"])).to_dict() == made
        listed = await client.responses.input_items.list(made["id"])
        assert [item.type for item in listed.data] == ["custom_tool_call_output", "function_call_output"]
        paged = [item async for item in client.responses.input_items.list(made["id"], limit=1, order="asc")]
        assert [item.id for item in paged] == [item.id for item in reversed(listed.data)]
        (question,) = (await client.responses.input_items.list(first["id"])).data
        assert question.type == "message"
        assert question.to_dict()["content"] == [{"type": "input_text", "text": "Oslo?"}]
        await client.responses.delete(made["id"])
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made["id"])
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(made["id"])
        assert (await client.responses.retrieve(first["id"])).id == first["id"]


async def test_an_item_that_was_asked_can_be_named_by_the_id_in_its_list(
    site: Site, runner: FakeRunner
) -> None:
    first = await answered(site, input="Oslo?")
    (question,) = (await asked(site, f"/v1/responses/{first['id']}/input_items"))["data"]
    await answered(site, input=[{"type": "item_reference", "id": question["id"]}])
    assert runner.jobs[1].request.prompt == runner.jobs[0].request.prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_not_kept_is_a_404_that_names_it(site: Site, clock: HandClock, streamed: bool) -> None:
    hidden = await answered(site, streamed=streamed, input="Oslo?", store=False)
    assert hidden["store"] is False
    old = await answered(site, streamed=streamed, input="Oslo?")
    clock.now_s += limits.RESPONSE_KEPT_S
    for gone in (hidden, old):
        reference = {"type": "item_reference", "id": gone["output"][0]["id"]}
        for body, param, name in (
            ({"previous_response_id": gone["id"], "input": "x"}, "previous_response_id", gone["id"]),
            ({"input": [{"role": "user", "content": "x"}, reference]}, "input[1]", reference["id"]),
        ):
            error = (await answered(site, status=404, **body))["error"]
            assert (error["code"], error["param"]) == ("response_not_found", param)
            assert name in error["message"]
            assert "Send the whole conversation" in error["message"]
        await asked(site, f"/v1/responses/{gone['id']}", 404)
        await asked(site, f"/v1/responses/{gone['id']}/input_items", 404)


async def test_an_answer_that_failed_is_not_kept(kept: KeptResponses) -> None:
    def dies(job: Job) -> Iterable[Step]:
        return [p.Accepted(job.request.id, 1), p.Delta(job.request.id, "half"), EngineDied("It died.")]

    async with serve(services(FakeRunner(dies), kept_responses=kept)) as site:
        failed = await answered(site, streamed=True, input="x")
        assert failed["status"] == "failed"
        await asked(site, f"/v1/responses/{failed['id']}", 404)


async def test_an_answer_that_its_client_left_is_not_kept(kept: KeptResponses) -> None:
    waits = asyncio.Event()

    def slow(job: Job) -> Iterable[Step]:
        return [p.Accepted(job.request.id, 1), p.Delta(job.request.id, "half"), waits]

    runner = FakeRunner(slow)
    async with serve(services(runner, kept_responses=kept)) as site:
        async with site.client() as session:
            answer = await session.post("/v1/responses", json={"input": "x", "stream": True})
            line = b""
            while not line.startswith(b"data: "):
                line = await answer.content.readline()
            name = json.loads(line.removeprefix(b"data: "))["response"]["id"]
            answer.close()
        await runner.wait_for(lambda: runner.running == 0)
        await asked(site, f"/v1/responses/{name}", 404)


async def test_an_answer_that_was_cut_by_length_is_gone_on_from(kept: KeptResponses) -> None:
    def cut(job: Job) -> Iterable[Step]:
        name = job.request.id
        return [p.Accepted(name, 1), p.Delta(name, "half"), p.Finished(name, "length", p.Usage(1, 0, 1))]

    runner = FakeRunner(cut)
    async with serve(services(runner, kept_responses=kept)) as site:
        first = await answered(site, input="x", max_output_tokens=1)
        assert first["status"] == "incomplete"
        await answered(site, input="go on", previous_response_id=first["id"])
    prompt = runner.jobs[1].request.prompt
    assert isinstance(prompt, p.ChatPrompt)
    assert [each["content"] for each in prompt.messages] == ["x", "half", "go on"]


async def test_attack_who_needs_no_token_finds_no_answer_of_who_has_it(
    runner: FakeRunner, kept: KeptResponses
) -> None:
    given = services(runner, kept_responses=kept)
    async with serve(given) as site, serve(given, needs_token=False) as tokenless:
        mine = await answered(site, input="Oslo?")
        theirs = await answered(tokenless, input="Oslo?")
        for place, name in ((tokenless, mine), (site, theirs)):
            path = f"/v1/responses/{name['id']}"
            await asked(place, path, 404)
            await asked(place, path, 404, "DELETE")
            await asked(place, f"{path}/input_items", 404)
            await answered(place, status=404, input="x", previous_response_id=name["id"])
            reference = {"type": "item_reference", "id": name["output"][0]["id"]}
            await answered(place, status=404, input=[reference])
        await asked(site, f"/v1/responses/{mine['id']}")
        await asked(tokenless, f"/v1/responses/{theirs['id']}")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "m"}, "after"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(site: Site, query: dict[str, str], param: str) -> None:
    first = await answered(site, input="Oslo?")
    path = f"/v1/responses/{first['id']}/input_items"
    assert (await asked(site, path, 400, **query))["error"]["param"] == param
    assert (await asked(site, f"/v1/responses/{first['id']}", 400, stream="true"))["error"][
        "param"
    ] == "stream"


# ---- The bounds ------------------------------------------------------------------------------------------


def response(name: str, text: str = "hi") -> Response:
    own = name.removeprefix("resp_")
    said = MessageItem(id=f"msg_{own}_0", status="completed", content=[OutputText(text)])
    call = FunctionCallItem(id=f"fc_{own}_1", status="completed", call_id="c", name="n", arguments="{}")
    return Response(id=name, created_at=0, model="m", output=[said, call])


def keep(kept: KeptResponses, name: str, text: str = "hi", **more: Any) -> None:
    keep_response(kept, "", response(name, text), [InputItem(role="user", content="x")], 10, **more)


def has(kept: KeptResponses, *names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            item_of(kept, "", f"msg_{name.removeprefix('resp_')}_0", "input")
        except ResponseNotFound:
            found.append(False)
        else:
            found.append(True)
    return found


def test_an_answer_lasts_an_hour_after_its_last_use(kept: KeptResponses, clock: HandClock) -> None:
    keep(kept, "resp_a")
    keep(kept, "resp_b")
    for _ in range(3):
        clock.now_s += limits.RESPONSE_KEPT_S * 0.9
        assert has(kept, "resp_a") == [True]
    assert has(kept, "resp_b") == [False]
    clock.now_s += limits.RESPONSE_KEPT_S
    assert has(kept, "resp_a") == [False]
    assert (kept.n_bytes, len(kept), kept._whole) == (0, 0, {})


def test_where_there_are_too_many_those_go_that_were_not_used_for_longest(
    kept: KeptResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RESPONSES_KEPT", 2)
    keep(kept, "resp_a")
    keep(kept, "resp_b")
    answer_of(kept, "", "resp_a")
    keep(kept, "resp_c")
    assert has(kept, "resp_a", "resp_b", "resp_c") == [True, False, True]


def test_what_is_kept_never_exceeds_its_bytes(kept: KeptResponses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESPONSES_KEPT_BYTES", 10_000)
    for i in range(50):
        keep(kept, f"resp_{i}", "x" * 2_000)
        assert kept.n_bytes <= 10_000
    assert has(kept, "resp_49", "resp_0") == [True, False]
    previous = answer_of(kept, "", "resp_49")
    for i in range(20):  # a chain counts what it goes on from, at each of its answers
        keep(kept, f"resp_chain{i}", "x" * 500, previous=previous)
        previous = answer_of(kept, "", f"resp_chain{i}") if i < 2 else previous
        assert kept.n_bytes <= 10_000
    keep(kept, "resp_huge", "x" * 20_000)
    assert has(kept, "resp_huge") == [False]
    assert (kept.n_bytes, kept._whole) == (0, {})


def test_items_that_a_client_sends_again_stay_those_of_their_own_answer_of(kept: KeptResponses) -> None:
    keep(kept, "resp_a")
    again = item_of(kept, "", "msg_a_0", "input")
    keep_response(kept, "", response("resp_b"), [again], 10)
    kept.remove("", "resp_b")
    assert item_of(kept, "", "msg_a_0", "input") == again
    kept.remove("", "resp_a")
    with pytest.raises(ResponseNotFound, match="msg_a_0"):
        item_of(kept, "", "msg_a_0", "input")
