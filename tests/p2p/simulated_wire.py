"""Connections in virtual time: TCP and TLS as far as a mesh notices them, with a real session at each end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetd import limits
from fleetd.errors import FleetError, NotPaired, Overloaded, PeerLost, PeerUnreachable, ProtocolError
from fleetd.p2p.actions import Dial
from fleetd.p2p.session import events as heard
from fleetd.p2p.session.frames import Hello
from fleetd.p2p.session.session import Session

if TYPE_CHECKING:
    from simulated_node import Node
    from simulation import Host

# As in the kernel.
SYN_AGAIN_S = (0.0, 1.0, 3.0)
RTO_S = 0.2


class Wire:
    """A call: TCP, TLS, and then a session between two ends."""

    def __init__(self, caller: Node, dial: Dial) -> None:
        self.world, self.caller, self.dial = caller.world, caller, dial
        self.client = End(self, caller, dial)
        self.server: End | None = None
        self.given_up = False
        self.world.note("dial", caller.host.number, *dial.address)
        self._called_s = self.world.now
        self._syn(0)

    def _syn(self, attempt: int) -> None:
        world, host = self.world, self.world.host_at(self.dial.address)
        if attempt == len(SYN_AGAIN_S):
            wait_s = self._called_s + limits.PEER_CONNECT_S - world.now
            self.caller.later(wait_s, lambda: self.fail(PeerUnreachable("It did not answer.")))
        elif host is None or not host.on or world.swallowed_by(self.caller.host, host) is not None:
            wait_s = self._called_s + [*SYN_AGAIN_S, SYN_AGAIN_S[-1]][attempt + 1] - world.now
            world.later(wait_s, lambda: self._syn(attempt + 1))
        else:
            world.later(world.delay() + world.delay(), lambda: self._answered(host))

    def _answered(self, host: Host) -> None:
        if self.client.is_closed:
            return
        node = host.node
        if node is None or node.stopping:
            self.caller.later(0.0, lambda: self.fail(PeerUnreachable("It refused the connection.")))
            return
        self.server = End(self, node, None)
        self.caller.later(0.0, self._begin_tls)

    def _begin_tls(self) -> None:
        if self.client.is_closed:
            return
        assert self.server is not None
        server = self.server
        self.client.prepare()
        self.caller.later(limits.PEER_HANDSHAKE_S, self._time_out)
        server.node.later(limits.PEER_HANDSHAKE_S, self._time_out)
        self.client.out.send(self._server_hello)

    def _server_hello(self) -> None:
        assert self.server is not None
        self.server.prepare()
        self.server.out.send(self._client_done)

    def _client_done(self) -> None:
        assert self.server is not None
        node, expected = self.server.node, self.dial.expected
        if node.me not in self.caller.roster.members or (expected and node.me != expected):
            self.server.reset()
            self.fail(NotPaired("Another machine answers there."))
            return
        self.client.out.send(self._server_done)
        self.client.begin(node.me)

    def _server_done(self) -> None:
        assert self.server is not None
        if self.caller.me not in self.server.node.roster.members:
            self.world.counts["strangers refused"] += 1
            self.server.lost(NotPaired("A stranger."))
            self.server.out.send(lambda: self.client.lost(NotPaired("It refuses this certificate.")))
        else:
            self.server.begin(self.caller.me)

    def _time_out(self) -> None:
        for end in (self.client, self.server):
            if end is not None and end.session is None and not end.is_closed:
                end.reset()
        if self.client.session is None:
            self.fail(PeerUnreachable("The TLS handshake took too long."))

    def fail(self, error: FleetError) -> None:
        self.client.is_closed = True
        self.caller.dial_failed(self, error)

    def other(self, end: End) -> End | None:
        return self.server if end is self.client else self.client


class Pipe:
    """One direction of a TCP connection: bytes, or steps of the handshake, in order."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.last_s = 0.0
        self._held: list[tuple[float, bytes | Callable[[], None]]] = []

    def send(self, item: bytes | Callable[[], None]) -> None:
        world, other = self.end.node.world, self.end.wire.other(self.end)
        assert other is not None
        swallowed = world.swallowed_by(self.end.node.host, other.node.host)
        if swallowed is not None or self._held:
            if swallowed is not None and self not in swallowed:
                swallowed.append(self)
            self._held.append((world.now, item))
            return
        self.last_s = max(self.last_s, world.now + world.delay())
        world.later(self.last_s - world.now, lambda: self._arrive(other, item))

    def retransmit(self) -> None:
        """The network is back; the kernel notices when its next retransmission is due."""
        world = self.end.node.world
        first_s, wait_s = self._held[0][0], RTO_S
        while first_s + wait_s <= world.now:
            wait_s = wait_s * 2 + RTO_S
        world.later(first_s + wait_s - world.now, self._again)

    def _again(self) -> None:
        held, self._held = self._held, []
        for _, item in held:
            self.send(item)

    def _arrive(self, other: End, item: bytes | Callable[[], None]) -> None:
        node = other.node
        if node.dead:
            # Whoever is there now does not know this connection; if nobody is, nothing comes back.
            if node.host.on:
                node.world.later(node.world.delay(), self.end.broken, self.end.node)
        elif callable(item):
            if not other.is_closed:
                node.later(0.0, item)
        else:
            node.world.bytes += len(item)
            node.later(0.0, lambda: other.received(item))


