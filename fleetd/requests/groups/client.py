"""One group seen from the machine that answers: which machines hold what, and whether they still do.

    planned ──► each promises memory in turn ──► all at once: layers are loaded
        ──► streams to the engine here ──► watched

The engine's process asks for all of this when it starts (``engine.daemon_side.group_front``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import STAGE, Loading, StreamTag
from fleetd.engine.settings import GroupMember
from fleetd.errors import FleetError, GroupLost, PeerLost, ProtocolError
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.group_cut import GroupCut, GroupPart
from fleetd.requests.concurrency import gather_or_cancel
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
    invitation: Invitation | None = None
    arithmetic: str = field(default="")

    @property
    def name(self) -> str:
        return self.part.machine.name


class FleetGroup:
    """Args:
    model, digest: as the members are to find it.
    promise_here: what this machine promises its own part, given what tells the bytes that are held of it.
    """

    def __init__(
        self,
        partners: FleetPort,
        model: str,
        digest: str,
        planned: GroupCut,
        promise_here: Callable[[Callable[[], int]], AbstractContextManager[None]] = lambda held: (
            nullcontext()
        ),
    ) -> None:
        self._partners, self._model, self._digest, self._planned = partners, model, digest, planned
        self._promise_here, self._promised = promise_here, ExitStack()
        self._is_promised = False
        self._engine: EngineProcess | None = None
        self._id = secrets.token_hex(8)
        self._held = [
            _AskedMember(part, GroupMember(part.first, part.last, f"{self._id}.{number}", part.machine.name))
            for number, part in enumerate(planned.parts[1:])
        ]

    @property
    def members(self) -> tuple[GroupMember, ...]:
        return tuple(held.member for held in self._held)

    @property
    def tokens(self) -> int:
        """Whose keys and values have room everywhere."""
        return self._planned.tokens

    @property
    def kinds(self) -> frozenset[str]:
        """How the members compute, as ``Arithmetic.kind`` has it."""
        return frozenset(held.arithmetic for held in self._held)

    async def form(self, told: Callable[[Loading], None]) -> None:
        """Have every member load its layers. Raises the first failure, naming its machine."""
        # In this order on all machines: of two groups one is promised all that it needs.
        for held in sorted(self._held, key=lambda held: held.part.machine.node_id):
            if held.part.machine.node_id > self._partners.node_id:
                self._promise()
            await self._begin(held, told)
        self._promise()
        await gather_or_cancel(*(self._load(held, told) for held in self._held))

    async def connect(self, engine: EngineProcess) -> None:
        """Give the engine its streams to the members. Raises PeerError, EngineDied."""
        self._engine = engine
        await gather_or_cancel(*(self._dial(held, engine) for held in self._held))

    async def watch(self) -> None:
        """Does not return by itself. Raises why a member has left, naming it."""
        await gather_or_cancel(*(self._watch(held) for held in self._held))

    def close(self) -> None:
        """The members may let go of their layers; idempotent."""
        self._promised.close()
        for held in self._held:
            if held.stream is not None:
                held.stream.cancel()

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
        held.stream = self._partners.request(part.machine.node_id, messages.SERVE, messages.encode(ask))
        await self._hear(held, held.stream, told)

    async def _load(self, held: _AskedMember, told: Callable[[Loading], None]) -> None:
        while held.stream is not None and held.invitation is None:
            await self._hear(held, held.stream, told)

    async def _hear(self, held: _AskedMember, stream: PeerStream, told: Callable[[Loading], None]) -> None:
        part = held.part
        try:
            answer = await self._told(stream)
        except FleetError as error:
            raise said_by(held.name, error) from error
        held.invitation, held.arithmetic = answer.stream, answer.arithmetic
        if answer.stream is None:
            where = f"{answer.stage}: layers {part.first} to {part.last} on {held.name}"
            told(Loading(where[: limits.CARD_TEXT_CHARS], answer.done, answer.total))

    async def _told(self, stream: PeerStream) -> StageTold:
        if (body := await next_message(stream)) is None:
            raise ProtocolError("It ended its part in the group without a word.")
        return messages.decode(body, StageTold)

    async def _dial(self, held: _AskedMember, engine: EngineProcess) -> None:
        if held.invitation is None:
            raise PeerLost(f"{held.name} is not in the group.")
        try:
            sock = await self._partners.connect(held.part.machine.node_id, held.invitation)
        except FleetError as error:
            raise _left(held, error) from error
        await engine.give_stream(StreamTag(held.member.stream, STAGE, held.invitation.key, "connector"), sock)

    async def _watch(self, held: _AskedMember) -> None:
        try:
            if held.stream is not None and await next_message(held.stream) is None:
                raise PeerLost("It has left the group.")
        except FleetError as error:
            raise _left(held, error) from error
        raise GroupLost(f"{held.name} said more than that it is alive.")


def _left(held: _AskedMember, error: FleetError) -> GroupLost:
    return GroupLost(
        f"{held.name}: {error.message}", hint="Send the request again: others may have its layers."
    )
