"""The events of GET /fleet/v1/events: the whole state first, then what has changed, as it changes."""

from __future__ import annotations

import msgspec

from fleetd.control.daemon_status import DaemonStatus, RunningRequest
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.prefill_trace import Trace


class FleetChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is not there has not changed. ``full``: this is all there is, and what was known before is void.

    ``status`` has no fleet, which is in ``fleet``; that has no peers, which are in ``peers`` by node id.
    ``requests``: running ones by id. None for a key that is gone. ``traces``: requests that ended, oldest
    first; a full event has none, as GET /fleet/v1/traces tells them.
    """

    full: bool = False
    status: DaemonStatus | None = None
    fleet: FleetView | None = None
    peers: dict[str, PeerView | None] = {}
    requests: dict[str, RunningRequest | None] = {}
    traces: list[Trace] = []
