"""Stopping: what runs is finished, what is new is refused, and nothing holds the process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fakes import FakeModels, FakePool, answer

from fleetd import limits
from fleetd.app import Daemon
from fleetd.config import Config, FleetSettings, HttpSettings
from fleetd.control.daemon_status import EngineStatus
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.protocol import Accepted, Delta, Prefill
from fleetd.errors import EngineDied
from fleetd.process.notify import Notifier
from fleetd.storage import paths
from fleetd.storage.paths import HomeFolder


@dataclass
class Engines(FakePool):
    """A pool whose closing ends what it streams, as the real one's does."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: bool = False
    held_bytes: int = 0
    # What plans groups and cuts is put here.
    maker: SimpleNamespace = field(default_factory=SimpleNamespace)
    recut: SimpleNamespace = field(default_factory=SimpleNamespace)
    lent: None = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def status(self) -> list[Any]:
        return []

    def forget_origins(self, labels: list[str]) -> None:
        pass

    def engine(self, folder: Any) -> None:
        """Nobody can look into it: what it streams is made up."""

    async def close(self) -> None:
        self.closed.set()
        if self.hangs:
            await asyncio.Event().wait()


@dataclass
class RunningDaemon:
    daemon: Daemon
    task: asyncio.Task[None]
    session: aiohttp.ClientSession
    last_resorts_s: list[float]

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def chat(self, *, stream: bool = True) -> Any:
        body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        return self.session.post("http://localhost/v1/chat/completions", json=body)


Start = Callable[..., Any]

# Sooner than a drain that waits for answers; read before any test makes drains short.
SOONER_S = limits.DRAIN_S / 2


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run a daemon over fake engines on this test's loop."""

    @asynccontextmanager
    async def running(pool: Engines, models: FakeModels | None = None) -> AsyncIterator[RunningDaemon]:
        home = HomeFolder(tmp_path / "h")
        paths.prepare(home)
        config = Config(
            http=HttpSettings(listen="127.0.0.1:0"), fleet=FleetSettings(listen="127.0.0.1:0", mdns=False)
        )
        resorts: list[float] = []
        daemon = Daemon(
            config,
            home,
            pool=pool,  # type: ignore[arg-type]  # the fake has what the daemon uses
            models=models or FakeModels(found=[]),  # type: ignore[arg-type]
            notifier=Notifier({}),
            exit_after=resorts.append,
        )
        task = asyncio.create_task(daemon.serve())
        try:
            async with asyncio.timeout(60):
                while not daemon.status().ready:  # noqa: ASYNC110  (readiness is a figure in status)
                    await asyncio.sleep(0.005)
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(home.socket))) as session:
                yield RunningDaemon(daemon, task, session, resorts)
                await ended(task)
        finally:
            task.cancel()
            await asyncio.wait([task])
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)

    return running


