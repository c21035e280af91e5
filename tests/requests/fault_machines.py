"""Machines that share prompts, on which faults can strike at every step: real daemons' parts, real workers.

    runner, sharing, ledger, traces ── node ══ wire ══ node ── assists          (all in this process)
            │                                                     │
         worker ═══════════════ sealed streams ════════════════ worker          (processes of their own)

``FaultMachines.point`` is told of every step before it happens, and says what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import forked_programs
import own_resources
import psutil
import pytest
from asking import folder_of
from fault_seams import (
    GARBAGE,
    WITHIN_S,
    FaultMachine,
    FullableStore,
    FullDisk,
    TappedStream,
    request,
    settled,
)
from fault_table import CHUNK, HELPERS, HOME, Scenario
from fleet_nodes import running, settings, together
from forked_programs import Programs
from msgspec.structs import replace
from own_resources import grown
from request_events import RequestEvents
from runners import runner_over
from sharing import write
from wire import Effect, Link, WatchedWire, Way

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import Accepted, Generate, PrefillWithHelpers, StreamTag
from fleetd.engine.settings import WorkerOptions
from fleetd.p2p import node as node_module
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerConnection
from fleetd.plan.prefill.choice import PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.process import observe
from fleetd.requests.admission import ServingContext
from fleetd.requests.job import Job
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Member, Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.prefill_sharing import client as sharing_module
from fleetd.requests.prefill_sharing import messages as share_wire
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.prefill_sharing.server import AssistServer
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.traces import Traces

# Where no time is to be lost: until who stands still is given up, and until an agreement is.
LATE_S, DECIDE_S = 3.0, 3.0
# So long that whoever waits for it, instead of hearing that somebody is gone, is found out.
SETUP_S = 90.0
# A plan's figure that lets nobody be late.
PATIENT_S = 60.0
_WORKERS = {
    "SHARE_GRACE_S": LATE_S,
    "SHARE_SETUP_S": SETUP_S,
    "ENGINE_BEAT_S": 0.02,
    "CALIBRATE_S": 0.0,
    # A stream that comes when its prompt has gone on is closed after this.
    "TICKET_S": 3.0,
}
_KEPT = ("asyncio_", "uvloop_", "files-")


class FaultMachines:
    """Home and helpers, as long as ``machines`` is entered."""

    def __init__(
        self, home: FaultMachine, helpers: list[FaultMachine], wire: WatchedWire, store: FullableStore
    ) -> None:
        self.home, self.helpers, self.wire, self.store = home, helpers, wire, store
        self.all = {machine.name: machine for machine in (home, *helpers)}
        #: Told of each step; what it says becomes of it.
        self.point: Callable[[str], Effect] = lambda step: Effect.PASS
        self.predicted_s, self.gain_s = PATIENT_S, 60.0
        self.scenario: Scenario
        self.traces: list[Trace] = []
        self.outcomes: list[str] = []
        self.assists: list[AssistServer] = []
        self.last_error = ""
        #: Set once home has accepted the prompt that it is asked: who helps with it is decided then.
        self.accepted = asyncio.Event()
        # Ends of sessions that a fault broke.
        self._broken: list[PeerConnection] = []
        wire.watch = self._passing
        wire.broke = self._broke
        self._serve()
        self._answer()

    # ---- parts of daemons --------------------------------------------------------------------------------

    def _serve(self) -> None:
        for machine in self.helpers:
            context = ServingContext(
                machine,
                lambda machine=machine: machine.card,  # type: ignore[misc]
                draining=lambda: False,
                finished=lambda _kind, outcome: self.outcomes.append(outcome),
            )
            assists = AssistServer(BulkDialer(machine.node), machine.pool.lent, context)
            self.assists.append(assists)

            async def assist(
                peer: str, body: bytes, stream: Any, name: str = machine.name, inner: AssistServer = assists
            ) -> None:
                if self.point(f"{name}: ask") is Effect.SPOIL:
                    body = GARBAGE
                tapped = TappedStream(
                    stream,
                    self.point,
                    [f"{name}: offer made", f"{name}: done sent"],
                    [f"{name}: go taken"],
                )
                await inner.assist(peer, body, tapped)

            machine.node.handle(share_wire.ASSIST, assist)
            machine.node.handle(share_wire.WARM, assists.warm)

    def _answer(self) -> None:
        home = self.home
        dialer = BulkDialer(home.node)
        metrics = Metrics("0")
        traces = Traces(self.store)

        def record(trace: Trace) -> None:
            self.traces.append(trace)
            traces.record(trace)

        self.expect, self.connect, self.carried = dialer.expect, dialer.connect, dialer.carried
        self.sharing = PrefillSharing(self, home.pool, Members(self.machines, lambda: home.card), metrics)  # type: ignore[arg-type]
        self.sharing.choose = self._choose  # type: ignore[method-assign]
        self.runner = runner_over(
            home.pool,
            home,
            Ledger(self.store),
            metrics,
            features=[self.sharing],
            record=record,
        )

    # ---- agreement.Partners ------------------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self.home.node_id

    def machines(self) -> list[Member]:
        return [
            Member(m.card, m.name, unusable="", sees_prompts=True, rtt_s=0.001, bytes_per_s=1e9)
            for m in self.helpers
        ]

    def request(self, node_id: str, method: str, body: bytes) -> Any:
        name = next(machine.name for machine in self.helpers if machine.node_id == node_id)
        stream = self.home.node.request(node_id, method, body)
        return TappedStream(
            stream, self.point, [f"{name}: go sent"], [f"{name}: offer taken", f"{name}: done taken"]
        )

    async def ask(self, *_: Any, **__: Any) -> bytes:
        raise AssertionError("nobody is to be asked to load anything")

    def _choose(self, _own: Any, asked: PrefillSize, *, exact: bool) -> PlanChoice:
        split = self.scenario.split
        assert (split.tokens, split.cached, split.chunk) == (asked.tokens, asked.cached, asked.chunk)
        chain = self.helpers[: split.helpers]
        ids, names = tuple(m.node_id for m in chain), tuple(m.name for m in chain)
        kind = split.kind if split.cuts[-2] < split.cuts[-1] else "whole"
        best = PrefillOption(kind, ids, names, split, self.predicted_s)
        return PlanChoice(best, (PrefillOption("local", predicted_s=self.predicted_s + self.gain_s),))

    # ---- steps that are not messages ---------------------------------------------------------------------

    def _passing(self, dialler: str, listener: str, way: Way | None, number: int | str) -> Effect:
        name = stream_name(dialler, listener)
        if way is None:
            return self.point(f"{name}: dial")
        return self.point(f"{name}: to {listener if way == 'forth' else dialler} {number}")

    def _broke(self, link: Link) -> None:
        if link.kind != "session":
            return
        dialled, called = link.near.get_extra_info("peername"), link.far.get_extra_info("sockname")
        ends = ((link.front.dialler, "sockname", dialled), (link.front.listener, "peername", called))
        self._broken += [
            connection
            for name, which, address in ends
            for connection in self.all[name].node.connections
            if connection._transport is not None and connection._transport.get_extra_info(which) == address
        ]

    def machine_of(self, engine: EngineProcess) -> FaultMachine:
        return next(machine for machine in self.all.values() if machine.folder.name == engine.settings.name)

    # ---- requests ----------------------------------------------------------------------------------------

    async def reference(self, asked: Generate) -> RequestEvents:
        """What a machine that has never heard of it answers alone."""
        last = self.all[HELPERS[-1]]
        return await last.alone(replace(asked, id=f"alone {asked.id}"))

    async def run(self, request: Generate, *, local_only: bool = False) -> RequestEvents:
        """As a user's."""

        def seen(event: Any) -> None:
            if isinstance(event, Accepted):
                self.accepted.set()

        job, found = Job("m", request, "socket", "chat", local_only=local_only), RequestEvents(seen)
        async with asyncio.timeout(2 * WITHIN_S):
            await found.read(self.runner.run(job))
        return found

    def prompt(self, request_id: str, seed: int) -> Generate:
        return request(request_id, self.scenario.tokens + 1, seed)

    # ---- faults ------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Its worker, and with it what was under way to others."""
        engine = self.all[name].engine
        if engine is not None and engine.pid is not None:
            os.kill(engine.pid, signal.SIGKILL)
            self.all[name].killed = engine
        for link in self.wire.links(name, "stream"):
            link.reset()

    def stop(self, name: str, again_after_s: float | None = None) -> None:
        """Its worker stands still, and so does what was under way."""
        engine = self.all[name].engine
        if engine is not None and engine.pid is not None:
            os.kill(engine.pid, signal.SIGSTOP)
        if again_after_s is None:
            for link in self.wire.links(name, "stream"):
                link.hold()
        else:
            asyncio.get_running_loop().call_later(again_after_s, self.go_on, name)

    def go_on(self, name: str) -> None:
        engine = self.all[name].engine
        if engine is not None and engine.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        self.store.full = True
        observe.configure("debug", "json", stream=FullDisk())  # type: ignore[arg-type]

    def mend(self) -> None:
        """Whatever was wrong no longer is; who was killed starts again when there is need."""
        self.store.full = False
        observe.configure("warning", "json", stream=sys.stderr)
        for name in self.all:
            self.go_on(name)
        self.wire.mend()

    # ---- what must be left: nothing ----------------------------------------------------------------------

    async def ready(self) -> None:
        """Until everybody is there again."""
        # A session is in use until its machine hears that it broke, which may be after the answer.
        await settled(lambda: all(end.gone.is_set() for end in self._broken), "both ends hear of a break")
        self._broken.clear()
        async with asyncio.timeout(WITHIN_S):
            await together([machine.node for machine in self.all.values()])
        for machine in self.all.values():
            await machine.ready()

    async def quiet(self) -> None:
        """Until nothing is left of what happened, anywhere."""
        await settled(lambda: self.runner.counts.running == 0, "no request is left")
        await settled(lambda: not any(each._limit.running for each in self.assists), "no assist is left")
        await settled(lambda: not self.sharing.background, "no share is left in the background")
        await settled(lambda: self.wire.count("stream") == 0, "all streams are closed")
        pairs = len(self.wire.fronts) // 2
        # Two machines that call each other at once keep one of their sessions.
        await settled(lambda: self.wire.count("session") == pairs, "one session for each two machines")
        await asyncio.gather(*(machine.rested() for machine in self.all.values()))
        for machine in self.all.values():
            assert len(machine.node.bulk._tickets) == 0, f"{machine.name} still expects somebody"
            assert not any(machine.pool.table.claims.values()), f"{machine.name} still uses an engine"

    def own(self) -> dict[str, int]:
        """Resources of this process, where the daemons are."""
        process = psutil.Process()
        # An executor's threads are made as they are needed, up to a few, and kept.
        threads = Counter(t.name for t in threading.enumerate() if not t.name.startswith(_KEPT))
        return {
            "descriptors": own_resources.descriptors(),
            "tasks": len(asyncio.all_tasks()),
            "processes": len(process.children(recursive=True)),
            **threads,
        }

    async def unchanged(self, before: dict[str, int]) -> None:
        try:
            await settled(lambda: not grown(self.own(), before), "")
        except AssertionError:
            raise AssertionError(f"{self.own()} was {before}") from None


