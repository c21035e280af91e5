"""Helping with other machines' prompts: what a member may ask for, and how a part of a prefill runs here.

    AssistQuestion ──► digest, split, arithmetic checked ──► engine reserves memory ──► AssistOffer
    AssistGo       ──► streams to the engine ──► alive, alive … ──► AssistDone

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from fleetd import limits
from fleetd.engine.daemon_side.lent_workers import LentWorkers
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Accepted, Arithmetic, Assisted, AssistPrefill, Event, StreamTag
from fleetd.errors import EngineDied, FleetError, Overloaded, PeerLost, ProtocolError
from fleetd.models.folder import ModelFolder
from fleetd.p2p.bulk_connections import Expected
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.observe import get_logger
from fleetd.requests.admission import ConcurrencyLimit, ServedRequest, ServingContext
from fleetd.requests.concurrency import cancel_all, gather_or_cancel, with_heartbeats
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.prefill_sharing.agreement import checked_split, compare
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import own_id
from fleetd.requests.row_origins import Labels, no_label

log = get_logger("fleetd.assisting")


class AssistServer:
    """The handlers of ``messages.ASSIST`` and ``WARM``."""

    def __init__(
        self, dialer: BulkDialer, lent: LentWorkers, context: ServingContext, *, label: Labels = no_label
    ) -> None:
        self._dialer = dialer
        self._label = label
        self._lent = lent
        self._context = context
        self._limit = ConcurrencyLimit(
            context, "assist", limits.ASSISTS, f"helps with {limits.ASSISTS} prompts"
        )
        self._warming: asyncio.Task[None] | None = None
        # Models that could not be loaded for others, and until when that is not tried again.
        self._unloadable_s: dict[str, float] = {}

    async def assist(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Compute one part of a prompt. Raises FleetError: what the other side is told."""
        ask = messages.decode(body, messages.AssistQuestion)
        with self._limit.serving(peer, ask.id) as request:
            await self._assist(ask, await self._label(peer), stream, request)

    async def _assist(
        self, ask: messages.AssistQuestion, label: str, stream: PeerStream, request: ServedRequest
    ) -> None:
        folder = await self._context.model_by_digest(ask.model, ask.digest)
        split, rank = ask.split, ask.rank
        # The figures must make sense before an engine is asked for; they are checked against its own below.
        checked_split(split, layers=split.layers, context_tokens=folder.context_tokens, rank=rank)
        layers = split.layers_of(rank)
        if not self._lent.holds(folder, layers.start, layers.stop):
            raise Overloaded(f"{folder.name} is not loaded on this machine.", hint="Ask again when it is.")
        async with self._lent.assisting(folder, layers.start, layers.stop) as engine:
            facts = engine.facts
            if facts is None or facts.arithmetic is None:
                raise EngineDied(f"The engine for {folder.name} has just ended.")
            checked_split(
                split, layers=facts.shape.layers, context_tokens=facts.shape.context_tokens, rank=rank
            )
            compare(ask.arithmetic, facts.arithmetic, layers, own_chunks=True)
            job = own_id(ask.id)
            part = AssistPrefill(job, split, rank, ask.kv_bits, label, ask.warm, ask.wire_bits, ask.exact)
            async with aclosing(engine.assist(part)) as events:
                accepted = await anext(events, None)
                if not isinstance(accepted, Accepted):
                    raise EngineDied(f"The engine for {folder.name} did not take the work.")
                # An engine that ends before it has its streams must not leave others waiting for them.
                await gather_or_cancel(
                    self._meet(ask, accepted, engine, facts.arithmetic, stream),
                    _finish(events, stream, request),
                )

    async def _meet(
        self,
        ask: messages.AssistQuestion,
        accepted: Accepted,
        engine: EngineProcess,
        arithmetic: Arithmetic,
        stream: PeerStream,
    ) -> None:
        """Offer, wait for Go, and give the engine its streams."""
        with ExitStack() as stack:
            home = stack.enter_context(self._dialer.expect())
            before = stack.enter_context(self._dialer.expect()) if ask.rank else None
            offer = messages.AssistOffer(
                arithmetic,
                invitation(home),
                invitation(before) if before else None,
                ask.kv_bits,
                accepted.is_warm,
                ask.wire_bits,
            )
            stream.send(messages.encode(offer))
            await self._stream(accepted.id, engine, home, before, await _go(stream))

    async def _stream(
        self, job: str, engine: EngineProcess, home: Expected, before: Expected | None, go: messages.AssistGo
    ) -> None:
        """Give the engine its streams from the home and the machine before, and to the one after."""

        async def accept(name: str, expected: Expected) -> None:
            sock = await expected.socket()
            await engine.give_stream(StreamTag(job, name, expected.key, "acceptor"), sock)

        async def connect(invited: Invitation) -> None:
            sock = await self._dialer.connect(go.next, invited)
            await engine.give_stream(StreamTag(job, "out", invited.key, "connector"), sock)

        work = [accept("home", home)]
        if before is not None:
            work.append(accept("in", before))
        if go.invitation is not None:
            work.append(connect(go.invitation))
        await gather_or_cancel(*work)

    # ---- getting ready -----------------------------------------------------------------------------------

    async def warm(self, _peer: str, body: bytes, stream: PeerStream) -> None:
        """Load a model for prompts to come, or some layers of it if it does not fit.

        Answered at once; one at a time, and nothing that is loaded gives way.
        """
        asked = messages.decode(body, messages.WarmModel)
        self._context.admit()
        if self._warming is not None and not self._warming.done():
            raise Overloaded("This machine is loading a model already.")
        folder = await self._context.model_by_digest(asked.model, asked.digest)
        if not self._lent.holds(folder, asked.first, asked.last):
            if (part := self._lent.part(folder)) is not None:
                raise Overloaded(f"This machine has layers {part[0]}-{part[1] - 1} of {folder.name} already.")
            self._check_room(asked, folder.name)
            self._warming = asyncio.create_task(self._load(folder, asked.first, asked.last))
        stream.send(ALIVE)

    def _check_room(self, asked: messages.WarmModel, name: str) -> None:
        """A model that is loaded and idle does not give way: it is for this machine's own next prompt."""
        if asyncio.get_running_loop().time() < self._unloadable_s.get(name, float("-inf")):
            raise Overloaded(f"{asked.model} could not be loaded on this machine a short while ago.")
        # What some layers need, only their worker finds out; it takes no more than is free either.
        card = self._context.own_card()
        needed = next((model.memory_bytes for model in card.models if model.digest == asked.digest), 0)
        if not asked.last and needed > card.usable_bytes:
            raise Overloaded(f"{asked.model} needs more memory than is free on this machine now.")

    async def _load(self, folder: ModelFolder, first: int, last: int) -> None:
        log.info("assist.warming", model=folder.name, layers=f"{first}:{last}" if last else "all")
        try:
            async with self._lent.assisting(folder, first, last):
                pass  # it stays loaded
        except FleetError as error:
            again_s = asyncio.get_running_loop().time() + limits.SHARE_LOAD_AGAIN_S
            self._unloadable_s[folder.name] = again_s
            log.warning("assist.not_warmed", model=folder.name, error=str(error))

    async def close(self) -> None:
        """End a load that is under way."""
        if self._warming is not None:
            await cancel_all([self._warming])


async def _go(stream: PeerStream) -> messages.AssistGo:
    # The machine that asked has given up long before, if it has not said so by then.
    try:
        async with asyncio.timeout(2 * limits.SHARE_SETUP_S):
            body = await stream.receive()
    except TimeoutError:
        raise PeerLost(f"No word to begin within {2 * limits.SHARE_SETUP_S:.0f} s.") from None
    if body is None:
        raise ProtocolError("A peer asked for help and ended without taking it.")
    return messages.decode(body, messages.AssistGo)


async def _finish(events: AsyncGenerator[Event, None], stream: PeerStream, request: ServedRequest) -> None:
    async with aclosing(with_heartbeats(events, limits.JOB_ALIVE_S)) as beats:
        async for event in beats:
            if event is None:
                stream.send(ALIVE)
            elif isinstance(event, Assisted):
                done = messages.AssistDone(event.steps[: limits.SHARE_STEPS], event.kept)
                stream.send(messages.encode(done))
                request.done = True
                return
    raise EngineDied("The engine ended its part without finishing it.")
