"""What another machine may ask of this one with a job, and what it may not; attacks are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from fakes import answer

from fleetd import limits
from fleetd.engine.protocol import ChatPrompt, Event, Generate, Loading, Sampling, TextPrompt, Tokenized
from fleetd.errors import FleetError, ModelNotFound, PeerLost, ProtocolError
from fleetd.requests.job import Job, Planned
from fleetd.requests.remote import messages, remote

PROMPT = TextPrompt("hi")


class PeerReader:
    """The asking side, which reads unless told otherwise."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> bytes | None:
        return None

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    async def drained(self) -> None:
        await self.reads.wait()

    def end(self) -> None: ...

    def cancel(self, error: FleetError | None = None) -> None: ...


class CountingRunner:
    """A runner's part: the jobs that reached it, and whether they were left early."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.left = 0

    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        self.jobs.append(job)
        try:
            for event in answer():
                yield event
        except GeneratorExit:
            self.left += 1
            raise


async def ask(
    body: bytes, *, running: CountingRunner | None = None, has: Callable[[str], bool] = lambda digest: True
) -> list[Job]:
    running = running or CountingRunner()
    await remote.JobServer(running.run, has)("peer", body, PeerReader())
    return running.jobs


def generate(**fields: Any) -> Generate:
    return Generate(**{"id": "r1", "prompt": PROMPT, **fields})


def run(model: str = "big", digest: str = "", **fields: Any) -> bytes:
    return messages.encode(messages.RunJob(model, generate(**fields), "chat", digest))


async def test_an_honest_job_is_run_here() -> None:
    sampling = Sampling(0.7, 0.9, 40, 0.1, 7, 1.1, 0.5, -0.5, {5: -100.0})
    (job,) = await ask(run(sampling=sampling, max_tokens=0, stop=["a"], top_logprobs=0, echo=True))
    assert msgspec.structs.replace(job.request, id="r1") == generate(
        sampling=sampling, max_tokens=0, stop=["a"], top_logprobs=0, echo=True
    )
    assert (job.origin, job.local_only) == ("peer", True)


async def test_attack_a_prompt_that_waits_for_helpers_that_no_machine_asked_for() -> None:
    (job,) = await ask(run(shared=True))
    assert not job.request.shared


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"max_tokens": 2**31},
        {"top_logprobs": limits.TOP_LOGPROBS + 1},
        {"stop": [""]},
        {"stop": ["x" * (limits.STOP_STRING_CHARS + 1)]},
        {"stop": ["x"] * (limits.STOP_STRINGS + 1)},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(temperature=-1.0)},
        {"sampling": Sampling(top_p=0.0)},
        {"sampling": Sampling(top_k=-1)},
        {"sampling": Sampling(min_p=float("inf"))},
        {"sampling": Sampling(repetition_penalty=0.0)},
        {"sampling": Sampling(presence_penalty=1e9)},
        {"sampling": Sampling(logit_bias={1: float("nan")})},
        {"prompt": ChatPrompt([{}] * (limits.MESSAGES + 1))},
        {"prompt": ChatPrompt([{}], tools=[{}] * (limits.TOOLS + 1))},
        {"id": ""},
        {"id": "x" * (limits.REQUEST_ID_CHARS + 1)},
    ],
    ids=str,
)
async def test_values_that_break_an_engine_are_refused(fields: dict[str, Any]) -> None:
    """It is the engine of everybody who uses this machine."""
    with pytest.raises(ProtocolError, match="cannot be read"):
        await ask(run(**fields))


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages"])
async def test_a_template_of_its_own_is_refused(name: str) -> None:
    """A template is a program."""
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], template_kwargs={name: "{{ 1 }}"})
    with pytest.raises(ProtocolError, match="template of its own"):
        await ask(run(prompt=prompt))


@pytest.mark.parametrize("field", ["messages", "tools", "template_kwargs"])
def test_attack_a_conversation_that_is_nested_without_end_is_refused(field: str) -> None:
    def job(depth: int) -> bytes:
        deep: Any = {"text": "x"}
        for _ in range(depth):
            deep = {"in": [deep]}
        given = {"messages": [{"role": "user", "content": "x"}]} | {
            field: deep if field == "template_kwargs" else [deep]
        }
        return messages.encode(messages.RunJob("m", Generate("r", ChatPrompt(**given)), "chat"))

    messages.decode_run(job(limits.JSON_DEPTH // 2))
    with pytest.raises(ProtocolError, match="nested without end"):
        messages.decode_run(job(limits.CONVERSATION_DEPTH))


@pytest.mark.parametrize("model", ["/etc", "~/private/model", "/home/somebody/model.gguf"])
async def test_looking_around_on_the_disk_is_refused(model: str) -> None:
    """Paths are for this machine's own user; errors about them would tell what is there."""
    with pytest.raises(ProtocolError, match="by a path"):
        await ask(run(model))


