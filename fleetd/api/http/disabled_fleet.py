"""The fleet of a daemon with ``fleet.enabled`` off: an empty view, and one refusal for every request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.model_change import ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.control.pairing_events import PairingEvent, Unpaired
from fleetd.errors import FleetError, NotPaired, PairingClosed
from fleetd.p2p.session.transport import PeerStream


class DisabledFleet:
    """What handlers call of ``fleetd.fleet.service.Fleet``."""

    def view(self) -> FleetView:
        return FleetView(enabled=False)

    def pair(self) -> AsyncGenerator[PairingEvent, None]:
        raise _off(PairingClosed)

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        raise _off(PairingClosed)

    def join(self, code: str, host: str | None, *, sees_prompts: bool) -> AsyncGenerator[PairingEvent, None]:
        raise _off(PairingClosed)

    async def unpair(self, peer: str, keep: Iterable[str] = ()) -> Unpaired:
        raise _off(NotPaired)

    async def allow_prompts(self, peer: str, allowed: bool, *, fleet: bool) -> PeerView:
        raise _off(NotPaired)

    def request(self, node_id: str, method: str, body: bytes) -> PeerStream:
        raise _off(NotPaired)

    def is_here(self, ref: str) -> bool:
        return False

    def manage(self, machine: str, verb: Verb, model: str) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        raise _off(NotPaired)

    async def look(self, machine: str, words: str = "") -> ModelListing | FoundModels:
        raise _off(NotPaired)

    async def diagnose(self) -> None:
        """None: without a fleet, no network facts are gathered."""


def _off(kind: type[FleetError]) -> FleetError:
    return kind(
        "This daemon keeps to itself: fleet.enabled is off.",
        hint="Set fleet.enabled = true in fleetd.toml, then restart it.",
    )
