"""The daemon's status as fleetctl and /health read it."""

from __future__ import annotations

import msgspec

from fleetd.engine.engine_status import EngineStatus
from fleetd.hardware.probe import HardwareReading
from fleetd.p2p.views import FleetView
from fleetd.requests.runner import RequestCounts


class HttpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int


class Status(msgspec.Struct, frozen=True):
    """The body of ``/fleet/v1/status``; field names are the contract."""

    version: str
    pid: int
    home: str
    socket: str
    http: HttpAddress | None
    uptime_s: float
    ready: bool
    draining: bool
    default_model: str
    machine: HardwareReading
    engines: list[EngineStatus]
    requests: RequestCounts
    fleet: FleetView
