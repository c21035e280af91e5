"""A ring seen from the machine that answers, which has rank 0.

the last rank is asked first ──► each promises memory, opens a stream to the next one's machine, starts
    its process ──► tunnels and processes are there ──► rank 0 starts ──► all ranks meet ──► passes go to each
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from fleetd import limits
from fleetd.control.daemon_status import Carried
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import CONNECTING, STAGE, WAITING, Loading, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace
from fleetd.errors import (
    FleetError,
    GroupLost,
    MemberGone,
    ModelError,
    OutOfMemory,
    Overloaded,
    PeerLost,
    ProtocolError,
)
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.concurrency import gather_or_cancel
from fleetd.requests.ports import FleetPort
from fleetd.requests.promised_memory import OwnPromise
from fleetd.requests.ranks import messages
from fleetd.requests.ranks.fabrics import Fabrics, no_offer
from fleetd.requests.ranks.messages import NextRank, RankQuestion, RankTold
from fleetd.requests.ranks.ring_links import RingLinks
from fleetd.requests.remote.bulk_dialer import invitation
from fleetd.requests.remote.peer_stream import next_message, said_by


class RankMachine(msgspec.Struct, frozen=True):
    node_id: str
    name: str


@dataclass(slots=True)
class _Rank:
    machine: RankMachine
    member: GroupMember
    stream: PeerStream | None = None
    # It has read its weights, and waits for the others.
    waits: bool = False


class FleetRanks:
    """Args:
    model, digest: as the others are to find it.
    machines: of the other ranks.
    layers: of the model. ``tokens``: whose keys and values have room on each machine.
    own_promise: what this machine promises its own part.
    fabrics: what this machine offers to carry sums with; None: sealed tunnels.
    measured: is told the seconds of one sum of the ring, once all ranks are there.
    """

    kinds: frozenset[str] = frozenset()

    def __init__(
        self,
        partners: FleetPort,
        model: str,
        digest: str,
        machines: Sequence[RankMachine],
        layers: int,
        tokens: int,
        own_promise: OwnPromise | None = None,
        measured: Callable[[float], object] = lambda seconds: None,
        fabrics: Fabrics | None = None,
    ) -> None:
        self._partners, self._model, self._digest = partners, model, digest
        self._layers, self.tokens = layers, tokens
        self._own_promise = own_promise or OwnPromise()
        self._measured, self._fabrics = measured, fabrics
        self._engine: EngineProcess | None = None
        # When ranks that all wait for each other must have met, and when all must have read their weights;
        # the loop's time.
        self._meet_by_s = self._read_by_s = math.inf
        self._id = secrets.token_hex(8)
        self._links = RingLinks(0, 1 + len(machines), fabrics or no_offer)
        # The last one is asked first: the order in which any group is promised memory.
        ordered = sorted(machines, key=lambda machine: machine.node_id, reverse=True)
        self._ranks = [
            _Rank(machine, GroupMember(0, layers, f"{self._id}.{number}", machine.name))
            for number, machine in enumerate(ordered, 1)
        ]

    @property
    def members(self) -> tuple[GroupMember, ...]:
        return tuple(rank.member for rank in self._ranks)

    @property
    def ring(self) -> RingPlace:
        """This machine's place."""
        return self._links.place

    @property
    def carried(self) -> Carried:
        """How the ring's bytes travel from and to this machine."""
        return self._links.carried

    async def form(self, told: Callable[[Loading], None]) -> None:
        """Have every machine close the ring of tunnels, and start its rank. Raises the first failure, naming
        its machine: GroupLost, OutOfMemory, or ModelError if others would do no better."""
        if self._fabrics is not None:
            await self._fabrics.look()
        with self._partners.expect() as expected:
            following = NextRank(self._partners.node_id, invitation(expected))
            for number, rank in reversed(list(enumerate(self._ranks, 1))):
                if rank.machine.node_id > self._partners.node_id:
                    self._promise()
                told(Loading(f"asking {rank.machine.name}"[: limits.CARD_TEXT_CHARS]))
                following = await self._asked(rank, number, following)
            self._promise()
            with self._forming(self._ranks[0]):
                sock = await self._partners.connect(following.node_id, following.invitation)
                self._links.goes_to(sock, following.invitation.key)
            with self._forming(self._ranks[-1]):
                self._links.comes_from(await expected.socket(), expected.key)
                await self._links.agree()
        await gather_or_cancel(*(self._started(rank, told) for rank in self._ranks))

    async def connect(self, engine: EngineProcess) -> None:
        """Give the engine its streams to the other ranks, once they have read their weights."""
        self._engine = engine
        self._read_by_s = asyncio.get_running_loop().time() + limits.RANKS_LOAD_S
        await gather_or_cancel(*(self._joined(rank, engine) for rank in self._ranks))

    async def watch(self) -> None:
        """Does not return by itself. Raises why a machine has left, naming it."""
        await gather_or_cancel(self._learn(), *(self._watch(rank) for rank in self._ranks))

    def close(self) -> None:
        """The others may end their ranks; idempotent."""
        if self._fabrics is not None and (self._engine is None or self._engine.facts is None):
            self._fabrics.failed(self._links.place.backend)
        self._own_promise.close()
        self._links.close()
        for rank in self._ranks:
            if rank.stream is not None:
                rank.stream.cancel()

    def _promise(self) -> None:
        """Promise this machine's own part the memory, once. Raises OutOfMemory."""
        self._own_promise.make(lambda: self._engine.claimed_bytes if self._engine is not None else 0)

    # ---- one rank ----------------------------------------------------------------------------------------

    async def _asked(self, rank: _Rank, number: int, following: NextRank) -> NextRank:
        """Ask for a rank; where the one before it is expected. Of a machine that is a rank already, the group
        may just have ended: it is asked again for as long as others expect the ring to be closed."""
        ask = RankQuestion(
            self._model,
            self._digest,
            self._id,
            number,
            1 + len(self._ranks),
            self._layers,
            self.tokens,
            following,
        )
        clock = asyncio.get_running_loop().time
        by_s, again_s = clock() + limits.LOAD_STALL_S, clock() + limits.TICKET_S / 2
        with self._forming(rank):
            while True:
                rank.stream = self._partners.request(
                    rank.machine.node_id, messages.SERVE, messages.encode(ask)
                )
                try:
                    while (answer := await self._hear(rank.stream, lambda: by_s)).before is None:
                        pass
                    return NextRank(rank.machine.node_id, answer.before)
                except Overloaded:
                    if clock() >= again_s:
                        raise
                await asyncio.sleep(limits.RANK_LOOK_S)

    async def _started(self, rank: _Rank, told: Callable[[Loading], None]) -> None:
        """Until a rank's process starts. Its machine may load another model first, and a process waits for
        the others only for as long as a ring takes to form."""
        by_s = asyncio.get_running_loop().time() + limits.ENGINE_LOAD_S
        with self._forming(rank):
            if rank.stream is None:
                raise PeerLost("It was not asked.")
            while (answer := await self._hear(rank.stream, lambda: by_s)).stage.startswith(WAITING):
                told(Loading(f"{rank.machine.name}: {answer.stage}"[: limits.CARD_TEXT_CHARS]))

    async def _joined(self, rank: _Rank, engine: EngineProcess) -> None:
        with self._forming(rank):
            if rank.stream is None:
                raise PeerLost("It was not asked.")
            while (answer := await self._hear(rank.stream, self._due_s)).passes is None:
                rank.waits = answer.stage.startswith(WAITING)
            sock = await self._partners.connect(rank.machine.node_id, answer.passes)
        await engine.give_stream(StreamTag(rank.member.stream, STAGE, answer.passes.key, "connector"), sock)

    def _due_s(self) -> float:
        """Until when a rank may say nothing but that it is alive. While any rank reads its weights, that may
        take as long as the ranks themselves wait. A link that carries nothing any more is noticed by none."""
        all_wait = all(rank.waits for rank in self._ranks) and (
            self._engine is not None and self._engine.loading.stage == CONNECTING
        )
        if not all_wait:
            self._meet_by_s = math.inf
            return self._read_by_s
        if self._meet_by_s == math.inf:
            self._meet_by_s = asyncio.get_running_loop().time() + limits.RANKS_MEET_S
        return self._meet_by_s

    async def _watch(self, rank: _Rank) -> None:
        try:
            if rank.stream is None or await _next(rank.stream) is None:
                raise PeerLost("It has left the group.")
            raise ProtocolError("It said more than that it is alive.")
        except FleetError as error:
            if isinstance(error, MemberGone):
                # Another rank is gone, whose own machine says why.
                await asyncio.sleep(limits.MEMBER_TELLS_S)
            # Whatever it ended with, even without memory: what is under way goes another way.
            raise _lost(rank, error) from error

    async def _learn(self) -> None:
        """Tell what the ring has measured, once the model is loaded."""
        if self._engine is None:
            return
        # If its load fails, that is told elsewhere.
        with suppress(FleetError):
            async for _ in self._engine.loaded():
                pass
        if self._engine.facts is not None:
            self._measured(self._engine.facts.sum_s)

    @staticmethod
    async def _hear(stream: PeerStream, due_s: Callable[[], float] = lambda: math.inf) -> RankTold:
        if (body := await _next(stream, due_s)) is None:
            raise ProtocolError("It ended its rank without a word.")
        return messages.decode(body, RankTold)

    @contextmanager
    def _forming(self, rank: _Rank) -> Iterator[None]:
        """What a machine fails with meanwhile comes out with its name: GroupLost, if others may do better."""
        try:
            yield
        except (ModelError, OutOfMemory) as error:
            raise said_by(rank.machine.name, error) from error
        except FleetError as error:
            raise _lost(rank, error) from error


def _lost(rank: _Rank, error: FleetError) -> GroupLost:
    return GroupLost(
        f"{rank.machine.name}: {error.message}", hint="Send the request again: it goes another way."
    )


async def _next(stream: PeerStream, due_s: Callable[[], float] = lambda: math.inf) -> bytes | None:
    return await next_message(stream, due_s=due_s, silence_s=limits.GROUP_SILENT_S)
