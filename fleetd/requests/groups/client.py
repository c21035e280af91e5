"""One group seen from the machine that answers: which machines hold what, and whether they still do.

    planned ──► each promises memory in turn ──► all at once: layers are loaded
        and streams are opened ──► the engine here has the streams ──► watched

The engine's process asks for all of this when it starts (``engine.daemon_side.group_front``).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import Carried
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, Loading, StreamTag
from fleetd.engine.settings import GroupMember, RingPlace
from fleetd.errors import FleetError, GroupLost, ModelError, OutOfMemory, PeerLost, ProtocolError
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.group_cut import GroupCut, GroupPart
from fleetd.requests.concurrency import cancel_all, gather_or_cancel
from fleetd.requests.groups import messages
from fleetd.requests.groups.messages import StageQuestion, StageTold
from fleetd.requests.ports import FleetPort
from fleetd.requests.remote.peer_stream import next_message, said_by


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

    @property
    def name(self) -> str:
        return self.part.machine.name


class FleetGroup:
    """Args:
    model, digest: as the members are to find it.
    promise_here: what this machine promises its own part, given what tells the bytes that are held of it.
    failed: told of each member that is lost, by its node id, and why.
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
        promise_here: Callable[[Callable[[], int]], AbstractContextManager[None]] = lambda held: (
            nullcontext()
        ),
        failed: Callable[[str, FleetError], None] = lambda node_id, error: None,
    ) -> None:
        self._partners, self._model, self._digest, self._planned = partners, model, digest, planned
        self._promise_here, self._promised = promise_here, ExitStack()
        self._is_promised = False
        self._engine: EngineProcess | None = None
        self._failed = failed
        self._all_joined = asyncio.Event()
        self._id = secrets.token_hex(8)
        self._held = [
            _AskedMember(part, GroupMember(part.first, part.last, f"{self._id}.{number}", part.machine.name))
            for number, part in enumerate(planned.parts[1:])
        ]

    @property
    def members(self) -> tuple[GroupMember, ...]:
        return tuple(replace(held.member, arithmetic=held.layers) for held in self._held)

    @property
    def tokens(self) -> int:
        """Whose keys and values have room everywhere."""
        return self._planned.tokens

    @property
    def kinds(self) -> frozenset[str]:
        """How the members compute, as ``Arithmetic.kind`` has it."""
        return frozenset(held.arithmetic for held in self._held)

    async def form(self, told: Callable[[Loading], None]) -> None:
        """Have every member load its layers, and open the streams to them. Raises the first failure, naming
        its machine: GroupLost, OutOfMemory, or ModelError if others would do no better."""
        # In this order on all machines: of two groups one is promised all that it needs.
        for held in sorted(self._held, key=lambda held: held.part.machine.node_id):
            if held.part.machine.node_id > self._partners.node_id:
                self._promise()
            await self._begin(held, told)
        self._promise()
        await gather_or_cancel(*(self._join(held, told) for held in self._held))

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
        self._promised.close()
        for held in self._held:
            if held.stream is not None:
                held.stream.cancel()
            if held.sock is not None:
                held.sock.close()
                held.sock = None

    # ---- one member --------------------------------------------------------------------------------------

    def _promise(self) -> None:
        """Promise this machine's own part the memory, once. Raises OutOfMemory."""
        if self._is_promised:
            return
        self._is_promised = True
        self._promised.enter_context(
            self._promise_here(lambda: self._engine.claimed_bytes if self._engine is not None else 0)
        )

    async def _begin(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Ask a member, and wait until it has promised the memory."""
        part = held.part
        ask = StageQuestion(self._model, self._digest, self._id, part.first, part.last, self._planned.tokens)
        with self._forming(held):
            held.stream = self._partners.request(part.machine.node_id, messages.SERVE, messages.encode(ask))
            await self._hear(held, held.stream, told)

    async def _join(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        """Until all members have their layers, or this one has left. A member expects its stream for seconds,
        and another one may load for minutes: so each stream is opened at once."""
        with self._forming(held):
            invitation = None
            while held.stream is not None and invitation is None:
                invitation = await self._hear(held, held.stream, told)
            if invitation is None:
                raise PeerLost("It is not in the group.")
            held.key = invitation.key
            held.sock = await self._partners.connect(held.part.machine.node_id, invitation)
        if all(each.sock is not None for each in self._held):
            self._all_joined.set()
        joined = asyncio.create_task(self._all_joined.wait())
        watching = asyncio.create_task(self._watch(held))
        try:
            await asyncio.wait({joined, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not joined.done():
                await watching
        finally:
            await cancel_all([joined, watching])

    @contextmanager
    def _forming(self, held: _AskedMember) -> Iterator[None]:
        """What a member fails with meanwhile comes out with its name: GroupLost, if others may do better."""
        try:
            yield
        except (ModelError, OutOfMemory) as error:
            self._failed(held.part.machine.node_id, error)
            raise said_by(held.name, error) from error
        except FleetError as error:
            raise self._lost(held, error) from error

    async def _hear(
        self, held: _AskedMember, stream: PeerStream, told: Callable[[Loading], None]
    ) -> Invitation | None:
        """Where the stream is expected; None for a step on the way to that, which is told."""
        part = held.part
        if (body := await self._next(stream)) is None:
            raise ProtocolError("It ended its part in the group without a word.")
        answer = messages.decode(body, StageTold)
        held.arithmetic, held.layers = answer.arithmetic, answer.layers
        if answer.stream is None:
            where = f"{answer.stage}: layers {part.first} to {part.last} on {held.name}"
            told(Loading(where[: limits.CARD_TEXT_CHARS], answer.done, answer.total))
        return answer.stream

    async def _watch(self, held: _AskedMember) -> None:
        try:
            if held.stream is None or await self._next(held.stream) is None:
                raise PeerLost("It has left the group.")
            raise ProtocolError("It said more than that it is alive.")
        except FleetError as error:
            raise self._lost(held, error) from error

    @staticmethod
    async def _next(stream: PeerStream) -> bytes | None:
        return await next_message(stream, silence_s=limits.GROUP_SILENT_S)

    def _lost(self, held: _AskedMember, error: FleetError) -> GroupLost:
        """What the loss of a member comes to for a request that waits for the model."""
        self._failed(held.part.machine.node_id, error)
        return GroupLost(
            f"{held.name}: {error.message}", hint="Send the request again: others may have its layers."
        )
