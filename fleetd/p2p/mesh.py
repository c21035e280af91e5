"""Whom to call, who can be used, what to tell whom. Sans-IO: events and the time go in, actions come out.

A node keeps one session with every member of its roster. Nothing here trusts what it hears: mDNS, told and
remembered addresses are places to dial, who answers there is settled by TLS, and whether a machine can be
used only by its session. The same object runs in the daemon and, in virtual time, in the simulation.

    in    address_seen  dial_failed  opened  closed  quiet  heard  notified  card_changed  roster calls  tick
    out   Dial  Notify  Drop  Retire  Save
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.errors import FleetError, NotPaired, ProtocolError, VersionMismatch
from fleetd.p2p.links import Kind, PeerPath, PeerPaths, Source, backoff_s, guess_kind
from fleetd.p2p.membership import cards, gossip
from fleetd.p2p.membership.cards import Card, CardTable
from fleetd.p2p.membership.gossip import ADDRESSES, CARD, ROSTER, AddressHint
from fleetd.p2p.membership.roster import Roster, RosterRecord

Address = tuple[str, int]


# ---- Actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect, and report ``opened`` or ``dial_failed``. ``expected`` "": any member may answer."""

    address: Address
    expected: str


@dataclass(frozen=True, slots=True)
class SendNotify:
    link: int
    topic: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a session; None is a good-bye without a fault."""

    link: int
    error: FleetError | None


@dataclass(frozen=True, slots=True)
class Retire:
    """Close a session that another one has replaced, unless a request runs on it. Said until it is closed."""

    link: int


@dataclass(frozen=True, slots=True)
class Save:
    """The roster changed: make it durable, and trust nobody who is not in it."""


Action = Dial | SendNotify | Drop | Retire | Save


# ---- State -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PeerSession:
    """An open session. ``number`` is the owner's handle for it."""

    number: int
    node_id: str
    outbound: bool
    epoch: int
    address: Address | None
    #: Digest of the roster that the other side said hello with.
    roster: bytes
    opened_s: float
    quiet: bool = False
    greeted: bool = False
    #: Since when another session with the same machine is used instead.
    replaced_s: float | None = None


