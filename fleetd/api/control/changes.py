"""What has changed since the last event of one listener. Pure: states in, changes out.

Figures that move all the time (free memory, ages, round trips) would make every state a new one. So states
are compared with those rounded or left out; what is sent is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from fleetd.control.daemon_status import (
    DaemonStatus,
    EngineStatus,
    HardwareReading,
    MemoryBudget,
    RunningRequest,
)
from fleetd.control.fleet_change import FleetChange
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.prefill_trace import Trace

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
# Free memory counts as changed by this part of all memory.
_MEMORY_PARTS = 64


class ChangeTracker:
    """Remembers what one listener knows."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._peers: frozenset[str] = frozenset()
        self._requests: frozenset[str] = frozenset()
        self._begun = False

    def next(
        self, status: DaemonStatus, running: Sequence[RunningRequest], traces: Sequence[Trace] = ()
    ) -> FleetChange | None:
        """The next event; None where nothing has changed."""
        fleet = status.fleet
        peers = {peer.node_id: peer for peer in fleet.peers}
        requests = {request.id: request for request in running}
        plain_status = replace(status, fleet=FleetView())
        plain_fleet = replace(fleet, peers=[])
        calm_peers = {key: _calm_peer(peer) for key, peer in peers.items()}
        change = FleetChange(
            full=not self._begun,
            status=self._new("status", plain_status, _calm_status(plain_status)),
            fleet=self._new("fleet", plain_fleet, plain_fleet),
            peers=self._keyed("peer", peers, calm_peers, self._peers),
            requests=self._keyed("request", requests, requests, self._requests),
            traces=list(traces) if self._begun else [],
        )
        self._begun, self._peers, self._requests = True, frozenset(peers), frozenset(requests)
        return change if change != FleetChange() else None

    def _new(self, name: str, value: T, calm: object) -> T | None:
        """The value if it is not what is known; notes it."""
        encoded = _encode(calm)
        if self._known.get(name) == encoded:
            return None
        self._known[name] = encoded
        return value

    def _keyed(
        self, kind: str, values: Mapping[str, T], calm: Mapping[str, object], known: Iterable[str]
    ) -> dict[str, T | None]:
        found: dict[str, T | None] = {}
        for key, value in values.items():
            if (new := self._new(f"{kind} {key}", value, calm[key])) is not None:
                found[key] = new
        for key in known:
            if key not in values:
                found[key] = None
                self._known.pop(f"{kind} {key}", None)
        return found


def _calm_status(status: DaemonStatus) -> DaemonStatus:
    return replace(
        status,
        uptime_s=0.0,
        machine=_calm_machine(status.machine),
        memory=_calm_memory(status.memory),
        engines=[_calm_engine(engine) for engine in status.engines],
    )


def _calm_machine(machine: HardwareReading) -> HardwareReading:
    return replace(
        machine,
        available_bytes=_rounded(machine.available_bytes, machine.memory_bytes),
        card_free_bytes=_rounded(machine.card_free_bytes, machine.card_bytes),
    )


def _calm_memory(memory: MemoryBudget) -> MemoryBudget:
    return replace(
        memory,
        available_bytes=_rounded(memory.available_bytes, memory.total_bytes),
        usable_bytes=_rounded(memory.usable_bytes, memory.total_bytes),
    )


def _calm_engine(engine: EngineStatus) -> EngineStatus:
    return replace(engine, progress_age_s=0.0, idle_s=0.0)


def _calm_peer(peer: PeerView) -> PeerView:
    return replace(
        peer,
        available_bytes=_rounded(peer.available_bytes, peer.memory_bytes),
        usable_bytes=_rounded(peer.usable_bytes, peer.memory_bytes),
        heard_s=None,
        rtt_ms=_magnitude(peer.rtt_ms),
        bytes_per_s=_magnitude(peer.bytes_per_s),
        paths=[
            replace(path, rtt_ms=_magnitude(path.rtt_ms), bytes_per_s=_magnitude(path.bytes_per_s))
            for path in peer.paths
        ],
    )


def _rounded(value: int, of: int) -> int:
    part = of // _MEMORY_PARTS
    return value // part if part else value


def _magnitude(value: float | None) -> float | None:
    """The same number for values within some 40 % of each other."""
    return None if value is None or value <= 0 else float(round(2 * math.log2(value)))
