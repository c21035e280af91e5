"""Drafting for answers of other machines: what a member may ask for, and how its text is followed here.

    DraftQuestion ──► digest and vocabulary checked, engine loaded beside what runs ──► DraftOffer
        ──► stream to the engine ──► alive, alive … ──► DraftDone

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise

from fleetd import limits
from fleetd.engine.daemon_side.lent_workers import LentWorkers
from fleetd.engine.protocol import DraftFor, StepTime, StreamTag
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.prefill import step_names
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.drafting import messages
from fleetd.requests.drafting.client import DRAFTS, await_accepted, check_vocabulary, draft_report
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import own_id

# From the question to an engine, to the stream, to the end of the text.
_STEPS = (step_names.LOADED, step_names.AGREED, step_names.DRAFTED)


class DraftServer:
    """The handler of ``messages.FOLLOW``."""

    def __init__(
        self,
        dialer: BulkDialer,
        lent: LentWorkers,
        context: ServingContext,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._dialer = dialer
        self._lent = lent
        self._context = context
        self._limit = ConcurrencyLimit(context, "draft", limits.FOLLOWS, f"drafts for {limits.FOLLOWS} texts")

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, messages.DraftQuestion)
        with self._limit.serving(peer, ask.id) as request:
            async with (
                aclosing(self._follow(ask)) as said,
                aclosing(with_heartbeats(said, limits.JOB_ALIVE_S)) as beats,
            ):
                async for message in beats:
                    stream.send(ALIVE if message is None else messages.encode(message))
                    request.done = request.done or isinstance(message, messages.DraftDone)

    async def _follow(
        self, ask: messages.DraftQuestion
    ) -> AsyncGenerator[messages.DraftOffer | messages.DraftDone, None]:
        times = [self._monotonic()]
        folder = await self._context.model_by_digest(ask.model, ask.digest)
        async with self._lent.assisting(folder, 0, 0) as engine:
            times.append(self._monotonic())
            check_vocabulary(engine.facts, ask.vocabulary)
            follow = DraftFor(own_id(ask.id))
            async with aclosing(engine.follow(follow)) as events:
                await await_accepted(events)
                with self._dialer.expect() as home:
                    yield messages.DraftOffer(ask.vocabulary, invitation(home))
                    sock = await home.socket()
                await engine.give_stream(StreamTag(follow.id, DRAFTS, home.key, "acceptor"), sock)
                times.append(self._monotonic())
                done = await draft_report(events)
                times.append(self._monotonic())
                steps = [
                    StepTime(name, later_s - earlier_s, 0, earlier_s, later_s)
                    for name, (earlier_s, later_s) in zip(_STEPS, pairwise(times), strict=True)
                ]
                yield messages.DraftDone(done.drafted, done.judged, done.right, steps)
