"""How every verb words a machine, and this machine's part in the fleet. Pure, and light to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fleetctl.render.text import one_line

if (
    TYPE_CHECKING
):  # `fleetctl status` does without msgspec, which takes longer to load than to be of use there
    from fleetd.control.fleet_view import FleetView, Neighbour, PeerView
    from fleetd.control.pairing_events import Meeting, Paired

_NAMES = 5
# Any other text is the reason why mDNS does not run.
MDNS_STATES = ("running", "starting", "stopped", "off")
OFF = "off (fleet.enabled in fleetd.toml)"
# The states of a paired machine that people call otherwise; the page's `units.js` has the same words.
_STATES = {"quiet": "silent", "draining": "stopping", "incompatible": "other version"}


def label(name: str, short_id: str) -> str:
    """Name and short id: two machines may have the same name."""
    return f"{one_line(name)} ({one_line(short_id)})"


def state_word(state: str) -> str:
    """What people call the state of a paired machine."""
    return _STATES.get(state, state)


def daemon_word(status: Mapping[str, Any]) -> str:
    """The state of this machine's daemon, by its answer to `/fleet/v1/status`."""
    if status.get("draining"):
        return "stopping"
    return "ready" if status.get("ready") else "starting"


def label_of(machine: FleetView | PeerView | Neighbour | Meeting | Paired) -> str:
    """The label of a machine as the daemon describes it."""
    return label(machine.name, machine.short_id)


def summary(
    me: str, *, port: int, usable: int, peers: int, mdns: str, local_only: bool = False, pairing: bool = False
) -> str:
    """This machine's part in the fleet, in one line; ``me`` is this machine's label."""
    parts = [
        me,
        f"port {port}",
        f"{usable} of {peers} peers usable" if peers else "no peers",
        f"mDNS {mdns}" if mdns in MDNS_STATES else f"mDNS fails: {one_line(mdns)}",
    ]
    if local_only:
        parts.append("prompts stay here (fleet.local_only)")
    if pairing:
        parts.append("pairing window open")
    return " · ".join(parts)


def newcomer(name: str, short_id: str, through: str) -> tuple[str, str]:
    """What is said of a machine that others added, and what to do about it."""
    what = (
        f"{label(name, short_id)} is new: it is here on the word of {one_line(through)}, and sees no prompts"
    )
    return (
        f"{what} typed here.",
        f"If it is yours, `fleetctl peers prompts {one_line(short_id)} yes`; else "
        f"`fleetctl unpair {one_line(short_id)}`.",
    )


def crowd_of(names: list[str]) -> str:
    """The sentence on machines that wait because a member adds too many."""
    shown = ", ".join(one_line(name) for name in names[:_NAMES])
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"A member adds more machines than one may in a day; these wait: {shown}{more}."


def removal(by: str) -> str:
    """The sentence on a machine that another machine removed from the fleet."""
    undo = "`fleetctl pair` there and `fleetctl join CODE` here undo it"
    return f"{one_line(by)} removed this machine from the fleet; {undo}."
