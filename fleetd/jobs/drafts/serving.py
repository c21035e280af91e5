"""Drafting for answers of other machines: what a member may ask for, and how its text is followed here.

    Ask ──► digest and vocabulary checked, engine loaded beside what runs ──► Offer ──► stream to the engine
        ──► alive, alive … ──► Done

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Protocol

from fleetd import limits
from fleetd.engine.protocol import Follow, StreamTag
from fleetd.errors import Draining, FleetError, Overloaded
from fleetd.jobs.drafts import wire
from fleetd.jobs.drafts.drafting import DRAFTS, Pool, accepted, check_vocabulary, ended
from fleetd.jobs.held import Models, holding
from fleetd.jobs.remote import Stream, own_id
from fleetd.jobs.together import beating
from fleetd.jobs.ways import invitation
from fleetd.observe import get_logger
from fleetd.p2p.bulk import Expected
from fleetd.p2p.cards import Card

log = get_logger("fleetd.drafting")


class Meeting(Protocol):
    """``fleetd.jobs.ways.Ways``."""

    def expect(self) -> AbstractContextManager[Expected]: ...


class Drafters:
    """The handler of ``drafting_wire.FOLLOW``.

    Args:
        own_card: what this machine has told others; only what it shows may be asked for.
        finished: told how each ended: "done", "cancelled" or an error's code.
    """

    def __init__(
        self,
        meeting: Meeting,
        pool: Pool,
        models: Models,
        own_card: Callable[[], Card],
        *,
        draining: Callable[[], bool],
        finished: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._meeting = meeting
        self._pool = pool
        self._models = models
        self._own_card = own_card
        self._draining = draining
        self._finished = finished
        self._running = 0

    async def __call__(self, peer: str, body: bytes, stream: Stream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = wire.decode(body, wire.Ask)
        if self._draining():
            raise Draining("This machine is stopping and takes no new work.")
        if self._running >= limits.FOLLOWS:
            raise Overloaded(f"This machine drafts for {limits.FOLLOWS} texts already.")
        self._running += 1
        outcome = "cancelled"
        try:
            async with (
                aclosing(self._follow(ask)) as said,
                aclosing(beating(said, limits.JOB_ALIVE_S)) as beats,
            ):
                async for message in beats:
                    stream.send(wire.ALIVE if message is None else wire.encode(message))
                    if isinstance(message, wire.Done):
                        outcome = "done"  # whoever reads it may be gone before this ends
        except FleetError as error:
            outcome = error.code
            raise
        finally:
            self._running -= 1
            self._finished(outcome)
            log.info("drafting.ended", peer=peer[:7], request=ask.id, outcome=outcome)

    async def _follow(self, ask: wire.Ask) -> AsyncGenerator[wire.Offer | wire.Done, None]:
        folder = await holding(self._models, self._own_card(), ask.model, ask.digest)
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