def stream_name(dialler: str, listener: str) -> str:
    """Home dials its helpers; each helper dials whom its output goes to."""
    return f"{listener}'s home" if dialler == HOME else f"{dialler}'s out"


@contextlib.asynccontextmanager
async def machines(folder: Path) -> AsyncIterator[FaultMachines]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        observe.configure("warning", "json", stream=sys.stderr)
        patch.setattr(limits, "SHARE_SETUP_S", SETUP_S)
        patch.setattr(limits, "RETIRE_S", 0.1)
        patch.setattr(limits, "DIAL_AGAIN_S", 0.02)
        patch.setattr(limits, "DIAL_AGAIN_MOST_S", 0.1)
        patch.setattr(node_module, "_TICK_SETTLED_S", 0.05)
        patch.setattr(node_module, "_TICK_S", 0.02)
        patch.setattr(sharing_module, "_ACCOUNTS_S", 0.3)
        patch.setattr(sharing_module, "_SETUP_LEAST_S", DECIDE_S)
        if forked_programs.AVAILABLE:
            programs = Programs(folder / "workers.log", limits=_WORKERS, install=["scarce_memory"])
            stack.callback(programs.close)
            patch.setattr(asyncio, "create_subprocess_exec", programs.exec)
        found = await _made(folder, patch, stack)
        try:
            async with running(*(machine.node for machine in found.all.values())):
                for machine in found.all.values():
                    await machine.ready()
                await introduced(found.all, found.wire)
                yield found
        finally:
            found.mend()
            for each in found.assists:
                await each.close()
            await found.sharing.close()
            for machine in found.all.values():
                await machine.pool.close()
            await found.wire.close()
            found.store.close()


