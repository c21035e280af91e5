"""Whatever a worker does, a request ends with a typed error and nothing of the worker stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import fake_worker
import psutil
import pytest
from asking import ask, folder_of, run

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.cpu import openmp_file
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Accepted,
    AssistPrefill,
    Event,
    Finished,
    Heartbeat,
    Loading,
    PrefillWithHelpers,
    StreamTag,
    Tokenized,
)
from fleetd.engine.settings import RingPlace
from fleetd.errors import (
    EngineDied,
    EngineError,
    EngineStalled,
    GroupLost,
    ModelUnloaded,
    OutOfMemory,
    Overloaded,
)
from fleetd.plan.prefill.split import Split

FOLDER = folder_of(Path("/nowhere"), "fake")
Misbehave = Callable[[str], None]


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Misbehave:
    monkeypatch.setattr(limits, "ENGINE_STOP_S", 0.2)
    monkeypatch.setattr(limits, "POOL_CHECK_S", 0.05)

    def behave(behaviour: str) -> None:
        monkeypatch.setattr(EngineProcess, "command", (sys.executable, fake_worker.__file__, behaviour))

    return behave


def _fds() -> int:
    return psutil.Process().num_fds()


@pytest.fixture
async def watched(make_pool: Callable[..., EnginePool], behave: Misbehave) -> AsyncIterator[EnginePool]:
    """A pool with its watchdog; afterwards no process, task or file descriptor may be left."""
    # What an event loop opens once for its first child process is not a leak.
    first = await asyncio.create_subprocess_exec("true", stderr=asyncio.subprocess.PIPE)
    await first.communicate()
    fds, tasks, processes = _fds(), len(asyncio.all_tasks()), set(psutil.Process().children())
    pool = make_pool()
    watch = asyncio.create_task(pool.run())
    yield pool
    watch.cancel()
    await asyncio.wait([watch])
    await pool.close()
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        started = set(psutil.Process().children()) - processes
        left = started, len(asyncio.all_tasks()) - tasks, _fds() - fds
        if not left[0] and left[1] <= 0 and left[2] <= 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"left behind: processes {left[0]}, tasks {left[1]}, file descriptors {left[2]}")


async def drain(pool: EnginePool, request_id: str = "r") -> list[Loading | Event]:
    async with asyncio.timeout(60):
        return [e async for e in pool.stream(FOLDER, ask("<hello>", request_id))]


@pytest.mark.parametrize(
    "behaviour",
    [
        "exits at once",
        "garbage while loading",
        "not UTF-8",
        "garbage",
        "oversized frame",
        "half a frame",
        "closes its socket and lives on",
    ],
)
async def test_a_broken_worker_is_a_dead_engine(
    watched: EnginePool, behave: Misbehave, behaviour: str
) -> None:
    behave(behaviour)
    with pytest.raises(EngineDied):
        await drain(watched)
    (status,) = watched.status()
    assert status.state == "failed"
    assert status.error
    # The next request starts a new worker.
    behave("answers")
    assert len(await drain(watched, "again")) > 0


async def test_a_report_that_cannot_be_fails_its_request_alone(
    watched: EnginePool, behave: Misbehave
) -> None:
    behave("is wrong about the first")
    with pytest.raises(EngineError, match="reported what cannot be"):
        await drain(watched, "first")
    assert isinstance((await drain(watched, "second"))[-1], Finished)
    (status,) = watched.status()
    assert status.state == "ready"


async def test_status_says_what_each_stage_of_the_load_took(watched: EnginePool, behave: Misbehave) -> None:
    behave("answers")
    await drain(watched)
    (status,) = watched.status()
    assert [step.name for step in status.load_steps] == ["starting", "reading"]
    assert all(step.seconds >= 0 for step in status.load_steps)


async def test_what_a_model_s_workers_wrote_is_counted_over_all_of_them(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("writes to the disk")
    monkeypatch.setattr(limits, "ENGINE_STOP_S", 30.0)
    for number in range(2):
        await drain(watched, f"r{number}")
        (status,) = watched.status()
        assert (status.disk_written_bytes, status.disk_dropped) == (number * 1200 + 700, number * 2 + 1)
        assert await watched.unload(FOLDER.name)


@pytest.mark.parametrize("behaviour", ["says nothing", "beats without progress"])
async def test_a_worker_without_progress_is_stalled(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    behave(behaviour)
    monkeypatch.setattr(limits, "ENGINE_STALL_S", 0.3)
    with pytest.raises(EngineStalled):
        await drain(watched)


@pytest.mark.one_loop
async def test_a_rank_without_progress_is_a_loss_of_its_group(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for others: what is under way goes another way, as for every loss of a rank."""
    monkeypatch.setattr(limits, "ENGINE_STALL_S", 0.2)
    monkeypatch.setattr(limits, "RANK_SILENT_S", 3600.0)
    behave("accepts one")
    async with watched.lent.ranked(FOLDER, RingPlace(0, 2, 1, 2)) as engine:
        with pytest.raises(GroupLost, match="no progress"):
            async for _ in engine.stream(ask("<hello>", "r")):
                pass


