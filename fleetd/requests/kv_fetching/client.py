"""The step of fetching: other machines are asked what they have of a prompt, and the best one sends it.

    KvMissing ──► every machine that may see it: what have you got? ──► price ──► FetchBlocks(0)
                                                                       └─► stream ──► FetchBlocks(n)

No failure of another machine fails the request: what does not come is computed here.
"""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    BLOCKS,
    Event,
    FetchBlocks,
    Finished,
    KvFetched,
    KvMissing,
    Loading,
    StreamTag,
)
from fleetd.errors import (
    EngineError,
    FleetError,
    PeerError,
    PeerLate,
    PeerUnreachable,
    ProtocolError,
    from_code,
)
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.prefill import step_names
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import cancel_all
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.choice import FetchChoice, FetchSource, choose_fetch, within_s
from fleetd.requests.kv_fetching.fetch_counts import FetchCounts
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.ports import FleetPort
from fleetd.requests.remote.peer_stream import require_message
from fleetd.requests.request import Request
from fleetd.requests.row_origins import Labels, no_label
from fleetd.requests.timeline import Span

log = get_logger("fleetd.fetching")


class BlockFetching(PipelineStep):
    """The step that brings a prompt's keys and values from another machine.

    Args:
        members: the machines that may have some of it, and what was learned of them.
        counts: told what came.
        label: under which what comes from a machine is kept.
    """

    events = (KvMissing, KvFetched, Finished)

    def __init__(
        self,
        partners: FleetPort,
        pool: EnginePool,
        members: Members,
        counts: FetchCounts | None = None,
        label: Labels = no_label,
    ) -> None:
        self.label = label
        self.counts = counts or FetchCounts()
        self.partners = partners
        self.members = members
        self._pool = pool
        self._runs: dict[str, FetchRun] = {}

    def prepare(self, request: Request) -> None:
        folder = request.folder_here
        fetches = request.placement.fetches and request.job.shareable and not request.job.images
        if folder is not None and fetches and self._sources(folder.name):
            request.attempt.generate = msgspec.structs.replace(request.attempt.generate, fetches=True)

    def _sources(self, model: str) -> list[Member]:
        """The machines to ask, those with the fastest links first. They need not have the model any more."""
        own = self.members.here().model(model)
        if own is None or not own.digest:
            return []
        found = [member for member in self.members.others("fetch") if eligible(member) is None]
        return sorted(found, key=lambda member: -member.bytes_per_s)[: limits.FETCH_ASKED]

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        folder = request.folder_here
        if isinstance(event, KvMissing):
            engine = self._pool.engine(folder) if folder is not None else None
            if engine is not None and folder is not None:
                self._runs[request.id] = FetchRun(self, engine, event, self._sources(folder.name))
            return None
        if isinstance(event, KvFetched):
            if (fetch := self._runs.get(request.id)) is not None:
                fetch.came(request, event)
            return None
        fetched = request.attempt.fetched
        if isinstance(event, Finished) and event.timings.fetched_tokens and fetched is not None:
            timings = msgspec.structs.replace(event.timings, fetched_from=fetched.machine)
            return msgspec.structs.replace(event, timings=timings)
        return event

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        if (fetch := self._runs.pop(request.id, None)) is not None:
            fetch.task.cancel()
        return None

    async def close(self) -> None:
        await cancel_all([fetch.task for fetch in self._runs.values()])


