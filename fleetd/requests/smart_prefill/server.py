"""Scoring prompts of other machines: what a member may ask for, and the bounds of it.

    ScoreQuestion ──► digest on this machine's own card? room? ──► the engine scores a segment ──► Scored

Nothing that is loaded gives way for it, and no prompt waits for a model to be measured. When the machine that
asked is gone, the work ends with its stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Timings, Usage
from fleetd.errors import ScorerNotReady
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import with_beats
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ledger import SCORE_ROUTE, Ledger, Reservation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import drained, own_id
from fleetd.requests.smart_prefill import messages


class ScoreServer:
    """The handler of ``messages.SCORE``."""

    def __init__(
        self,
        pool: EnginePool,
        context: ServingContext,
        ledger: Ledger,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._context = context
        self._ledger = ledger
        self._now = now
        self._limit = ConcurrencyLimit(
            context, "score", limits.SMART_SERVED, f"scores {limits.SMART_SERVED} prompts"
        )

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode_ask(body)
        with self._limit.serving(peer, ask.score.id):
            await self._score(ask, stream)

    async def _score(self, ask: messages.ScoreQuestion, stream: PeerStream) -> None:
        folder = await self._context.model_by_digest(ask.model, ask.digest)
        score = msgspec.structs.replace(ask.score, id=own_id(ask.score.id))
        row = Reservation(score.id, folder.name, THIS_NAME, SCORE_ROUTE, self._now())
        try:
            async with self._ledger.entry(row) as spent:
                work = self._pool.ask(
                    folder, score, evict=False, progress=lambda step: stream.send(messages.encode(step))
                )
                scored = await with_beats(work, limits.JOB_ALIVE_S, lambda: stream.send(ALIVE))
                stream.send(messages.encode(scored))
                await drained(stream)
                spent.usage = Usage(scored.tokens)
                spent.timings = Timings(prefill_s=scored.seconds)
        except ScorerNotReady:
            self._pool.measuring.want(folder)
            raise