class End:
    """What transport.py's PeerConnection is: one side of a connection and its session."""

    def __init__(self, wire: Wire, node: Node, dialled: Dial | None) -> None:
        self.wire, self.node, self.dialled = wire, node, dialled
        self.hello: Hello | None = None
        self.session: Session | None = None
        self.node_id = ""
        self.is_closed = False
        self.out = Pipe(self)
        self._hello: Hello | None = None
        self._due: float | None = None

    @property
    def peer(self) -> Host:
        other = self.wire.other(self)
        assert other is not None
        return other.node.host

    @property
    def peer_host(self) -> str:
        return self.peer.addresses[0][0]

    def prepare(self) -> None:
        """TCP is there: what will be said of oneself is fixed."""
        self._hello = self.node.hello()
        self.node.ends[self] = 0

    def begin(self, node_id: str) -> None:
        """TLS is there."""
        assert self._hello is not None
        if self.is_closed:
            return
        self.node_id = node_id
        self.session = Session(hello=self._hello, initiator=self.dialled is not None, now=self.node.world.now)
        self._flush()

    def received(self, data: bytes) -> None:
        if self.session is not None and not self.is_closed:
            self._handle(self.session.receive(data, self.node.world.now))
            self._flush()

    def notify(self, topic: str, body: bytes) -> None:
        if self.session is not None and not self.is_closed:
            with suppress(PeerLost, Overloaded):
                self.session.notify(topic, body)
            self._flush()

    def close(self, error: FleetError | None) -> None:
        if self.is_closed:
            return
        if self.session is None:
            self.reset()
            return
        self._flush()
        self.session.close(error)
        self._flush()
        self._fin()
        self.lost(error)

    def _fin(self) -> None:
        other = self.wire.other(self)
        if other is not None:
            self.out.send(other.broken)

    def reset(self) -> None:
        """Die without a word; the kernel says it."""
        if self.node.host.on and self.wire.other(self) is not None:
            self._fin()
        self.lost(PeerLost("It was aborted here."))

    def broken(self) -> None:
        if not self.is_closed:
            early = self.hello is None and self.dialled is not None and self.session is not None
            self.lost(NotPaired("It refuses.") if early else PeerLost("The connection broke."))

    def lost(self, error: FleetError | None) -> None:
        """Tell everybody, once."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.dialled is not None and self.hello is None:
            self.node.dial_failed(self.wire, error or PeerLost("It was closed."))
        self.node.closed(self, error)

    def _handle(self, found: list[heard.Event]) -> None:
        for event in found:
            match event:
                case heard.Opened(hello, _):
                    if hello.node_id != self.node_id:
                        self.close(ProtocolError("It calls itself somebody else."))
                        return
                    self.hello = hello
                    if self.dialled is not None:
                        self.node.dial_opened(self.wire)
                    self.node.opened(self)
                case heard.Closed(error):
                    if isinstance(error, PeerLost) and self.node_id:
                        self._blame(error)
                    self._flush()
                    self._fin()
                    self.lost(error)
                case _:
                    self.node.event(self, event)
            if self.is_closed:
                return

    def _blame(self, error: PeerLost) -> None:
        other = self.wire.other(self)
        if other is not None and not other.is_closed and not other.node.dead:
            world = self.node.world
            if world.swallowed_by(self.node.host, other.node.host) is None:
                world.given_up.append(f"{self.node.host.name} gave up {other.node.host.name}: {error}")

    def _flush(self) -> None:
        if self.session is None or self.is_closed:
            return
        while data := self.session.data_to_send():
            self.out.send(data)
        due = self.session.next_deadline()
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            self.node.world.at(due, lambda: self._tick(due), self.node)

    def _tick(self, due: float) -> None:
        if self._due == due and self.session is not None and not self.is_closed:
            self._due = None
            self._handle(self.session.tick(self.node.world.now))
            self._flush()