class FetchRun:
    """The fetch of one prompt's beginning, from the worker's KvMissing to the end of the request."""

    def __init__(
        self, fetching: BlockFetching, engine: EngineProcess, lacking: KvMissing, sources: list[Member]
    ) -> None:
        self._fetching = fetching
        self._engine = engine
        self._lacking = lacking
        self._choice: FetchChoice | None = None
        # Both the request and the stream may tell of one failure.
        self._blamed = False
        self._begun_s = time.monotonic()
        self.task = asyncio.create_task(self._run(sources), name="fetch")

    async def _run(self, sources: list[Member]) -> None:
        decided = False
        try:
            # A path that is long beside the whole prefill gains little, and nothing most of the time.
            patience_s = limits.FETCH_LOOK_SHARE * max(self._lacking.computed_s, default=0.0)
            sources = [member for member in sources if member.rtt_s < patience_s]
            # Of two sources that save as much the first is chosen: the answer stays exact.
            asked = [self._ask(member, equivalent=False) for member in sources]
            if self._lacking.equivalent_names:
                asked += [self._ask(member, equivalent=True) for member in sources]
            found = [source for source in await asyncio.gather(*asked) if source is not None]
            choice = choose_fetch(found, self._lacking.computed_s, self._lacking.block_bytes)
            if choice is None:
                return
            self._choice, source, decided_s = choice, choice.source, time.monotonic()
            within = within_s(choice, self._lacking.computed_s, decided_s - self._begun_s)
            stream = self._fetching.partners.request(source.node_id, messages.FETCH, self._order(choice))
            try:
                offer, sock = await self._accepted(stream, source)
                tag = StreamTag(self._lacking.id, BLOCKS, offer.invitation.key, "connector")
                await self._engine.give_stream(tag, sock)
                label = await self._fetching.label(source.node_id)
                block_s = source.block_s(self._lacking.block_bytes)
                since_s = time.monotonic() - decided_s
                self._engine.fetch(
                    FetchBlocks(
                        self._lacking.id,
                        source.blocks,
                        block_s,
                        source.equivalent,
                        choice.last_first,
                        within,
                        since_s,
                        label,
                    )
                )
                decided = True
                await _until_end(stream)
            finally:
                stream.cancel()
        except FleetError as error:
            self._failed(error)
        except Exception as error:
            # A bug in fetching must not fail the request.
            log.warning("fetching.bug", type=type(error).__name__)
        finally:
            if not decided:
                self._engine.fetch(FetchBlocks(self._lacking.id))

    async def _accepted(
        self, stream: PeerStream, source: FetchSource
    ) -> tuple[messages.FetchOffer, socket.socket]:
        """Its offer, and the connection that it expects. Raises PeerLate when no worker waits any longer."""
        try:
            async with asyncio.timeout(limits.FETCH_DECIDE_S):
                offer = messages.decode(await require_message(stream), messages.FetchOffer)
                return offer, await self._fetching.partners.connect(source.node_id, offer.invitation)
        except TimeoutError as error:
            raise PeerLate(
                f"It has not begun to send what it keeps within {limits.FETCH_DECIDE_S:.0f} s."
            ) from error

    def _order(self, choice: FetchChoice) -> bytes:
        lacking = self._lacking
        asked = self._names(equivalent=choice.source.equivalent)[: choice.source.blocks]
        return messages.encode(
            messages.FetchQuestion(asked, lacking.id, lacking.rows, lacking.states, choice.last_first)
        )

    def _names(self, *, equivalent: bool) -> list[bytes]:
        return self._lacking.equivalent_names if equivalent else self._lacking.names

    async def _ask(self, member: Member, *, equivalent: bool) -> FetchSource | None:
        """What a machine has of the prompt, and how soon that would be here; None if it has nothing."""
        lacking = self._lacking
        body = messages.encode(
            messages.BlocksQuestion(self._names(equivalent=equivalent), lacking.rows, lacking.states)
        )
        asked_s = time.monotonic()
        try:
            answer = await self._fetching.partners.ask(
                member.node_id, messages.FIND, body, within_s=limits.FETCH_FIND_S
            )
            found = messages.decode(answer, messages.BlocksFound)
        except FleetError as error:
            log.debug("fetching.no_answer", peer=member.node_id[:7], reason=str(error))
            if isinstance(error, PeerUnreachable):
                self._fetching.members.unanswered(member.node_id, asked_s)
            return None
        self._fetching.members.answered(member.node_id)
        link = member.link
        blocks = min(found.blocks, len(lacking.names))
        if not blocks or link is None or (lacking.states and not found.state_bytes):
            return None
        node_id, name = member.node_id, member.name
        speed = self._fetching.members.fetch_speed(node_id, link, found.bytes_per_s, found.cached)
        return FetchSource(node_id, name, speed, blocks, found.state_bytes, equivalent, found.cached)

    def _failed(self, error: FleetError) -> None:
        if self._choice is None or self._blamed:
            return
        self._blamed = True
        source = self._choice.source
        if isinstance(error, PeerError):
            self._fetching.counts.failed(source.name, error.code)
            if isinstance(error, PeerLate):
                # It may do everything else well: only its disk, or the way from there, is slow.
                self._fetching.members.late(source.node_id, "fetch")
            else:
                self._fetching.members.failed(source.node_id, "fetch", error)
            log.warning("fetching.failed", peer=source.name, code=error.code, reason=error.message)
        elif not isinstance(error, EngineError):  # which would be this machine's
            self._fetching.members.failed(source.node_id, "fetch", error)

    def came(self, request: Request, fetched: KvFetched) -> None:
        if (choice := self._choice) is None:
            return
        source = choice.source
        if fetched.code:
            self._failed(from_code(fetched.code, fetched.reason))
        else:
            self._learn(choice, fetched)
            tells = fetched.n_bytes >= limits.CACHE_SPEED_BYTES
            late = tells and fetched.seconds > limits.FETCH_DOUBT * choice.seconds
            self._fetching.partners.carried(source.node_id, fetched.n_bytes, fetched.seconds, late=late)
        if fetched.blocks:
            log.debug(
                "fetching.came",
                peer=source.name,
                n_bytes=fetched.n_bytes,
                cached=round(source.cached, 2),
                opening_s=round(fetched.opening_s, 4),
                took_s=round(fetched.seconds, 4),
                predicted_s=round(choice.seconds, 4),
            )
            lacking = self._lacking
            # What was computed meanwhile took no time of its own.
            blocks = source.blocks if choice.last_first and not fetched.code else fetched.blocks
            computed_s = lacking.computed_s[min(blocks, len(lacking.computed_s)) - 1]
            self._fetching.counts.received(
                source.name,
                fetched.blocks * limits.CACHE_BLOCK_TOKENS,
                fetched.n_bytes,
                took_s=fetched.seconds,
                predicted_s=choice.seconds,
                saved_s=computed_s - fetched.seconds,
            )
        now_s = time.monotonic()
        request.attempt.fetched = Span(
            step_names.FETCHED, source.name, now_s - fetched.seconds, now_s, n_bytes=fetched.n_bytes
        )

    def _learn(self, choice: FetchChoice, fetched: KvFetched) -> None:
        members, source = self._fetching.members, choice.source
        members.succeeded(source.node_id, "fetch")
        if fetched.blocks:
            # The one that was under way when the two ends met counts half.
            n_bytes = fetched.n_bytes + (self._lacking.block_bytes / 2 if choice.last_first else 0.0)
            opening_s, took_s = fetched.opening_s, fetched.seconds
            members.fetched(source.node_id, source.cached, n_bytes, opening_s=opening_s, took_s=took_s)


async def _until_end(stream: PeerStream) -> None:
    """The other machine has sent everything, or says why not. Raises ProtocolError for anything else."""
    if await stream.receive() is not None:
        raise ProtocolError("It sends messages beside the blocks that it was asked for.")
