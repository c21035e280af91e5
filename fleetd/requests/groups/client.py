"""One group seen from the machine that answers: which machines hold what, and whether they still do.

    planned ──► who lacks layers fetches them, all at once
        ──► each promises memory in turn ──► all at once: layers are loaded
        and streams are opened ──► members open streams to each other
        ──► the engine here has the streams ──► watched

The engine's process asks for all of this when it starts (``engine.daemon_side.group_front``).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import structlog
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import Carried
from fleetd.control.model_change import FETCHING, FETCHING_HERE, READING, MemberProgress
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, Loading, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace
from fleetd.errors import (
    DiskFull,
    DownloadFailed,
    FleetError,
    GroupLost,
    Incompatible,
    MembersApart,
    ModelError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
)
from fleetd.models.hub_parts import HubCommit
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan import chip_speeds
from fleetd.plan.group_cut import GroupCut, GroupPart
from fleetd.requests.concurrency import cancel_all, gather_or_cancel
from fleetd.requests.groups import messages
from fleetd.requests.groups.known_hops import KnownHops
from fleetd.requests.groups.load_deadline import LoadDeadline
from fleetd.requests.groups.messages import LinkQuestion, LinkTold, NextMember, StageQuestion, StageTold
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ports import FleetPort
from fleetd.requests.promised_memory import OwnPromise
from fleetd.requests.remote.peer_stream import next_message, said_by

log = structlog.get_logger(__name__)

#: Fetches layers [first, last) of the model and what belongs to none, as far as they are not here.
Bring = Callable[[int, int], AsyncGenerator[PullProgress, None]]


@dataclass(slots=True)
class _AskedMember:
    """A member and what it was asked."""

    part: GroupPart
    member: GroupMember
    stream: PeerStream | None = None
    # Of the stream that is dialled, once the member expects it.
    key: bytes = b""
    # That stream, until the engine has it.
    sock: socket.socket | None = None
    arithmetic: str = field(default="")
    # What its layers compute; "" if that is unknown.
    layers: str = field(default="")
    # What it does, and the share of its layers' bytes that it has read.
    stage: str = field(default="asked")
    read: float = field(default=0.0)
    # It does not reach the hub, and gets its layers from this machine.
    from_here: bool = field(default=False)
    # Bytes of layers that it has fetched, and of all that it fetches; None while it fetches none.
    fetched: tuple[int, int] | None = None
    # When it has to be further with its layers; None while nothing is asked of it.
    deadline: LoadDeadline | None = None

    @property
    def name(self) -> str:
        return self.part.machine.name

    def hear(self, told: StageTold, now_s: float) -> None:
        """Take over how far its load is. ``now_s``: the loop's time."""
        if self.deadline is not None:
            self.deadline.told(told, now_s)
        self.arithmetic, self.layers, self.fetched = told.arithmetic, told.layers, None
        if told.stream is not None:
            self.stage, self.read = "loaded", 1.0
            return
        if told.stage == READING and told.total:
            self.read = min(1.0, told.done / told.total)
        elif self.stage == READING:
            self.read = 1.0
        if told.stage in FETCHING:
            self.fetched = told.done, told.total
        self.stage = told.stage

    @property
    def progress(self) -> MemberProgress:
        n_bytes = self.part.weights_bytes
        if self.fetched is not None:
            return MemberProgress(self.name, self.stage, *self.fetched)
        return MemberProgress(self.name, self.stage, int(self.read * n_bytes), n_bytes)


