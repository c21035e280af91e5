"""A job from admission to its last ledger row, and every way it can end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec
import pytest
from fakes import FakeFolder, FakeModels, FakePool, answer, job
from msgspec.structs import replace
from structlog.testing import capture_logs
from timelines import check_steps

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.daemon_status import RequestCounts
from fleetd.control.prefill_trace import Trace
from fleetd.engine.measure.stage_times import StageTimes
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Failed,
    Finished,
    Loading,
    Prefill,
    Timings,
    Usage,
)
from fleetd.errors import (
    ContextLengthExceeded,
    DownloadFailed,
    Draining,
    EngineDied,
    FleetError,
    ModelNotFound,
    ModelUnsupported,
    Overloaded,
)
from fleetd.models.model_names import ModelNames
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.metrics import Metrics
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.pulls import ModelSource, Pulls
from fleetd.requests.request import Request
from fleetd.requests.runner import RequestRunner
from fleetd.storage.store import Store
from fleetd.text import too_long

Make = Callable[..., RequestRunner]


async def planned(runner: RequestRunner, this: Job) -> AsyncGenerator[Loading | Event, None]:
    """The events after the first one, which says that the job runs here."""
    async with aclosing(runner.run(this)) as events:
        assert await anext(events) == LOCAL
        async for event in events:
            assert not isinstance(event, Planned)
            yield event


async def collect(runner: RequestRunner, this: Job) -> list[Loading | Event]:
    return [event async for event in planned(runner, this)]


def rows(store: Store) -> list[tuple[Any, ...]]:
    return store.call(
        lambda db: db.execute(
            "SELECT model, state, reason, prompt_tokens, cached_tokens, completion_tokens FROM usage"
        ).fetchall()
    )


def shown(metrics: Metrics, line: str) -> bool:
    return line in metrics.render()[0].decode().splitlines()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (conditions on figures, which announce nothing)
            await asyncio.sleep(0.001)


async def test_an_answer_passes_through_whole_and_is_settled(
    make_runner: Make, store: Store, metrics: Metrics
) -> None:
    script = answer()
    runner = make_runner(FakePool(list(script)), FakeModels())
    assert await collect(runner, job()) == script
    assert rows(store) == [("m", "settled", "stop", 7, 3, 2)]
    assert runner.counts == RequestCounts(completed=1)
    assert shown(metrics, 'vllm:generation_tokens_total{model_name="m"} 2.0')
    assert shown(metrics, 'vllm:num_requests_running{model_name="m"} 0.0')
    assert shown(metrics, 'vllm:num_requests_waiting{model_name="m"} 0.0')
    assert shown(metrics, 'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0')
    assert shown(metrics, 'vllm:inter_token_latency_seconds_count{model_name="m"} 1.0')


@pytest.mark.parametrize("asked", ["", "default", "m"])
async def test_no_name_means_the_default_model(make_runner: Make, asked: str) -> None:
    pool = FakePool(answer())
    await collect(make_runner(pool, FakeModels()), job(asked))
    assert pool.streamed == ["m"]


async def test_a_vendors_name_stands_for_the_model_that_the_settings_name(make_runner: Make) -> None:
    pool = FakePool(answer())
    runner = make_runner(pool, FakeModels(), names=ModelNames("other", "m", "small"))
    await collect(runner, job("claude-opus-4-8"))
    assert pool.streamed == ["m"]
    circle = make_runner(pool, FakeModels(), names=ModelNames("other", "gpt-5-mini", "gpt-5"))
    with pytest.raises(ModelNotFound):
        await collect(circle, job("gpt-5"))


async def test_the_row_is_reserved_before_the_engine_works(make_runner: Make, store: Store) -> None:
    gate = asyncio.Event()
    runner = make_runner(FakePool([gate, *answer()]), FakeModels())
    task = asyncio.create_task(collect(runner, job()))
    await until(lambda: bool(rows(store)))
    assert rows(store) == [("m", "reserved", "", 0, 0, 0)]
    assert runner.counts == RequestCounts(waiting=1)
    gate.set()
    await task
    assert rows(store)[0][1] == "settled"


async def test_a_request_runs_once_the_engine_prefills(make_runner: Make) -> None:
    gate = asyncio.Event()
    runner = make_runner(FakePool([Prefill("r1", 1, 2), gate, *answer()]), FakeModels())
    async with aclosing(planned(runner, job())) as events:
        await anext(events)
        assert runner.counts == RequestCounts(running=1)
        assert runner.unread_tokens == 1
    assert runner.counts == RequestCounts()
    assert runner.unread_tokens == 0


async def test_a_request_tells_how_far_it_is_and_no_word_of_it(make_runner: Make) -> None:
    runner = make_runner(FakePool(answer()), FakeModels())
    stages = []
    async with aclosing(planned(runner, job(prompt="a secret"))) as events:
        async for _ in events:
            for request in runner.running():
                assert (request.id, request.model, request.plan.nodes) == ("r1", "m", ["this"])
                assert "secret" not in str(request)
                stages.append((request.stage, request.done, request.total, request.completion_tokens))
    assert stages == [
        ("waiting", 0, 0, 0),
        ("reading the prompt", 3, 7, 0),
        ("reading the prompt", 7, 7, 0),
        ("answering", 0, 0, 1),
        ("answering", 0, 0, 2),
    ]
    assert runner.running() == []


@pytest.mark.parametrize("died_after", range(5))
async def test_an_engine_death_anywhere_is_refunded(make_runner: Make, store: Store, died_after: int) -> None:
    pool = FakePool([*answer()[:died_after], EngineDied("The worker died.")])
    runner = make_runner(pool, FakeModels())
    seen: list[Loading | Event] = []

    async def read() -> None:
        async for event in planned(runner, job()):
            seen.append(event)  # noqa: PERF401  (what came before the error counts)

    with pytest.raises(EngineDied, match="The worker died"):
        await read()
    assert seen == answer()[:died_after]
    assert rows(store) == [("m", "refunded", "engine_died", 0, 0, 0)]
    assert runner.counts == RequestCounts(failed=1)


async def test_a_failed_event_becomes_its_error(make_runner: Make, store: Store) -> None:
    failed = Failed("r1", "context_length_exceeded", "Too long.", hint="Shorten it.", param="messages")
    with pytest.raises(ContextLengthExceeded) as caught:
        await collect(make_runner(FakePool([failed]), FakeModels()), job())
    assert (caught.value.hint, caught.value.param) == ("Shorten it.", "messages")
    assert rows(store) == [("m", "refunded", "context_length_exceeded", 0, 0, 0)]


async def test_a_stream_that_just_ends_is_an_error(make_runner: Make, store: Store) -> None:
    with pytest.raises(EngineDied):
        await collect(make_runner(FakePool(answer()[:-1]), FakeModels()), job())
    assert rows(store)[0][1] == "refunded"


async def test_a_bug_is_told_without_its_text(make_runner: Make, store: Store) -> None:
    runner = make_runner(FakePool([RuntimeError("prompt was: secret")]), FakeModels())
    with capture_logs() as logs, pytest.raises(FleetError) as caught:
        await collect(runner, job())
    assert "secret" not in str(caught.value)
    assert "secret" not in str(logs)
    assert rows(store) == [("m", "refunded", "internal_error", 0, 0, 0)]


@pytest.mark.parametrize("steps", range(1, 6))
async def test_leaving_early_cancels_the_engine_and_bills_what_was_made(
    make_runner: Make, store: Store, steps: int
) -> None:
    pool = FakePool([*answer(), asyncio.Event()])
    runner = make_runner(pool, FakeModels())
    async with aclosing(planned(runner, job())) as events:
        for _ in range(steps):
            await anext(events)
    assert pool.cancelled == 1
    prompt, cached = (7, 3) if steps > 1 else (0, 0)
    assert rows(store) == [("m", "settled", "cancelled", prompt, cached, max(0, steps - 3))]
    assert runner.counts == RequestCounts()


async def test_a_cancelled_task_is_the_same(make_runner: Make, store: Store) -> None:
    pool = FakePool([Accepted("r1", 7), Prefill("r1", 7, 7), Delta("r1", "x"), asyncio.Event()])
    runner = make_runner(pool, FakeModels())
    task = asyncio.create_task(collect(runner, job()))
    await until(lambda: runner.counts.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.cancelled == 1
    assert rows(store) == [("m", "settled", "cancelled", 7, 0, 1)]


async def test_the_last_event_is_settled_before_it_is_seen(make_runner: Make, store: Store) -> None:
    async with aclosing(planned(make_runner(FakePool(answer()), FakeModels()), job())) as events:
        async for event in events:
            if isinstance(event, Finished):
                assert rows(store)[0][1:3] == ("settled", "stop")


# ---- finding the model -----------------------------------------------------------------------------------


async def test_attack_a_client_cannot_fill_the_log_with_failures(make_runner: Make) -> None:
    seconds = 0.0
    runner = make_runner(FakePool(answer()), FakeModels(), monotonic=lambda: seconds)

    async def fail(times: int) -> list[Any]:
        with capture_logs() as logs:
            for _ in range(times):
                with pytest.raises(ModelNotFound):
                    await collect(runner, job("nope"))
        return [each for each in logs if each["event"] == "request.failed"]

    assert len(await fail(limits.FAILURES_LOGGED + 7)) == limits.FAILURES_LOGGED
    assert await fail(3) == []
    seconds += limits.REPEAT_LOG_S
    (told,) = await fail(1)
    assert told["left_out"] == 10


async def test_a_model_of_the_hub_is_not_fetched_unasked(make_runner: Make) -> None:
    models = FakeModels(known={"qwen"})
    with pytest.raises(ModelNotFound) as caught:
        await collect(make_runner(FakePool(answer()), models), job("qwen"))
    assert caught.value.hint == "Get it with `fleetctl models pull qwen`."
    assert models.pulls == 0


@pytest.mark.parametrize("name", ["qwen3-embedding-0.6b", "all-minilm-l6-v2"])
async def test_a_model_that_answers_no_chats_is_neither_asked_nor_fetched(
    make_runner: Make, name: str
) -> None:
    models = FakeModels(known={name})
    runner = make_runner(FakePool(answer()), models)
    with pytest.raises(ModelUnsupported, match=f"{name} makes vectors"):
        await collect(runner, job(name))
    assert models.pulls == 0


async def test_the_embedded_model_is_fetched_with_progress(make_runner: Make, store: Store) -> None:
    models = FakeModels(names=[])
    models.gate.set()
    pool = FakePool(answer())
    seen = await collect(make_runner(pool, models, names=ModelNames("tiny")), job(""))
    assert Loading("downloading weights", 2, 2) in seen  # a reader sees the latest, not every step
    assert isinstance(seen[-1], Finished)
    assert models.pulls == 1
    assert rows(store)[0][:2] == ("tiny", "settled")


async def test_an_answer_that_goes_on_after_a_load_is_said_to_be_written(make_runner: Make) -> None:
    events = answer("r1")
    at = next(n for n, event in enumerate(events) if isinstance(event, Delta))
    # Its group was lost: the model is loaded once more, and the text goes on.
    runner = make_runner(FakePool([*events[: at + 1], Loading("warming up"), *events[at:]]), FakeModels())
    stages: list[str] = []
    async with aclosing(planned(runner, job())) as told:
        async for event in told:
            if isinstance(event, Delta | Loading):
                stages += [running.stage for running in runner.running()]
    assert stages[:3] == ["answering", "warming up", "answering"]


async def test_the_request_that_waited_for_a_load_tells_what_each_stage_took(make_runner: Make) -> None:
    traces: list[Trace] = []
    waited = [Loading("starting"), Loading("reading", 0, 2), Loading("reading", 2, 2), *answer("r1")]
    for events in (waited, answer("r1")):
        runner = make_runner(FakePool(events), FakeModels(), record=traces.append, name="mini")
        await collect(runner, job())
    first, second = traces
    stages = [step for step in first.steps if step.parent and first.steps[step.parent].name == "loading"]
    assert [(step.name, step.machine) for step in stages] == [
        ("starting", "mini"), ("reading the files", "mini"),
    ]  # fmt: skip
    # The second one found the model loaded.
    assert {step.name for step in second.steps}.isdisjoint({"loading", "starting"})
    for trace in traces:
        check_steps(trace)


def test_stages_that_come_again_are_listed_again_and_no_more_than_fit() -> None:
    times = StageTimes()
    for now_s, stage in enumerate(["a", "a", "b", "a"]):
        times.enter(stage, now_s)
    times.end(7)
    times.end(9)
    assert times.seconds == [("a", 2), ("b", 1), ("a", 4)]
    for now_s in range(2 * limits.LOAD_STAGES):
        times.enter(f"file {now_s}", now_s)
    assert len(times.seconds) == limits.LOAD_STAGES


async def test_two_first_requests_share_one_download(make_runner: Make) -> None:
    models = FakeModels(names=[])
    runner = make_runner(FakePool(answer()), models)
    first, second = planned(runner, job("tiny", "r1")), planned(runner, job("tiny", "r2"))
    async with aclosing(first), aclosing(second):
        assert await anext(first) == await anext(second) == Loading("downloading weights", 1, 2)
        models.gate.set()
        for events in (first, second):
            assert isinstance([event async for event in events][-1], Finished)
    assert models.pulls == 1


async def test_a_download_is_told_with_its_progress_until_it_ends() -> None:
    models = FakeModels(names=[])
    pulls = Pulls(cast("ModelSource", models))
    assert pulls.running == {}
    async with aclosing(pulls.watch("tiny")) as steps:
        first = await anext(steps)
        assert pulls.running == {"tiny": first}
        models.gate.set()
        async for _ in steps:
            pass
    assert pulls.running == {}


async def test_a_download_that_is_cancelled_before_its_first_step_is_over_for_who_waits_for_it() -> None:
    """As one is that was asked for as the daemon stopped."""
    pulls = Pulls(cast("ModelSource", FakeModels(names=[])))

    async def watched() -> None:
        async for _ in pulls.watch("tiny"):
            pass

    # In this order, within one turn of the loop.
    waiting, closing = asyncio.create_task(watched()), asyncio.create_task(pulls.close())
    async with asyncio.timeout(60.0):
        await closing
        with pytest.raises(Draining):
            await waiting
    assert pulls.running == {}


async def test_the_first_to_leave_does_not_stop_the_others_download(make_runner: Make) -> None:
    models = FakeModels(names=[])
    runner = make_runner(FakePool(answer()), models)
    async with aclosing(planned(runner, job("tiny", "r2"))) as second:
        async with aclosing(planned(runner, job("tiny", "r1"))) as first:
            await anext(first)
            await anext(second)
        assert models.cancelled_pulls == 0
        models.gate.set()
        assert isinstance([event async for event in second][-1], Finished)


async def test_the_last_to_leave_stops_the_download(make_runner: Make, store: Store) -> None:
    models = FakeModels(names=[])
    runner = make_runner(FakePool(answer()), models)
    async with aclosing(planned(runner, job("tiny"))) as events:
        await anext(events)
    assert models.cancelled_pulls == 1
    assert rows(store) == [("tiny", "settled", "cancelled", 0, 0, 0)]
    models.gate.set()
    assert isinstance((await collect(runner, job("tiny", "r2")))[-1], Finished)  # and it can start again
    assert models.pulls == 2


async def test_a_failed_download_reaches_everybody(make_runner: Make, store: Store) -> None:
    models = FakeModels(names=[])
    models.pull_steps = [models.gate, DownloadFailed("The index does not answer.")]
    runner = make_runner(FakePool(answer()), models)
    tasks = [asyncio.create_task(collect(runner, job("tiny", f"r{number}"))) for number in range(3)]
    await until(lambda: runner.counts.waiting == 3 and models.pulls == 1)
    models.gate.set()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, DownloadFailed)
    assert {row[1:3] for row in rows(store)} == {("refunded", "download_failed")}


# ---- bounds and stopping ---------------------------------------------------------------------------------


async def test_the_queue_is_bounded_exactly(make_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUED_REQUESTS", 3)
    gate = asyncio.Event()
    runner = make_runner(FakePool([gate, *answer()]), FakeModels())
    tasks = [asyncio.create_task(collect(runner, job(request_id=f"r{number}"))) for number in range(3)]
    await until(lambda: runner.counts.waiting == 3)
    with pytest.raises(Overloaded, match="limit is 3") as caught:
        await collect(runner, job(request_id="r4"))
    assert caught.value.retry_after_s == 5.0
    gate.set()
    await asyncio.gather(*tasks)
    assert (await collect(runner, job(request_id="r5")))[-1] == answer()[-1]


async def test_draining_refuses_new_work_and_waits_for_old(make_runner: Make) -> None:
    gate = asyncio.Event()
    runner = make_runner(FakePool([Prefill("r1", 1, 1), gate, *answer()]), FakeModels())
    task = asyncio.create_task(collect(runner, job()))
    await until(lambda: runner.counts.running == 1)
    runner.begin_drain()
    with pytest.raises(Draining):
        await collect(runner, job(request_id="r2"))
    drained = asyncio.create_task(runner.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    gate.set()
    assert isinstance((await task)[-1], Finished)
    await asyncio.wait_for(drained, 60)


async def test_what_is_cut_off_by_the_stop_says_so(make_runner: Make, store: Store) -> None:
    gate = asyncio.Event()
    pool = FakePool([Prefill("r1", 1, 1), gate, EngineDied("The worker was told to stop.")])
    runner = make_runner(pool, FakeModels())
    task = asyncio.create_task(collect(runner, job()))
    await until(lambda: runner.counts.running == 1)
    await runner.abandon()
    gate.set()
    with pytest.raises(Draining, match="before the answer was complete"):
        await task
    assert rows(store) == [("m", "refunded", "draining", 0, 0, 0)]


async def test_a_download_cut_off_by_the_stop_says_so(make_runner: Make) -> None:
    models = FakeModels(names=[])
    runner = make_runner(FakePool(answer()), models)
    task = asyncio.create_task(collect(runner, job("tiny")))
    await until(lambda: models.pulls == 1)
    await runner.abandon()
    with pytest.raises(Draining):
        await task
    assert models.cancelled_pulls == 1


# ---- what must never be written down ---------------------------------------------------------------------


async def test_prompt_leak_into_logs_database_or_metrics(
    make_runner: Make, store: Store, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-5f1d-prompt"
    caplog.set_level(logging.DEBUG)
    endings: tuple[list[Any], ...] = (
        answer(text=(canary, canary)),
        [EngineDied("died")],
        [RuntimeError(canary)],
        [Delta("r", canary)],
    )
    with capture_logs() as logs:
        for number, script in enumerate(endings):
            runner = make_runner(FakePool(list(script)), FakeModels())
            this = job(request_id=f"r{number}", prompt=canary)
            (result,) = await asyncio.gather(collect(runner, this), return_exceptions=True)
            assert not isinstance(result, BaseException) or canary not in str(result)
    assert logs
    assert len(rows(store)) == len(endings)
    assert canary not in str(logs)
    assert canary not in caplog.text
    assert canary.encode() not in metrics.render()[0]
    files = [path for path in store.path.parent.iterdir() if path.is_file()]
    assert any(path.stat().st_size > 0 for path in files)
    for path in files:
        assert canary.encode() not in path.read_bytes(), path


# ---- prefills that others help with ----------------------------------------------------------------------

HELPED = Planned("layers", ("studio", "this"), "exact")


class FakeSharing(PipelineStep):
    """Shares what ``may`` says; how it goes is in the pool's script."""

    def __init__(self, *, may: bool = True) -> None:
        self.may = may
        self.asked: list[Job] = []

    def prepare(self, request: Request) -> None:
        assert request.placement.planned == LOCAL
        if request.folder_here is not None:
            self.asked.append(request.job)
            request.attempt.generate = replace(request.attempt.generate, shared=self.may)