@dataclass(slots=True)
class Peer:
    """A member: the ways to it and, if there is one, the session with it."""

    node_id: str
    paths: PeerPaths
    #: The session that is used; there may be more of them for a moment.
    link: PeerSession | None = None
    dialling: set[Address] = field(default_factory=set)
    #: What the last attempts came to, where an address's own failure does not say it all.
    trouble: FleetError | None = None
    heard_s: float | None = None
    #: Sessions in a row that ended because one side could not make sense of the other.
    faults: int = 0
    #: Not called before this time.
    due_s: float = 0.0

    @property
    def usable(self) -> bool:
        return self.link is not None and not self.link.quiet

    def dialled_hints(self) -> list[bool]:
        """For each address that is being called whether it is only a hint; one that was forgotten was."""
        return [(path := self.paths.get(address)) is None or path.is_hint for address in self.dialling]

    def next_paths(self, now: float) -> list[PeerPath]:
        """What to call next, two at a time: the first may belong to an interface that leads nowhere.

        Where there are addresses that have worked and others that are only claimed, one of each: neither old
        addresses nor false claims keep the right one waiting.
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


class Mesh:
    """Args:
    static: addresses from the settings; whoever answers there, they are tried for ever.
    random: for spreading retries, in [0, 1).
    kind_of: what kind of way an address is, as this machine's interfaces tell.
    """

    def __init__(
        self,
        me: str,
        roster: Roster,
        *,
        static: Iterable[Address] = (),
        random: Callable[[], float],
        now: float,
        kind_of: Callable[[str], Kind] = guess_kind,
    ) -> None:
        self.me = me
        self.roster = roster
        self.cards = CardTable()
        self.peers: dict[str, Peer] = {}
        self.links: dict[int, PeerSession] = {}
        self.static: dict[Address, PeerPaths] = {}
        #: Why nobody usable answers at a static address.
        self.static_trouble: dict[Address, FleetError] = {}
        self._static_dialling: set[Address] = set()
        self._static_node: dict[Address, str] = {}
        self._random = random
        self._kind_of = kind_of
        self._card: bytes = b""
        #: What everybody who is connected has been told.
        self._told = frozenset(roster.records())
        self._actions: list[Action] = []
        for address in static:
            self.static[address] = PeerPaths(kind_of)
            self.static[address].add(address, "static", now)
        self._sync_peers()

    def take_actions(self) -> list[Action]:
        found, self._actions = self._actions, []
        return found

    # ---- addresses ---------------------------------------------------------------------------------------

    def address_seen(self, node_id: str, addresses: Sequence[Address], source: Source, now: float) -> None:
        """Somebody says that a machine is at these addresses."""
        peer = self.peers.get(node_id)
        if peer is None:
            return
        for address in addresses:
            peer.paths.add(address, source, now)
        self._dial(now)

    def dial_failed(self, dial: Dial, error: FleetError, now: float) -> None:
        self.dial_cancelled(dial)
        address = dial.address
        if dial.expected == "":
            if (paths := self.static.get(address)) is not None:
                paths.failed(address, error.message, now, self._random())
                self.static_trouble[address] = error
        elif (peer := self.peers.get(dial.expected)) is not None:
            peer.paths.failed(address, error.message, now, self._random())
            if isinstance(error, NotPaired | VersionMismatch | ProtocolError):
                peer.trouble = error
        self._dial(now)

    def dial_cancelled(self, dial: Dial) -> None:
        """Given up before it came to anything, because another address was faster."""
        if dial.expected == "":
            self._static_dialling.discard(dial.address)
        elif (peer := self.peers.get(dial.expected)) is not None:
            peer.dialling.discard(dial.address)

    def remembered(self) -> dict[str, list[Address]]:
        """Where members can be found again after a restart."""
        return {node_id: found for node_id, peer in self.peers.items() if (found := peer.paths.remembered())}

    # ---- sessions ----------------------------------------------------------------------------------------

    def opened(
        self,
        number: int,
        node_id: str,
        *,
        outbound: bool,
        epoch: int,
        roster: bytes,
        dialled: Dial | None,
        reached: Address | None,
        now: float,
    ) -> None:
        """A session is open.

        Args:
            epoch: of the other side's hello; a restarted machine has a greater one.
            roster: digest of its roster.
            dialled: the action behind an outbound session.
            reached: where the machine can be called again, as far as this session shows.
        """
        if dialled is not None:
            self.dial_cancelled(dialled)
            self._reached(dialled, node_id, now)
        peer = self.peers.get(node_id)
        if peer is None:
            self._actions.append(Drop(number, NotPaired("It is not paired with this machine.")))
            return
        self.links[number] = PeerSession(number, node_id, outbound, epoch, reached, roster, opened_s=now)
        if reached is not None:
            peer.paths.add(reached, "remembered", now)
            peer.paths.succeeded(reached, now)
        if peer.link is None:
            peer.heard_s = now
        peer.trouble = None
        self._choose(peer, now)

    def _choose(self, peer: Peer, now: float) -> PeerSession | None:
        """Of several sessions with a machine, use the one that the other side uses as well.

        One that is heard goes before one that is not, and a restarted machine before its former self. When
        both have called, both take the call of the smaller id. Of two calls by the same side the later one
        counts: whoever calls again has lost the first one, or found a better way.
        """

        def rank(link: PeerSession) -> tuple[bool, int, bool, int]:
            ours = link.outbound == (self.me < link.node_id)
            return not link.quiet, link.epoch, ours, link.number

        links = [link for link in self.links.values() if link.node_id == peer.node_id]
        used = peer.link = max(links, key=rank, default=None)
        for link in links:
            if link is used:
                link.replaced_s = None
            elif link.replaced_s is None:
                link.replaced_s = now
        if used is not None and not used.greeted:
            self._greet(used)
        return used

    def closed(self, number: int, error: FleetError | None, now: float) -> None:
        link = self.links.pop(number, None)
        if link is None:
            return
        peer = self.peers.get(link.node_id)
        if peer is None or peer.link is not link:
            return
        if self._choose(peer, now) is not None:
            return
        self.cards.drop(link.node_id)
        address = link.address
        if isinstance(error, NotPaired | VersionMismatch | ProtocolError):
            # It will say the same again.
            peer.trouble = error
            peer.due_s = now + backoff_s(peer.faults, self._random())
            peer.faults += 1
        else:
            peer.faults = 0
            peer.due_s = link.opened_s + limits.DIAL_AGAIN_S
        if address is not None and error is None:
            # It stops. When it is back it calls; until then it is asked now and then.
            peer.paths.failed(address, "It said good-bye.", now, self._random())
        elif address is not None:
            peer.paths.retry(address, now)
        self._dial(now)

    def measured(self, number: int, rtt_s: float, now: float) -> None:
        link = self.links.get(number)
        peer = self.peers.get(link.node_id) if link is not None else None
        if link is not None and peer is not None:
            peer.heard_s = now
            if link.address is not None:
                peer.paths.round_trip(link.address, rtt_s, now)

    def quiet(self, number: int, now: float) -> None:
        if (link := self.links.get(number)) is not None:
            link.quiet = True
            self._rechoose(link, now)

    def heard(self, number: int, now: float) -> None:
        if (link := self.links.get(number)) is not None:
            link.quiet = False
            if (peer := self._rechoose(link, now)) is not None:
                peer.heard_s = now

    def _rechoose(self, link: PeerSession, now: float) -> Peer | None:
        peer = self.peers.get(link.node_id)
        if peer is not None:
            self._choose(peer, now)
        return peer

    def prefer_best_path(self, node_id: str, now: float) -> None:
        """Call a machine at a clearly nearer address, if there is one; that call replaces the first."""
        peer = self.peers.get(node_id)
        if peer is None or peer.link is None or not peer.link.outbound or peer.link.address is None:
            return
        best = peer.paths.best_for_control(peer.link.address)
        if best is not None and best != peer.link.address and not peer.dialling and self._room() > 0:
            peer.dialling.add(best)
            self._actions.append(Dial(best, node_id))

    # ---- gossip ------------------------------------------------------------------------------------------

    def card_changed(self, card: Card) -> None:
        """This machine's own card; goes to everybody."""
        self._card = cards.encode(card)
        for link in self.links.values():
            self._actions.append(SendNotify(link.number, CARD, self._card))

    def notified(self, number: int, topic: str, body: bytes, now: float) -> None:
        """Something another node tells; what cannot be understood ends its session."""
        link = self.links.get(number)
        if link is None or link.node_id not in self.peers:
            return
        try:
            if topic == CARD:
                self.cards.accept(cards.decode(body), link.node_id, now)
            elif topic == ROSTER:
                self._merge(gossip.read_records(body), now)
            elif topic == ADDRESSES:
                self._believe(link, gossip.read_told(body), now)
        except ProtocolError as error:
            self._actions.append(Drop(number, error))

    def _merge(self, records: Iterable[RosterRecord], now: float) -> None:
        if self.roster.merge(records).changed:
            self.roster_changed(now)

    def _believe(self, link: PeerSession, told: Iterable[AddressHint], now: float) -> None:
        for hint in told:
            peer = self.peers.get(hint.node_id)
            if peer is not None and gossip.can_be_told(hint.host, link.address):
                peer.paths.add((hint.host, hint.port), "told", now)
        self._dial(now)

    def roster_changed(self, now: float) -> None:
        """After any change of the roster, from wherever: save it, act on it, pass it on."""
        self._actions.append(Save())
        records = self.roster.records()
        bodies = gossip.roster_batches(
            [record for record in records if record not in self._told],
            [self.me, *(record.subject for record in self._told)],
        )
        self._told = frozenset(records)
        for link in self.links.values():
            # Those who are out hear of it too; it is the last thing that they hear.
            if link.greeted:
                self._actions += [SendNotify(link.number, ROSTER, body) for body in bodies]
        self._actions += [
            Drop(link.number, NotPaired("It was unpaired."))
            for link in self.links.values()
            if link.node_id not in self.roster.members
        ]
        self._sync_peers()
        self._dial(now)

    def _sync_peers(self) -> None:
        members = self.roster.members
        for node_id in [known for known in self.peers if known not in members]:
            del self.peers[node_id]
            self.cards.drop(node_id)
        for node_id in members:
            if node_id not in self.peers:
                self.peers[node_id] = Peer(node_id, PeerPaths(self._kind_of))

    def _greet(self, link: PeerSession) -> None:
        """Tell a newcomer everything; tell the others, who may not hear its mDNS, where it was reached."""
        link.greeted = True
        if self._card:
            self._actions.append(SendNotify(link.number, CARD, self._card))
        if link.roster != self.roster.digest():
            bodies = gossip.roster_batches(self.roster.records(), [self.me])
            self._actions += [SendNotify(link.number, ROSTER, body) for body in bodies]
        used = [peer.link for peer in self.peers.values() if peer.link is not None]
        self._tell_addresses(link, [other for other in used if other is not link])
        for other in used:
            if other is not link:
                self._tell_addresses(other, [link])

    def _tell_addresses(self, to: PeerSession, of: Iterable[PeerSession]) -> None:
        known = [
            AddressHint(link.node_id, *link.address)
            for link in of
            if link.address is not None and gossip.can_be_told(link.address[0], to.address)
        ]
        if known:
            self._actions.append(SendNotify(to.number, ADDRESSES, gossip.write_told(known)))

    # ---- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Dial who is due, let old cards and replaced sessions go."""
        self.cards.expire(now)
        for link in self.links.values():
            if link.replaced_s is not None and now - link.replaced_s >= limits.RETIRE_S:
                self._retire(link)
        self._dial(now)

    def _retire(self, link: PeerSession) -> None:
        peer = self.peers.get(link.node_id)
        used = peer.link if peer is not None else None
        # Of two calls by the other side it knows which one it uses. Closing one here could hit that.
        theirs = used is not None and not used.outbound and not link.outbound and used.epoch == link.epoch
        if not theirs:
            self._actions.append(Retire(link.number))

    @property
    def settled(self) -> bool:
        """Whether everybody who should be connected is; ticks may then be rare."""
        return all(peer.link is not None for peer in self.peers.values()) and all(
            map(self._is_reached, self.static)
        )

    def _is_reached(self, static: Address) -> bool:
        peer = self.peers.get(self._static_node.get(static, ""))
        if peer is not None and peer.link is not None:
            return True
        return any(peer.link is not None and peer.link.address == static for peer in self.peers.values())

    def _room(self) -> int:
        """How many more connections may be made at once."""
        busy = sum(len(peer.dialling) for peer in self.peers.values()) + len(self._static_dialling)
        return limits.DIALS_AT_ONCE - busy

    def _dial(self, now: float) -> None:
        """Call whoever is missing, in the order in which the calls came due, so that none waits for ever
        behind machines that are switched off."""
        missing = [peer for peer in self.peers.values() if peer.link is None and peer.due_s <= now]
        static = [address for address in self.static if not self._is_reached(address)]
        if not missing and not static:
            return
        under_way = self._static_dialling.union(*(peer.dialling for peer in self.peers.values()))
        wanted: list[tuple[float, bool, Dial]] = []
        for address in static:
            path = self.static[address].get(address)
            if path is not None and path.due_s <= now and address not in under_way:
                wanted.append((path.due_s, False, Dial(address, "")))
        for peer in missing:
            wanted += [
                (path.due_s, path.is_hint, Dial(path.address, peer.node_id))
                for path in peer.next_paths(now)
                if path.address not in under_way
            ]
        room, hints = self._room(), limits.DIALS_TO_HINTS - self._hints_dialled()
        for _, is_hint, dial in sorted(wanted, key=lambda each: each[0]):
            if room <= 0:
                return
            if dial.address in under_way or (is_hint and hints <= 0):
                continue
            room, hints = room - 1, hints - is_hint
            under_way.add(dial.address)
            self._began(dial)

    def _began(self, dial: Dial) -> None:
        if dial.expected == "":
            self._static_dialling.add(dial.address)
        else:
            self.peers[dial.expected].dialling.add(dial.address)
        self._actions.append(dial)

    def _hints_dialled(self) -> int:
        return sum(is_hint for peer in self.peers.values() for is_hint in peer.dialled_hints())

    def _reached(self, dial: Dial, node_id: str, now: float) -> None:
        if dial.expected == "":
            self._static_node[dial.address] = node_id
            self.static_trouble.pop(dial.address, None)
            self.static[dial.address].succeeded(dial.address, now)
