"""This machine in its fleet: carries out the decisions of the mesh, and sends requests to the members.

mesh (decides) ── Dial, SendNotify, Drop, Retire, Save ──► node ──► dialer, connections, roster keeper, TLS
     ▲                                                      │
     └── opened, closed, quiet, resumed, address_seen, … ◄────┘  ◄── peer port, discovery, timers
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fleetd import limits
from fleetd.errors import Draining, FleetError, Overloaded, PeerUnreachable
from fleetd.p2p.actions import Action, Dial, Drop, Retire, Save, SendNotify
from fleetd.p2p.bulk_connections import Bulk
from fleetd.p2p.dialer import Dialer
from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.discovery import DiscoveredPeer, Discovery
from fleetd.p2p.invariants import check
from fleetd.p2p.links import Address
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.identity import Identity, short_id
from fleetd.p2p.membership.prompt_rules import PromptRules
from fleetd.p2p.membership.roster import Roster, RosterMember
from fleetd.p2p.membership.roster_keeper import RosterKeeper
from fleetd.p2p.mesh import Mesh
from fleetd.p2p.plain_links import PlainLinks
from fleetd.p2p.port import ConnectionHandlers, PeerPort
from fleetd.p2p.request_server import Handler, RequestServer
from fleetd.p2p.session import transport
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello
from fleetd.p2p.session.tls import TlsContexts
from fleetd.p2p.session.transport import PeerConnection, PeerStream
from fleetd.p2p.token_bucket import TokenBucket
from fleetd.process.observe import get_logger
from fleetd.process.periodic import keep_running

log = get_logger("fleetd.p2p")

# Values of the setting that are not addresses → the address to bind.
_ADDRESS = {"*": "0.0.0.0", "localhost": "127.0.0.1"}  # noqa: S104  (names an interface choice, binds nothing)
_TICK_S, _TICK_SETTLED_S = 0.2, 1.0
_RENEW_AGAIN_S = 5.0
_LAST_TURNS = 10


class NodeSettings(msgspec.Struct, frozen=True):
    folder: Path
    name: str
    software: str
    host: str
    port: int
    mdns: bool
    static: tuple[Address, ...] = ()
    #: Interfaces and networks that are private, by the settings.
    plain_links: tuple[str, ...] = ()
    #: Most connections to the peer port that have not shown what they are.
    most_unknown: int = limits.PEER_SOCKETS_UNKNOWN


class Node:
    """One machine's part in its fleet. ``await node.open()``, then ``await node.run()`` until cancelled."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.bulk = Bulk()
        self.keeper = RosterKeeper(settings.folder)
        self.prompt_rules = PromptRules(settings.folder / "prompt-rules.json")
        self.identity: Identity
        self.mesh: Mesh
        self.port = 0
        self.epoch = 0
        #: Set and cleared at once after each change of the fleet's state.
        self.changed = asyncio.Event()
        #: Called with each connection to the pairing port; None while no window is open.
        self.on_pairing_connection: Callable[[socket.socket], Coroutine[Any, Any, None]] | None = None
        self.discovery: Discovery | None = None
        self._peer_port = PeerPort(
            ConnectionHandlers(self._on_session_connection, self.bulk.on_connection, self._on_pairing),
            settings.most_unknown,
        )
        self._requests = RequestServer(settings.name)
        self.dialer = Dialer(self._connect, self._dial_failed, lambda dial: self.mesh.dial_cancelled(dial))
        # By number, from the start of the handshake until the socket is closed. The mesh knows the open ones.
        self._connections: dict[int, PeerConnection] = {}
        self._numbers = itertools.count(1)
        self._interfaces: list[interfaces.Interface] = []
        self.plain_links = PlainLinks(settings.plain_links, lambda: self._interfaces)
        self._contexts: TlsContexts
        self._group: asyncio.TaskGroup
        self._renewal: asyncio.TimerHandle | None = None
        # The members, as last logged, and how many changes may be logged.
        self._known: set[str] = set()
        self._member_news = TokenBucket(limits.ROSTER_MEMBERS, 1 / limits.REPEAT_LOG_S)
        self._performing = False
        self._running = False
        self._stopping = False

    # ---- starting and stopping ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Load identity and roster and bind the port.

        Raises:
            PortInUse, ConfigError: the port cannot be bound.
            IdentityRefused, RosterRefused, ConfigError: a file is damaged; the error names it.
        """
        self.identity = await asyncio.to_thread(Identity.load_or_create, self.settings.folder)
        self.epoch = await asyncio.to_thread(self.identity.next_epoch)
        roster = await self.keeper.load(self.identity)
        await self.prompt_rules.load()
        now = asyncio.get_running_loop().time()
        self._interfaces = await asyncio.to_thread(interfaces.read)
        self.mesh = Mesh(
            self.identity.node_id,
            roster,
            static=self.settings.static,
            random=random.random,
            now=now,
            kind_of=lambda host: interfaces.kind_of(host, self._interfaces),
        )
        for node_id, addresses in self.keeper.saved_addresses.items():
            self.mesh.address_seen(node_id, addresses, "remembered", now)
        self._trust_members()
        self._known = set(roster.members)
        self.port = self._peer_port.open(self.settings.host, self.settings.port)
        if self.settings.mdns:
            self.discovery = Discovery(
                node_id=self.identity.node_id,
                name=self.name,
                port=self.port,
                versions=PROTOCOL_VERSIONS,
                host=_ADDRESS.get(self.settings.host, self.settings.host),
                on_seen=self._on_discovered,
                keep=lambda node_id: node_id in self.roster.members,
            )

    async def run(self) -> None:
        """Connect to the members until cancelled, then close every connection."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group, self._running = group, True
                save = partial(self.keeper.save_when_due, self.mesh.remembered)
                group.create_task(self._peer_port.serve(), name="peer port")
                group.create_task(keep_running("save roster", save), name="save roster")
                group.create_task(keep_running("interfaces", self._watch_interfaces), name="interfaces")
                if self.discovery is not None:
                    group.create_task(self.discovery.run(), name="discovery")
                try:
                    await keep_running("mesh", self._tick_for_ever)
                finally:
                    # Here: a group that waits for its last tasks takes no others.
                    self._running = False
                    self._peer_port.close()
                    for connection in self._connections.values():
                        connection.abort(Draining("This machine stops."))
        finally:
            # Transports close in the next turns of the loop, which may end after this task.
            for _ in range(_LAST_TURNS):
                await asyncio.sleep(0)

    async def goodbye(self) -> None:
        """Tell every member that this machine stops; requests that still run here end with Draining."""
        self._stopping = True
        self._peer_port.close()
        await self._requests.stop()
        connections = [connection for connection in self._connections.values() if connection.is_attached]
        for connection in connections:
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.GOODBYE_S):
                if self.discovery is not None:
                    await self.discovery.stop()
                for connection in connections:
                    await connection.gone.wait()
        for connection in connections:
            connection.abort(Draining("This machine stops."))

    async def _watch_interfaces(self) -> None:
        """Look for cables that were plugged in: an address that was there may now be Thunderbolt's."""
        while True:
            await asyncio.sleep(limits.DISCOVERY_REFRESH_S)
            found = await asyncio.to_thread(interfaces.read)
            if found != self._interfaces:
                self._interfaces = found
                self.mesh.interfaces_changed()

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.mesh.tick(loop.time())
            self._perform()
            await asyncio.sleep(_TICK_SETTLED_S if self.mesh.settled else _TICK_S)

    # ---- for the rest of the daemon ----------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    @property
    def roster(self) -> Roster:
        return self.keeper.roster

    @property
    def connections(self) -> list[PeerConnection]:
        """Every connection whose socket is open, also one that shakes hands or closes."""
        return [connection for connection in self._connections.values() if not connection.gone.is_set()]

    def handle(self, method: str, handler: Handler) -> None:
        """Serve requests for ``method`` with ``handler``."""
        self._requests.handle(method, handler)

    def request(self, node_id: str, method: str, body: bytes) -> PeerStream:
        """Begin a request at a member. Raises PeerUnreachable, PeerLost or Overloaded."""
        connection = self.connection(node_id)
        if connection is None:
            raise PeerUnreachable(f"{self.name_of(node_id)} cannot be reached now.")
        return connection.request(method, body)

    async def ask(self, node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        """Send a request that one message answers; returns the message.

        Raises FleetError, and PeerUnreachable if no answer comes within ``within_s``.
        """
        stream = self.request(node_id, method, body)
        try:
            stream.end()
            async with asyncio.timeout(within_s):
                answer = await stream.receive()
        except TimeoutError:
            name = self.name_of(node_id)
            raise PeerUnreachable(f"{name} did not answer within {within_s:.3g} s.") from None
        finally:
            stream.cancel()
        if answer is None:
            raise PeerUnreachable(f"{self.name_of(node_id)} gave no answer.")
        return answer

    def connection(self, node_id: str) -> PeerConnection | None:
        """The connection in use with a member, or None."""
        peer = self.mesh.peers.get(node_id)
        return self._connections.get(peer.link.number) if peer and peer.link else None

    def bulk_addresses(self, node_id: str) -> list[Address]:
        """Addresses for sealed streams to a member, the fastest first."""
        peer = self.mesh.peers.get(node_id)
        if peer is None:
            return []
        found = [path.address for path in sorted(peer.paths, key=lambda path: -path.expected_bytes_per_s)]
        first = [peer.paths.best_for_bulk(), peer.link.address if peer.link is not None else None]
        return list(dict.fromkeys(address for address in (*first, *found) if address is not None))

    def allowed_here(self, member: RosterMember) -> bool:
        """True if a person at this machine lets a member see prompts typed here."""
        return member.confirmed and self.prompt_rules.allows(member.node_id)

    def name_of(self, node_id: str) -> str:
        """The name of a machine, also of one that was removed."""
        return self.keeper.name_of(node_id)

    def publish(self, card: Card) -> None:
        """Send this machine's new card to every member."""
        self.mesh.card_changed(card)
        self._perform()

    async def roster_changed(self) -> None:
        """Act on a change of the roster, and return when it is on disk.

        Raises DiskFull or ConfigError; the change holds in memory and the write is tried again.
        """
        self.mesh.roster_changed(asyncio.get_running_loop().time())
        self._perform()
        await self.keeper.save()

    def call_again(self, node_id: str) -> None:
        """Dial a member that may be waking up."""
        self.mesh.call_again(node_id, asyncio.get_running_loop().time())
        self._perform()

    def reached(self, node_id: str, address: Address) -> None:
        """Add an address at which a member was just reached."""
        self.mesh.address_seen(node_id, [address], "remembered", asyncio.get_running_loop().time())
        self._perform()

    def prefer_best_path(self, node_id: str) -> None:
        """Move an idle session to a path that measured clearly better."""
        connection = self.connection(node_id)
        if connection is not None and connection.initiator and not connection.busy:
            self.mesh.prefer_best_path(node_id, asyncio.get_running_loop().time())
            self._perform()

    # ---- events of connections (transport.Owner) ---------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        hello = connection.hello
        if hello is None:
            return
        if self._stopping:
            # Accepted or dialled just before the goodbye: the member must not begin to use it.
            connection.close()
            return
        known = self.connection(connection.node_id) is not None
        reached = connection.address
        if reached is None and hello.port and connection.peer_host:
            reached = (connection.peer_host, hello.port)
        self.mesh.opened(
            connection.number,
            connection.node_id,
            outbound=connection.initiator,
            epoch=hello.epoch,
            roster=hello.roster,
            dialled=connection.dialled,
            reached=reached,
            now=asyncio.get_running_loop().time(),
        )
        if not known:
            where = connection.address or (connection.peer_host, 0)
            log.info("peer.connected", peer=self.name_of(connection.node_id), address=where[0])
        if connection.dialled is not None:
            # Only for outbound sessions: if both sides dial, both must agree on the session that stays.
            self.dialer.reached(connection.dialled, connection.node_id)
        self.keeper.save_soon()  # the address at which it was reached
        self._perform()
        self._close_oldest(connection.node_id)

    def _close_oldest(self, node_id: str) -> None:
        """Close the oldest replaced sessions with a member above ``limits.SESSIONS_PER_PEER``."""
        links = [link for link in self.mesh.links.values() if link.node_id == node_id]
        peer = self.mesh.peers.get(node_id)
        spare = [link for link in links if peer is None or link is not peer.link]
        for link in spare[: max(0, len(spare) + 1 - limits.SESSIONS_PER_PEER)]:
            self._connections[link.number].close(
                Overloaded(f"{limits.SESSIONS_PER_PEER} newer sessions with this machine are open.")
            )

    def requested(self, connection: PeerConnection, stream: PeerStream, method: str, body: bytes) -> None:
        self._requests.serve(connection.node_id, stream, method, body, self._group)

    def notified(self, connection: PeerConnection, topic: str, body: bytes) -> None:
        self.mesh.notified(connection.number, topic, body, asyncio.get_running_loop().time())
        self._perform()

    def quiet(self, connection: PeerConnection) -> None:
        self.mesh.quiet(connection.number, asyncio.get_running_loop().time())
        log.warning("peer.quiet", peer=self.name_of(connection.node_id))
        self._perform()

    def resumed(self, connection: PeerConnection) -> None:
        self.mesh.resumed(connection.number, asyncio.get_running_loop().time())
        self._perform()

    def measured(self, connection: PeerConnection, rtt_s: float) -> None:
        self.mesh.measured(connection.number, rtt_s, asyncio.get_running_loop().time())

    def closed(self, connection: PeerConnection, error: FleetError | None) -> None:
        if connection.number not in self.mesh.links:
            return  # it never opened
        self.mesh.closed(connection.number, error, asyncio.get_running_loop().time())
        if self.connection(connection.node_id) is None:
            log.info("peer.gone", peer=self.name_of(connection.node_id), reason=str(error or "good-bye"))
        self._perform()

    # ---- actions of the mesh -----------------------------------------------------------------------------

    def _perform(self) -> None:
        """Carry out the actions of the mesh, once ``run`` has begun. Closing a connection adds actions, which
        the same loop carries out."""
        if self._performing or not self._running:
            return
        self._performing = True
        try:
            while actions := self.mesh.take_actions():
                for action in actions:
                    self._act(action)
        finally:
            self._performing = False
        self.changed.set()
        self.changed.clear()

    def _act(self, action: Action) -> None:
        match action:
            case Dial() if not self._stopping:
                self.dialer.begin(action, self._group)
            case SendNotify(number, topic, body):
                if (connection := self._connections.get(number)) is not None:
                    connection.notify(topic, body)
            case Drop(number, error):
                if (connection := self._connections.get(number)) is not None:
                    connection.close(error)
            case Retire(number):
                connection = self._connections.get(number)
                if connection is not None and not connection.busy:
                    connection.close()
            case Save():
                self._tell_of_members()
                self._renew_trust()
                self.keeper.save_soon()

    async def _connect(self, dial: Dial) -> None:
        connection = self._new_connection(dial)
        try:
            await transport.connect(connection, dial.address, self._contexts.client)
        finally:
            self._forget_unattached(connection)

    def _dial_failed(self, dial: Dial, error: FleetError) -> None:
        self.mesh.dial_failed(dial, error, asyncio.get_running_loop().time())
        self._perform()

    def _new_connection(self, dial: Dial | None) -> PeerConnection:
        hello = Hello(
            versions=PROTOCOL_VERSIONS,
            node_id=self.identity.node_id,
            name=self.name,
            epoch=self.epoch,
            software=self.settings.software,
            roster=self.roster.digest(),
            port=self.port,
        )
        self._connections = {each.number: each for each in self.connections}
        made = PeerConnection(self, hello, self.roster.members, number=next(self._numbers), dialled=dial)
        self._connections[made.number] = made
        return made

    def _forget_unattached(self, connection: PeerConnection) -> None:
        """Forget a connection whose handshake failed: it will never report that it is closed."""
        if not connection.is_attached:
            self._connections.pop(connection.number, None)

    async def _on_session_connection(self, sock: socket.socket) -> None:
        connection = self._new_connection(None)
        try:
            await transport.accept(connection, sock, self._contexts.server)
        finally:
            self._forget_unattached(connection)

    async def _on_pairing(self, sock: socket.socket) -> None:
        if self.on_pairing_connection is None:
            sock.close()
        else:
            await self.on_pairing_connection(sock)

    def _on_discovered(self, found: DiscoveredPeer) -> None:
        now = asyncio.get_running_loop().time()
        self.mesh.address_seen(found.node_id, found.addresses, "mdns", now)
        self._perform()

    # ---- trust -------------------------------------------------------------------------------------------

    def _trust_members(self) -> None:
        members = self.roster.members.values()
        self._contexts = TlsContexts.make(self.identity, [member.certificate for member in members])

    def _tell_of_members(self) -> None:
        """Log the machines that others have added, and those that are gone."""
        members, loop = self.roster.members, asyncio.get_running_loop()
        for node_id in [*(members.keys() - self._known), *(self._known - members.keys())]:
            if not self._member_news.take(1, loop.time()):
                break
            member = members.get(node_id)
            if member is None:
                log.info("member.gone", peer=self.name_of(node_id), id=short_id(node_id))
            elif not member.confirmed:
                log.warning(
                    "member.added",
                    peer=member.name,
                    id=short_id(node_id),
                    on_the_word_of=self.name_of(member.through),
                    note="it sees no prompts typed here until `fleetctl peers prompts` allows it",
                )
        self._known = set(members)

    def _renew_trust(self) -> None:
        """Make TLS contexts for the changed roster; on failure try again later.

        Until then no new member can connect. A removed one cannot either: each handshake checks the roster.
        """
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        try:
            self._trust_members()
        except OSError as error:  # making a context reads the key file
            log.warning("trust.not_renewed", error=str(error), again_in_s=_RENEW_AGAIN_S)
            self._renewal = asyncio.get_running_loop().call_later(_RENEW_AGAIN_S, self._renew_trust)

    # ---- invariants --------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests."""
        self.mesh.validate()
        check(
            all(number == connection.number for number, connection in self._connections.items()),
            "every connection is listed under its number",
        )
        check(set(self.mesh.links) <= set(self._connections), "every session of the mesh has a connection")
        dialling = {Dial(address, "") for address, static in self.mesh.static.items() if static.dialling}
        for peer in self.mesh.peers.values():
            dialling |= {Dial(address, peer.node_id) for address in peer.dialling}
        check(dialling <= set(self.dialer.under_way), "every dial of the mesh is under way")