async def test_a_job_that_nobody_can_help_with_runs_as_ever(make_runner: Make, metrics: Metrics) -> None:
    sharing = FakeSharing(may=False)
    pool = FakePool(answer())
    runner = make_runner(pool, FakeModels(), features=[sharing])
    assert await collect(runner, job()) == answer()
    assert len(sharing.asked) == 1
    assert shown(metrics, 'fleetd_plan_total{kind="local",reason="only"} 1.0')


async def test_a_shared_answer_is_this_machines_own_and_teaches_no_speed(
    make_runner: Make, store: Store, metrics: Metrics
) -> None:
    long = Timings(queue_s=0.1, prefill_s=1.0, decode_s=0.0)
    finished = Finished("r1", "stop", Usage(prompt_tokens=1000, completion_tokens=1), long)
    speeds = ModelSpeeds()
    pool = FakePool([HELPED, *answer()[:-1], finished])
    runner = make_runner(pool, FakeModels(), features=[FakeSharing()], speeds=speeds)
    events = [event async for event in runner.run(job())]
    assert events == [HELPED, *answer()[:-1], finished]
    assert rows(store)[0][1] == "settled"
    assert store.call(lambda db: db.execute("SELECT node FROM usage").fetchone()) == ("this",)
    assert shown(metrics, 'fleetd_plan_total{kind="layers",reason="only"} 1.0')
    assert speeds.of("m").prefill_tok_s == 0


