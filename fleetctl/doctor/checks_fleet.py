"""Doctor's checks of the fleet: why machines that should find each other do not.

These judge what the daemon sees of the fleet (`/fleet/v1/peers`); ``checks_network`` judges the network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from fleetctl.connection.client import Client
from fleetctl.connection.replies import fetch_fleet, read
from fleetctl.doctor import checks_network
from fleetctl.doctor.checks_network import BY_ADDRESS
from fleetctl.doctor.findings import Finding, fail, ok, warn
from fleetctl.render.fleet_words import OFF, crowd_of, label_of, newcomer, state_word
from fleetctl.render.text import clause, listed, one_line
from fleetd.control.fleet_view import FleetView, PathView, PeerView
from fleetd.control.network_diagnosis import InterfaceView, NetworkDiagnosis
from fleetd.errors import FleetError

_PAIR = "`fleetctl pair` here, then `fleetctl join CODE` there."
# EHOSTUNREACH of macOS, as the daemon words it.
_LOCAL_NETWORK = "error 65"
_LOCAL = ("wired", "wifi", "thunderbolt")
_FAST, _SLOW = ("thunderbolt", "wired"), ("wifi", "tailscale")


def check(client: Client) -> list[Finding]:
    """Ask the daemon and return all findings about the fleet and its network."""
    try:
        fleet = fetch_fleet(client)
    except FleetError as error:
        return [fail("fleet", f"It could not be checked: {one_line(error.message)}", _fix(error))]
    if not fleet.enabled:
        return [ok("fleet", f"{OFF}: this machine works alone")]
    try:
        return judge(fleet, read(client.get("/fleet/v1/diagnose"), NetworkDiagnosis))
    except FleetError as error:
        what = f"It could not be looked at: {one_line(error.message)}"
        return [*judge(fleet, None), warn("network", what, _fix(error))]


def _fix(error: FleetError) -> str:
    return one_line(error.hint) or "The daemon's log tells more."


def judge(fleet: FleetView, facts: NetworkDiagnosis | None) -> list[Finding]:
    """Findings, the likeliest causes first; without ``facts`` only those about the fleet."""
    return [
        *members(fleet),
        *neighbours(fleet),
        *configured(fleet),
        mdns(fleet),
        *local_network(fleet, (facts.interfaces if facts else None) or ()),
        *listening(fleet),
        *slow_paths(fleet),
        *plain_links(fleet),
        *(checks_network.judge(fleet, facts) if facts is not None else ()),
    ]


def members(fleet: FleetView) -> list[Finding]:
    """How many paired machines can be used, and a finding for each that cannot."""
    found = []
    if by := one_line(fleet.removed_by):
        what = f"{by} removed this machine from the fleet."
        found.append(warn("fleet", what, f"`fleetctl pair` on {by}, then `fleetctl join CODE` here."))
    if not fleet.peers:
        if not by:
            found.append(ok("fleet", f"no other machine is paired yet: {_PAIR}"))
        return found
    found += newcomers(fleet)
    usable = sum(peer.usable for peer in fleet.peers)
    if usable == len(fleet.peers):
        found.append(ok("fleet", f"{usable} of {usable} paired machines can be used"))
    return [*found, *(_unusable(peer) for peer in fleet.peers if not peer.usable)]


def newcomers(fleet: FleetView) -> list[Finding]:
    """A finding for each machine that another one added and no person here has spoken of."""
    found = [
        warn("new machine", *newcomer(peer.name, peer.short_id, peer.through))
        for peer in fleet.peers
        if peer.new
    ]
    if fleet.late:
        fix = "Ask on the machines of the fleet who pairs so many; `fleetctl unpair` takes out who must not."
        found.append(warn("new machines", crowd_of(fleet.late), fix))
    return found


def _unusable(peer: PeerView) -> Finding:
    name = f"peer {one_line(peer.name)}"
    reason = one_line(peer.reason) or f"It is {one_line(state_word(peer.state))}."
    if peer.state == "incompatible":
        fix = "Install the same version of fleetd on both machines."
    elif peer.state == "unreachable":
        fix = "See that it is switched on, on the same network, and that fleetd runs there."
    elif peer.state == "refused":
        fix = f"`fleetctl unpair {one_line(peer.short_id)}` here, then pair it again."
    else:
        fix = "Wait a moment; its `fleetctl doctor` tells more if this lasts."
    # A machine that is switched off is no fault of this one; a refusal is.
    level = fail if peer.state in ("incompatible", "refused") else warn
    return level(name, reason, one_line(peer.hint) or fix)


def configured(fleet: FleetView) -> list[Finding]:
    """A finding for each address of the settings at which no usable peer answers."""
    return [
        warn(
            "configured peer",
            f"{one_line(peer.address)}: {one_line(peer.reason)}",
            one_line(peer.hint) or "Correct fleet.peers, or pair that machine with this one.",
        )
        for peer in fleet.unanswered
    ]


def neighbours(fleet: FleetView) -> list[Finding]:
    """Machines that run fleetd on this network and are not paired."""
    found = []
    if shown := [label_of(neighbour) for neighbour in fleet.neighbours if neighbour.pairing]:
        found.append(warn("neighbours", f"{listed(shown)} shows a code.", "`fleetctl join CODE` here."))
    if others := [label_of(neighbour) for neighbour in fleet.neighbours if not neighbour.pairing]:
        what = f"{listed(others)} {'runs' if len(others) == 1 else 'run'} fleetd here and "
        found.append(warn("neighbours", f"{what}{'is' if len(others) == 1 else 'are'} not paired.", _PAIR))
    return found


def mdns(fleet: FleetView) -> Finding:
    """Check that mDNS runs, so that machines find each other."""
    if fleet.mdns == "running":
        return ok("mdns", "running")
    if fleet.mdns in ("starting", "stopped"):
        return warn("mdns", f"It is {fleet.mdns}.", "Wait a moment, then look again.")
    if fleet.mdns != "off":
        fix = f"See the daemon's log; until then {BY_ADDRESS}."
        return warn("mdns", f"Machines do not find each other by themselves: {one_line(fleet.mdns)}", fix)
    if fleet.peers and all(peer.usable for peer in fleet.peers):
        return ok("mdns", "off (fleet.mdns); all paired machines are reached by their addresses")
    what = "It is off (fleet.mdns): only known addresses are tried."
    return warn("mdns", what, f"Set fleet.mdns = true, or {BY_ADDRESS}.")


def local_network(fleet: FleetView, interfaces: Sequence[InterfaceView] = ()) -> list[Finding]:
    """Check the permission of macOS for the local network.

    Without it, macOS reports "no route", the same error as for a machine that is switched off.
    """
    fix = (
        "System Settings → Privacy & Security → Local Network: allow fleetd (or the Python or the terminal "
        "that runs it), then restart it."
    )
    if any(_LOCAL_NETWORK in reason for reason in (fleet.mdns, *(i.multicast for i in interfaces))):
        return [fail("local network", "macOS keeps fleetd from the local network.", fix)]
    if any(path.in_use and path.kind in _LOCAL for peer in fleet.peers for path in peer.paths):
        return []
    silent = [
        label_of(peer)
        for peer in fleet.peers
        if any(_LOCAL_NETWORK in reason for reason in (peer.reason, *(path.reason for path in peer.paths)))
    ]
    if not silent:
        return []
    what = f"Either macOS keeps fleetd from the local network, or no machine is there: {listed(silent)}."
    return [warn("local network", what, fix)]


def listening(fleet: FleetView) -> list[Finding]:
    """Check that the daemon listens on more than loopback if other machines are known."""
    if not _loopback(fleet.host):
        return []
    hosts = [path.host for peer in fleet.peers for path in peer.paths]
    hosts += [_host(address) for neighbour in fleet.neighbours for address in neighbour.addresses]
    others = [host for host in hosts if not _loopback(host)]
    if not others:
        return []
    return [
        fail(
            "listening",
            f"fleetd listens on {one_line(fleet.host)} only, but other machines are at {listed(others[:3])}.",
            f'Set fleet.listen = "*:{fleet.port}" in fleetd.toml and restart it.',
        )
    ]


def slow_paths(fleet: FleetView) -> list[Finding]:
    """A finding for each peer that is reached over a slow path although a fast one exists."""
    found = []
    for peer in fleet.peers:
        used = next((path for path in peer.paths if path.in_use), None)
        better = [path for path in peer.paths if path.kind in _FAST]
        if used is not None and used.kind in _SLOW and better:
            found.append(_slow_path(peer, used, better[0]))
    return found


def plain_links(fleet: FleetView) -> list[Finding]:
    """Which paired machines are reached over links that were declared private, and what was declared for
    nothing."""
    if not fleet.plain_links:
        return []
    names = one_line(listed(fleet.plain_links))
    to = [label_of(peer) for peer in fleet.peers if any(path.private for path in peer.paths)]
    found = []
    if fleet.missing_links:
        what = f"fleet.plain_links names {one_line(listed(fleet.missing_links))}, which is no interface here."
        fix = "Correct it in fleetd.toml, or plug the cable in."
        found.append(warn("plain links", what, fix))
    if to:
        what = (
            f"divided models may go unsealed to {listed(to)} over {names}, if their owners say so too; "
            "everything else is sealed"
        )
        found.append(ok("plain links", what))
    elif not fleet.missing_links:
        what = f"No paired machine has an address on {names}, which fleet.plain_links names."
        found.append(warn("plain links", what, "Name the link that the cable between the machines makes."))
    return found


def _slow_path(peer: PeerView, used: PathView, better: PathView) -> Finding:
    what = f"{label_of(peer)} is reached over {one_line(used.kind)} ({one_line(used.host)})"
    why = f": {clause(better.reason)}" if better.reason else ""
    return warn(
        "path",
        f"{what} although there is a {one_line(better.kind)} connection ({one_line(better.host)}){why}.",
        "See that the cable's interface is up on both machines and that no firewall closes it.",
    )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _host(address: str) -> str:
    """The host of HOST, HOST:PORT or [HOST]:PORT."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]
