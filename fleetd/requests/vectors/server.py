"""Vectors and scores for other machines: what a member may ask for, and the bounds of it.

    VectorPart ──► digest on this machine's own card? room? no chat? ──► the engine ──► pieces, Finished

Nothing that is loaded gives way for it, and a machine that answers a chat takes no part. When the machine
that asked is gone, the work ends with its stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Finished, Loading, TextsEmbedded, TextsReranked, Usage
from fleetd.errors import Overloaded
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ledger import SCORE_ROUTE, Ledger, Reservation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import drained, own_id
from fleetd.requests.vectors import messages


class VectorServer:
    """The handler of ``messages.VECTORS``.

    Args:
        chats: True while this machine answers a chat.
    """

    def __init__(
        self,
        pool: EnginePool,
        context: ServingContext,
        ledger: Ledger,
        *,
        chats: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._context = context
        self._ledger = ledger
        self._chats = chats
        self._now = now
        most = limits.VECTOR_PARTS_SERVED
        self._limit = ConcurrencyLimit(context, "vectors", most, f"makes vectors for {most} requests")

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        part = messages.decode_part(body)
        if self._chats():
            raise Overloaded("This machine answers a chat.")
        with self._limit.serving(peer, part.request.id):
            await self._compute(part, stream)

    async def _compute(self, part: messages.VectorPart, stream: PeerStream) -> None:
        folder = await self._context.model_by_digest(part.model, part.digest)
        request = msgspec.structs.replace(part.request, id=own_id(part.request.id), background=True)
        row = Reservation(request.id, folder.name, THIS_NAME, SCORE_ROUTE, self._now())
        tokens = 0
        async with (
            self._ledger.entry(row) as spent,
            aclosing(self._pool.vectors(folder, request, evict=False)) as work,
            aclosing(with_heartbeats(work, limits.JOB_ALIVE_S)) as events,
        ):
            async for event in events:
                if event is None:
                    stream.send(ALIVE)
                elif isinstance(event, Loading | TextsEmbedded | TextsReranked | Finished):
                    tokens += sum(getattr(event, "tokens", ()))
                    stream.send(messages.encode(event))
                    await drained(stream)
            spent.usage = Usage(prompt_tokens=tokens)