async def test_tokens_that_are_left_out_teach_no_speed(make_runner: Make) -> None:
    taught = []
    for tokens, kept in ((1000, 0), (9000, 1000)):
        usage = Usage(prompt_tokens=tokens, completion_tokens=1)
        finished = Finished("r1", "stop", usage, Timings(queue_s=0.1, prefill_s=1.0, decode_s=0.0))
        speeds, pool = ModelSpeeds(), FakePool([Accepted("r1", tokens, kept=kept), finished])
        await collect(make_runner(pool, FakeModels(), speeds=speeds), job())
        taught.append(speeds.of("m").prefill_tok_s)
    assert taught[0] == taught[1] > 0


@pytest.mark.parametrize("interleaved", ["", "prefill_interleaved", "decode_interleaved"])
async def test_time_in_which_other_work_was_done_teaches_no_speed(
    make_runner: Make, interleaved: str
) -> None:
    flags = {interleaved: True} if interleaved else {}
    timings = Timings(prefill_s=1.0, decode_s=1.0, **flags)
    finished = Finished("r1", "stop", Usage(900, 0, 100), timings)
    speeds = ModelSpeeds()
    await collect(make_runner(FakePool([Accepted("r1", 900), finished]), FakeModels(), speeds=speeds), job())
    learned = speeds.of("m")
    assert (learned.prefill_tok_s == 0) == (interleaved == "prefill_interleaved")
    assert (learned.decode_tok_s == 0) == (interleaved == "decode_interleaved")


