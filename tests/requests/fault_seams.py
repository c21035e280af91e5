"""One machine of those that faults strike, and the places at which they do.

A worker and its pool are real; a request's stream, a disk and a log can be told to fail.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from asking import GREEDY
from own_resources import POOL_THREADS, grown, of_worker
from request_events import RequestEvents
from wire import Effect

from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Generate, TokenPrompt
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.node import Node
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.storage.store import Store

WITHIN_S = 60.0
DIGEST = "d" * 64
GARBAGE = b"\xc1 no message"


class FullDisk:
    """Where logs go."""

    def write(self, _text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return False


class FullableStore(Store):
    full = False

    def _attempt(self, work: Any) -> Any:
        def on_a_full_disk(db: sqlite3.Connection) -> Any:
            result = work(db)
            if self.full:
                raise sqlite3.OperationalError("database or disk is full")
            return result

        return super()._attempt(on_a_full_disk)


class TappedStream:
    """A request's stream, seen from one machine."""

    def __init__(
        self, stream: Any, point: Callable[[str], Effect], sends: list[str], gets: list[str]
    ) -> None:
        self._stream, self._point, self._sends, self._gets = stream, point, sends, gets

    def send(self, body: bytes) -> None:
        if body != ALIVE and self._sends:
            self._point(self._sends.pop(0))
        self._stream.send(body)

    async def receive(self) -> bytes | None:
        body: bytes | None = await self._stream.receive()
        if body and self._gets and self._point(self._gets.pop(0)) is Effect.SPOIL:
            return GARBAGE
        return body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass
class FaultMachine:
    name: str
    node: Node
    pool: EnginePool
    folder: Any
    killed: EngineProcess | None = None
    # Of its worker, when it had nothing to do; by process, of which a later one may have the number again.
    baseline: dict[psutil.Process, dict[str, int]] = field(default_factory=dict)

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id

    @property
    def card(self) -> Card:
        model = ModelCard(
            self.folder.name, DIGEST, state="loaded", memory_bytes=1000, speed=MeasuredSpeed(100.0)
        )
        return Card(
            self.node_id, 1, 1, name=self.name, models=[model], available_bytes=1 << 30, usable_bytes=1 << 30
        )

    @property
    def engine(self) -> EngineProcess | None:
        return self.pool.engine(self.folder)

    def resolve(self, ref: str) -> Any:
        assert ref in (self.folder.name, "m")
        return self.folder

    in_part = resolve

    def digest(self, _folder: Any) -> str:
        return DIGEST

    def needs_pull(self, _ref: str) -> bool:
        return False

    async def alone(self, request: Generate) -> RequestEvents:
        return await told(self.pool.stream(self.folder, request))

    async def ready(self) -> None:
        """With a worker whose resources, doing nothing, are known."""
        if self.killed is not None:
            await settled(lambda: self.killed.state == "failed", f"{self.name}'s worker is known to be gone")  # type: ignore[union-attr]
            self.killed = None
        await self.pool.load(self.folder)
        assert self.engine is not None
        worker = psutil.Process(self.engine.pid)
        if worker not in self.baseline:
            await self.alone(request("warm", 10, -1))
            await settled(self.idle, f"{self.name} has just answered alone")
            self.baseline[worker] = of_worker(self.engine.pid)

    def idle(self) -> bool:
        if self.engine is None:
            return False
        status = self.engine.status
        return not any(
            (status.kv_bytes, status.assisting, status.prefilling, status.decoding, status.waiting)
        )

    def spare(self) -> bool:
        """True if its worker holds no more than before anything happened."""
        return self.engine is not None and not grown(of_worker(self.engine.pid), self._before, POOL_THREADS)

    @property
    def _before(self) -> dict[str, int]:
        assert self.engine is not None
        return self.baseline[psutil.Process(self.engine.pid)]

    async def rested(self) -> None:
        """Until its worker, a new one if it must be, does nothing and holds nothing."""
        await self.ready()
        await self.beaten()
        await settled(self.idle, f"{self.name}'s worker does nothing and holds no keys and values")
        try:
            await settled(self.spare, "")
        except AssertionError:
            assert self.engine is not None
            what = f"{self.name}'s worker has {of_worker(self.engine.pid)}, and had "
            what += str(self._before)
            raise AssertionError(what) from None

    async def beaten(self) -> None:
        """Until its worker has said twice more how it is."""
        for _ in range(2):
            before = self.engine._heartbeat if self.engine else None
            await settled(
                lambda before=before: self.engine is not None and self.engine._heartbeat is not before,  # type: ignore[misc]
                f"{self.name}'s worker says how it is",
            )


async def told(events: Any) -> RequestEvents:
    found = RequestEvents()
    await found.read(events)
    return found


def request(request_id: str, tokens: int, seed: int, **fields: Any) -> Generate:
    drawn = random.Random(seed).choices(range(300), k=tokens)
    # No two that follow each other begin alike: what is cached of one is of no use to the next.
    drawn[0] = seed % 300
    return Generate(
        request_id, TokenPrompt(drawn), **{"sampling": GREEDY, "max_tokens": 3, "top_logprobs": 2, **fields}
    )


async def settled(check: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WITHIN_S):
            while not check():  # noqa: ASYNC110 — what is waited for happens in other processes
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None