@pytest.mark.one_loop
async def test_a_gpu_has_the_time_that_its_kernels_take_to_compile(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100's host compiled one for 50 s in the middle of a step; a smaller host takes longer."""
    behave("says nothing on a GPU")
    monkeypatch.setattr(limits, "ENGINE_STALL_S", 0.1)
    monkeypatch.setattr(limits, "ENGINE_COMPILE_S", 0.7)
    with pytest.raises(EngineStalled, match=r"made no progress for 1 s\."):
        await drain(watched)


@pytest.mark.one_loop
async def test_a_worker_that_waits_for_other_machines_is_alive(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a beat that is given here: it has made no step, and can only wait."""
    behave("accepts one")
    events = pool.stream(FOLDER, ask("<hello>", "r"))
    async for event in events:
        if isinstance(event, Accepted):
            break
    engine = pool.engine(FOLDER)
    assert engine is not None
    monkeypatch.setattr(limits, "ENGINE_STALL_S", -1.0)
    engine._on_heartbeat(Heartbeat(0, prefilling=1, blocked=True), asyncio.get_running_loop().time() + 3600.0)
    await engine.check()
    assert engine.error is None
    await events.aclose()


@pytest.mark.one_loop
async def test_a_worker_that_hangs_after_waiting_for_other_machines_is_stalled(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("waits for others, then hangs")
    monkeypatch.setattr(limits, "ENGINE_STALL_S", 0.5)
    with pytest.raises(EngineStalled):
        await drain(watched)


async def test_an_assist_of_a_worker_that_dies_ends_with_it(watched: EnginePool, behave: Misbehave) -> None:
    behave("closes its socket and lives on")
    await watched.load(FOLDER)
    engine = watched.engine(FOLDER)
    assert engine is not None
    running = asyncio.create_task(drain(watched))
    split = Split("layers", (0, 1, 2), 2, 0, 300, 64)
    with pytest.raises(EngineDied):
        await anext(engine.assist(AssistPrefill("a", split, 0)))
    with pytest.raises(EngineDied):
        await running
    assert watched.engine(FOLDER) is None
    # Too late for any of these; a socket that is given is closed all the same.
    engine.share(PrefillWithHelpers("r", split, 1.0))
    engine.alone("r")
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(EngineDied):
            await engine.give_stream(StreamTag("r", "in", bytes(32), "acceptor"), theirs)
        assert ours.recv(1) == b""


@pytest.mark.one_loop
async def test_a_worker_that_takes_no_streams_holds_nobody_up(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("answers")
    monkeypatch.setattr(limits, "HANDOFF_S", 0.2)
    await watched.load(FOLDER)
    engine = watched.engine(FOLDER)
    assert engine is not None
    tag = StreamTag("r", "x" * 60_000, bytes(32), "acceptor")
    pairs = [socket.socketpair() for _ in range(12)]
    given = [asyncio.create_task(engine.give_stream(tag, theirs)) for _, theirs in pairs]
    await asyncio.sleep(0)
    given[-1].cancel()  # its thread closes the socket all the same
    outcomes = await asyncio.gather(*given, return_exceptions=True)
    assert any(isinstance(outcome, EngineDied) for outcome in outcomes)
    assert len(await drain(watched)) > 0
    await watched.unload("fake")
    for ours, _ in pairs:
        with ours:
            ours.settimeout(60)
            assert await asyncio.to_thread(ours.recv, 1) == b""


@pytest.mark.one_loop
async def test_a_worker_that_hangs_while_loading(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("hangs while loading")
    monkeypatch.setattr(limits, "ENGINE_LOAD_S", 0.5)
    with pytest.raises(EngineStalled, match="did not load"):
        await drain(watched)


@pytest.mark.one_loop
async def test_a_load_that_stands_still_is_ended_long_before_its_whole_time_is_over(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request, and the load of another model, have a new worker."""
    behave("hangs while loading")
    monkeypatch.setattr(limits, "LOAD_STALL_S", 0.5)
    monkeypatch.setattr(limits, "LOAD_LATE", 0.0)
    first, waiting = watched.loading(FOLDER), watched.loading(folder_of(Path("/nowhere"), "other"))
    await anext(first)
    assert (await anext(waiting)).stage == "waiting for fake to load"
    with pytest.raises(EngineStalled, match="read and computed nothing"):
        async for _ in first:
            pass
    behave("answers")
    monkeypatch.setattr(limits, "LOAD_STALL_S", 600.0)
    async for _ in waiting:
        pass
    assert isinstance((await drain(watched))[-1], Finished)


@pytest.mark.one_loop
async def test_a_worker_that_the_kernel_cannot_end_keeps_no_request_waiting(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk that is gone."""
    behave("hangs while loading")
    monkeypatch.setattr(limits, "LOAD_STALL_S", 0.5)
    monkeypatch.setattr(limits, "LOAD_LATE", 0.0)
    monkeypatch.setattr(limits, "ENGINE_KILL_S", 0.1)
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with pytest.raises(EngineStalled, match="read and computed nothing"):
        await drain(watched)
    (left,) = watched.status()
    behave("answers")
    monkeypatch.setattr(limits, "LOAD_STALL_S", 600.0)
    assert isinstance((await drain(watched))[-1], Finished)
    assert left.pid is not None
    kill(left.pid, signal.SIGKILL)
    assert watched.status()[0].pid != left.pid


@pytest.mark.one_loop
async def test_a_worker_that_refuses_is_not_left_to_linger(watched: EnginePool, behave: Misbehave) -> None:
    behave("refuses, then lives on")
    with pytest.raises(OutOfMemory, match="does not fit") as caught:
        await drain(watched)
    assert caught.value.hint == "Try less."


async def test_a_flood_of_events_ends_one_request_and_costs_bounded_memory(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("floods")
    monkeypatch.setattr(limits, "EVENTS_QUEUED", 50)

    async def read_slowly() -> None:
        async for _ in watched.stream(FOLDER, ask("<hello>")):
            await asyncio.sleep(0.005)

    with pytest.raises(Overloaded):
        await asyncio.wait_for(read_slowly(), 60)


@pytest.mark.one_loop
async def test_events_of_other_requests_are_not_delivered(watched: EnginePool, behave: Misbehave) -> None:
    behave("others' events")
    events = await drain(watched)
    assert [type(e).__name__ for e in events if not isinstance(e, Loading)] == ["Accepted", "Finished"]


@pytest.mark.one_loop
async def test_a_prompt_that_is_tokenized_waits_and_is_not_taken_for_a_template_without_end(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("tokenizes, then computes for others")
    asked = ask("<hello>")
    async with contextlib.aclosing(watched.stream(FOLDER, asked)) as events:
        told = await anext(event async for event in events if not isinstance(event, Loading))
        assert told == Tokenized(asked.id, 5)
        engine = watched.engine(FOLDER)
        assert engine is not None
        monkeypatch.setattr(limits, "RENDER_S", -1.0)
        await engine.check()
        assert (engine.error, engine.status.waiting) == (None, 1)
    assert engine.status.waiting == 0


@pytest.mark.one_loop
@pytest.mark.parametrize("ends", ["is killed", "is unloaded"])
async def test_what_openmp_keeps_of_a_worker_is_removed_with_it(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str
) -> None:
    """The library removes its file in /dev/shm only at a normal exit."""
    monkeypatch.setattr(openmp_file, "FOLDER", tmp_path)
    behave("long line on stderr")
    await drain(watched)
    engine = watched.engine(FOLDER)
    assert engine is not None
    files = [tmp_path / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (engine.pid, 1)]
    for file in files:
        file.touch()
    if ends == "is killed":
        async with engine._changed:
            engine.kill()
            await engine._changed.wait()
    else:
        await watched.unload("fake")
    assert [file.exists() for file in files] == [False, True]


@pytest.mark.one_loop
async def test_what_openmp_keeps_of_workers_killed_with_their_daemon_is_removed_by_the_next(
    watched: EnginePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(openmp_file, "FOLDER", tmp_path)
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    mine = [tmp_path / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (ended.pid, os.getpid())]
    others = [tmp_path / f"__KMP_REGISTERED_LIB_{ended.pid}_{os.getuid() + 1}", tmp_path / "other"]
    for file in [*mine, *others]:
        file.touch()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await watched.run()
    assert [file.exists() for file in [*mine, *others]] == [False, True, True, True]


@pytest.mark.one_loop
async def test_a_long_line_on_stderr_does_no_harm(watched: EnginePool, behave: Misbehave) -> None:
    behave("long line on stderr")
    assert len(await drain(watched)) >= 2


@pytest.mark.one_loop
async def test_a_worker_deaf_to_shutdown_is_killed(watched: EnginePool, behave: Misbehave) -> None:
    behave("deaf to shutdown")
    await drain(watched)
    async with asyncio.timeout(60):
        assert await watched.unload("fake")


async def test_unloading_during_a_load_ends_the_waiting_request(
    watched: EnginePool, behave: Misbehave
) -> None:
    behave("hangs while loading")
    request = asyncio.create_task(drain(watched))
    async with asyncio.timeout(60):
        while not (watched.status() and watched.status()[0].stage == "reading"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await watched.unload("fake")
    with pytest.raises(ModelUnloaded, match="fake was unloaded"):
        await request


@pytest.mark.one_loop
async def test_attack_a_client_that_wants_no_model_kept_ends_nobodys_answer(
    watched: EnginePool, behave: Misbehave
) -> None:
    """``keep_alive`` 0 of another client is for the time after the last request."""
    behave("accepts one")
    events = watched.stream(FOLDER, ask("<hello>", "r"))
    async for event in events:
        if isinstance(event, Accepted):
            break
    watched.keep("fake", 0)
    engine = watched.engine(FOLDER)
    assert engine is not None
    assert (engine.idle_s, watched.stays_s("fake")) == (0, 0)
    assert not engine.idle_s > watched.stays_s("fake"), "only what is idle for longer is unloaded"
    watched.pinned = lambda: {"fake"}
    assert watched.stays_s("fake") == math.inf, "what is pinned stays"
    await events.aclose()


@pytest.mark.one_loop
async def test_a_request_whose_model_is_unloaded_hears_of_that_and_not_of_a_death(
    watched: EnginePool, behave: Misbehave
) -> None:
    behave("accepts one")
    events = watched.stream(FOLDER, ask("<hello>", "r"))
    async for event in events:
        if isinstance(event, Accepted):
            break
    assert await watched.unload("fake")
    with pytest.raises(ModelUnloaded):
        await anext(events)


async def test_a_worker_that_cannot_be_started(
    watched: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineProcess, "command", ("/nowhere/python",))
    for request_id in ("one", "two"):
        with pytest.raises(EngineDied, match="could not be started"):
            await drain(watched, request_id)
    behave("answers")
    await drain(watched, "three")


# At which turn of the loop it is done; the quick run has every second one on each of the two loops.
@pytest.mark.parametrize("turns", range(6))
async def test_a_request_cancelled_while_the_worker_starts_does_not_block_the_next(
    watched: EnginePool, behave: Misbehave, turns: int
) -> None:
    behave("answers")
    request = asyncio.create_task(drain(watched, "gone"))
    for _ in range(turns):
        await asyncio.sleep(0)
    request.cancel()
    await asyncio.wait([request])
    await drain(watched, "next")


@pytest.mark.parametrize("turns", range(1, 7))
async def test_unloading_while_the_worker_starts_leaves_none(
    watched: EnginePool, behave: Misbehave, turns: int
) -> None:
    behave("answers")
    request = asyncio.create_task(drain(watched))
    for _ in range(turns):
        await asyncio.sleep(0)
    await watched.unload("fake")
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    # Unloaded before it began, or in the middle.
    assert isinstance(outcome, list | EngineDied)
    await watched.close()
    assert watched.status() == []


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("behaviour", ["answers", "deaf to shutdown"])
async def test_an_unload_that_is_cancelled_ends_the_worker_all_the_same(
    watched: EnginePool, behave: Misbehave, behaviour: str, turns: int
) -> None:
    """As a request is that unwinds because of one loss while another one cancels it."""
    behave(behaviour)
    await drain(watched)
    process = watched.table.models["fake"].first._process
    unloading = asyncio.create_task(watched.unload("fake"))
    for _ in range(turns):
        await asyncio.sleep(0)
    unloading.cancel()
    await asyncio.wait([unloading])
    if turns == 0:  # it had not begun
        await watched.unload("fake")
    assert watched.status() == []
    assert process is not None
    async with asyncio.timeout(30):
        await process.wait()
    await watched.close()
    assert watched.held_bytes == 0
    assert watched.table._ending == []


@pytest.mark.parametrize("turns", range(24))
async def test_a_rank_whose_request_ends_twice_leaves_no_worker(
    watched: EnginePool, behave: Misbehave, turns: int
) -> None:
    """At whichever moment of its life: its load fails, as its machine is lost, and then it is cancelled."""
    behave("answers")
    place = RingPlace(1, 2, 1, 2)

    async def served() -> None:
        async with watched.lent.ranked(FOLDER, place):
            await asyncio.Event().wait()

    serving = asyncio.create_task(served())
    for _ in range(turns):
        await asyncio.sleep(0)
    # The first one unwinds it; the second one comes in the middle of that.
    serving.cancel()
    for _ in range(turns // 2 % 4):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving])
    await watched.close()
    assert watched.status() == []
    # Until processes, descriptors and tasks are those of before: see ``watched``.


@pytest.mark.one_loop
async def test_two_models_load_side_by_side(watched: EnginePool, behave: Misbehave) -> None:
    behave("answers")
    names = ["one", "two", "one", "two"]
    await asyncio.gather(
        *(run(watched, folder_of(Path("/nowhere"), n), ask("x", f"r{i}")) for i, n in enumerate(names))
    )
    assert sorted(s.model for s in watched.status()) == ["one", "two"]
    assert os.getpid() not in [s.pid for s in watched.status()]


async def test_closing_many_streams_leaves_no_claim_behind(watched: EnginePool, behave: Misbehave) -> None:
    behave("floods")
    for i in range(4):
        events = watched.stream(FOLDER, ask("<hello>", f"r{i}"))
        async for event in events:
            if not isinstance(event, Loading):
                break
        await events.aclose()
        await watched.unload("fake")
    assert not watched.table.in_use("fake")


@pytest.mark.one_loop
async def test_what_a_worker_measured_again_takes_the_place_of_what_it_measured_at_load(
    watched: EnginePool, behave: Misbehave
) -> None:
    behave("measures again")
    await drain(watched)
    async with asyncio.timeout(60):
        while not (status := watched.status()[0]).speed.prefill_tok_s:  # noqa: ASYNC110  (told a moment later)
            await asyncio.sleep(0.01)
    assert status.speed == MeasuredSpeed(500.0, 40.0, 1e-6, 0.01)


# ---- A system that is short of memory --------------------------------------------------------------------


@pytest.mark.one_loop
async def test_a_critical_shortage_ends_idle_workers_and_none_that_is_used(
    pool: EnginePool, behave: Misbehave
) -> None:
    behave("answers")
    await pool.load(FOLDER)
    with pool.table.claim("fake"):
        await pool.relieve("critical")
        assert pool.engine(FOLDER) is not None
    # Not twice within a moment: what was given back shows only then.
    await pool.relieve("critical")
    assert pool.engine(FOLDER) is not None
    await pool.relieve("normal")
    await pool.relieve("critical")
    assert pool.engine(FOLDER) is None


@pytest.mark.one_loop
async def test_a_warning_ends_what_was_idle_for_a_while(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("answers")
    await pool.load(FOLDER)
    await pool.relieve("warning")
    assert pool.engine(FOLDER) is not None
    monkeypatch.setattr(limits, "PRESSURE_IDLE_S", 0.0)
    monkeypatch.setattr(limits, "PRESSURE_STEP_S", 0.0)
    await pool.relieve("warning")
    assert pool.engine(FOLDER) is None


@pytest.mark.one_loop
async def test_a_pinned_model_ends_only_where_the_shortage_is_critical(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("answers")
    monkeypatch.setattr(limits, "PRESSURE_IDLE_S", 0.0)
    monkeypatch.setattr(limits, "PRESSURE_STEP_S", 0.0)
    pinned = {"fake"}
    monkeypatch.setattr(pool, "pinned", lambda: pinned)
    await pool.load(FOLDER)
    await pool.relieve("warning")
    assert not await pool.table.evict_idle("memory is needed", kept=pool.pinned())
    assert pool.stays_s("fake") == math.inf
    (status,) = pool.status()
    assert status.pinned
    assert not status.evictable
    pinned.clear()
    assert pool.status()[0].evictable
    pinned.add("fake")
    await pool.relieve("critical")
    assert pool.status() == []


async def test_the_pool_asks_by_itself(make_pool: Callable[..., EnginePool], behave: Misbehave) -> None:
    behave("answers")
    pool = make_pool()
    await pool.load(FOLDER)
    pool.pressure = lambda: "critical"
    worker = pool.table.models["fake"].first._process
    assert worker is not None
    watch = asyncio.create_task(pool.run())
    async with asyncio.timeout(60):
        await worker.wait()
    watch.cancel()
    assert pool.engine(FOLDER) is None


@pytest.mark.one_loop
async def test_workers_are_told_what_others_hold(pool: EnginePool, behave: Misbehave) -> None:
    behave("answers")
    await pool.load(FOLDER)
    first = pool.table.models["fake"].first
    assert first.settings.held_bytes == 0
    held = pool.held_bytes
    assert held % (256 * limits.MIB) == 0
    assert held >= first.memory_bytes
    await pool.load(folder_of(Path("/nowhere"), "second"))
    assert pool.table.models["second"].first.settings.held_bytes == held


@pytest.mark.one_loop
async def test_of_two_loads_that_begin_at_the_same_moment_the_second_counts_the_first(
    pool: EnginePool, behave: Misbehave
) -> None:
    """The first one's earlier worker has failed and lives on: while it is ended, the other load begins."""
    behave("refuses, then lives on")
    with pytest.raises(OutOfMemory):
        await pool.load(FOLDER)
    behave("answers")
    second = folder_of(Path("/nowhere"), "second")
    await asyncio.gather(pool.load(FOLDER), pool.load(second))
    held = [model.first.settings.held_bytes for model in pool.table.models.values()]
    assert sorted(held) == [0, 256 * limits.MIB]


@pytest.mark.one_loop
async def test_a_worker_holds_memory_until_it_has_ended_and_none_after_it_has_died(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("deaf to shutdown")
    monkeypatch.setattr(limits, "ENGINE_STOP_S", 3600.0)
    await pool.load(FOLDER)
    engine = pool.table.models["fake"].first
    unloading = asyncio.create_task(pool.unload("fake"))
    await asyncio.sleep(0)
    assert pool.status() == []
    assert pool.held_bytes == 256 * limits.MIB
    engine.kill()
    assert await unloading
    assert pool.held_bytes == 0
    behave("answers")
    await pool.load(FOLDER)
    died = asyncio.Event()
    engine = pool.table.models["fake"].first
    engine.on_exit = lambda _: died.set()
    engine.kill()
    await died.wait()
    assert (pool.status()[0].state, pool.held_bytes) == ("failed", 0)


@pytest.mark.one_loop
async def test_who_waits_for_a_load_hears_that_it_was_never_started(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("answers")
    begun, spawn = asyncio.Event(), EngineProcess._spawn

    async def never(engine: EngineProcess, *sockets: socket.socket) -> asyncio.subprocess.Process:
        if engine.settings.name == "second":
            return await spawn(engine, *sockets)
        begun.set()
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(EngineProcess, "_spawn", never)
    first = asyncio.create_task(pool.load(FOLDER))
    await begun.wait()
    waiting = pool.loading(folder_of(Path("/nowhere"), "second"))
    assert (await anext(waiting)).stage == "waiting for fake to load"
    after = asyncio.create_task(anext(waiting))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(60):
        assert (await after).stage != "waiting for fake to load"
        async for _ in waiting:
            pass
    assert [status.model for status in pool.status()] == ["second"]


@pytest.mark.one_loop
async def test_earlier_workers_hear_what_later_ones_take_of_what_they_were_given(
    pool: EnginePool, behave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker claims what its requests were promised, too."""
    behave("answers")
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(
        EngineProcess, "taken_elsewhere", lambda engine, n: told.append((engine.settings.name, n))
    )
    await pool.load(FOLDER)
    pool.share_memory()
    assert told.pop() == ("fake", 0)
    await pool.load(folder_of(Path("/nowhere"), "second"))
    first = pool.table.models["fake"].first
    pool.share_memory()
    assert told == [("fake", 256 * limits.MIB), ("second", 0)]
    first._on_heartbeat(Heartbeat(1, kv_bytes=limits.GIB, prefix_bytes=limits.GIB, memory_bytes=5), 0.0)
    assert first.claimed_bytes == 1 + 2 * limits.GIB
    told.clear()
    pool.share_memory()
    # Of which it had 256 MiB, rounded, when the second one was loaded.
    assert told == [("fake", 256 * limits.MIB), ("second", 2 * limits.GIB)]
    await pool.unload("second")
    told.clear()
    pool.share_memory()
    assert told == [("fake", 0)]


# ---- a model in several workers --------------------------------------------------------------------------


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """Every model is loaded by two workers; all that were made."""
    one, made = WorkerMaker.workers, list[EngineProcess]()

    def two(maker: WorkerMaker, *given: Any) -> list[EngineProcess]:
        made.extend(workers := [*one(maker, *given), *one(maker, *given)])
        return workers

    monkeypatch.setattr(WorkerMaker, "workers", two)
    return made


async def both_ended(workers: Sequence[EngineProcess]) -> None:
    async with asyncio.timeout(60):
        for worker in workers:
            if worker._process is not None:
                await worker._process.wait()


async def test_what_two_workers_hold_of_one_model_counts_together_until_both_are_unloaded(
    watched: EnginePool, behave: Misbehave, in_two: list[EngineProcess]
) -> None:
    behave("answers")
    assert isinstance((await drain(watched))[-1], Finished)
    (model,) = watched.table.models.values()
    assert (model.state, [worker.state for worker in model.workers]) == ("ready", ["ready", "ready"])
    for worker in model.workers:
        worker._on_heartbeat(Heartbeat(1, kv_bytes=limits.GIB, memory_bytes=limits.GIB), 0.0)
    assert watched.held_bytes >= 2 * limits.GIB
    (status,) = watched.status()
    assert (status.memory_bytes, status.kv_bytes) == (2 * limits.GIB, 2 * limits.GIB)
    assert await watched.unload("fake")
    assert watched.held_bytes == 0
    assert not any(psutil.pid_exists(worker.pid or 0) for worker in model.workers)


@pytest.mark.parametrize("dies", [0, 1])
async def test_if_one_of_two_workers_dies_both_are_ended_and_the_next_request_starts_both(
    watched: EnginePool, behave: Misbehave, in_two: list[EngineProcess], dies: int
) -> None:
    behave("accepts one")
    asking = asyncio.create_task(drain(watched))
    async with asyncio.timeout(60):
        while not (model := watched.table.models.get("fake")) or not model.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    model.workers[dies].kill()
    with pytest.raises(EngineDied):
        await asking
    await both_ended(model.workers)
    assert (model.state, model.lost) == ("failed", model.workers[dies])
    assert watched.held_bytes == 0
    behave("answers")
    assert isinstance((await drain(watched, "again"))[-1], Finished)
    # It is one death of the model, whichever worker died.
    assert [worker.restarts for worker in watched.table.models["fake"].workers] == [1, 1]


async def test_of_two_workers_none_is_left_if_one_does_not_load(
    watched: EnginePool, behave: Misbehave, in_two: list[EngineProcess]
) -> None:
    behave("exits at once")
    with pytest.raises(EngineDied):
        await drain(watched)
    assert len(in_two) == 2
    await both_ended(in_two)
    # The model is not kept if the first worker ends before the second one is started.
    assert [model.state for model in watched.table.models.values()] in ([], ["failed"])