async def test_a_helper_that_fails_is_a_fallback_of_the_plan(make_runner: Make, metrics: Metrics) -> None:
    moved = Planned("local", ("this",), "exact", "studio: it went away.")
    pool = FakePool([HELPED, answer()[0], moved, *answer()[1:]])
    runner = make_runner(pool, FakeModels(), features=[FakeSharing()])
    assert [event async for event in runner.run(job()) if isinstance(event, Planned)] == [HELPED, moved]
    assert shown(metrics, 'fleetd_plan_total{kind="local",reason="fallback"} 1.0')


async def test_a_model_that_has_to_be_fetched_first_is_not_shared(make_runner: Make) -> None:
    sharing = FakeSharing()
    models = FakeModels(names=[])
    models.gate.set()
    await collect(make_runner(FakePool(answer()), models, features=[sharing]), job("tiny"))
    assert sharing.asked == []


async def test_a_request_that_no_model_was_found_for_is_counted_listed_and_in_the_ledger(
    make_runner: Make, store: Store
) -> None:
    """A failure that only a counter knew of: nobody could find out which request it was."""
    traces: list[Trace] = []
    runner = make_runner(
        FakePool(answer()), FakeModels(), record=traces.append, name="mini", monotonic=lambda: 5.0
    )
    with pytest.raises(ModelNotFound, match="nope") as caught:
        await collect(runner, replace(job("nope"), client="claude"))
    assert "Did you mean" in caught.value.hint
    (trace,) = traces
    assert (trace.id, trace.model, trace.outcome) == ("r1", "nope", "failed")
    assert trace.client == "claude"
    assert trace.code == "model_not_found"
    assert trace.summary.startswith("Failed after 0.")
    check_steps(trace)
    assert runner.counts == RequestCounts(failed=1)
    assert [row[:3] for row in rows(store)] == [("nope", "refunded", "model_not_found")]


