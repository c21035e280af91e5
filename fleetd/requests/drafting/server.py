"""Drafting for answers of other machines: what a member may ask for, and how its text is followed here.

    Ask ──► digest and vocabulary checked, engine loaded beside what runs ──► Offer ──► stream to the engine
        ──► alive, alive … ──► Done

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fleetd import limits
from fleetd.engine.pool import EnginePool
from fleetd.engine.protocol import DraftFor, StreamTag
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.bulk_dialer import BulkDialer, invitation
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.drafting import messages
from fleetd.requests.drafting.client import DRAFTS, accepted, check_vocabulary, ended
from fleetd.requests.message_codec import ALIVE
from fleetd.requests.remote import own_id


class DraftServer:
    """The handler of ``messages.FOLLOW``."""

    def __init__(self, meeting: BulkDialer, pool: EnginePool, host: ServingContext) -> None:
        self._meeting = meeting
        self._pool = pool
        self._host = host
        self._served = ConcurrencyLimit(host, "draft", limits.FOLLOWS, f"drafts for {limits.FOLLOWS} texts")

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, messages.DraftQuestion)
        with self._served.visit(peer, ask.id) as visit:
            async with (
                aclosing(self._follow(ask)) as said,
                aclosing(with_heartbeats(said, limits.JOB_ALIVE_S)) as beats,
            ):
                async for message in beats:
                    stream.send(ALIVE if message is None else messages.encode(message))
                    visit.done = visit.done or isinstance(message, messages.DraftDone)

    async def _follow(
        self, ask: messages.DraftQuestion
    ) -> AsyncGenerator[messages.DraftOffer | messages.DraftDone, None]:
        folder = await self._host.holding(ask.model, ask.digest)
        async with self._pool.assisting(folder, 0, 0) as engine:
            check_vocabulary(engine.facts, ask.vocabulary)
            follow = DraftFor(own_id(ask.id))
            async with aclosing(engine.follow(follow)) as events:
                await accepted(events)
                with self._meeting.expect() as home:
                    yield messages.DraftOffer(ask.vocabulary, invitation(home))
                    sock = await home.socket()
                await engine.give_stream(StreamTag(follow.id, DRAFTS, home.key, "acceptor"), sock)
                done = await ended(events)
                yield messages.DraftDone(done.drafted, done.judged, done.right)
