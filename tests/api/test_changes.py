"""What a listener of the fleet's events is told: everything once, then what has changed, and no noise."""

from __future__ import annotations

from typing import Any

from api_fakes import engine, status
from msgspec.structs import replace

from fleetd.api.control.changes import ChangeTracker
from fleetd.control.daemon_status import DaemonStatus, RunningRequest
from fleetd.control.fleet_change import FleetChange
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.prefill_trace import Trace

STUDIO = PeerView(
    "k3f", "k3f", "studio", "usable", memory_bytes=64 << 30, available_bytes=32 << 30, rtt_ms=1.0
)


def seen(*peers: PeerView, **changes: Any) -> DaemonStatus:
    return status(fleet=FleetView(True, "me", "me", "mini", peers=list(peers)), **changes)


def begun(state: DaemonStatus) -> ChangeTracker:
    tracker = ChangeTracker()
    first = tracker.next(state, [], [Trace(id="of before")])
    assert first is not None
    assert first.full
    assert first.traces == []
    return tracker


def test_what_always_moves_is_no_change() -> None:
    tracker = begun(seen(STUDIO, engines=[engine()], uptime_s=1.0))
    moved = replace(STUDIO, heard_s=0.7, rtt_ms=1.1, available_bytes=STUDIO.available_bytes + 1_000_000)
    busy = engine(progress_age_s=3.0, idle_s=9.0)
    assert tracker.next(seen(moved, engines=[busy], uptime_s=2.0), []) is None


def test_free_memory_counts_as_changed_by_a_good_part_of_it() -> None:
    tracker = begun(seen(STUDIO))
    fuller = replace(STUDIO, available_bytes=STUDIO.available_bytes // 2)
    assert tracker.next(seen(fuller), []) == FleetChange(peers={"k3f": fuller})


def test_only_what_changed_is_told_and_what_is_gone_is_none() -> None:
    tracker = begun(seen(STUDIO))
    lost = replace(STUDIO, state="unreachable", reason="It does not answer.")
    request = RunningRequest("r1", stage="waiting")
    told = tracker.next(seen(lost), [request], [Trace(id="r0")])
    assert told == FleetChange(peers={"k3f": lost}, requests={"r1": request}, traces=[Trace(id="r0")])
    assert tracker.next(seen(), []) == FleetChange(peers={"k3f": None}, requests={"r1": None})
    # One that comes back is told again, although it is as it was.
    assert tracker.next(seen(lost), []) == FleetChange(peers={"k3f": lost})
