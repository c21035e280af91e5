"""One start of a machine in virtual time: what fleetd/p2p/node.py is around a mesh and its sessions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulated_wire import Wire

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.p2p.actions import Action, Dial, Drop, Retire, Save, SendNotify
from fleetd.p2p.links import Address
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.mesh import Mesh
from fleetd.p2p.peers import PeerSession
from fleetd.p2p.session import events
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Hello

if TYPE_CHECKING:
    from simulated_wire import End
    from simulation import Host, World

# As in node.py and discovery.py.
TICK_S, TICK_SETTLED_S = 0.2, 1.0
ASK_EARLY_S = (0.0, 1.0, 3.0)
SAVE_S = 0.02


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
            self.mesh.address_seen(node_id, addresses, "remembered", self.world.now)
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
        self.validate()
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
        self.mesh.address_seen(host.node_id, host.addresses, "mdns", self.world.now)
        self.perform()

    def reached(self, node_id: str, address: Address) -> None:
        self.mesh.address_seen(node_id, [address], "remembered", self.world.now)
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

    def event(self, end: End, event: events.Event) -> None:
        number, now = self.ends[end], self.world.now
        match event:
            case events.Notified(topic, body):
                self.mesh.notified(number, topic, body, now)
                self.perform()
            case events.Measured(rtt_s):
                self.mesh.measured(number, rtt_s, now)
            case events.Quiet():
                self.world.note("quiet", self.host.number, number)
                self.mesh.quiet(number, now)
                self.perform()
            case events.Resumed():
                self.mesh.resumed(number, now)
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

    def _act(self, action: Action) -> None:
        match action:
            case Dial():
                key = (action.address, action.expected)
                if not self.stopping and key not in self.dials:
                    self.world.counts["dials"] += 1
                    self.dials[key] = Wire(self, action)
            case SendNotify(number, topic, body):
                if (end := self.connections.get(number)) is not None:
                    end.notify(topic, body)
            case Drop(number, error):
                if (end := self.connections.get(number)) is not None:
                    end.close(error)
            case Retire(number):
                if (end := self.connections.get(number)) is not None:
                    end.close(None)
            case Save():
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

    def sessions(self, node_id: str) -> list[PeerSession]:
        return [link for link in self.mesh.links.values() if link.node_id == node_id]

    def validate(self) -> None:
        """What must hold of a node at any time."""
        mesh, members = self.mesh, self.roster.members
        who = f"seed {self.world.seed}, {self.host.name} at {self.world.now:.3f}"
        try:
            mesh.validate()
        except AssertionError as error:
            raise AssertionError(f"{who}: {error}") from None
        assert set(mesh.links) == set(self.connections), who
        assert {link.node_id for link in mesh.links.values()} <= set(members), who
        dialling = {(address, peer.node_id) for peer in mesh.peers.values() for address in peer.dialling}
        static = {(address, "") for address, each in mesh.static.items() if each.dialling}
        assert dialling | static == {key for key in self.dials if key[1] in ("", *members)}, who
        assert all(len(self.sessions(node_id)) <= 4 for node_id in mesh.peers), who
