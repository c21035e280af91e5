"""Decides which machines to dial, which session with each to use, and what to gossip to the members.

Sans-IO: events and the time go in, actions come out. A node keeps one session with every member of its
roster. An address is only a hint where to dial, whether mDNS, a member or the last run gave it: TLS decides
which machine answers there, and only an open session makes a machine usable. The same object runs in the
daemon and, in virtual time, in the simulation.

    in    address_seen  dial_failed  opened  closed  quiet  resumed  measured  notified
          card_changed  roster_changed  tick
    out   Dial  SendNotify  Drop  Retire  Save
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from fleetd import limits
from fleetd.errors import FleetError, IdentityRefused, NotPaired, ProtocolError, VersionMismatch
from fleetd.p2p.actions import Action, Dial, Drop, Retire, Save, SendNotify
from fleetd.p2p.invariants import check
from fleetd.p2p.links import Address, Kind, PeerPath, PeerPaths, Source, backoff_s, guess_kind
from fleetd.p2p.membership import cards, gossip
from fleetd.p2p.membership.cards import Card, CardTable
from fleetd.p2p.membership.gossip import ADDRESSES, CARD, ROSTER, AddressHint
from fleetd.p2p.membership.roster import Roster, RosterRecord
from fleetd.p2p.membership.roster_inbox import RosterInbox
from fleetd.p2p.peers import Peer, PeerSession, StaticAddress

# Of a machine that answers; the next attempt would most likely end in the same way.
_FAULTS = (NotPaired, VersionMismatch, ProtocolError, IdentityRefused)
_COPIED = (
    "The same identity is connected from a later start. If the machine was not just restarted, another one "
    "runs with a copy of its home: delete the folder identity/ in one of them, and pair that one again."
)


class Mesh:
    """The decisions of one node.

    Args:
        me: this machine's node id.
        static: addresses from the settings; they are dialled for ever, whichever member answers.
        random: a number in [0, 1), to spread retries.
        kind_of: the kind of path to a host, by this machine's interfaces.
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
        self._inbox = RosterInbox()
        self.peers: dict[str, Peer] = {}
        self._pairings = itertools.count()
        self.links: dict[int, PeerSession] = {}
        self.static = {
            address: StaticAddress(PeerPath(address, "static", kind_of(address[0]), due_s=now))
            for address in static
        }
        self._random = random
        self._kind_of = kind_of
        self._card: bytes = b""
        # The records that were sent to every connected machine.
        self._sent = frozenset(roster.records())
        self._actions: list[Action] = []
        self._sync_peers()

    def take_actions(self) -> list[Action]:
        found, self._actions = self._actions, []
        return found

    # ---- addresses ---------------------------------------------------------------------------------------

    def address_seen(self, node_id: str, addresses: Sequence[Address], source: Source, now: float) -> None:
        """Add addresses where a machine is said to be."""
        peer = self.peers.get(node_id)
        if peer is None:
            return
        for address in addresses:
            peer.paths.add(address, source, now)
        self._dial(now)

    def interfaces_changed(self) -> None:
        """This machine has other interfaces: a known address may be reached by another path than before."""
        for path in (path for peer in self.peers.values() for path in peer.paths):
            path.kind = self._kind_of(path.address[0])
        for static in self.static.values():
            static.path.kind = self._kind_of(static.path.address[0])

    def dial_failed(self, dial: Dial, error: FleetError, now: float) -> None:
        self.dial_cancelled(dial)
        address = dial.address
        if dial.expected == "":
            if (static := self.static.get(address)) is not None:
                static.path.failed(error.message, now, self._random())
                static.trouble = error
        elif (peer := self.peers.get(dial.expected)) is not None:
            peer.paths.failed(address, error.message, now, self._random())
            if isinstance(error, _FAULTS):
                peer.trouble = error
        self._dial(now)

    def dial_cancelled(self, dial: Dial) -> None:
        """A dial was given up, because another address was faster."""
        if dial.expected == "":
            self.static[dial.address].dialling = False
        elif (peer := self.peers.get(dial.expected)) is not None:
            peer.dialling.discard(dial.address)

    def remembered(self) -> dict[str, list[Address]]:
        """Addresses by node id, to dial after a restart."""
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
            epoch: from the other side's hello; it grows with each start.
            roster: digest of the other side's roster.
            dialled: the action that led to an outbound session.
            reached: an address where the machine can be dialled again, if the session shows one.
        """
        if dialled is not None:
            self.dial_cancelled(dialled)
            if (static := self.static.get(dialled.address)) is not None and dialled.expected == "":
                static.node_id, static.trouble = node_id, None
                static.path.succeeded(now)
        peer = self.peers.get(node_id)
        if peer is None:
            self._actions.append(Drop(number, NotPaired("It is not paired with this machine.")))
            return
        if any(link.epoch > epoch and not link.quiet for link in self._links_of(node_id)):
            self._actions.append(Drop(number, IdentityRefused(_COPIED)))
            return
        self.links[number] = PeerSession(number, node_id, outbound, epoch, reached, roster, opened_s=now)
        if reached is not None:
            peer.paths.add(reached, "remembered", now)
            peer.paths.succeeded(reached, now)
        if peer.link is None:
            peer.heard_s = now
            self._dial_static_soon(now)
        peer.trouble = None
        self._choose(peer, now)

    def _choose(self, peer: Peer, now: float) -> PeerSession | None:
        """Choose the session that both sides use, out of several with one machine.

        A session that is not quiet goes before a quiet one, and a higher epoch before a lower one. If each
        side dialled, both use the session that the smaller id dialled. If one side dialled twice, the later
        session is used: that side has lost the first one, or found a better path.
        """

        def rank(link: PeerSession) -> tuple[bool, int, bool, int]:
            ours = link.outbound == (self.me < link.node_id)
            return not link.quiet, link.epoch, ours, link.number

        links = self._links_of(peer.node_id)
        used = peer.link = max(links, key=rank, default=None)
        for link in links:
            if link is used:
                link.replaced_s = None
            elif link.replaced_s is None:
                link.replaced_s = now
        if used is not None and not used.greeted:
            self._greet(used)
        return used

    def _links_of(self, node_id: str) -> list[PeerSession]:
        return [link for link in self.links.values() if link.node_id == node_id]

    def closed(self, number: int, error: FleetError | None, now: float) -> None:
        link = self.links.pop(number, None)
        if link is None:
            return
        peer = self.peers.get(link.node_id)
        if peer is None or peer.link is not link:
            return
        if self._choose(peer, now) is not None:
            return
        # Who sleeps says no good-bye.
        peer.last_card = self.cards.get(link.node_id) if error is not None else None
        self.cards.drop(link.node_id)
        address = link.address
        if isinstance(error, _FAULTS):
            peer.trouble = error
            peer.due_s = now + backoff_s(peer.faults, self._random())
            peer.faults += 1
        else:
            peer.faults = 0
            peer.due_s = link.opened_s + limits.DIAL_AGAIN_S
        if address is not None and error is None:
            # The machine stops. It dials when it is back; until then this side dials now and then.
            peer.paths.failed(address, "It said good-bye.", now, self._random())
        elif address is not None:
            peer.paths.retry(address, now)
        self._dial(now)

    def asleep(self, node_id: str) -> Card | None:
        """The last card of a machine that went without a word, and for which nothing answers; else None."""
        peer = self.peers.get(node_id)
        if peer is None or peer.link is not None or peer.trouble is not None or peer.paths.refused:
            return None
        return peer.last_card

    def call_again(self, node_id: str, now: float) -> None:
        """Dial a machine soon, whatever its last failures: it may be waking up."""
        if (peer := self.peers.get(node_id)) is not None:
            for path in peer.paths:
                path.due_s = min(path.due_s, max(now, (path.tried_s or now) + limits.DIAL_AGAIN_S))
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

    def resumed(self, number: int, now: float) -> None:
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
        """Dial a clearly nearer address of a machine, if there is one; the new session replaces the old."""
        peer = self.peers.get(node_id)
        if peer is None or peer.link is None or not peer.link.outbound or peer.link.address is None:
            return
        best = peer.paths.best_for_control(peer.link.address)
        if best is not None and best != peer.link.address and not peer.dialling and self._room() > 0:
            peer.dialling.add(best)
            self._actions.append(Dial(best, node_id))

    # ---- gossip ------------------------------------------------------------------------------------------

    def card_changed(self, card: Card) -> None:
        """Send this machine's new card to every connected machine."""
        self._card = cards.encode(card)
        for link in self.links.values():
            self._actions.append(SendNotify(link.number, CARD, self._card))

    def notified(self, number: int, topic: str, body: bytes, now: float) -> None:
        """Handle a notification from a member; one that cannot be read ends its session."""
        link = self.links.get(number)
        peer = self.peers.get(link.node_id) if link is not None else None
        if link is None or peer is None:
            return
        if not peer.news.take(len(body) + limits.NEWS_COST_BYTES, now):
            self._actions.append(Drop(number, ProtocolError("It sends more news than any machine has.")))
            return
        try:
            if topic == CARD:
                self.cards.accept(cards.decode(body), link.node_id, now)
            elif topic == ROSTER:
                self._merge(self._inbox.receive(link.node_id, gossip.read_records(body), now), now)
            elif topic == ADDRESSES:
                self._add_hints(link, gossip.read_hints(body), now)
        except ProtocolError as error:
            self._actions.append(Drop(number, error))

    def _merge(self, records: Sequence[RosterRecord], now: float) -> None:
        if not records:
            return
        merged = self.roster.merge(records, now)
        self._inbox.put_off(merged.late, now)
        if merged.changed:
            self.roster_changed(now)

    @property
    def late(self) -> list[RosterRecord]:
        """Entries that wait, because their signers have added as many machines as they may for now."""
        return self._inbox.late

    def _add_hints(self, link: PeerSession, hints: Iterable[AddressHint], now: float) -> None:
        for hint in hints:
            peer = self.peers.get(hint.node_id)
            if peer is not None and gossip.is_shareable(hint.host, link.address):
                peer.paths.add((hint.host, hint.port), "told", now)
        self._dial(now)

    def roster_changed(self, now: float) -> None:
        """Save a changed roster, send the change to the members, and close the sessions of removed ones."""
        self._actions.append(Save())
        records = self.roster.records()
        bodies = gossip.roster_batches(
            [record for record in records if record not in self._sent],
            [self.me, *(record.subject for record in self._sent)],
        )
        self._sent = frozenset(records)
        for link in self.links.values():
            # Also to machines that were removed: it tells them why their session ends.
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
            self._inbox.forget(node_id)
        for node_id in members:
            if node_id not in self.peers:
                self.peers[node_id] = Peer(node_id, PeerPaths(self._kind_of), next(self._pairings))

    def _greet(self, link: PeerSession) -> None:
        """Send card, roster and addresses on a new session, and the new machine's address to the others."""
        link.greeted = True
        if self._card:
            self._actions.append(SendNotify(link.number, CARD, self._card))
        if link.roster != self.roster.digest():
            bodies = gossip.roster_batches(self.roster.records(), [self.me])
            self._actions += [SendNotify(link.number, ROSTER, body) for body in bodies]
        used = [peer.link for peer in self.peers.values() if peer.link is not None]
        self._send_addresses(link, [other for other in used if other is not link])
        for other in used:
            if other is not link:
                self._send_addresses(other, [link])

    def _send_addresses(self, to: PeerSession, about: Iterable[PeerSession]) -> None:
        known = [
            AddressHint(link.node_id, *link.address)
            for link in about
            if link.address is not None and gossip.is_shareable(link.address[0], to.address)
        ]
        if known:
            self._actions.append(SendNotify(to.number, ADDRESSES, gossip.write_hints(known)))

    # ---- time --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Dial machines that are due, expire old cards and close replaced sessions."""
        self.cards.expire(now)
        self._merge(self._inbox.due(now), now)
        for link in self.links.values():
            if link.replaced_s is not None and now - link.replaced_s >= limits.RETIRE_S:
                self._retire(link)
        self._dial(now)

    def _retire(self, link: PeerSession) -> None:
        peer = self.peers.get(link.node_id)
        used = peer.link if peer is not None else None
        # If the other side dialled both, it alone knows which one it uses: closing one here could hit that.
        theirs = used is not None and not used.outbound and not link.outbound and used.epoch == link.epoch
        if not theirs:
            self._actions.append(Retire(link.number))

    @property
    def settled(self) -> bool:
        """True if every member and every static address is connected and no news waits; ticks may be rare."""
        return (
            not self._inbox
            and all(peer.link is not None for peer in self.peers.values())
            and all(map(self._is_reached, self.static.values()))
        )

    def _is_reached(self, static: StaticAddress) -> bool:
        peer = self.peers.get(static.node_id)
        if peer is not None and peer.link is not None:
            return True
        address = static.path.address
        return any(peer.link is not None and peer.link.address == address for peer in self.peers.values())

    def unanswered(self) -> dict[Address, FleetError]:
        """Addresses from the settings whose last dial failed, if no connected machine is known to be."""
        return {
            address: static.trouble
            for address, static in self.static.items()
            if static.trouble is not None and not self._is_reached(static)
        }

    def _dial_static_soon(self, now: float) -> None:
        """A machine has come; it may be the one behind a name, which its sessions do not show."""
        for static in self.static.values():
            if static.trouble is not None and not self._is_reached(static):
                static.path.due_s = min(static.path.due_s, now + limits.DIAL_AGAIN_S)

    def _static_dialling(self) -> set[Address]:
        return {address for address, static in self.static.items() if static.dialling}

    def _room(self) -> int:
        """How many more dials may be under way."""
        busy = sum(len(peer.dialling) for peer in self.peers.values()) + len(self._static_dialling())
        return limits.DIALS_AT_ONCE - busy

    def _dial(self, now: float) -> None:
        """Dial machines without a session in the order in which they came due, so that machines that are
        switched off delay no other for ever."""
        missing = [peer for peer in self.peers.values() if peer.link is None and peer.due_s <= now]
        static = [each.path for each in self.static.values() if not self._is_reached(each)]
        if not missing and not static:
            return
        under_way = self._static_dialling().union(*(peer.dialling for peer in self.peers.values()))
        wanted = [
            (path.due_s, False, Dial(path.address, ""))
            for path in static
            if path.due_s <= now and path.address not in under_way
        ]
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
            self.static[dial.address].dialling = True
        else:
            self.peers[dial.expected].dialling.add(dial.address)
        self._actions.append(dial)

    def _hints_dialled(self) -> int:
        return sum(is_hint for peer in self.peers.values() for is_hint in peer.dialled_hints())

    # ---- invariants --------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests."""
        linked = {link.node_id for link in self.links.values()}
        check(set(self.peers) == set(self.roster.members), "the peers are the members")
        check(all(number == link.number for number, link in self.links.items()), "links have their number")
        check({card.node_id for card in self.cards} <= linked, "a card needs a session")
        check(self._room() >= 0, "dials are within their bound")
        for peer in self.peers.values():
            links = self._links_of(peer.node_id)
            check(peer.link in links if links else peer.link is None, "one of a peer's sessions is in use")
            used = [link for link in links if link.replaced_s is None]
            check(used == [peer.link] if links else not used, "all other sessions are replaced ones")
            check(len(peer.dialling) <= limits.DIALS_PER_PEER, "dials to a peer are within their bound")
            check(len(peer.paths) <= limits.ADDRESSES_PER_PEER, "addresses are within their bound")
