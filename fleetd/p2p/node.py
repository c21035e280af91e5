"""This machine in its fleet: carries out what the mesh decides, and gives the rest of the daemon requests.

mesh (decides) ── Dial, Notify, Drop, Save ──► node ──► transport, roster file, TLS contexts
     ▲                                          │
     └── opened, closed, address_seen, heard … ◄─────┘  ◄── peer port, discovery, timers
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fleetd import limits
from fleetd.errors import Draining, FleetError, NotFound, Overloaded, PeerUnreachable
from fleetd.observe import get_logger
from fleetd.p2p import mesh as decide
from fleetd.p2p.bulk_connections import Bulk
from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.discovery import DiscoveredPeer, Discovery
from fleetd.p2p.membership.address_file import AddressFile
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.identity import Identity, short_id
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile
from fleetd.p2p.mesh import Address, Dial, Mesh
from fleetd.p2p.port import ConnectionHandlers, PeerPort
from fleetd.p2p.session import tls, transport
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello
from fleetd.p2p.session.transport import PeerConnection, PeerStream

log = get_logger("fleetd.p2p")

#: Serves one request: the peer's node id, the request's body, its stream. What it raises is told to the peer.
Handler = Callable[[str, bytes, PeerStream], Coroutine[Any, Any, None]]
_T = TypeVar("_T")

# What the settings call it → what the system does.
_ADDRESS = {"*": "0.0.0.0", "localhost": "127.0.0.1"}  # noqa: S104  (names an interface choice, binds nothing)
_TICK_S, _TICK_SETTLED_S = 0.2, 1.0
_SAVE_AGAIN_S = 5.0
_LAST_TURNS = 3


@dataclass(frozen=True, slots=True)
class NodeSettings:
    folder: Path
    name: str
    software: str
    host: str
    port: int
    mdns: bool
    static: tuple[Address, ...] = ()


@dataclass(slots=True)
class _Dialling:
    dial: Dial
    task: asyncio.Task[None] | None = field(default=None)


class Node:
    """One machine's part in its fleet. ``await node.open()``, then ``await node.run()`` until cancelled."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.bulk = Bulk()
        self.identity: Identity
        self.roster: Roster
        self.mesh: Mesh
        self.port = 0
        self.epoch = 0
        #: Wakes whoever shows or uses the fleet: somebody came, went, or said something new.
        self.changed = asyncio.Event()
        #: Given every newcomer of the pairing port; None while no window is open.
        self.on_pairing_connection: Callable[[socket.socket], Coroutine[Any, Any, None]] | None = None
        self._roster_file = RosterFile(settings.folder / "roster")
        self._addresses = AddressFile(settings.folder / "addresses.json")
        self._peer_port = PeerPort(
            ConnectionHandlers(self._session_visitor, self.bulk.visitor, self._pairing_visit)
        )
        self.discovery: Discovery | None = None
        self._handlers: dict[str, Handler] = {}
        self._connections: dict[int, PeerConnection] = {}
        self._numbers: dict[PeerConnection, int] = {}
        # All whose transport may still be open: also those that shake hands, or take their leave.
        self._made: set[PeerConnection] = set()
        # Which kinds of ways there are from here; as of the start, because kinds seldom change.
        self._interfaces: list[interfaces.Interface] = []
        self._next_number = 1
        self._dials: dict[tuple[Address, str], _Dialling] = {}
        self._serving: dict[str, set[asyncio.Task[None]]] = {}
        self._performing = False
        self._running = False
        self._stopping = False
        self._group: asyncio.TaskGroup
        self._server_context: ssl.SSLContext
        self._client_context: ssl.SSLContext
        self._save_due = asyncio.Event()
        self._save_lock = asyncio.Lock()
        self._saved_digest = b""
        # What is on the disk beyond the roster in use.
        self._promised: list[Callable[[Roster], Any]] = []
        self._saved_addresses: dict[str, list[Address]] = {}

    # ---- starting and stopping ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Load identity and roster and bind the port.

        Raises:
            PortInUse, ConfigError: the port.
            IdentityRefused, RosterRefused: a damaged file, by name.
        """
        folder = self.settings.folder
        self.identity = await asyncio.to_thread(Identity.load_or_create, folder)
        self.epoch = await asyncio.to_thread(self.identity.next_epoch)
        records = await asyncio.to_thread(self._roster_file.load)
        self.roster = Roster(self.identity, records)
        self._saved_digest = self.roster.digest()
        now = asyncio.get_running_loop().time()
        await self._look_at_interfaces()
        self.mesh = Mesh(
            self.identity.node_id,
            self.roster,
            static=self.settings.static,
            random=random.random,
            now=now,
            kind_of=lambda host: interfaces.kind_of(host, self._interfaces),
        )
        self._saved_addresses = await asyncio.to_thread(self._addresses.load)
        for node_id, addresses in self._saved_addresses.items():
            self.mesh.address_seen(node_id, addresses, "remembered", now)
        self._trust()
        self.port = self._peer_port.open(self.settings.host, self.settings.port)
        if self.settings.mdns:
            self.discovery = Discovery(
                node_id=self.identity.node_id,
                name=self.name,
                port=self.port,
                versions=PROTOCOL_VERSIONS,
                host=_ADDRESS.get(self.settings.host, self.settings.host),
                on_seen=self._seen,
                keep=lambda node_id: node_id in self.roster.members,
            )

    async def run(self) -> None:
        """Meet the others until cancelled, then say good-bye."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group, self._running = group, True
                group.create_task(self._peer_port.serve(), name="peer port")
                group.create_task(self._save_when_due(), name="save roster")
                if self.discovery is not None:
                    group.create_task(self.discovery.run(), name="discovery")
                await self._tick_for_ever()
        finally:
            self._running = False
            self._peer_port.close()
            for connection in self._made:
                connection.abort(Draining("This machine stops."))
            # Transports close in the loop's next turns, and there may be none after this.
            for _ in range(_LAST_TURNS):
                await asyncio.sleep(0)

    async def goodbye(self) -> None:
        """Tell everybody that this machine stops; what still runs for them ends with Draining."""
        self._stopping = True
        self._peer_port.close()
        serving = [task for tasks in self._serving.values() for task in tasks]
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving, timeout=limits.GOODBYE_S)
        connections = [connection for connection in self._made if connection.is_attached]
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

    async def _look_at_interfaces(self) -> None:
        self._interfaces = await asyncio.to_thread(interfaces.read)

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.mesh.tick(loop.time())
            self._perform()
            await asyncio.sleep(_TICK_SETTLED_S if self.mesh.settled else _TICK_S)

    # ---- for the rest of the daemon ----------------------------------------------------------------------

    def handle(self, method: str, handler: Handler) -> None:
        """Serve requests of this name."""
        self._handlers[method] = handler

    def request(self, node_id: str, method: str, body: bytes) -> PeerStream:
        """Begin a request at a member. Raises PeerUnreachable, PeerLost or Overloaded."""
        connection = self.connection(node_id)
        if connection is None:
            raise PeerUnreachable(f"{self.name_of(node_id)} cannot be reached now.")
        return connection.request(method, body)

    async def ask(self, node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        """A request with one message as its answer. Raises FleetError, also for silence."""
        stream = self.request(node_id, method, body)
        try:
            stream.end()
            async with asyncio.timeout(within_s):
                answer = await stream.receive()
        except TimeoutError:
            name = self.name_of(node_id)
            raise PeerUnreachable(f"{name} did not answer within {within_s:.0f} s.") from None
        finally:
            stream.cancel()
        if answer is None:
            raise PeerUnreachable(f"{self.name_of(node_id)} gave no answer.")
        return answer

    def connection(self, node_id: str) -> PeerConnection | None:
        peer = self.mesh.peers.get(node_id)
        return self._connections.get(peer.link.number) if peer and peer.link else None

    def bulk_addresses(self, node_id: str) -> list[Address]:
        """Where to open sealed streams to a member, the fastest way first."""
        peer = self.mesh.peers.get(node_id)
        if peer is None:
            return []
        found = [path.address for path in sorted(peer.paths, key=lambda path: -path.expected_bytes_per_s)]
        first = [peer.paths.best_for_bulk(), peer.link.address if peer.link is not None else None]
        return list(dict.fromkeys(address for address in (*first, *found) if address is not None))

    def name_of(self, node_id: str) -> str:
        """What people call a machine; also one that is no member any more."""
        member = self.roster.members.get(node_id)
        if member is not None:
            return member.name
        said = [record for record in self.roster.records() if record.subject == node_id]
        return max(said, key=lambda record: record.sequence).name if said else short_id(node_id)

    def publish(self, card: Card) -> None:
        """Tell everybody what this machine is and has now."""
        self.mesh.card_changed(card)
        self._perform()

    async def roster_changed(self) -> None:
        """After ``roster.admit`` and its like: act on it, and return when it is on the disk.

        Raises DiskFull and its like; the change holds in memory and is written when the disk lets it.
        """
        self.mesh.roster_changed(asyncio.get_running_loop().time())
        self._perform()
        await self._save()

    async def promise(self, change: Callable[[Roster], _T]) -> _T:
        """Put a change of the roster on the disk, but not yet into use: ``keep`` or ``drop`` it.

        Returns what ``change`` does, which must not depend on when it is called. Raises what it raises, and
        DiskFull and its like: then nothing has changed.
        """
        promised = change(Roster(self.identity, self.roster.records()))
        self._promised.append(change)
        try:
            await self._save()
        except BaseException:
            self._promised.remove(change)
            self._save_due.set()
            raise
        return promised

    async def keep(self, change: Callable[[Roster], Any]) -> None:
        """Use a promised change from now on."""
        self._promised.remove(change)
        change(self.roster)
        await self.roster_changed()

    def drop(self, change: Callable[[Roster], Any]) -> None:
        """A promised change never was."""
        self._promised.remove(change)
        self._save_due.set()

    def reached(self, node_id: str, address: Address) -> None:
        """A way to a member that has just been used."""
        self.mesh.address_seen(node_id, [address], "remembered", asyncio.get_running_loop().time())
        self._perform()

    def prefer_best_path(self, node_id: str) -> None:
        """Move an idle session to a way that measured clearly better."""
        connection = self.connection(node_id)
        if connection is not None and connection.initiator and not connection.busy:
            self.mesh.prefer_best_path(node_id, asyncio.get_running_loop().time())
            self._perform()

    # ---- what connections tell (transport.Owner) ---------------------------------------------------------

    def opened(self, connection: PeerConnection) -> None:
        hello = connection.hello
        if hello is None:
            return
        if self._stopping:
            # Accepted or called just before; nobody must come to rely on it.
            connection.close()
            return
        known = self.connection(connection.node_id) is not None
        number, self._next_number = self._next_number, self._next_number + 1
        self._connections[number] = connection
        self._numbers[connection] = number
        reached = connection.address
        if reached is None and hello.port and connection.peer_host:
            reached = (connection.peer_host, hello.port)
        self.mesh.opened(
            number,
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
        if connection.initiator:
            self._end_other_dials(connection)
        self._save_due.set()  # where it was reached
        self._perform()
        self._hold_to_bound(connection.node_id)

    def _end_other_dials(self, connection: PeerConnection) -> None:
        """Other addresses of the same machine, still being tried. Not for its own calls: when both call at
        once, both have to agree on the one that stays."""
        for waiting in list(self._dials.values()):
            other = waiting.dial.expected == connection.node_id and waiting.dial != connection.dialled
            if other and waiting.task is not None:
                waiting.task.cancel()

    def _hold_to_bound(self, node_id: str) -> None:
        """Sessions that were replaced go on for what runs on them; the oldest do not when there are many."""
        used = self.connection(node_id)
        spare = [each for each in self._connections.values() if each.node_id == node_id and each is not used]
        for connection in spare[: max(0, len(spare) + 1 - limits.SESSIONS_PER_PEER)]:
            connection.close(
                Overloaded(f"{limits.SESSIONS_PER_PEER} newer sessions with this machine are open.")
            )

    def requested(self, connection: PeerConnection, stream: PeerStream, method: str, body: bytes) -> None:
        handler = self._handlers.get(method)
        running = self._serving.setdefault(connection.node_id, set())
        if self._stopping:
            stream.cancel(Draining("This machine is stopping."))
        elif handler is None:
            stream.cancel(NotFound(f"This machine has nothing called {method[:64]!r}."))
        elif len(running) >= limits.PEER_REQUESTS:
            stream.cancel(Overloaded(f"{len(running)} requests of this machine already run here."))
        else:
            task = self._group.create_task(self._serve(method, handler, connection.node_id, body, stream))
            running.add(task)
            task.add_done_callback(running.discard)
            stream.on_cancel = task.cancel

    def notified(self, connection: PeerConnection, topic: str, body: bytes) -> None:
        self.mesh.notified(self._numbers[connection], topic, body, asyncio.get_running_loop().time())
        self._perform()

    def quiet(self, connection: PeerConnection) -> None:
        self.mesh.quiet(self._numbers[connection], asyncio.get_running_loop().time())
        log.warning("peer.quiet", peer=self.name_of(connection.node_id))
        self._perform()

    def heard(self, connection: PeerConnection) -> None:
        self.mesh.heard(self._numbers[connection], asyncio.get_running_loop().time())
        self._perform()

    def measured(self, connection: PeerConnection, rtt_s: float) -> None:
        self.mesh.measured(self._numbers[connection], rtt_s, asyncio.get_running_loop().time())

    def closed(self, connection: PeerConnection, error: FleetError | None) -> None:
        number = self._numbers.pop(connection, None)
        if number is None:
            return
        del self._connections[number]
        self.mesh.closed(number, error, asyncio.get_running_loop().time())
        if self.connection(connection.node_id) is None:
            log.info("peer.gone", peer=self.name_of(connection.node_id), reason=str(error or "good-bye"))
        self._perform()

    async def _serve(self, method: str, handler: Handler, peer: str, body: bytes, stream: PeerStream) -> None:
        try:
            await handler(peer, body, stream)
            stream.end()
        except FleetError as error:
            stream.cancel(error)
        except asyncio.CancelledError:
            stream.cancel(Draining("This machine is stopping."))
            raise
        except Exception as error:  # the request's boundary: one bad request must not end the node
            # A bug: its text may hold anything, also a prompt, so only its type goes out and into the log.
            bug = type(error).__name__
            log.warning("peer.request_failed", method=method, bug=bug)
            stream.cancel(FleetError(f"Internal error ({bug}) on {self.name}."))

    # ---- carrying out ------------------------------------------------------------------------------------

    def _perform(self) -> None:
        """Do what the mesh has decided, from ``run`` on. Closing a connection makes new decisions, which are
        taken in turn."""
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

    def _act(self, action: decide.Action) -> None:
        match action:
            case decide.Dial():
                self._begin_dial(action)
            case decide.SendNotify(number, topic, body):
                if (connection := self._connections.get(number)) is not None:
                    connection.notify(topic, body)
            case decide.Drop(number, error):
                if (connection := self._connections.get(number)) is not None:
                    connection.close(error)
            case decide.Retire(number):
                connection = self._connections.get(number)
                if connection is not None and not connection.busy:
                    connection.close()
            case decide.Save():
                self._renew_trust()
                self._save_due.set()

    def _begin_dial(self, dial: Dial) -> None:
        key = (dial.address, dial.expected)
        if self._stopping or key in self._dials:
            return
        waiting = self._dials[key] = _Dialling(dial)
        waiting.task = self._group.create_task(self._dial(dial), name=f"dial {dial.address[0]}")
        waiting.task.add_done_callback(lambda done: self._dial_over(dial, done))

    def _dial_over(self, dial: Dial, task: asyncio.Task[None]) -> None:
        del self._dials[dial.address, dial.expected]
        if task.cancelled():  # also one that was never begun
            self.mesh.dial_cancelled(dial)

    async def _dial(self, dial: Dial) -> None:
        connection = self._connection(dial)
        try:
            await transport.connect(lambda: connection, dial.address, self._client_context)
        except FleetError as error:
            log.debug("peer.dial_failed", address=dial.address[0], error=str(error))
            self.mesh.dial_failed(dial, error, asyncio.get_running_loop().time())
            self._perform()
        finally:
            self._forget_unmade(connection)

    def _connection(self, dial: Dial | None) -> PeerConnection:
        hello = Hello(
            versions=PROTOCOL_VERSIONS,
            node_id=self.identity.node_id,
            name=self.name,
            epoch=self.epoch,
            software=self.settings.software,
            roster=self.roster.digest(),
            port=self.port,
        )
        self._made = {connection for connection in self._made if not connection.gone.is_set()}
        made = PeerConnection(self, hello, self.roster.members, dialled=dial)
        self._made.add(made)
        return made

    async def _session_visitor(self, sock: socket.socket) -> None:
        connection = self._connection(None)
        try:
            await transport.accept(lambda: connection, sock, self._server_context)
        finally:
            self._forget_unmade(connection)

    def _forget_unmade(self, connection: PeerConnection) -> None:
        """A handshake that failed tells nobody that its connection is gone."""
        if not connection.is_attached:
            self._made.discard(connection)

    async def _pairing_visit(self, sock: socket.socket) -> None:
        if self.on_pairing_connection is None:
            sock.close()
        else:
            await self.on_pairing_connection(sock)

    def _seen(self, sighting: DiscoveredPeer) -> None:
        now = asyncio.get_running_loop().time()
        self.mesh.address_seen(sighting.node_id, sighting.addresses, "mdns", now)
        self._perform()

    # ---- trust -------------------------------------------------------------------------------------------

    def _trust(self) -> None:
        certificates = [member.certificate for member in self.roster.members.values()]
        self._server_context = tls.server_context(self.identity, certificates)
        self._client_context = tls.client_context(self.identity, certificates)

    def _renew_trust(self) -> None:
        """Until it succeeds no newcomer gets in. Who is out stays out: each handshake asks the roster too."""
        try:
            self._trust()
        except OSError as error:  # it reads the key's file
            log.warning("trust.not_renewed", error=str(error), again_in_s=_SAVE_AGAIN_S)
            asyncio.get_running_loop().call_later(_SAVE_AGAIN_S, self._renew_trust)

    async def _save(self) -> None:
        async with self._save_lock:
            roster = self.roster
            if self._promised:
                roster = Roster(self.identity, roster.records())
                for change in self._promised:
                    change(roster)
            records, digest = roster.records(), roster.digest()
            if digest != self._saved_digest:
                self._saved_digest = b""  # unknown, should this end before it is done
                await asyncio.to_thread(self._roster_file.save, records)
                self._saved_digest = digest

    async def _save_when_due(self) -> None:
        """What gossip brings and where machines are is written soon; a disk that is full is tried again."""
        while True:
            await self._save_due.wait()
            self._save_due.clear()
            try:
                await self._save()
                if (found := self.mesh.remembered()) != self._saved_addresses:
                    await asyncio.to_thread(self._addresses.save, found)
                    self._saved_addresses = found
            except FleetError as error:
                log.warning("roster.not_saved", error=str(error), again_in_s=_SAVE_AGAIN_S)
                await asyncio.sleep(_SAVE_AGAIN_S)
                self._save_due.set()
