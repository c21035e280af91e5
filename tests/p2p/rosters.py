"""Five machines, what they sign about each other, and rosters that tell each other all they know."""

from __future__ import annotations

import itertools

import msgspec
from machines import MachineKeys, machine

from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import RosterRecord

A, B, C, D, E = (machine(number) for number in range(5))
NAMES = {who.node_id: name for who, name in zip((A, B, C, D, E), "abcde", strict=True)}


def said(
    signer: MachineKeys,
    about: MachineKeys,
    sequence: int = 1,
    *,
    removed: bool = False,
    sees_prompts: bool = True,
    name: str = "n",
) -> RosterRecord:
    """A record as its signer's own, possibly malicious, program could make it."""
    draft = RosterRecord(about.certificate, name, signer.node_id, sequence, removed, sees_prompts, b"")
    return msgspec.structs.replace(draft, signature=signer.sign(draft.signed_bytes()))


def names(roster: Roster) -> str:
    return "".join(sorted(NAMES[node_id] for node_id in roster.members))


def pair(inviter: Roster, joiner: Roster, first: MachineKeys, second: MachineKeys) -> None:
    """What pairing does, without its cryptography."""
    offered = Roster(first, inviter.records())
    offered.admit(second.certificate, NAMES[second.node_id], True)
    joiner.join(first.certificate, NAMES[first.node_id], True, offered.records())
    inviter.join(second.certificate, NAMES[second.node_id], True, [*offered.records(), *joiner.records()])


def exchange(*rosters: Roster) -> None:
    """Until nobody has news for anybody, tell everything to everybody."""
    while any(one.merge(other.records()).changed for one, other in itertools.permutations(rosters, 2)):
        pass