async def _made(folder: Path, patch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> FaultMachines:
    model = write(folder / "model")
    wire = WatchedWire()
    options = WorkerOptions(
        device="cpu",
        threads=1,
        # Room for fewer tokens than the context has, so that a test can fill it.
        max_memory_bytes=(512 << 20) + (12 << 20),
        prefill_chunk_tokens=CHUNK,
        prefix_cache_bytes=2 << 20,
    )
    every = []
    for name in (HOME, *HELPERS):
        node = Node(settings(folder, name))
        # Whatever others call it, by its files it is the same.
        every.append(
            FaultMachine(name, node, EnginePool(WorkerMaker(options)), folder_of(model, f"tiny-{name}"))
        )
    for machine in every:
        await machine.node.open()
    found = FaultMachines(every[0], every[1:], wire, FullableStore(folder / "fleetd.db"))
    give, share = EngineProcess.give_stream, EngineProcess.share

    async def given(self: EngineProcess, tag: StreamTag, sock: Any) -> None:
        if tag.role == "connector":
            # Who dialled may be quicker than who looks on.
            front = next(f for f in wire.fronts.values() if sock.getpeername() == f.address)
            try:
                port = sock.getsockname()[1]
                await settled(lambda: port in front.seen, "a stream that was dialled is there")
            except BaseException:
                sock.close()
                raise
        found.point(f"{found.machine_of(self).name}: given {tag.name}")
        await give(self, tag, sock)

    def shared(self: EngineProcess, share_: PrefillWithHelpers) -> None:
        found.point("share")
        share(self, share_)

    patch.setattr(EngineProcess, "give_stream", given)
    patch.setattr(EngineProcess, "share", shared)
    return found


async def introduced(machines: Mapping[str, FaultMachine], wire: WatchedWire) -> None:
    """Each knows the others, and finds them only through the wire."""
    nodes = {name: machine.node for name, machine in machines.items()}
    ports = {name: node.port for name, node in nodes.items()}
    pairs = list(itertools.permutations(nodes.items(), 2))
    for (_, node), (_, other) in pairs:
        node.roster.admit(other.identity.certificate, other.name, True)
    for node in nodes.values():
        node.port = 0  # not told to others
        await node.roster_changed()
    for (name, node), (other_name, other) in pairs:
        address = await wire.between(name, other_name, ports[other_name])
        node.reached(other.identity.node_id, address)
    await together(list(nodes.values()))
