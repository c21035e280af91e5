"""This machine's fleet: its node, the members with their links, pairing; and what fleetctl asks of it.

node ── sessions ──► members (what each machine is) ──► placement, shared prefill, smart prefill, drafting
  └── link prober (how fast the links are) · pairing
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.model_change import ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.control.network_diagnosis import ClockOffset, ClockOffsets, NetworkDiagnosis
from fleetd.control.pairing_events import PairingEvent, Unpaired
from fleetd.errors import FleetError, InvalidValue, NotFound, NotPaired, PeerUnreachable, VersionMismatch
from fleetd.p2p.bulk_connections import Expected
from fleetd.p2p.discovery import diagnosis
from fleetd.p2p.link_prober import Invitation, LinkProber
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.identity import short_id
from fleetd.p2p.membership.roster import RosterMember
from fleetd.p2p.message_reader import reader
from fleetd.p2p.node import Node
from fleetd.p2p.overview import fleet_view, peer_view, reach
from fleetd.p2p.pairing.service import PairingService
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.periodic import keep_running
from fleetd.requests.job import THIS_NAME
from fleetd.requests.managing import client as managing
from fleetd.requests.managing.client import ManagedMachine
from fleetd.requests.members import claims
from fleetd.requests.members.members import Member
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.waking import Waker

CLOCK = "node.clock"


class ClockReading(msgspec.Struct, frozen=True):
    """A peer's clock, for ``fleetctl doctor``."""

    unix_s: Annotated[float, Meta(ge=0, le=limits.CLOCK_UNIX_S)]


_read_clock: Callable[[bytes], ClockReading] = reader(
    ClockReading, "A peer's clock", limits.SMALL_MESSAGE_BYTES
)