class FleetGroup:
    """Args:
    model, digest: as the members are to find it.
    own_promise: what this machine promises its own part.
    failed: told of each member that is lost, by its node id, and why.
    hops: which members have reached each other.
    after: the id of a group that has ended, whose layers the members free before they promise memory.
    hub: where the model's files are, if they are not here as a whole.
    bring: brings this machine's own layers.
    load_s: about how many seconds the machine of a part takes to load it.
    new: node ids of the members that were not in the group before, and load their layers ahead (``prepare``).
    """

    # Layers are not divided.
    ring: RingPlace | None = None
    carried: Carried = ""

    def __init__(
        self,
        partners: FleetPort,
        model: str,
        digest: str,
        planned: GroupCut,
        own_promise: OwnPromise | None = None,
        failed: Callable[[str, FleetError], None] = lambda node_id, error: None,
        hops: KnownHops | None = None,
        *,
        after: str = "",
        hub: HubCommit | None = None,
        bring: Bring | None = None,
        load_s: Callable[[GroupPart], float] = lambda part: chip_speeds.load_s(part.weights_bytes),
        new: Collection[str] = (),
    ) -> None:
        #: Called once the group begins to form.
        self.on_form: Callable[[], None] = lambda: None
        self._new = new
        self._after, self._hub, self._bring = after, hub, bring
        self._load_s = load_s
        # How far this machine is with its own layers; None if it does not fetch them.
        self._own: MemberProgress | None = None
        self._partners, self._model, self._digest, self._planned = partners, model, digest, planned
        self._own_promise = own_promise or OwnPromise()
        self._engine: EngineProcess | None = None
        self._closed = False
        self._failed = failed
        self._all_joined = asyncio.Event()
        self._hops = hops or KnownHops()
        # True once every member has a stream to the next one.
        self._direct = False
        # As its members know it.
        self.id = secrets.token_hex(8)
        self._held = [
            _AskedMember(part, GroupMember(part.first, part.last, f"{self.id}.{number}", part.machine.name))
            for number, part in enumerate(planned.parts[1:])
        ]

    @property
    def members(self) -> tuple[GroupMember, ...]:
        return tuple(
            replace(held.member, arithmetic=held.layers, kind=held.arithmetic, direct=self._direct)
            for held in self._held
        )

    @property
    def tokens(self) -> int:
        """Whose keys and values have room everywhere."""
        return self._planned.tokens

    @property
    def kinds(self) -> frozenset[str]:
        """How the members compute, as ``Arithmetic.kind`` has it."""
        return frozenset(held.arithmetic for held in self._held)

    async def prepare(self, kind: str, until: Callable[[], Awaitable[None]]) -> None:
        """Have the new members load their layers while the group before answers, and watch them until
        ``until`` returns. ``form`` then has the others load theirs.

        Args:
            kind: how they have to compute, as ``Arithmetic.kind`` has it; "" for any.

        Raises as ``form``, and Incompatible if one computes otherwise.
        """
        new = [held for held in self._held if held.part.machine.node_id in self._new]
        await gather_or_cancel(*(self._have_fetched(held, _untold) for held in new if self._fetches(held)))
        for held in sorted(new, key=lambda held: held.part.machine.node_id):
            await self._begin(held, _untold)
        await gather_or_cancel(*(self._open(held, _untold) for held in new))
        for held in new:
            if kind and held.arithmetic != kind:
                error = Incompatible(f"{held.name} does not compute the same bytes as the group has so far.")
                self._failed(held.part.machine.node_id, error)
                raise error
        await _unless(_all(self._watch(held) for held in new), _done(until()))

    async def form(self, told: Callable[[Loading], None]) -> None:
        """Have every member load its layers, and open the streams to them. Raises the first failure, naming
        its machine: GroupLost, OutOfMemory, or ModelError if others would do no better."""
        self.on_form()
        # No memory is promised while bytes come, which may take hours.
        fetching = [held for held in self._held if held.stream is None and self._fetches(held)]
        await gather_or_cancel(self._fetch(told), *(self._have_fetched(held, told) for held in fetching))
        self._own = None
        # In this order on all machines: of two groups one is promised all that it needs.
        for held in sorted(self._held, key=lambda held: held.part.machine.node_id):
            if held.part.machine.node_id > self._partners.node_id:
                self._promise()
            if held.stream is None:
                await self._begin(held, told)
        self._promise()
        await gather_or_cancel(*(self._join(held, told) for held in self._held))
        await _unless(self.watch(), self._link())

    async def connect(self, engine: EngineProcess) -> None:
        """Give the engine its streams to the members. Raises EngineDied."""
        self._engine = engine
        for held in self._held:
            if held.sock is not None:
                sock, held.sock = held.sock, None
                await engine.give_stream(StreamTag(held.member.stream, STAGE, held.key, "connector"), sock)

    async def watch(self) -> None:
        """Does not return by itself. Raises why a member has left, naming it."""
        await gather_or_cancel(*(self._watch(held) for held in self._held))

    def close(self) -> None:
        """The members may let go of their layers; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._own_promise.close()
        if self._engine is not None and isinstance(self._engine.error, MembersApart):
            self._hops.broke(self._pairs)
        for held in self._held:
            if held.stream is not None:
                held.stream.cancel()
            if held.sock is not None:
                held.sock.close()
                held.sock = None

    # ---- one member --------------------------------------------------------------------------------------

    def _promise(self) -> None:
        """Promise this machine's own part the memory, once. Raises OutOfMemory."""
        self._own_promise.make(lambda: self._engine.claimed_bytes if self._engine is not None else 0)

    async def _begin(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Ask a member, and wait until it has promised the memory."""
        with self._forming(held):
            held.stream = self._asked(held, messages.SERVE)
            self._expect(held)
            # It fetches layers first that it was thought to have.
            while held.stage != messages.PROMISED:
                await self._hear(held, held.stream, told)

    def _asked(self, held: _AskedMember, method: str) -> PeerStream:
        part = held.part
        ask = StageQuestion(
            self._model,
            self._digest,
            self.id,
            part.first,
            part.last,
            self._planned.tokens,
            self._after,
            None if held.from_here else self._hub,
        )
        return self._partners.request(part.machine.node_id, method, messages.encode(ask))

    # ---- layers that machines lack -------------------------------------------------------------------------

    def _fetches(self, held: _AskedMember) -> bool:
        """True if a member may have to fetch its layers."""
        return self._bring is not None or held.part.machine.can_fetch is not None

    async def _have_fetched(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Until a member has its layers: from this machine or, of a model that is here in part, from the hub,
        and through this machine if it does not reach that."""
        with self._forming(held):
            try:
                await self._fetching(held, told)
            except DownloadFailed as error:
                if self._bring is None:
                    raise
                failed = error
            else:
                return
        log.warning("group.fetched_here", model=self._model, peer=held.name, reason=failed.message)
        try:
            async for step in self._brought(held.part):
                held.stage, held.fetched = FETCHING_HERE, (step.done_bytes, step.total_bytes)
                told(self._progress())
        except (DiskFull, DownloadFailed) as error:
            log.warning("group.not_fetched_here", model=self._model, peer=held.name, reason=error.message)
            with self._forming(held):
                raise failed from error
        held.from_here = True
        with self._forming(held):
            await self._fetching(held, told)

    async def _fetching(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        stream = self._asked(held, messages.FETCH)
        self._expect(held)
        try:
            while (body := await self._next(stream, held)) is not None:
                held.hear(messages.decode(body, StageTold), asyncio.get_running_loop().time())
                told(self._progress())
        finally:
            stream.cancel()
        held.stage, held.fetched = "fetched", None

    async def _brought(self, part: GroupPart) -> AsyncGenerator[PullProgress, None]:
        """Bring layers to this machine. Raises why they cannot be."""
        if self._bring is not None:
            async with aclosing(self._bring(part.first, part.last)) as steps:
                async for step in steps:
                    yield step

    async def _fetch(self, told: Callable[[Loading], None]) -> None:
        """Bring this machine's own layers. Raises why they cannot be."""
        async for step in self._brought(self._planned.parts[0]):
            self._own = MemberProgress(THIS_NAME, step.stage, step.done_bytes, step.total_bytes)
            told(self._progress())

    async def _join(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Until all members have their layers, or this one has left. A member expects its stream for seconds,
        and another one may load for minutes: so each stream is opened at once."""
        if held.sock is None:
            await self._open(held, told)
        if all(each.sock is not None for each in self._held):
            self._all_joined.set()
        await _unless(self._watch(held), self._all_joined.wait())

    async def _open(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Until a member has its layers, and its stream is open."""
        with self._forming(held):
            invitation = None
            # What it has said meanwhile was not listened to.
            self._expect(held)
            while held.stream is not None and invitation is None:
                invitation = await self._hear(held, held.stream, told)
            if invitation is None:
                raise PeerLost("It is not in the group.")
            held.key = invitation.key
            held.sock = await self._partners.connect(held.part.machine.node_id, invitation)

    # ---- between members -----------------------------------------------------------------------------------

    async def _link(self) -> None:
        """Have the members open streams to each other; if two cannot, all hidden states pass through here."""
        try:
            self._hops.check(self._pairs)
            async with asyncio.timeout(limits.GROUP_LINK_S):
                await gather_or_cancel(*(self._linked(*pair) for pair in pairwise(self._held)))
        except (FleetError, TimeoutError) as error:
            reason = error.message if isinstance(error, FleetError) else "It took too long."
            log.warning("group.relayed", model=self._model, reason=reason)
        else:
            self._direct = True

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        """Which member sends to which, by their node ids."""
        return list(pairwise(held.part.machine.node_id for held in self._held))

    async def _linked(self, before: _AskedMember, behind: _AskedMember) -> None:
        """Have one member open a stream to the next. Raises FleetError, naming both."""
        streams = []

        def ask(held: _AskedMember, following: NextMember | None) -> PeerStream:
            question = messages.encode(LinkQuestion(self.id, following))
            streams.append(self._partners.request(held.part.machine.node_id, messages.LINK, question))
            return streams[-1]

        try:
            expecting = ask(behind, None)
            if (where := await self._link_told(expecting)) is None:
                raise ProtocolError("It does not say where the stream is expected.")
            opening = ask(before, NextMember(behind.part.machine.node_id, where))
            if await self._link_told(opening) or await self._link_told(expecting):
                raise ProtocolError("It expects another stream.")
        except FleetError as error:
            between = f"Hidden states from {before.name} to {behind.name} pass through this machine"
            raise said_by(between, error) from error
        finally:
            for stream in streams:
                stream.cancel()

    async def _link_told(self, stream: PeerStream) -> Invitation | None:
        if (body := await self._next(stream)) is None:
            raise ProtocolError("It ended without opening a stream.")
        return messages.decode(body, LinkTold).stream

    @contextmanager
    def _forming(self, held: _AskedMember) -> Iterator[None]:
        """What a member fails with meanwhile comes out with its name: GroupLost, if others may do better."""
        try:
            yield
        except DownloadFailed as error:
            # The hub may be out of reach from there, and not from others.
            raise self._lost(held, error) from error
        except (ModelError, OutOfMemory) as error:
            self._failed(held.part.machine.node_id, error)
            raise said_by(held.name, error) from error
        except FleetError as error:
            raise self._lost(held, error) from error

    async def _hear(
        self, held: _AskedMember, stream: PeerStream, told: Callable[[Loading], None]
    ) -> Invitation | None:
        """Where the stream is expected; None for a step on the way to that, which is told."""
        if (body := await self._next(stream, held)) is None:
            raise ProtocolError("It ended its part in the group without a word.")
        answer = messages.decode(body, StageTold)
        held.hear(answer, asyncio.get_running_loop().time())
        told(self._progress())
        return answer.stream

    def _progress(self) -> Loading:
        """How far all members are, in bytes of their layers."""
        members = [*([self._own] if self._own is not None else []), *(held.progress for held in self._held)]
        where = f"layers on {', '.join(member.name for member in members)}"
        return Loading(
            where[: limits.CARD_TEXT_CHARS],
            sum(member.done_bytes for member in members),
            sum(member.total_bytes for member in members),
            members,
        )

    async def _watch(self, held: _AskedMember) -> None:
        try:
            if held.stream is None or await self._next(held.stream) is None:
                raise PeerLost("It has left the group.")
            raise ProtocolError("It said more than that it is alive.")
        except FleetError as error:
            raise self._lost(held, error) from error

    def _expect(self, held: _AskedMember) -> None:
        """The member has to get further with its layers, from now on."""
        held.deadline = LoadDeadline(self._load_s(held.part), asyncio.get_running_loop().time())

    @staticmethod
    async def _next(stream: PeerStream, loads: _AskedMember | None = None) -> bytes | None:
        """The next message that says more than that a member is alive; ``loads``: the one that has to get
        further."""

        def due_s() -> float:
            return loads.deadline.due_s if loads is not None and loads.deadline is not None else math.inf

        return await next_message(stream, due_s=due_s, silence_s=limits.GROUP_SILENT_S)

    def _lost(self, held: _AskedMember, error: FleetError) -> GroupLost:
        """What the loss of a member comes to for a request that waits for the model."""
        # Members leave, as they should, once the engine here has ended because of one of them.
        if self._engine is None or self._engine.error is None:
            self._failed(held.part.machine.node_id, error)
        again = "Send the request again: others may have its layers."
        hint = error.hint if isinstance(error, DownloadFailed) and error.hint else again
        return GroupLost(f"{held.name}: {error.message}", hint=hint)


def _untold(_progress: Loading) -> None:
    """Nobody waits for it."""


async def _all(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    await gather_or_cancel(*work)


async def _done(work: Awaitable[None]) -> None:
    await work


async def _unless(watching: Coroutine[Any, Any, None], work: Coroutine[Any, Any, Any]) -> None:
    """Wait for ``work``. Raises what ``watching`` ends with before."""
    working, watched = asyncio.create_task(work), asyncio.create_task(watching)
    try:
        await asyncio.wait({working, watched}, return_when=asyncio.FIRST_COMPLETED)
        # A member that is lost at the same moment is lost.
        await (watched if watched.done() else working)
    finally:
        await cancel_all([working, watched])
        for task in (working, watched):
            # One of both is raised.
            if not task.cancelled():
                task.exception()
