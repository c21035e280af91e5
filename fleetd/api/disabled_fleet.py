"""The fleet of a daemon whose settings keep it to itself: nothing to see, and one answer to every wish."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.pairing_events import PairingEvent, Unpaired
from fleetd.control.prefill_plan import PlanQuestion, PlanView
from fleetd.errors import FleetError, NotPaired, PairingClosed


class DisabledFleet:
    def view(self) -> FleetView:
        return FleetView(enabled=False)

    def pair(self) -> AsyncGenerator[PairingEvent, None]:
        raise _off(PairingClosed)

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        raise _off(PairingClosed)

    def join(self, code: str, host: str | None, *, sees_prompts: bool) -> AsyncGenerator[PairingEvent, None]:
        raise _off(PairingClosed)

    async def unpair(self, peer: str) -> Unpaired:
        raise _off(NotPaired)

    async def allow_prompts(self, peer: str, allowed: bool) -> PeerView:
        raise _off(NotPaired)

    async def diagnose(self) -> None:
        """None: nothing is looked at."""

    def plan(self, question: PlanQuestion, folder: Any) -> PlanView:
        raise _off(NotPaired)


def _off(kind: type[FleetError]) -> FleetError:
    return kind(
        "This daemon keeps to itself: fleet.enabled is off.",
        hint="Set fleet.enabled = true in fleetd.toml, then restart it.",
    )