async def test_an_answer_that_ends_without_an_end_is_a_failure_everywhere(
    make_runner: Make, store: Store
) -> None:
    traces: list[Trace] = []
    runner = make_runner(FakePool(answer("r1")[:-1]), FakeModels(), record=traces.append)
    with pytest.raises(EngineDied):
        await collect(runner, job())
    assert [trace.outcome for trace in traces] == ["failed"]
    assert runner.counts.failed == 1
    assert [row[1] for row in rows(store)] == ["refunded"]


@pytest.mark.parametrize(
    ("folders", "smart", "hint"),
    [
        (
            [("m", 8192, 1000), ("large", 131_072, 9000), ("long", 65_536, 2000)],
            None,
            "m takes 8,192. long, which is on this machine, takes 65,536. Smart prefill that keeps 14% of "
            "the prompt fits: `--keep-ratio 0.14` of `fleetctl chat`, "
            "or `smart_prefill` with a `target_ratio` of 0.14 in a body.",
        ),
        (
            [("m", 8192, 1000)],
            SmartPrefillPolicy(enabled=True),
            "m takes 8,192. No model on this machine takes as many. Shorten it, or get a model with a longer "
            "context: `fleetctl models` lists them.",
        ),
    ],
    ids=["a longer model and smart prefill", "shortened already"],
)
async def test_a_prompt_that_is_too_long_is_told_what_takes_it(
    make_runner: Make, folders: list[tuple[str, int, int]], smart: SmartPrefillPolicy | None, hint: str
) -> None:
    models = FakeModels([name for name, _, _ in folders], [FakeFolder(*folder) for folder in folders])
    failed = Failed("r1", "context_length_exceeded", too_long.sentence(46_921, 8192), hint="Shorten it.")
    with pytest.raises(ContextLengthExceeded) as caught:
        await collect(make_runner(FakePool([failed]), models), msgspec.structs.replace(job(), smart=smart))
    # Clients know its words.
    assert caught.value.message == (
        "The prompt is too long: 46921 tokens > 8192 maximum. "
        "This model's maximum context length is 8192 tokens."
    )
    assert caught.value.hint == hint
