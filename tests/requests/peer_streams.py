"""Other machines whose answers a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from fleetd.errors import FleetError
from fleetd.requests.members.members import Member
from fleetd.requests.remote import messages
from fleetd.requests.remote.message_codec import ALIVE


class FakeStream:
    """A peer's answer: bodies are received, exceptions raised, None hangs, however often it is asked."""

    def __init__(self, script: Iterable[bytes | FleetError | None]) -> None:
        self.script = list(script)
        self.cancelled = False
        self.ended = False

    async def receive(self) -> bytes | None:
        if not self.script:
            return None
        if self.script[0] is None:
            await asyncio.Event().wait()
        step = self.script.pop(0)
        if isinstance(step, FleetError):
            raise step
        return step

    def send(self, body: bytes) -> None:
        raise AssertionError("who asks says everything in the request")

    async def drained(self) -> None: ...

    def end(self) -> None:
        self.ended = True

    def cancel(self, error: FleetError | None = None) -> None:
        self.cancelled = True


class FakeOthers:
    """Scripted peers: node id → what its streams say, one script per request."""

    def __init__(self, *found: Member, **scripts: list[Any]) -> None:
        self.found = list(found)
        self.scripts = scripts
        self.asked: list[tuple[str, messages.RunJob]] = []
        self.streams: list[FakeStream] = []
        self.methods: list[str] = []
        self.woken: list[str] = []
        self.deaf: FleetError | None = None

    async def wake(self, node_id: str) -> None:
        self.woken.append(node_id)
        if self.deaf is not None:
            raise self.deaf

    def machines(self) -> list[Member]:
        return self.found

    def request(self, node_id: str, method: str, body: bytes) -> FakeStream:
        self.methods.append(method)
        self.asked.append((node_id, messages.decode_run(body)))
        script = self.scripts[node_id].pop(0)
        if isinstance(script, FleetError):
            raise script
        self.streams.append(FakeStream(script))
        return self.streams[-1]

    @property
    def order(self) -> list[str]:
        return [node_id for node_id, _ in self.asked]


class OnlyAlive(FakeStream):
    """Says that it is alive, for ever; the script comes before that."""

    async def receive(self) -> bytes | None:
        await asyncio.sleep(0)
        return await super().receive() if self.script else ALIVE


class RequestPipe:
    """Both ends of one request: what the server sends is what the client receives."""

    def __init__(self, serve: Callable[[Any], Any]) -> None:
        self._sent: asyncio.Queue[bytes | FleetError | None] = asyncio.Queue()
        self.cancelled = False
        self._task = asyncio.create_task(self._run(serve))

    async def _run(self, serve: Callable[[Any], Any]) -> None:
        try:
            await serve(self)
            self._sent.put_nowait(None)
        except FleetError as error:
            self._sent.put_nowait(error)

    async def receive(self) -> bytes | None:
        found = await self._sent.get()
        if isinstance(found, FleetError):
            raise found
        return found

    def send(self, body: bytes) -> None:
        self._sent.put_nowait(body)

    async def drained(self) -> None: ...

    def end(self) -> None: ...

    def cancel(self, error: FleetError | None = None) -> None:
        self.cancelled = True
        self._task.cancel()