class Fleet:
    """What fleetctl asks of this machine's fleet, and what requests need of other machines."""

    def __init__(
        self,
        node: Node,
        *,
        local_only: bool,
        manage: bool = True,
        wakes: bool = True,
        own_card: Callable[[], Card | None] = lambda: None,
    ) -> None:
        self.node = node
        # Told of a machine that was removed here; the task throws away what it sent.
        self.removed: Callable[[str], asyncio.Task[None] | None] = lambda node_id: None
        self.waker = Waker(node, enabled=wakes)
        self._own_card = own_card
        self.pairing = PairingService(node)
        self.dialer = BulkDialer(node)
        self._prober = LinkProber(node)
        self._local_only = local_only
        self._manage = manage
        self._wall = time.time
        node.handle(CLOCK, self._tell_time)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.node.run(), name="node")
            group.create_task(keep_running("link prober", self._prober.run), name="link prober")

    def pairings(self) -> dict[str, int]:
        """Members, each with a number that is another one after it was removed and paired again."""
        return {node_id: peer.pairing for node_id, peer in self.node.mesh.peers.items()}

    # ---- for requests --------------------------------------------------------------------------------------

    def machines(self) -> Iterable[Member]:
        """Members that have sent a card, and those that sleep and can be woken."""
        now = asyncio.get_running_loop().time()
        names = distinct_names(self.node.roster.members)
        for card in self.node.mesh.cards:
            member = self.node.roster.members.get(card.node_id)
            peer = self.node.mesh.peers.get(card.node_id)
            if member is not None and peer is not None:
                connection = self.node.connection(card.node_id)
                path = self.dialer.best(card.node_id)
                yield Member(
                    card,
                    names[card.node_id],
                    reach(peer, card, now),
                    member.sees_prompts and self.node.allowed_here(member),
                    (connection.rtt_s or 0.0) if connection is not None else 0.0,
                    path.expected_bytes_per_s if path is not None else 0.0,
                    pairing=peer.pairing,
                    clock_offset_s=connection.clock_offset_s if connection is not None else None,
                )
        for node_id in self.node.mesh.peers:
            if wake_s := self.waker.seconds(node_id):
                yield self._asleep(self.node.roster.members[node_id], names[node_id], wake_s)

    def _asleep(self, member: RosterMember, name: str, wake_s: float) -> Member:
        """A machine as it was before it slept: what it had loaded is still in its memory."""
        card = self.node.mesh.asleep(member.node_id) or Card(member.node_id, 0, 0)
        return Member(
            msgspec.structs.replace(card, running=0, waiting=0, vectors=0),
            name,
            "It is probably asleep.",
            member.sees_prompts and self.node.allowed_here(member),
            wake_s=wake_s,
            pairing=self.node.mesh.peers[member.node_id].pairing,
        )

    def unaided(self) -> bool:
        """True if a machine that answers for this one must not let others help.

        It does not know which machines this one allows, so it could show the prompt to another.
        """
        return not all(map(self.node.allowed_here, self.node.roster.members.values()))

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id

    def request(self, node_id: str, method: str, body: bytes) -> PeerStream:
        return self.node.request(node_id, method, body)

    async def ask(self, node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        return await self.node.ask(node_id, method, body, within_s=within_s)

    def expect(self) -> AbstractContextManager[Expected]:
        return self.dialer.expect()

    async def connect(self, node_id: str, invited: Invitation) -> socket.socket:
        return await self.dialer.connect(node_id, invited)

    def carried(self, node_id: str, count: int, seconds: float, *, late: bool = False) -> None:
        """Record what a machine sent in this time. ``late``: clearly later than its path promised."""
        self.dialer.carried(node_id, count, seconds, late=late)

    # ---- for fleetctl ------------------------------------------------------------------------------------

    def view(self) -> FleetView:
        now = asyncio.get_running_loop().time()
        view = fleet_view(self.node, local_only=self._local_only, pairing=self.pairing.is_open, now=now)
        peers = [self._believed(peer) for peer in view.peers]
        return msgspec.structs.replace(view, peers=peers, manage=self._manage)

    def _believed(self, peer: PeerView) -> PeerView:
        """A peer with the speeds that requests are placed by."""
        claim = self.node.mesh.cards.get(peer.node_id)
        card = claims.believed(claim, self._own_card()) if claim is not None else None
        if claim is None or card is None or card is claim:
            return peer
        capped = claims.capped(claim, card)
        models = [
            msgspec.structs.replace(shown, speed=model.speed, capped=model.name in capped)
            for shown, model in zip(peer.models, card.models, strict=True)
        ]
        return msgspec.structs.replace(peer, models=models)

    def pair(self) -> AsyncGenerator[PairingEvent, None]:
        return self.pairing.pair()

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        self.pairing.answer(node_id, admit=admit, sees_prompts=sees_prompts)

    def join(self, code: str, host: str | None, *, sees_prompts: bool) -> AsyncGenerator[PairingEvent, None]:
        return self.pairing.join(code, host, sees_prompts=sees_prompts)

    async def unpair(self, peer: str, keep: Iterable[str] = ()) -> Unpaired:
        """Remove a machine from the fleet, everywhere, and end this machine's own rule about it.

        Machines that this one knows through it alone go with it, but for those in ``keep``, by name or id.
        These see no prompts until a person here allows it. Raises NotFound, InvalidValue, DiskFull.
        """
        member = self.find(peer)
        named = [self.find(ref) for ref in keep]
        dependent = {each.node_id for each in self.node.roster.only_through(member.node_id)}
        kept = [each for each in named if each.node_id in dependent]
        for each in kept:
            await self.node.prompt_rules.allow(each.node_id, False)
        members = self.node.roster.members
        reached = {node_id for node_id in members if self.node.connection(node_id) is not None}
        gone = self.node.roster.remove(member.node_id, [each.node_id for each in kept])
        others = list(members.values())
        await self.node.roster_changed()
        await self.node.prompt_rules.allow(member.node_id, True)
        if (forgetting := self.removed(member.node_id)) is not None:
            # A disk that refuses is tried again; nobody waits for that.
            await asyncio.wait({forgetting}, timeout=limits.CACHE_BLOCK_S)
        return Unpaired(
            member.node_id,
            member.name,
            told=[other.name for other in others if other.node_id in reached],
            pending=[other.name for other in others if other.node_id not in reached],
            gone=[each.name for each in gone],
            kept=[each.name for each in kept],
        )

    async def allow_prompts(self, peer: str, allowed: bool, *, fleet: bool) -> PeerView:
        """Change whether a machine may see prompts: those typed here or, for ``fleet``, all of the fleet.

        Raises as ``unpair``.
        """
        member = self.find(peer)
        if fleet and not allowed and not member.confirmed:
            # The fleet's word is an entry of this machine's own, which would vouch for it.
            raise InvalidValue(
                f"No person here has confirmed {member.name}: it sees no prompts typed here in any case.",
                hint=f"`fleetctl unpair {short_id(member.node_id)}` takes it out of the fleet. To keep it, "
                f"allow it here first: `fleetctl peers prompts {short_id(member.node_id)} yes`.",
                param="peer",
            )
        if not fleet:
            await self.node.prompt_rules.allow(member.node_id, allowed)
            if allowed and not member.confirmed:
                self.node.roster.confirm(member.node_id)
                await self.node.roster_changed()
        elif member.sees_prompts != allowed:
            self.node.roster.allow_prompts(member.node_id, allowed)
            await self.node.roster_changed()
        now = asyncio.get_running_loop().time()
        return peer_view(self.node, self.node.roster.members[member.node_id], now)

    def manage(self, machine: str, verb: Verb, model: str) -> AsyncGenerator[ModelProgress | ModelDone, None]:
        """Have another machine do something with one of its models; closing it early ends that there.

        Raises as ``find``, and PeerUnreachable, VersionMismatch or NotPaired for a machine that cannot be
        asked. The events raise what that machine says.
        """
        return managing.run(self, self._managed(machine), verb, model)

    async def look(self, machine: str, words: str = "") -> ModelListing | FoundModels:
        """The models of another machine or, for words, those of the hub and whether they fit there. Raises as
        ``manage``."""
        return await managing.look(self, self._managed(machine), words)

    def _managed(self, ref: str) -> ManagedMachine:
        member = self.find(ref, "on")
        peer = peer_view(self.node, member, asyncio.get_running_loop().time())
        if not peer.usable:
            asleep = self.node.mesh.asleep(member.node_id) is not None
            kind = {"incompatible": VersionMismatch, "refused": NotPaired}.get(peer.state, PeerUnreachable)
            raise kind(
                f"{member.name}: {'It is probably asleep.' if asleep else peer.reason}",
                hint="Wake it, then try again."
                if asleep
                else peer.hint or "`fleetctl peers` shows its state.",
                param="on",
            )
        return ManagedMachine(member.node_id, member.name, peer.software)

    def is_here(self, ref: str) -> bool:
        """True for the name, short id or id of this machine that no other member has."""
        me, key = self.node.identity.node_id, ref.strip().lower()
        own = key == self.node.name.lower() or key.replace("-", "") in (me, short_id(me))
        return own and not self._called(ref)

    def _called(self, ref: str) -> list[RosterMember]:
        """The members with this id, else those with this name."""
        members = list(self.node.roster.members.values())
        key = ref.strip().lower().replace("-", "")
        found = [m for m in members if m.node_id == key or short_id(m.node_id) == key]
        return found or [m for m in members if m.name.lower() == ref.strip().lower()]

    def find(self, ref: str, param: str = "peer") -> RosterMember:
        """A member by name, short id or id; ``param`` is the field of the request that names it.

        Raises:
            NotFound: no member has it; the error names the members.
            InvalidValue: several members have that name, or it is this machine.
        """
        found = self._called(ref)
        if len(found) > 1:
            ids = ", ".join(short_id(member.node_id) for member in found)
            raise InvalidValue(
                f"{len(found)} machines are called {ref}.", hint=f"Say which: {ids}.", param=param
            )
        if found:
            return found[0]
        if self.is_here(ref):
            raise InvalidValue(
                "That is this machine itself.",
                hint="To take it out of the fleet, run `fleetctl unpair` for it on another machine.",
                param=param,
            )
        names = ", ".join(member.name for member in self.node.roster.members.values())
        raise NotFound(
            f"No machine called {ref} is paired with this one.",
            hint=f"Paired are: {names}." if names else "None is paired yet: fleetctl pair.",
            param=param,
        )

    async def diagnose(self) -> NetworkDiagnosis:
        """What the network looks like from inside this process, which may differ from a terminal's view."""
        facts = asyncio.to_thread(diagnosis.gather, self.node.settings.host, self.node.port)
        found, clocks = await asyncio.gather(facts, self._clocks())
        return msgspec.structs.replace(found, clock=ClockOffsets(clocks))

    async def _clocks(self) -> list[ClockOffset]:
        async def offset(node_id: str) -> ClockOffset | None:
            began = self._wall()
            try:
                answer = await self.node.ask(node_id, CLOCK, b"", within_s=limits.CLOCK_WITHIN_S)
                reading = _read_clock(answer)
            except FleetError:
                return None
            return ClockOffset(self.node.name_of(node_id), reading.unix_s - (began + self._wall()) / 2)

        usable = [node_id for node_id, peer in self.node.mesh.peers.items() if peer.usable]
        return [found for found in await asyncio.gather(*map(offset, usable)) if found is not None]

    async def _tell_time(self, _peer: str, _body: bytes, stream: PeerStream) -> None:
        stream.send(msgspec.msgpack.encode(ClockReading(self._wall())))


def distinct_names(members: Mapping[str, RosterMember]) -> dict[str, str]:
    """Node id → a name that no other machine has in plans, traces and headers: with its short id if need be.

    There, "this" is the machine that was asked.
    """
    used = Counter([THIS_NAME, *(member.name.lower() for member in members.values())])
    return {
        node_id: member.name if used[member.name.lower()] == 1 else f"{member.name} ({short_id(node_id)})"
        for node_id, member in members.items()
    }


def default_name() -> str:
    """This machine's name unless the settings give one."""
    return (socket.gethostname().partition(".")[0] or "unnamed")[: limits.PEER_NAME_CHARS]
