"""Machines that agree on shared prefills: real nodes on loopback, engines that only look like engines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

from fakes import LAYERS, FakeEngine, FakeModels
from fleet_nodes import introduce, running, settings, together
from msgspec.structs import replace
from nested_fields import changed

from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    Prefill,
    PrefillReport,
    Timings,
    Usage,
)
from fleetd.errors import FleetError
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.prefill.split import Split
from fleetd.requests.admission import ServingContext
from fleetd.requests.members.members import Member
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.prefill_sharing.server import AssistServer
from fleetd.requests.remote.bulk_dialer import BulkDialer

DIGEST = "d" * 64


def split(helpers: int = 1, kind: Any = "layers", home: bool = True) -> Split:
    """Of 4 layers and 1024 tokens among so many helpers and, if it has a part at all, home."""
    parts = helpers + home
    whole = LAYERS if kind == "layers" else 1024
    cuts = [whole * n // parts for n in range(parts + 1)] if home else [*range(helpers), whole, whole]
    return Split(kind, tuple(cuts), LAYERS, 0, 1024, 256)


@dataclass
class HelperPool:
    """One engine, with all layers or with those that were loaded for somebody, which are kept in ``loads``.

    ``refusal``: why none can be.
    """

    fake: FakeEngine
    loaded: bool = True
    refusal: FleetError | None = None
    loads: list[tuple[int, int]] = field(default_factory=list)
    used: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def holds(self, folder: Any, first: int, last: int) -> bool:
        if not self.loaded or (part := self.part(folder)) is None:
            return self.loaded
        return part[0] <= first < last <= part[1]

    def engine(self, folder: Any) -> FakeEngine | None:
        return self.fake if self.loaded and self.part(folder) is None else None

    def part(self, folder: Any) -> tuple[int, int] | None:
        return self.loads[-1] if self.loads and self.loads[-1][1] else None

    @contextlib.asynccontextmanager
    async def assisting(self, folder: Any, first: int, last: int) -> AsyncIterator[FakeEngine]:
        self.used += 1
        try:
            if not self.holds(folder, first, last):
                self.loads.append((first, last))
                await self.gate.wait()
                if self.refusal is not None:
                    self.loads.clear()
                    raise self.refusal
                self.loaded = True
            yield self.fake
        finally:
            self.used -= 1


@dataclass
class HomePool:
    """An engine that answers: it waits for word how to prefill, then follows ``ending``.

    ``ending``: what the prefill comes to once it is shared; "wait" is until ``engine.alone`` is told.
    """

    fake: FakeEngine
    ending: PrefillReport | str = "wait"
    waits: bool = True
    cached: int = 0
    # All rows that the request names are of its prompt.
    warm: bool = False
    exact: bool = True
    tokens: int = 4096
    text: str = "hello"
    # Of a model that has to be loaded first.
    loading: Sequence[Loading] = ()
    requests: list[Generate] = field(default_factory=list)
    left: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def engine(self, folder: Any) -> FakeEngine | None:
        return self.fake

    async def stream(
        self, folder: Any, request: Generate, over: Any = None
    ) -> AsyncGenerator[Loading | Event, None]:
        self.requests.append(request)
        done = False
        try:
            for stage in self.loading:
                yield stage
            waits = self.waits and request.shared
            warm = list(range(len(request.warm))) if self.warm else []
            yield Accepted(request.id, self.tokens, self.cached, 256, waits, self.exact, warm=warm)
            if waits:
                async for event in self._prefilled(request.id):
                    yield event
            yield Delta(request.id, self.text)
            done = True
            yield Finished(request.id, "stop", Usage(self.tokens, 0, 1), Timings(0.1, 0.2, 0.3))
        finally:
            self.left += not done

    async def _prefilled(self, request_id: str) -> AsyncGenerator[Event, None]:
        engine = self.fake
        await engine.until(lambda: engine.shares or engine.lonely)
        yield Prefill(request_id, 1, self.tokens)
        if not engine.shares:
            return
        self.begun.set()
        await self.gate.wait()
        if isinstance(self.ending, PrefillReport):
            yield self.ending
        else:
            await engine.until(lambda: engine.lonely)
            yield PrefillReport(request_id, [], "alone", engine.lonely[0][1], 256)


def own_card(name: str, **model: Any) -> Card:
    known = ModelCard("m", DIGEST, state="loaded", memory_bytes=1000, speed=MeasuredSpeed(100.0))
    return Card(
        name,
        1,
        1,
        name=name,
        models=[changed(known, **model)],
        available_bytes=1 << 30,
        usable_bytes=1 << 30,
    )


class HelperMachine:
    """A machine that helps: a node and the handlers, over a fake engine."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.engine = FakeEngine()
        self.pool = HelperPool(self.engine)
        self.draining = False
        self.outcomes: list[str] = []
        self.card = own_card(node.name)
        context = ServingContext(
            FakeModels(),
            lambda: self.card,
            draining=lambda: self.draining,
            finished=lambda _kind, outcome: self.outcomes.append(outcome),
        )
        self.assists = AssistServer(BulkDialer(node), self.pool, context)
        node.handle(messages.ASSIST, self.assists.assist)
        node.handle(messages.WARM, self.assists.warm)

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id


class HomePartners:
    """``sharing.Partners`` on a node. ``fields``: of every machine but its card."""

    def __init__(self, node: Node, helpers: Sequence[HelperMachine] = (), **fields: Any) -> None:
        self.node = node
        self.helpers = helpers
        self.fields: dict[str, Any] = {
            "unusable": "",
            "sees_prompts": True,
            "rtt_s": 0.001,
            "bytes_per_s": 1e9,
        }
        self.fields |= fields
        self.dialer = BulkDialer(node)
        self.expect = self.dialer.expect
        self.connect = self.dialer.connect
        self.came: list[tuple[str, int, float, bool]] = []
        self.asked: list[tuple[str, str]] = []

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id

    def machines(self) -> list[Member]:
        return [
            Member(replace(helper.card, node_id=helper.node_id), helper.node.name, **self.fields)
            for helper in self.helpers
        ]

    def carried(self, node_id: str, count: int, seconds: float, *, late: bool = False) -> None:
        self.came.append((node_id, count, seconds, late))

    async def ask(self, node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        self.asked.append((node_id, method))
        return await self.node.ask(node_id, method, body, within_s=within_s)

    def request(self, node_id: str, method: str, body: bytes) -> PeerStream:
        self.asked.append((node_id, method))
        return self.node.request(node_id, method, body)


@contextlib.asynccontextmanager
async def machines(folder: Path, helpers: int) -> AsyncIterator[tuple[Node, list[HelperMachine]]]:
    """A home and its helpers, paired and in session with each other."""
    home = Node(settings(folder, "home"))
    others = [HelperMachine(Node(settings(folder, f"helper{n}"))) for n in range(helpers)]
    nodes = [home, *(other.node for other in others)]
    try:
        async with running(*nodes):
            await introduce(*nodes)
            await together(nodes)
            yield home, others
    finally:
        for other in others:
            await other.assists.close()
            other.engine.close()
