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
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from machines import MachineKeys, machine
from simulated_node import Node
from simulated_wire import RTO_S

from fleetd.p2p.links import Address
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import RosterRecord

if TYPE_CHECKING:
    from simulated_wire import Pipe

PORT = 8115
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
    me: MachineKeys
    addresses: list[Address]
    records: tuple[RosterRecord, ...] = ()
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
