"""Views of the fleet: the state of the mesh in sentences, and the reason why a machine cannot be used."""

from __future__ import annotations

from fleetd.control.fleet_view import (
    FleetView,
    Neighbour,
    PathView,
    PeerModel,
    PeerState,
    PeerView,
    UnansweredAddress,
)
from fleetd.errors import VersionMismatch
from fleetd.p2p.links import PeerPath
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.identity import short_id
from fleetd.p2p.membership.roster import RosterMember
from fleetd.p2p.node import Node
from fleetd.p2p.peers import Peer
from fleetd.text.host_port import host_port


def fleet_view(node: Node, *, local_only: bool, pairing: bool, now: float) -> FleetView:
    """The whole fleet; ``now`` is the loop's time."""
    if not node.port:  # not open yet
        return FleetView(enabled=True, name=node.name)
    mesh = node.mesh
    members = node.roster.members
    discovery = node.discovery
    seen = discovery.seen.values() if discovery is not None else ()
    removed_by = node.roster.removed_by
    return FleetView(
        enabled=True,
        node_id=mesh.me,
        short_id=short_id(mesh.me),
        name=node.name,
        host=node.settings.host,
        port=node.port,
        mdns=discovery.state if discovery is not None else "off",
        local_only=local_only,
        pairing=pairing,
        removed_by=node.name_of(removed_by) if removed_by else "",
        peers=sorted(
            (peer_view(node, member, now) for member in members.values()), key=lambda peer: peer.name.lower()
        ),
        neighbours=[
            Neighbour(
                node_id=found.node_id,
                short_id=short_id(found.node_id),
                name=found.name,
                addresses=[host for host, _ in found.addresses],
                pairing=bool(found.pairing),
            )
            for found in seen
            if found.node_id not in members
        ],
        plain_links=list(node.plain_links.declared),
        missing_links=node.plain_links.missing,
        late=sorted({record.name for record in mesh.late}),
        unanswered=[
            UnansweredAddress(host_port(*address), error.message, error.hint)
            for address, error in mesh.unanswered().items()
        ],
    )


def peer_view(node: Node, member: RosterMember, now: float) -> PeerView:
    """One member."""
    mesh, allowed_here = node.mesh, node.allowed_here(member)
    peer = mesh.peers[member.node_id]
    card = mesh.cards.get(member.node_id)
    state, reason, hint = condition(peer, card, now)
    address = peer.link.address if peer.link is not None else None
    used = peer.paths.get(address) if address is not None else None
    facts = card.machine if card is not None else None
    return PeerView(
        node_id=member.node_id,
        short_id=short_id(member.node_id),
        name=member.name,
        state=state,
        reason=reason,
        hint=hint,
        sees_prompts=member.sees_prompts and allowed_here,
        allowed_here=allowed_here,
        allowed_by_fleet=member.sees_prompts,
        added_by=member.added_by,
        new=not member.confirmed and node.prompt_rules.allows(member.node_id),
        through="" if member.confirmed else node.name_of(member.through),
        brings=[
            each.node_id for each in node.roster.only_through(member.node_id) if each.node_id in mesh.peers
        ],
        software=card.software if card is not None else "",
        tier=facts.tier if facts is not None else "",
        chip=facts.chip if facts is not None else "",
        accelerator=facts.accelerator if facts is not None else "",
        memory_bytes=facts.memory_bytes if facts is not None else 0,
        available_bytes=card.available_bytes if card is not None else 0,
        usable_bytes=card.usable_bytes if card is not None else 0,
        running=card.running if card is not None else 0,
        waiting=card.waiting if card is not None else 0,
        vectors=card.vectors if card is not None else 0,
        models=[
            PeerModel(
                m.name,
                m.state,
                m.roles,
                m.digest,
                m.speed,
                m.part_first,
                m.part_last,
                m.part_total,
                m.part_asked_by,
                shape=m.shape,
            )
            for m in (card.models if card is not None else ())
        ],
        address=address[0] if address is not None else "",
        rtt_ms=_ms(used.rtt_s if used is not None else None),
        bytes_per_s=used.bytes_per_s if used is not None else None,
        link_doubtful=used is not None and used.bytes_per_s is not None and used.speeds.doubtful(now),
        heard_s=None if peer.heard_s is None else round(now - peer.heard_s, 1),
        paths=[
            _path(path, path.address == address, private=node.plain_links.leads_to(path.address[0]))
            for path in peer.paths
        ],
    )


def condition(peer: Peer, card: Card | None, now: float) -> tuple[PeerState, str, str]:
    """State, reason and hint; reason and hint are "" for a usable machine."""
    if peer.link is not None:
        if peer.link.quiet:
            silent = now - (peer.heard_s if peer.heard_s is not None else now)
            return (
                "quiet",
                f"Nothing was heard from it for {silent:.0f} s.",
                "It may be asleep or overloaded.",
            )
        if card is None:
            return "connecting", "It is connected, and has not yet said what it has.", ""
        if card.draining:
            return "draining", "It is stopping.", ""
        return "usable", "", ""
    trouble = peer.trouble
    if isinstance(trouble, VersionMismatch):
        return "incompatible", trouble.message, trouble.hint or "Update fleetd on the older of the two."
    if trouble is not None:
        return "refused", trouble.message, trouble.hint
    if peer.dialling and not any(path.reason for path in peer.paths):
        return "connecting", "It is being called.", ""
    return "unreachable", peer.paths.why_unusable(), _START if peer.paths.refused else _ADVICE


_START = "Start fleetd there. If it runs, `fleetctl doctor` here looks for the cause."
_ADVICE = "See that fleetd runs there and both are on one network; `fleetctl doctor` looks for the cause."


def reach(peer: Peer, card: Card | None, now: float) -> str:
    """The reason why a machine cannot be used; "" for a usable one."""
    return condition(peer, card, now)[1]


def _path(path: PeerPath, in_use: bool, *, private: bool) -> PathView:
    return PathView(
        host=path.address[0],
        port=path.address[1],
        kind=path.kind,
        source=path.source,
        rtt_ms=_ms(path.rtt_s),
        bytes_per_s=path.bytes_per_s,
        in_use=in_use,
        reason=path.reason,
        private=private,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
