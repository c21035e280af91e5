"""Doctor's checks of the network, from what the daemon measures on request (`/fleet/v1/diagnose`).

A missing fact is reported as unknown, never taken for a good one.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.render.text import clause, duration, listed, one_line
from fleetd.control.fleet_view import FleetView
from fleetd.control.network_diagnosis import ClockOffsets, InterfaceView, NetworkDiagnosis, PeerPortView

BY_ADDRESS = "name the other machine's address in fleet.peers (or `fleetd run --peer HOST`)"
# Sessions do not depend on the clock, but logs and daily usage become hard to compare.
_CLOCK_S = 30.0
# Interfaces of this machine itself, of containers and of tunnels: mDNS does not use them.
_NOT_LOCAL = ("loopback", "virtual", "tailscale")


def judge(fleet: FleetView, facts: NetworkDiagnosis) -> list[Finding]:
    return [
        *port(fleet, facts.port),
        *firewall(fleet, facts.firewall),
        *multicast(facts.interfaces),
        *mtu(facts.mtu),
        *clocks(facts.clock, synchronised=facts.clock_synchronised),
        *unknown(fleet, facts),
    ]


def port(fleet: FleetView, found: PeerPortView | None) -> list[Finding]:
    """Check that this machine's peer port can be reached."""
    if found is None or found.reachable is None:
        return []
    if found.reachable:
        return [ok("peer port", f"{fleet.port} takes connections at {one_line(found.host)}")]
    what = one_line(found.reason) or f"{one_line(found.host)} does not answer on port {fleet.port}."
    return [fail("peer port", what, f"Let TCP port {fleet.port} through the firewall of this machine.")]


def firewall(fleet: FleetView, hints: Sequence[str] | None) -> list[Finding]:
    """Warn of each firewall that is on, unless every paired machine is reached."""
    hints = [one_line(hint) for hint in hints or () if one_line(hint)]
    if hints and fleet.peers and all(peer.usable for peer in fleet.peers):
        return [ok("firewall", "there is one, and all paired machines are reached")]
    return [warn("firewall", "There is one, and it may keep other machines away.", hint) for hint in hints]


def multicast(interfaces: Sequence[InterfaceView] | None) -> list[Finding]:
    """Check that multicast passes on each local network: mDNS needs it."""
    asked = [interface for interface in _local(interfaces) if interface.multicast]
    good = [one_line(i.name) for i in asked if i.multicast == "ok"]
    found = [ok("multicast", f"passes on {listed(good)}")] if good else []
    for interface in asked:
        if interface.multicast != "ok":
            what = f"None passes on {one_line(interface.name)}: {clause(interface.multicast)}."
            fix = f"Look for a firewall or for client isolation on the Wi-Fi; or {BY_ADDRESS}."
            found.append(warn("multicast", what, fix))
    return found


def mtu(sentences: Sequence[str] | None) -> list[Finding]:
    """Warn of unusual packet sizes: packets too large for one hop are lost, in bulk transfers first."""
    fix = "If in doubt, set 1500 on all of them."
    return [warn("mtu", one_line(sentence), fix) for sentence in sentences or () if one_line(sentence)]


def clocks(clock: ClockOffsets | None, *, synchronised: bool | None = None) -> list[Finding]:
    """Check this machine's clock against those of its peers or, without peers, that it is synchronised."""
    fix = "Switch time synchronisation on."
    known = [(o, o.offset_s) for o in (clock.peers if clock else None) or () if o.offset_s is not None]
    if not known:
        what = "Nothing keeps this machine's clock right."
        # Only Linux tells.
        here = "Switch time synchronisation on: `sudo timedatectl set-ntp true`."
        return [warn("clocks", what, here)] if synchronised is False else []
    off = []
    for offset, off_s in known:
        if abs(off_s) > _CLOCK_S:
            how = f"{duration(abs(off_s))} {'ahead of' if off_s > 0 else 'behind'} this one"
            off.append(warn("clocks", f"The clock of {one_line(offset.name)} is {how}.", fix))
    return off or [ok("clocks", f"agree with those of {listed([one_line(o.name) for o, _ in known])}")]


def unknown(fleet: FleetView, facts: NetworkDiagnosis) -> list[Finding]:
    """One finding that lists all facts that the daemon could not find out."""
    missing = []
    if facts.interfaces is None:
        missing.append("whether multicast passes")
    else:
        unclear = [one_line(i.name) for i in _local(facts.interfaces) if not i.multicast]
        if unclear:
            missing.append(f"whether multicast passes on {listed(unclear)}")
    if facts.port is None or facts.port.reachable is None:
        missing.append(f"whether port {fleet.port} can be reached")
    if facts.firewall is None:
        missing.append("whether a firewall is on")
    if facts.mtu is None:
        missing.append("which packets fit through")
    compared = facts.clock.peers if facts.clock and facts.clock.peers else ()
    if any(peer.usable for peer in fleet.peers) and all(offset.offset_s is None for offset in compared):
        missing.append("whether the clocks agree")
    if not missing:
        return []
    what = f"Not known: {'; '.join(missing)}."
    return [warn("network", what, "The daemon's log may say why it could not look.")]


def _local(interfaces: Sequence[InterfaceView] | None) -> list[InterfaceView]:
    """The interfaces with an address through which other machines may be reached."""
    return [i for i in interfaces or () if i.addresses and i.kind not in _NOT_LOCAL]
