"""Drafting for answers of other machines: what a member may ask for, and how its text is followed here.

    Ask ──► digest and vocabulary checked, engine loaded beside what runs ──► Offer ──► stream to the engine
        ──► alive, alive … ──► Done

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Protocol

from fleetd import limits
from fleetd.engine.protocol import Follow, StreamTag
from fleetd.jobs.drafts import wire
from fleetd.jobs.drafts.drafting import DRAFTS, Pool, accepted, check_vocabulary, ended
from fleetd.jobs.messages import ALIVE
from fleetd.jobs.remote import Stream, own_id
from fleetd.jobs.served import Host, Served
from fleetd.jobs.together import beating
from fleetd.jobs.ways import invitation
from fleetd.p2p.bulk import Expected


class Meeting(Protocol):
    """``fleetd.jobs.ways.Ways``."""

    def expect(self) -> AbstractContextManager[Expected]: ...


class Drafters:
    """The handler of ``wire.FOLLOW``."""

    def __init__(self, meeting: Meeting, pool: Pool, host: Host) -> None:
        self._meeting = meeting
        self._pool = pool
        self._host = host
        self._served = Served(host, "draft", limits.FOLLOWS, f"drafts for {limits.FOLLOWS} texts")

    async def __call__(self, peer: str, body: bytes, stream: Stream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = wire.decode(body, wire.Ask)
        with self._served.visit(peer, ask.id) as visit:
            async with (
                aclosing(self._follow(ask)) as said,
                aclosing(beating(said, limits.JOB_ALIVE_S)) as beats,
            ):
                async for message in beats:
                    stream.send(ALIVE if message is None else wire.encode(message))
                    visit.done = visit.done or isinstance(message, wire.Done)

    async def _follow(self, ask: wire.Ask) -> AsyncGenerator[wire.Offer | wire.Done, None]:
        folder = await self._host.holding(ask.model, ask.digest)
        async with self._pool.assisting(folder, 0, 0) as engine:
            check_vocabulary(engine.facts, ask.vocabulary)
            follow = Follow(own_id(ask.id))
            async with aclosing(engine.follow(follow)) as events:
                await accepted(events)
                with self._meeting.expect() as home:
                    yield wire.Offer(ask.vocabulary, invitation(home))
                    sock = await home.socket()
                await engine.give_stream(StreamTag(follow.id, DRAFTS, home.key, "acceptor"), sock)
                done = await ended(events)
                yield wire.Done(done.drafted, done.judged, done.right)
