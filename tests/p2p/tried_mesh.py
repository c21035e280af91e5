"""A mesh without a network, and what it asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from machines import MachineKeys, machine

from fleetd.errors import FleetError, PeerUnreachable
from fleetd.p2p.actions import Action, Dial, SendNotify
from fleetd.p2p.links import Address
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.mesh import Mesh

OTHER = b"x" * 16  # digest of some other roster
ME = machine(0)


def at(number: int, interface: int = 0) -> Address:
    return f"10.0.{interface}.{number}", 8115


@dataclass
class Tried:
    """A mesh of machine 0, or of ``me``, and what it has asked for."""

    members: Sequence[int] = (1,)
    me: MachineKeys = ME
    static: Sequence[Address] = ()
    numbers: Iterable[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.roster = Roster(self.me)
        for number in self.members:
            self.roster.admit(machine(number).certificate, f"m{number}", True)
        self.mesh = Mesh(self.me.node_id, self.roster, static=self.static, random=lambda: 0.0, now=0.0)
        self._numbers = iter(self.numbers)

    def asked(self) -> list[Action]:
        self.mesh.validate()
        return self.mesh.take_actions()

    def dials(self) -> list[Dial]:
        return [action for action in self.asked() if isinstance(action, Dial)]

    def told(self, topic: str) -> list[tuple[int, bytes]]:
        return [(a.link, a.body) for a in self.asked() if isinstance(a, SendNotify) and a.topic == topic]

    def opens(
        self,
        other: int = 1,
        *,
        dial: Dial | None = None,
        outbound: bool = False,
        epoch: int = 1,
        reached: Address | None = None,
        now: float = 0.0,
    ) -> int:
        """A session with machine ``other``: its number."""
        number = next(self._numbers)
        self.mesh.opened(
            number,
            machine(other).node_id,
            outbound=outbound or dial is not None,
            epoch=epoch,
            roster=OTHER,
            dialled=dial,
            reached=reached or (dial.address if dial is not None else at(other)),
            now=now,
        )
        return number

    def used(self, other: int = 1) -> int | None:
        link = self.mesh.peers[machine(other).node_id].link
        return link.number if link is not None else None

    def usable(self, other: int = 1) -> bool:
        return self.mesh.peers[machine(other).node_id].usable

    def sights(self, other: int, *addresses: Address, now: float = 0.0) -> None:
        self.mesh.address_seen(machine(other).node_id, addresses, "mdns", now)

    def fails(self, dial: Dial, now: float, error: FleetError | None = None) -> None:
        self.mesh.dial_failed(dial, error or PeerUnreachable("Nobody answers."), now)
