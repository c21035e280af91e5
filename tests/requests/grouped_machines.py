"""Machines that hold a model together, on which faults can strike at every step.

    pool, planner ── node ══ wire ══ node ── stage server          (all in this process)
         │                                         │
      worker ═════════ sealed stream ═══════════ worker            (processes of their own)

``point`` is told of every step before it happens, and says what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import forked_programs
import own_resources
import psutil
import pytest
import set_speeds
import short_stages
from asking import folder_of
from fault_machines import introduced
from fault_seams import FaultMachine, FullDisk, request, settled
from fleet_nodes import running, settings
from forked_programs import Programs
from msgspec.structs import replace
from own_resources import grown
from request_events import RequestEvents
from sharing import write
from wire import Effect, Link, WatchedWire, Way

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.protocol import (
    Delta,
    Generate,
    Loading,
    Prefill,
    Sampling,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import FleetError
from fleetd.models.memory_need import WORKING_BYTES, WeightRules
from fleetd.p2p import node as node_module
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node
from fleetd.process import observe
from fleetd.requests.admission import ServingContext
from fleetd.requests.groups import messages
from fleetd.requests.groups.planning import FleetGroups
from fleetd.requests.groups.server import StageServer
from fleetd.requests.members.members import Member, Members
from fleetd.requests.members.peer_backoff import PeerBackoff
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.remote.message_codec import ALIVE

HOME, HELPERS = "home", ("helper0", "helper1")
CHUNK, PREFILL_CHUNKS = 64, 3
# Silence that ends a group, here and in the workers; within what time the loss of a member is to be known.
SILENT_S, BEAT_S, NOTICED_S = 2.5, 0.1, 3.0
# By which everything may come later: all machines of a test are two cores, on which other tests compute too.
BUSY_S = 30.0
# A worker of this machine that stands still is ended after this.
STALL_S = 4.0
MEMORY_BYTES = WORKING_BYTES + (24 << 20)
# By which home holds no model whole.
_TWO = 7, 8
_NO_ROOM = WeightRules("cpu", setting="float32")
_LIMITS = {
    "GROUP_SILENT_S": SILENT_S,
    "GROUP_BEAT_S": BEAT_S,
    "ENGINE_BEAT_S": 0.05,
    "ENGINE_STALL_S": STALL_S,
    "ENGINE_STOP_S": 0.5,
}


class _TappedStages:
    """A member's stream to the machine that answers: the steps of its load are told of."""

    def __init__(self, stream: Any, point: Callable[[str], Effect], name: str) -> None:
        self._stream, self._point, self._name, self._loads = stream, point, name, False

    def send(self, body: bytes) -> None:
        if body != ALIVE:
            told = messages.decode(body, messages.StageTold)
            if told.stream is not None:
                self._point(f"{self._name}: ready")
            elif not self._loads and told.stage != "promised":
                # There is memory for the layers before there is a worker.
                self._loads = True
                self._point(f"{self._name}: loading")
        self._stream.send(body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class GroupedMachines:
    """Home, which answers, and two machines of which one is enough, as long as ``machines`` is entered."""

    def __init__(self, home: FaultMachine, helpers: list[FaultMachine], wire: WatchedWire) -> None:
        self.home, self.helpers, self.wire = home, helpers, wire
        self.all = {machine.name: machine for machine in (home, *helpers)}
        #: Told of each step; what it says becomes of it.
        self.point: Callable[[str], Effect] = lambda step: Effect.PASS
        self.members = Members(self.machines, lambda: self.card(home))
        self.servers: dict[str, Any] = {}
        wire.watch = self._passing
        for machine in helpers:
            self._serve(machine)
        dialer = BulkDialer(home.node)
        self.expect, self.connect = dialer.expect, dialer.connect
        self._plan(home)

    def _plan(self, home: FaultMachine) -> None:
        """How home chooses its members."""
        home.pool.maker.weight_rules = lambda: _NO_ROOM
        rules = replace(_NO_ROOM, budget_bytes=24 << 20)
        home.pool.maker.groups = FleetGroups(self, self.members, lambda: rules)  # type: ignore[arg-type]

    def _serve(self, machine: FaultMachine) -> None:
        context = ServingContext(machine, lambda: self.card(machine), draining=lambda: False)  # type: ignore[arg-type]
        server = self.servers[machine.name] = StageServer(
            BulkDialer(machine.node), machine.pool.lent, context
        )

        async def serve(peer: str, body: bytes, stream: Any) -> None:
            self.point(f"{machine.name}: asked")
            await server(peer, body, _TappedStages(stream, self.point, machine.name))

        machine.node.handle(messages.SERVE, serve)
        machine.node.handle(messages.LINK, server.link)

    # ---- what the planner knows --------------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self.home.node_id

    def request(self, node_id: str, method: str, body: bytes) -> Any:
        return self.home.node.request(node_id, method, body)

    def card(self, machine: FaultMachine) -> Card:
        """Home prefers the first helper, which has more room."""
        room = (24 << 20) + (1 << 20) * (machine is self.helpers[0])
        return replace(machine.card, usable_bytes=WORKING_BYTES + room)

    def machines(self) -> list[Member]:
        found = []
        for machine in self.helpers:
            peer = self.home.node.mesh.peers.get(machine.node_id)
            if peer is None:
                continue
            unusable = "" if peer.usable else "It is not connected."
            found.append(Member(self.card(machine), machine.name, unusable, True, 0.001, 1e9))
        return found

    # ---- steps that are not messages ---------------------------------------------------------------------

    def _passing(self, dialler: str, listener: str, way: Way | None, number: int | str) -> Effect:
        if way is None:
            return self.point(f"{listener}: dialled")
        return self.point(f"to {listener if way == 'forth' else dialler}: {number}")

    def given(self, engine: EngineProcess) -> None:
        """A stream is about to be handed to a worker."""
        name = next(name for name, machine in self.all.items() if engine in self.workers(name))
        self.point(f"{name}: given")

    # ---- use ---------------------------------------------------------------------------------------------

    def prompt(self, request_id: str, **fields: Any) -> Generate:
        """Its answer is of two tokens, as the end of the prompt: so there are drafts for each token, of which
        some are right, and blocks of the answer are ahead of others. It is so long that it is not over before
        what is done at its first token is noticed, however late a busy machine comes to that."""
        two = Sampling(temperature=2.0, seed=3, logit_bias=dict.fromkeys(_TWO, 60.0))
        asked = request(request_id, CHUNK * PREFILL_CHUNKS - 10 - CHUNK, 1)
        end = random.Random(4).choices(_TWO, k=CHUNK)
        assert isinstance(asked.prompt, TokenPrompt)
        prompt = TokenPrompt([*asked.prompt.tokens, *end])
        return replace(asked, **{"prompt": prompt, "sampling": two, "max_tokens": 200, **fields})

    async def ask(
        self,
        asked: Generate,
        told: RequestEvents,
        seen: Callable[[Any], None],
        over: Sequence[str] | None = None,
    ) -> None:
        """As the pool of a daemon that is asked. ``seen`` is told of each event and of the error."""
        try:
            async with contextlib.aclosing(self.home.pool.stream(self.home.folder, asked, over)) as events:
                async for event in events:
                    told.events.append(event)
                    seen(event)
                    if isinstance(event, Prefill) and event.done:
                        self.point(f"read {event.done}")
                    elif isinstance(event, Delta):
                        self.point(f"token {len(told.of(Delta))}")
        except FleetError as error:
            told.error = error
            seen(error)

    def workers(self, name: str) -> list[EngineProcess]:
        return self.all[name].pool.table.workers()

    # ---- faults ------------------------------------------------------------------------------------------

    def pids(self, name: str) -> list[int]:
        return [worker.pid for worker in self.workers(name) if worker.pid is not None]

    def signal(self, name: str, number: int) -> None:
        """To the workers that it has now."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def streams(self, name: str) -> list[Link]:
        return self.wire.links(name, "stream")

    def mend(self) -> None:
        """Whatever was wrong no longer is; machines that were left out are asked again."""
        observe.configure("warning", "json", stream=sys.stderr)
        for name, machine in self.all.items():
            self.signal(name, signal.SIGCONT)
            machine.pool.maker.options = replace(machine.pool.maker.options, max_memory_bytes=MEMORY_BYTES)
        self.wire.mend()
        self.members.backoff = PeerBackoff()
        self.point = lambda step: Effect.PASS

    @staticmethod
    def fill_disk() -> None:
        observe.configure("debug", "json", stream=FullDisk())  # type: ignore[arg-type]

    # ---- what must be left: nothing ----------------------------------------------------------------------

    async def together(self) -> None:
        """Until every machine has a session with each other one."""
        nodes = [machine.node for machine in self.all.values()]
        await settled(
            lambda: all(peer.usable for node in nodes for peer in node.mesh.peers.values()),
            "all machines see each other again",
        )

    async def pair_again(self, name: str) -> None:
        """After it was unpaired: it has forgotten all others."""
        self.all[name].node.roster.reset()
        pairs = [pair for pair in self.wire.fronts if name in pair]
        for one, other in pairs:
            node, identity = self.all[one].node, self.all[other].node.identity
            node.roster.admit(identity.certificate, other, True)
            await node.roster_changed()
        for one, other in pairs:
            self.all[one].node.reached(self.all[other].node_id, self.wire.fronts[one, other].address)
        await self.together()

    async def close_servers(self) -> None:
        for server in self.servers.values():
            await server.close()

    async def unload(self) -> None:
        await self.home.pool.unload(self.home.folder.name)

    async def quiet(self) -> None:
        """Until no process, stream, ticket or reservation is left of any group."""
        for machine in self.all.values():
            await settled(
                lambda machine=machine: not machine.pool.table.models and not machine.pool.table._ending,  # type: ignore[misc]
                f"{machine.name} has no worker",
            )
            assert machine.pool.held_bytes == 0, f"{machine.name} still counts memory"
        await settled(lambda: self.wire.count("stream") == 0, "all streams are closed")
        for name, server in self.servers.items():
            await settled(lambda server=server: server._limit.running == 0, f"{name} is in no group")  # type: ignore[misc]
            ends = getattr(server, "_background", ())
            await settled(lambda ends=ends: not len(ends), f"{name} ends nothing more")  # type: ignore[misc]
        for machine in self.all.values():
            assert len(machine.node.bulk._tickets) == 0, f"{machine.name} still expects somebody"
            assert not any(machine.pool.table.claims.values()), f"{machine.name} still uses a worker"

    def own(self) -> dict[str, int]:
        """Resources of this process, where the daemons are, and its workers."""
        process = psutil.Process()
        return {
            "descriptors": own_resources.descriptors(),
            "tasks": len(asyncio.all_tasks()),
            "processes": len(process.children(recursive=True)),
        }

    async def unchanged(self, before: dict[str, int]) -> None:
        with contextlib.suppress(AssertionError):
            await settled(lambda: not grown(self.own(), before), "")
        assert not grown(self.own(), before), self._left()

    @staticmethod
    def _left() -> str:
        """What runs here, for a test that fails."""
        tasks = sorted(task.get_name() for task in asyncio.all_tasks())
        children = [(child.pid, child.status()) for child in psutil.Process().children(recursive=True)]
        return f"{children}; {tasks}; {own_resources.named()}; {threading.enumerate()}"


@contextlib.asynccontextmanager
async def machines(
    folder: Path,
    kind: type[GroupedMachines] = GroupedMachines,
    install: str = "short_stages",
    **figures: float,
) -> AsyncIterator[Any]:
    """Machines of a ``kind``. ``install``: what makes faults strike their workers; ``figures``: of limits."""
    figures = {**_LIMITS, **figures}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        observe.configure("warning", "json", stream=sys.stderr)
        for name, figure in figures.items():
            patch.setattr(limits, name, figure)
        for name, figure in (
            ("RETIRE_S", 0.1),
            ("DIAL_AGAIN_S", 0.02),
            ("DIAL_AGAIN_MOST_S", 0.1),
            ("POOL_CHECK_S", 0.1),
        ):
            patch.setattr(limits, name, figure)
        patch.setattr(node_module, "_TICK_SETTLED_S", 0.05)
        patch.setattr(node_module, "_TICK_S", 0.02)
        (folder / "short").mkdir()
        patch.setenv(short_stages.FOLDER, str(folder / "short"))
        if forked_programs.AVAILABLE:
            programs = Programs(
                folder / "workers.log",
                limits={**set_speeds.LIMITS, **figures},
                install=["set_speeds", install],
            )
            stack.callback(programs.close)
            patch.setattr(asyncio, "create_subprocess_exec", programs.exec)
        found = await _made(folder, patch, kind)
        watching = [asyncio.create_task(machine.pool.run()) for machine in found.all.values()]
        try:
            async with running(*(machine.node for machine in found.all.values())):
                await introduced(found.all, found.wire)
                yield found
        finally:
            found.mend()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await found.close_servers()
            for machine in found.all.values():
                await machine.pool.close()
            await found.wire.close()


async def _made(folder: Path, patch: pytest.MonkeyPatch, kind: type[GroupedMachines]) -> GroupedMachines:
    model = write(folder / "model")
    options = WorkerOptions(
        device="cpu",
        threads=1,
        max_memory_bytes=MEMORY_BYTES,
        prefill_chunk_tokens=CHUNK,
        # Not if it pays: how busy the processors are is no part of the tests.
        speculation="on",
    )
    every = []
    for name in (HOME, *HELPERS):
        node = Node(settings(folder, name))
        # Whatever others call it, by its files it is the same.
        every.append(
            FaultMachine(name, node, EnginePool(WorkerMaker(options)), folder_of(model, f"tiny-{name}"))
        )
        await node.open()
    found = kind(every[0], every[1:], WatchedWire())
    give = EngineProcess.give_stream

    async def given(self: EngineProcess, tag: StreamTag, sock: Any) -> None:
        found.given(self)
        await give(self, tag, sock)

    patch.setattr(EngineProcess, "give_stream", given)
    return found


def began_again(event: Any) -> bool:
    """True for what says that a member is known to be lost."""
    return isinstance(event, Loading) and event.stage.startswith("going on")