async def ended(task: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait([task], timeout=SOONER_S)
    assert done, "the daemon did not stop"
    task.result()


async def read_until(lines: aiohttp.StreamReader, wanted: str) -> None:
    async with asyncio.timeout(60):
        while wanted not in (line := (await lines.readline()).decode()):
            assert line, f"the stream ended before {wanted!r}"


async def rest(response: aiohttp.ClientResponse) -> str:
    async with asyncio.timeout(60):
        return (await response.read()).decode()


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_running_answer_is_finished_and_new_work_refused(start: Start) -> None:
    gate = asyncio.Event()
    pool = Engines([Accepted("r", 1), Prefill("r", 1, 1), Delta("r", "first"), gate, *answer()[3:]])
    async with start(pool) as running:
        async with running.chat() as response:
            await read_until(response.content, "first")
            running.terminate()
            await until(lambda: running.daemon.status().draining)
            async with running.chat(stream=False) as late:
                assert late.status == 503
                assert (await late.json())["error"]["code"] == "draining"
            async with running.session.get("http://localhost/health") as health:
                assert health.status == 503
            assert not running.task.done()
            gate.set()
            text = await rest(response)
            assert " world" in text
            assert text.rstrip().endswith("data: [DONE]")
        await ended(running.task)
    # The second one is for threads that read on when all is closed: a model's first digest takes minutes.
    assert running.last_resorts_s == [
        limits.DRAIN_S + 2 * limits.ENGINE_STOP_S + limits.STOP_S,
        limits.STOP_S,
    ]
    assert running.last_resorts_s[0] < 45  # what systemd waits before it kills


async def test_an_answer_that_outlives_the_drain_ends_with_a_reason(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DRAIN_S", 0.05)
    pool = Engines()
    pool.script = [Delta("r", "first"), pool.closed, EngineDied("The worker was told to stop.")]
    async with start(pool) as running:
        async with running.chat() as response:
            await read_until(response.content, "first")
            running.terminate()
            text = await rest(response)
    error = json.loads(next(line for line in text.splitlines() if '"error"' in line).removeprefix("data: "))
    assert error["error"]["code"] == "draining"
    assert "[DONE]" not in text


async def test_a_second_signal_does_not_wait(start: Start) -> None:
    pool = Engines()
    pool.script = [Delta("r", "first"), pool.closed, EngineDied("The worker was told to stop.")]
    async with start(pool) as running:
        async with running.chat() as response:
            await read_until(response.content, "first")
            running.terminate()
            await until(lambda: running.daemon.status().draining)
            running.terminate()
            await ended(running.task)
            assert "draining" in await rest(response)
    assert running.last_resorts_s[1] == limits.STOP_S


async def test_engines_that_do_not_stop_do_not_hold_the_daemon(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENGINE_STOP_S", 0.05)
    async with start(Engines(hangs=True)) as running:
        running.terminate()
        await ended(running.task)


async def test_an_idle_daemon_stops_at_once(start: Start) -> None:
    async with start(Engines()) as running:
        async with running.session.get("http://localhost/health/live") as response:
            assert response.status == 200  # leaves an idle keep-alive connection behind
        running.terminate()
        await ended(running.task)


def test_the_last_resort_ends_a_process_whose_threads_hang() -> None:
    code = "import time; from fleetd.app import _exit_after; _exit_after(0.1); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
    assert done.returncode == 0


@dataclass
class SilentDisk(FakeModels):
    """Looking a model up does not end before it answers."""

    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)

    def resolve(self, ref: str) -> Any:
        self.asked.set()
        assert self.answers.wait(60)
        return super().resolve(ref)


async def test_a_disk_that_does_not_answer_holds_up_no_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SilentDisk(found=[])
    try:
        async with start(Engines(answer()), disk) as running:
            monkeypatch.setattr(limits, "STOP_S", 0.05)
            asked = [asyncio.create_task(rest_of(running.chat(stream=False))) for _ in range(12)]
            assert await asyncio.to_thread(disk.asked.wait, 60)
            await until(lambda: running.daemon.status().requests.waiting == 12)
            running.terminate()
            assert {status for status, _ in await asyncio.gather(*asked)} == {503}
            await ended(running.task)
    finally:
        disk.answers.set()


async def rest_of(asking: Any) -> tuple[int, str]:
    async with asking as response:
        return response.status, await rest(response)


async def test_the_status_tells_speeds_as_answers_have_corrected_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Engines(answer())
    at_load = MeasuredSpeed(200.0, 3.3, doubt="CPU 90 % busy with other programs when measured")
    monkeypatch.setattr(pool, "status", lambda: [EngineStatus(model="m", state="ready", speed=at_load)])
    async with start(pool) as running:
        assert running.daemon.status().engines[0].speed == at_load
        speeds = running.daemon._machine.speeds
        speeds.seed("m", at_load, now_s=0.0)
        for _ in range(9):
            speeds.ran(
                "m",
                prompt_tokens=0,
                cached_tokens=0,
                completion_tokens=401,
                prefill_s=0.0,
                decode_s=10.0,
                now_s=1.0,
            )
        assert running.daemon.status().engines[0].speed.decode_tok_s == pytest.approx(40, rel=0.05)
        running.terminate()
