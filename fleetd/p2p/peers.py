"""State of the mesh: each member with its addresses and sessions, and each address from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.p2p.links import Address, PeerPath, PeerPaths
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.token_bucket import TokenBucket


@dataclass(slots=True)
class PeerSession:
    """An open session. ``number`` is the owner's handle for it."""

    number: int
    node_id: str
    outbound: bool
    epoch: int
    address: Address | None
    #: Digest of the roster in the other side's hello.
    roster: bytes
    opened_s: float
    quiet: bool = False
    greeted: bool = False
    #: Since when another session with the same machine is used instead.
    replaced_s: float | None = None


@dataclass(slots=True)
class StaticAddress:
    """An address from the settings: dialled for as long as the machine there is not connected."""

    path: PeerPath
    dialling: bool = False
    #: The machine that answered there last, or "".
    node_id: str = ""
    #: The error of the last dial, if it failed.
    trouble: FleetError | None = None


@dataclass(slots=True)
class Peer:
    """A member: its addresses and, if it is connected, the session in use."""

    node_id: str
    paths: PeerPaths
    #: Another number after it was unpaired and paired again.
    pairing: int = 0
    #: The session in use; for a moment there may be others.
    link: PeerSession | None = None
    dialling: set[Address] = field(default_factory=set)
    #: The error of the last session or dial, if the failures of single addresses do not explain it.
    trouble: FleetError | None = None
    heard_s: float | None = None
    #: Consecutive sessions that ended in such an error.
    faults: int = 0
    #: The last card of a machine that went without a good-bye; None of one that said it.
    last_card: Card | None = None
    #: Not dialled before this time.
    due_s: float = 0.0
    #: Bytes of news that it may still send, whether or not it connects anew.
    news: TokenBucket = field(
        default_factory=lambda: TokenBucket(limits.NEWS_BURST_BYTES, limits.NEWS_BYTES_PER_S)
    )

    @property
    def usable(self) -> bool:
        return self.link is not None and not self.link.quiet

    def dialled_hints(self) -> list[bool]:
        """Each address being dialled, and whether it is a hint. A forgotten address was one."""
        return [(path := self.paths.get(address)) is None or path.is_hint for address in self.dialling]

    def next_paths(self, now: float) -> list[PeerPath]:
        """The paths to dial next, two at a time: the first may belong to an interface that leads nowhere.

        One that has worked and one hint, if there are both kinds: neither old addresses nor false hints
        delay the right address.
        """
        due = [path for address in self.paths.order(now) if (path := self.paths.get(address)) is not None]
        known = {path.is_hint for path in self.paths}
        under_way = self.dialled_hints()
        found: list[PeerPath] = []
        for is_hint in sorted(known):
            free = limits.DIALS_PER_PEER // len(known) - under_way.count(is_hint)
            alike = [path for path in due if path.is_hint is is_hint and path.address not in self.dialling]
            found += alike[: max(0, free)]
        return found[: limits.DIALS_PER_PEER - len(under_way)]