async def test_a_digest_that_is_not_known_starts_no_reading_of_files() -> None:
    running = CountingRunner()
    with pytest.raises(ModelNotFound, match="does not have these files of big"):
        await ask(run(digest="a" * 64), running=running, has=lambda digest: digest == "b" * 64)
    assert running.jobs == []
    assert await ask(run(digest="b" * 64), running=running, has=lambda digest: digest == "b" * 64)


async def test_the_id_of_a_running_request_cannot_be_taken() -> None:
    """The engine tells requests apart by their ids: with that of another one its answer would be had."""
    running = CountingRunner()
    for _ in range(2):
        await ask(run(id="r" * limits.REQUEST_ID_CHARS), running=running)
    ids = [job.request.id for job in running.jobs]
    assert len(set(ids)) == 2
    for found in ids:
        assert found.startswith("r" * limits.JOB_ID_CHARS + ".")
        assert len(found) <= limits.REQUEST_ID_CHARS


async def test_a_machine_that_stops_reading_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_READ_STALL_S", 0.05)
    running, reader = CountingRunner(), PeerReader()
    reader.reads.clear()
    with pytest.raises(PeerLost, match="Nothing of it was read"):
        await remote.JobServer(running.run, lambda digest: True)("peer", run(), reader)
    assert len(reader.sent) == 1
    assert running.left == 1


async def test_a_slow_reader_gets_everything() -> None:
    reader = PeerReader()
    reader.reads.clear()
    asyncio.get_running_loop().call_later(0.05, reader.reads.set)
    await remote.JobServer(CountingRunner().run, lambda digest: True)("peer", run(), reader)
    assert [messages.decode_event(body) for body in reader.sent] == answer()


class SharedRunning(CountingRunner):
    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        yield Planned("layers", ("mini", "this"), "exact")
        for event in answer():
            yield event


class RestingRunning(CountingRunner):
    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        yield Planned("local", ("this",), "equivalent")
        for event in answer():
            yield event


async def test_an_answer_that_rests_on_what_others_computed_is_not_passed_off_as_exact() -> None:
    reader = PeerReader()
    body = messages.encode(messages.RunJob("big", generate(), "chat", where=True))
    await remote.JobServer(RestingRunning().run, lambda digest: True)("peer", body, reader)
    assert messages.decode_event(reader.sent[0]) == messages.RanAt()


@pytest.mark.parametrize("where", [True, False])
async def test_who_helps_is_told_to_those_who_want_to_know(where: bool) -> None:
    """Machines of an earlier version would not understand it."""
    reader = PeerReader()
    body = messages.encode(messages.RunJob("big", generate(), "chat", where=where))
    await remote.JobServer(SharedRunning().run, lambda digest: True)("peer", body, reader)
    events = [messages.decode_event(body) for body in reader.sent]
    assert events == [*([messages.RanAt(("mini",), exact=True)] if where else []), *answer()]


class TokenizingRunning(CountingRunner):
    async def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        yield Tokenized("r1", 7)
        for event in answer():
            yield event


@pytest.mark.parametrize("tokenized", [True, False])
async def test_a_prompts_length_is_told_at_once_to_those_who_want_to_know(tokenized: bool) -> None:
    """Machines of an earlier version would not understand it."""
    reader = PeerReader()
    body = messages.encode(messages.RunJob("big", generate(), "chat", tokenized=tokenized))
    await remote.JobServer(TokenizingRunning().run, lambda digest: True)("peer", body, reader)
    events = [messages.decode_event(body) for body in reader.sent]
    assert events == [*([Tokenized("r1", 7)] if tokenized else []), *answer()]


async def test_another_machine_is_asked_to_tell_a_prompts_length_at_once() -> None:
    bodies = [messages.encode(event) for event in (Tokenized("r1", 7), *answer())]
    asked: list[bytes] = []

    class Answering(PeerReader):
        async def receive(self) -> bytes | None:
            return bodies.pop(0)

    def request(method: str, body: bytes) -> Any:
        asked.append(body)
        return Answering()

    job = Job("big", generate(), "http", "chat")
    events = remote.RemoteJob(request, job, "big", "", Planned("remote", ("studio",), "equivalent")).events()
    assert [event async for event in events] == [Tokenized("r1", 7), *answer()]
    assert messages.decode_run(asked[0]).tokenized
