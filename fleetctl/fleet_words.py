"""How machines, and this machine's part in the fleet, are worded in every verb. Pure, and light to import."""

from __future__ import annotations

from fleetctl.text import one_line

# Anything else is the reason why it does not run.
MDNS_STATES = ("running", "starting", "stopped", "off")
OFF = "off (fleet.enabled in fleetd.toml)"


def label(name: str, short_id: str) -> str:
    """Name and short id, because names may be alike."""
    return f"{one_line(name)} ({one_line(short_id)})"


def summary(
    me: str, *, port: int, usable: int, peers: int, mdns: str, local_only: bool = False, pairing: bool = False
) -> str:
    """One line; ``me`` is this machine's label."""
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


def removal(by: str) -> str:
    """The sentence for a machine that another one removed."""
    undo = "`fleetctl pair` there and `fleetctl join CODE` here undo it"
    return f"{one_line(by)} removed this machine from the fleet; {undo}."
