"""The events of GET /fleet/v1/events: the whole state first, then what has changed, as it changes."""

from __future__ import annotations

import msgspec

from fleetd.control.daemon_status import DaemonStatus
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Trace


class RunningRequest(msgspec.Struct, frozen=True):
    """A request that has not ended. A word of its prompt or answer is never in it.

    ``stage``: what it does now, in words for people; ``done`` of ``total`` is the progress of that, in tokens
    or bytes, and 0 of 0 if nothing counts it. ``at_s``: Unix time of its arrival; ``age_s``: its seconds.
    ``client``: the program that asked, as in a trace.
    ``plan``: how its prompt is read; its ``cuts`` say which machine computes what.
    """

    id: str = ""
    model: str = ""
    route: str = ""
    asked_by: str = ""
    client: str = ""
    at_s: float = 0.0
    age_s: float = 0.0
    stage: str = ""
    done: int = 0
    total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    exactness: str = ""
    plan: OptionView = OptionView()


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
