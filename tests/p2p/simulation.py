"""A fleet in virtual time: real meshes, sessions, rosters and cards on a network that a seed makes up.

What is simulated is only what surrounds them in fleetd/p2p/node.py and transport.py, and the network: TCP
that delays, loses (and so delays more), keeps the order and is reset by a process that dies; hosts that
vanish; partitions that swallow everything; processes that stall; mDNS that may not arrive. Nothing depends on
anything but the seed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from machines import Machine, machine

from fleetd import limits
from fleetd.errors import (
    FleetError,
    NotPaired,
    Overloaded,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
)
from fleetd.p2p import events as heard
from fleetd.p2p import mesh as decide
from fleetd.p2p.cards import Card
from fleetd.p2p.frames import PROTOCOL_VERSIONS, Hello
from fleetd.p2p.mesh import Address, Dial, Mesh
from fleetd.p2p.roster import Record, Roster
from fleetd.p2p.session import Session

PORT = 8115
# As in node.py, discovery.py and the kernel.
TICK_S, TICK_SETTLED_S = 0.2, 1.0
SYN_AGAIN_S = (0.0, 1.0, 3.0)
RTO_S = 0.2
ASK_EARLY_S = (0.0, 1.0, 3.0)
SAVE_S = 0.02
Pair = frozenset[int]


@dataclass
class Weather:
    """The network. Seconds, and probabilities."""

    delay_s: float = 0.0005
    jitter_s: float = 0.0005
    loss: float = 0.0
    mdns_loss: float = 0.0


@dataclass
class Host:
    """A machine with its disk, whether it is on or not."""

    number: int
    me: Machine
    addresses: list[Address]
    records: tuple[Record, ...] = ()
    remembered: dict[str, list[Address]] = field(default_factory=dict)
    epoch: int = 0
    #: Its clock, which is anybody's guess.
    wall_s: float = 0.0
    on: bool = True
    mdns: bool = True
    static: tuple[Address, ...] = ()
    node: Node | None = None

    @property
    def name(self) -> str:
        return f"m{self.number}"

    @functools.cached_property
    def node_id(self) -> str:
        return self.me.node_id


class World:
    """``run`` until a time; ``hosts`` by number."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.weather = weather or Weather()
        self.now = 1000.0
        self.hosts: dict[int, Host] = {}
        self.trace: list[tuple[Any, ...]] = []
        self.bytes = 0
        self.counts: Counter[str] = Counter()
        #: Sessions that a side gave up because it heard nothing.
        self.given_up: list[str] = []
        self._cut: dict[Pair, list[Pipe]] = {}
        self._at: dict[Address, Host] = {}
        self._heap: list[tuple[float, int, Node | None, Callable[[], None]]] = []
        self._order = itertools.count()

    # ---- time --------------------------------------------------------------------------------------------

    def later(self, wait_s: float, what: Callable[[], None], node: Node | None = None) -> None:
        """``node``: whose process does it, unless it is dead by then, and not before it is awake."""
        self.at(self.now + wait_s, what, node)

    def at(self, when: float, what: Callable[[], None], node: Node | None = None) -> None:
        heapq.heappush(self._heap, (when, next(self._order), node, what))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Whether the condition came true; it is looked at every hundredth of a second."""
        end, look = self.now + seconds, self.now
        while True:
            if until is not None and self.now >= look:
                if until():
                    return True
                look = self.now + 0.01
            if not self._heap or self._heap[0][0] > end:
                self.now = end
                return until is not None and until()
            at, _, node, what = heapq.heappop(self._heap)
            if until is not None and at > look:
                heapq.heappush(self._heap, (at, _, node, what))
                self.now = look
                continue
            self.now = max(self.now, at)
            if node is None:
                what()
            elif not node.dead:
                if node.asleep_until > self.now:
                    self.at(node.asleep_until, what, node)
                else:
                    what()

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.now, 6), *what))

    def delay(self) -> float:
        """One way through the network, with the retransmissions that loss costs."""
        weather = self.weather
        wait_s, rto_s = weather.delay_s + self.random.random() * weather.jitter_s, RTO_S
        while weather.loss and self.random.random() < weather.loss:
            wait_s, rto_s = wait_s + rto_s, rto_s * 2
        return wait_s

    # ---- machines ----------------------------------------------------------------------------------------

    def add(self, number: int, *, interfaces: int = 1, mdns: bool = True) -> Host:
        addresses = [(f"10.0.{i}.{number + 1}", PORT) for i in range(interfaces)]
        host = self.hosts[number] = Host(number, machine(number), addresses, mdns=mdns)
        self._at |= dict.fromkeys(addresses, host)
        return host

    def fleet(self, count: int, **more: Any) -> list[Host]:
        """Machines that are paired with each other, each by the first one, and switched off."""
        hosts = [self.add(number, **more) for number in range(count)]
        first = Roster(hosts[0].me)
        for host in hosts[1:]:
            first.admit(host.me.certificate, host.name, True)
        merged = Roster(hosts[0].me, first.records())
        for host in hosts[1:]:
            own = Roster(host.me)
            own.admit(hosts[0].me.certificate, hosts[0].name, True)
            merged.merge(own.records())
        for host in hosts:
            host.records = merged.records()
        return hosts

    def host_at(self, address: Address) -> Host | None:
        return self._at.get(address)

    def running(self) -> list[Node]:
        return [host.node for host in self.hosts.values() if host.node is not None]

    def start(self, host: Host) -> Node:
        host.on = True
        assert host.node is None
        host.epoch = max(host.epoch, int(host.wall_s * 1000)) + 1
        node = host.node = Node(self, host)
        node.begin()
        return node

    def crash(self, host: Host, *, power: bool = False) -> None:
        """The process dies; with the power, nobody is left to say so."""
        node, host.node = host.node, None
        host.on = not power
        if node is not None:
            self.note("crash", host.number, power)
            node.dead = True
            for end in list(node.ends):
                end.reset()

    def stop(self, host: Host) -> None:
        """Politely."""
        node, host.node = host.node, None
        if node is not None:
            self.note("stop", host.number)
            node.stopping = True
            for end in list(node.ends):
                end.close(None)
            node.dead = True

    def stall(self, host: Host, seconds: float) -> None:
        if host.node is not None:
            host.node.asleep_until = max(host.node.asleep_until, self.now + seconds)

    def pair(self, a: Host, b: Host) -> None:
        """``b`` joins ``a``, as the end of pairing does it."""
        if a.node is None or b.node is None:
            return
        self.note("pair", a.number, b.number)
        a.node.roster.admit(b.me.certificate, b.name, True)
        b.node.roster.join(a.me.certificate, a.name, True, a.node.roster.records())
        a.node.roster.merge(r for r in b.node.roster.records() if r.signer == b.node_id)
        for one, other in ((a, b), (b, a)):
            assert one.node is not None
            one.node.roster_changed()
            one.node.write()  # pairing is not done before
            one.node.reached(other.node_id, other.addresses[0])

    def unpair(self, by: Host, whom: Host) -> None:
        if by.node is not None and whom.node_id in by.node.roster.members:
            self.note("unpair", by.number, whom.number)
            by.node.roster.remove(whom.node_id)
            by.node.roster_changed()
            by.node.write()

    # ---- the network -------------------------------------------------------------------------------------

    def cut(self, a: Host, b: Host) -> None:
        if a is not b:
            self._cut.setdefault(frozenset((a.number, b.number)), [])

    def split(self, side: Iterable[Host]) -> None:
        """These from all others."""
        inside = list(side)
        self.note("split", *(host.number for host in inside))
        for a, b in itertools.product(inside, self.hosts.values()):
            if b not in inside:
                self.cut(a, b)

    def heal(self) -> None:
        self.note("heal")
        cut, self._cut = self._cut, {}
        for pipes in cut.values():
            for pipe in pipes:
                pipe.retransmit()

    def swallowed_by(self, a: Host, b: Host) -> list[Pipe] | None:
        return self._cut.get(frozenset((a.number, b.number)))

    def hear_mdns(self, of: Host, to: Host) -> None:
        if of is to or not (of.mdns and to.mdns) or self.swallowed_by(of, to) is not None:
            return
        if to.node is not None and self.random.random() >= self.weather.mdns_loss:
            node = to.node
            self.later(0.01 + self.random.random() * 0.2, lambda: node.seen(of), node)

    # ---- what must hold ----------------------------------------------------------------------------------

    def converged(self) -> str:
        """What is not yet as it should be between the machines that run, "" for nothing.

        The fleet is what the first machine takes for it; nobody else may have a session with any of these.
        """
        first = self.hosts[0].node
        assert first is not None
        fleet = [node for node in self.running() if node is first or node.me in first.roster.members]
        for node in self.running():
            if node not in fleet and any(
                link.node_id in first.roster.members for link in node.mesh.links.values()
            ):
                return f"{node.host.name} has a session though it does not belong"
        for a, b in itertools.combinations(fleet, 2):
            if self.swallowed_by(a.host, b.host) is None and (why := self._apart(a, b)):
                return f"{a.host.name} and {b.host.name} {why}"
        return ""

    def _apart(self, a: Node, b: Node) -> str:
        at_a, at_b = a.mesh.peers.get(b.me), b.mesh.peers.get(a.me)
        if at_a is None or at_b is None:
            return "do not agree that they are paired"
        if a.roster.digest() != b.roster.digest():
            return "have different rosters"
        if not at_a.usable or not at_b.usable or at_a.link is None or at_b.link is None:
            return "have no session"
        if a.mesh.cards.get(b.me) != b.card or b.mesh.cards.get(a.me) != a.card:
            return "do not have each other's newest card"
        if a.connections[at_a.link.number].wire is not b.connections[at_b.link.number].wire:
            return "use different sessions"
        if len(a.sessions(b.me)) + len(b.sessions(a.me)) != 2:
            return "have more than one session"
        return ""

    def settle(self, within_s: float) -> float:
        """How long it takes until all is as it should be."""
        began = self.now
        if not self.run(within_s, lambda: not self.converged()):
            raise AssertionError(f"seed {self.seed}: after {within_s} s {self.converged()}")
        return self.now - began


class Node:
    """What node.py is, for one start of a machine."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host, self.me = world, host, host.node_id
        self.dead = self.stopping = False
        self.asleep_until = 0.0
        self.roster = Roster(host.me, host.records)
        random = Random(world.random.random())
        self.mesh = Mesh(self.me, self.roster, static=host.static, random=random.random, now=world.now)
        self.ends: dict[End, int] = {}
        self.connections: dict[int, End] = {}
        self.dials: dict[tuple[Address, str], Wire] = {}
        self.card = Card(self.me, host.epoch, 0)
        self._numbers = itertools.count(1)
        self._performing = False
        self._saving = False

    def begin(self) -> None:
        self.world.note("start", self.host.number, self.host.epoch)
        for node_id, addresses in self.host.remembered.items():
            self.mesh.sighted(node_id, addresses, "remembered", self.world.now)
        self.publish()
        self._tick()
        for wait_s in ASK_EARLY_S:
            self.later(wait_s + self.world.random.random() * 0.05, self._ask)
        self.later(limits.DISCOVERY_ASK_S, self._ask_again)
        self.later(limits.CARD_REPEAT_S, self._repeat_card)

    def later(self, wait_s: float, what: Callable[[], None]) -> None:
        self.world.later(wait_s, what, self)

    def _tick(self) -> None:
        self.mesh.tick(self.world.now)
        self.perform()
        self.check()
        self.later(TICK_SETTLED_S if self.mesh.settled else TICK_S, self._tick)

    def _ask(self) -> None:
        """Announce oneself, and be answered."""
        for host in self.world.hosts.values():
            self.world.hear_mdns(self.host, host)
            if host.node is not None:
                self.world.hear_mdns(host, self.host)

    def _ask_again(self) -> None:
        self._ask()
        self.later(limits.DISCOVERY_ASK_S, self._ask_again)

    def _repeat_card(self) -> None:
        self.publish()
        self.later(limits.CARD_REPEAT_S, self._repeat_card)

    def publish(self) -> None:
        self.card = Card(self.me, self.host.epoch, self.card.sequence + 1, name=self.host.name)
        self.mesh.card_changed(self.card)
        self.perform()

    def seen(self, host: Host) -> None:
        self.mesh.sighted(host.node_id, host.addresses, "mdns", self.world.now)
        self.perform()

    def reached(self, node_id: str, address: Address) -> None:
        self.mesh.sighted(node_id, [address], "remembered", self.world.now)
        self.perform()

    def roster_changed(self) -> None:
        self.mesh.roster_changed(self.world.now)
        self.perform()

    # ---- what connections tell ---------------------------------------------------------------------------

    def opened(self, end: End) -> None:
        assert end.hello is not None
        number = next(self._numbers)
        self.connections[number] = end
        self.ends[end] = number
        reached = end.dialled.address if end.dialled is not None else (end.peer_host, end.hello.port)
        self.world.note("opened", self.host.number, number, end.peer.number, end.dialled is not None)
        self.mesh.opened(
            number,
            end.node_id,
            outbound=end.dialled is not None,
            epoch=end.hello.epoch,
            roster=end.hello.roster,
            dialled=end.dialled,
            reached=reached,
            now=self.world.now,
        )
        if end.dialled is not None:
            for key, wire in list(self.dials.items()):
                if key[1] == end.node_id and key != (end.dialled.address, end.dialled.expected):
                    del self.dials[key]
                    self.mesh.dial_cancelled(wire.dial)
                    if wire.client.hello is None:
                        wire.client.reset()
        self.save()
        self.perform()

    def closed(self, end: End, error: FleetError | None) -> None:
        number = self.ends.pop(end, None)
        if number is None or number == 0:
            return
        del self.connections[number]
        self.world.note("closed", self.host.number, number, type(error).__name__)
        self.mesh.closed(number, error, self.world.now)
        self.perform()

    def event(self, end: End, event: heard.Event) -> None:
        number, now = self.ends[end], self.world.now
        match event:
            case heard.Notified(topic, body):
                self.mesh.notified(number, topic, body, now)
                self.perform()
            case heard.Measured(rtt_s):
                self.mesh.measured(number, rtt_s, now)
            case heard.Quiet():
                self.world.note("quiet", self.host.number, number)
                self.mesh.quiet(number, now)
                self.perform()
            case heard.Heard():
                self.mesh.heard(number, now)
                self.perform()

    # ---- carrying out ------------------------------------------------------------------------------------

    def perform(self) -> None:
        if self._performing:
            return
        self._performing = True
        while actions := self.mesh.take_actions():
            for action in actions:
                self._act(action)
        self._performing = False

    def _act(self, action: decide.Action) -> None:
        match action:
            case Dial():
                key = (action.address, action.expected)
                if not self.stopping and key not in self.dials:
                    self.world.counts["dials"] += 1
                    self.dials[key] = Wire(self, action)
            case decide.Notify(number, topic, body):
                if (end := self.connections.get(number)) is not None:
                    end.notify(topic, body)
            case decide.Drop(number, error):
                if (end := self.connections.get(number)) is not None:
                    end.close(error)
            case decide.Retire(number):
                if (end := self.connections.get(number)) is not None:
                    end.close(None)
            case decide.Save():
                self.save()

    def dial_failed(self, wire: Wire, error: FleetError) -> None:
        key = (wire.dial.address, wire.dial.expected)
        if self.dials.get(key) is wire and not self.dead:
            del self.dials[key]
            self.world.counts["dials failed"] += 1
            self.mesh.dial_failed(wire.dial, error, self.world.now)
            self.perform()

    def dial_opened(self, wire: Wire) -> None:
        key = (wire.dial.address, wire.dial.expected)
        if self.dials.get(key) is wire:
            del self.dials[key]

    def save(self) -> None:
        if not self._saving:
            self._saving = True
            self.later(SAVE_S, self.write)

    def write(self) -> None:
        self._saving = False
        self.host.records = self.roster.records()
        self.host.remembered = self.mesh.remembered()

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSIONS,
            self.me,
            self.host.name,
            self.host.epoch,
            "simulation",
            self.roster.digest(),
            self.host.addresses[0][1],
        )

    def sessions(self, node_id: str) -> list[decide.Link]:
        return [link for link in self.mesh.links.values() if link.node_id == node_id]

    def check(self) -> None:
        """What must hold of a node at any time."""
        mesh, members = self.mesh, self.roster.members
        who = f"seed {self.world.seed}, {self.host.name} at {self.world.now:.3f}"
        assert set(mesh.peers) == set(members), who
        assert set(mesh.links) == set(self.connections), who
        assert {link.node_id for link in mesh.links.values()} <= set(members), who
        assert {card.node_id for card in mesh.cards} <= {link.node_id for link in mesh.links.values()}, who
        dialling = {(address, peer.node_id) for peer in mesh.peers.values() for address in peer.dialling}
        static = {(address, "") for address in mesh._static_dialling}
        assert dialling | static == {key for key in self.dials if key[1] in ("", *members)}, who
        assert len(dialling | static) <= limits.DIALS_AT_ONCE, who
        for peer in mesh.peers.values():
            mine = self.sessions(peer.node_id)
            assert (peer.link in mine) if mine else peer.link is None, who
            assert len(peer.dialling) <= limits.DIALS_PER_PEER, who
            assert len(peer.paths) <= limits.ADDRESSES_PER_PEER, who
            assert len(mine) <= 4, who


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
