"""Machines that divide the layers of a model, on which faults can strike at every step.

pool, planner ── node ══ wire ══ node ── rank server            (all in this process)
     │     tunnels ═════ wire ═════ tunnels │                   (threads of this process)
   rank 0 ─┘                             └─ rank 1              (processes of their own)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fault_machines import FaultMachine
from grouped_machines import HELPERS, GroupedMachines, machines
from msgspec.structs import replace
from request_events import RequestEvents
from wire import Effect

from fleetd.engine.protocol import Generate
from fleetd.errors import FleetError
from fleetd.models.memory_need import WeightRules
from fleetd.p2p.membership.cards import Card, MachineFacts
from fleetd.requests.admission import ServingContext
from fleetd.requests.promised_memory import PromisedMemory
from fleetd.requests.ranks import messages
from fleetd.requests.ranks.planning import RankPlanner
from fleetd.requests.ranks.server import RankServer
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.remote.message_codec import ALIVE

# A pass that is late ends its rank after the first figure, a rank that says nothing after the second. In
# these tests all ranks, the wire and the daemons share the processors.
LATE_S, SILENT_S = 6.0, 7.0
_FIGURES = {
    "RANK_STALL_S": LATE_S,
    "GROUP_SILENT_S": LATE_S,
    "RANK_SILENT_S": SILENT_S,
    "RANK_END_S": 0.5,
    "RING_FORM_S": 20.0,
    "RANKS_MEET_S": 30.0,
    # A worker that answers is looked at as a rank first.
    "ENGINE_STALL_S": 60.0,
    "TICKET_S": 5.0,
    # What is wrong is found soon: the answers of these tests are short.
    "RANK_CANARY_PASSES": 4,
}
# Of an answer. Each token is a pass of all ranks through this process, and a ring that waits looks for its
# bytes without a pause: so few take long enough for every fault to be noticed on a busy machine.
_ANSWER_TOKENS = 64
_RULES = WeightRules("cpu", setting="float32")
_CPU = MachineFacts(accelerator="cpu")


class _TappedRank:
    """A rank's stream to the machine that answers: the steps of its load are told of."""

    def __init__(self, stream: Any, point: Callable[[str], Effect], name: str) -> None:
        self._stream, self._point, self._name, self._loads = stream, point, name, False

    def send(self, body: bytes) -> None:
        if body != ALIVE:
            told = messages.decode(body, messages.RankTold)
            if told.before is not None:
                self._point(f"{self._name}: promised")
            elif told.passes is not None:
                self._point(f"{self._name}: ready")
            elif not self._loads:
                self._loads = True
                self._point(f"{self._name}: loading")
        self._stream.send(body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RankedMachines(GroupedMachines):
    """Home, which answers and has room for the whole model, and two others of which the first is rank 1."""

    def __init__(self, home: FaultMachine, helpers: list[FaultMachine], wire: Any) -> None:
        self.promised: dict[str, PromisedMemory] = {}
        super().__init__(home, helpers, wire)

    def _plan(self, home: FaultMachine) -> None:
        home.pool.maker.weight_rules = lambda: _RULES
        promised = self.promised[home.name] = PromisedMemory()
        home.pool.maker.ranks = RankPlanner(
            self,  # type: ignore[arg-type]
            self.members,
            promised.promise,
            lambda: home.pool.maker.options.max_memory_bytes,
        )

    def _serve(self, machine: FaultMachine) -> None:
        context = ServingContext(machine, lambda: self.card(machine), draining=lambda: False)  # type: ignore[arg-type]
        promised = self.promised[machine.name] = PromisedMemory()
        server = self.servers[machine.name] = RankServer(
            BulkDialer(machine.node),
            machine.pool.lent,
            context,
            promised.promise,
            lambda: machine.pool.maker.options.max_memory_bytes - machine.pool.held_bytes,
            lambda: True,
        )

        async def serve(peer: str, body: bytes, stream: Any) -> None:
            self.point(f"{machine.name}: asked")
            await server(peer, body, _TappedRank(stream, self.point, machine.name))

        machine.node.handle(messages.SERVE, serve)

    def card(self, machine: FaultMachine) -> Card:
        return replace(super().card(machine), machine=_CPU)

    def prompt(self, request_id: str, **fields: Any) -> Generate:
        return super().prompt(request_id, **{"max_tokens": _ANSWER_TOKENS, **fields})

    async def ask(self, asked: Generate, told: RequestEvents, seen: Callable[[Any], None]) -> None:
        """Divide the model's layers, as its owner asks for it, then ask. ``seen`` is told of what a load or a
        request fails with; a model that cannot be divided answers from home."""
        try:
            async for _ in self.home.pool.loading(self.home.folder, over=[HELPERS[0]], split="tensors"):
                pass
        except FleetError as error:
            seen(error)
        await super().ask(asked, told, seen)

    async def quiet(self) -> None:
        await super().quiet()
        for name, promised in self.promised.items():
            assert not promised._promised, f"{name} still promises memory"

    def own(self) -> dict[str, int]:
        tunnels = sum(thread.name == "tunnel" for thread in threading.enumerate())
        return {**super().own(), "threads of tunnels": tunnels}

    async def close_servers(self) -> None:
        """They end with their requests."""


@contextlib.asynccontextmanager
async def ranked(folder: Path) -> AsyncIterator[RankedMachines]:
    async with machines(folder, RankedMachines, "wrong_sums", **_FIGURES) as found:
        yield found
