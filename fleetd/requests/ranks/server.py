"""Being a rank of another machine's model: what is asked for, and how long it stays here.

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from functools import partial

from fleetd import limits
from fleetd.engine.daemon_side.lent_workers import LentWorkers
from fleetd.engine.protocol import STAGE, Accepted, Loading, ServeStage, StreamTag
from fleetd.errors import EngineDied, ModelUnsupported
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.ranks import undividable
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.ranks import messages
from fleetd.requests.ranks.fabrics import Fabrics, no_offer
from fleetd.requests.ranks.messages import RankQuestion, RankTold
from fleetd.requests.ranks.rank_memory import Promise, rank_need
from fleetd.requests.ranks.ring_links import RingLinks
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import own_id


class RankServer:
    """The handler of ``messages.SERVE``.

    Args:
        free_bytes: what models may take now, beside what workers hold.
        on_cpu: whether models run on a CPU here.
        name_of: a machine's name, by its node id.
        fabrics: what this machine offers to carry sums with; None: sealed tunnels.
    """

    def __init__(
        self,
        dialer: BulkDialer,
        lent: LentWorkers,
        context: ServingContext,
        promise: Promise,
        free_bytes: Callable[[], int],
        on_cpu: Callable[[], bool],
        name_of: Callable[[str], str] = str,
        fabrics: Fabrics | None = None,
    ) -> None:
        self._fabrics = fabrics
        self._dialer, self._lent, self._context = dialer, lent, context
        self._promise, self._free_bytes, self._on_cpu, self._name_of = promise, free_bytes, on_cpu, name_of
        self._limit = ConcurrencyLimit(context, "group", 1, "is a rank of another group")

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, RankQuestion)
        with self._limit.serving(peer, ask.id):
            async with (
                aclosing(self._promised(peer, ask, stream)) as told,
                aclosing(with_heartbeats(told, limits.GROUP_BEAT_S)) as beats,
            ):
                async for message in beats:
                    stream.send(ALIVE if message is None else messages.encode(message))

    async def _promised(
        self, peer: str, ask: RankQuestion, stream: PeerStream
    ) -> AsyncGenerator[RankTold, None]:
        """What the other machine is told, while the rank is here; does not end by itself."""
        folder = await self._context.model_by_digest(ask.model, ask.digest)
        if why := undividable(folder.config, ask.size):
            raise ModelUnsupported(why)
        n_bytes = await file_threads.look(rank_need, folder, ask.size, ask.tokens, self._on_cpu())
        what = f"Rank {ask.rank} of {ask.size} of {folder.name}"
        with (
            closing(RingLinks(ask.rank, ask.size, self._fabrics or no_offer)) as links,
            self._promise(
                what, n_bytes, self._free_bytes(), partial(self._lent.held_by_rank, folder, links.place)
            ),
        ):
            if self._fabrics is not None:
                await self._fabrics.look()
            with self._dialer.expect() as expected:
                yield RankTold(before=invitation(expected))
                following = ask.next
                sock = await self._dialer.connect(following.node_id, following.invitation)
                links.goes_to(sock, following.invitation.key)
                links.comes_from(await expected.socket(), expected.key)
                await links.agree()
            async with aclosing(self._served(peer, ask, folder, links, stream)) as told:
                async for message in told:
                    yield message

    async def _served(
        self, peer: str, ask: RankQuestion, folder: ModelFolder, links: RingLinks, stream: PeerStream
    ) -> AsyncGenerator[RankTold, None]:
        """The same, once the ring is closed."""

        def loading(step: Loading) -> None:
            stream.send(messages.encode(RankTold(step.stage, step.done, step.total)))

        name = self._name_of(peer)
        ranked = self._lent.ranked(
            folder, links.place, progress=loading, asked_by=name, carried=lambda: links.carried
        )
        async with ranked as engine:
            served = ServeStage(own_id(ask.id), 0, ask.layers, ask.tokens)
            async with aclosing(engine.serve(served)) as events:
                if not isinstance(await anext(events, None), Accepted):
                    raise EngineDied(f"The engine for {folder.name} did not take the work.")
                with self._dialer.expect() as expected:
                    yield RankTold(passes=invitation(expected))
                    sock = await expected.socket()
                await engine.give_stream(StreamTag(served.id, STAGE, expected.key, "acceptor"), sock)
                async for _ in events:
                    await asyncio.sleep(0)
        raise EngineDied(f"The engine for {folder.name} ended its rank.")
