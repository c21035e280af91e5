"""Past answers of this fleet: a worker drafts from what the same model has said on other machines as well.

    Finished, with its tokens ──► may they leave? who remembers, and has this model loaded? ──► REMEMBER
    REMEMBER ──► not too often? this model loaded here? tokens of its vocabulary? ──► its worker, when idle

Only machines whose settings say that they remember take part. What is sent is an answer's tokens and a hash
of its request's key: no text, no key, and nothing of the prompt. Where a prompt may not go, its answer does
not go either. Nobody waits for any of it, and whatever does not fit is dropped without a word.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from fleetd import limits
from fleetd.engine.pool import EnginePool
from fleetd.engine.protocol import Event, Finished, Loading, Remember
from fleetd.engine.speculation.suffix import past_key
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.route import USABLE
from fleetd.requests.drafting import messages
from fleetd.requests.job import Job
from fleetd.requests.pipeline import Step
from fleetd.requests.placement import Member
from fleetd.requests.ports import FleetPort
from fleetd.requests.request import Request

Fate = Literal["sent", "taken", "dropped"]
# A shorter answer is sooner said than found.
_LEAST_TOKENS = 16
_COMPLETE = frozenset({"stop", "length", "tool_calls"})


@dataclass(slots=True)
class Allowance:
    """So many at once, and so many per second after that."""

    burst: float = limits.PAST_BURST
    per_s: float = limits.PAST_PER_S
    _left: float = -1.0
    _at_s: float = 0.0

    def take(self, now_s: float) -> bool:
        before = self.burst if self._left < 0 else self._left
        left = min(self.burst, before + (now_s - self._at_s) * self.per_s)
        self._at_s, self._left = now_s, left - (left >= 1)
        return left >= 1


class Pasts(Step):
    """Both ends, of a machine that remembers; the other one is the handler of ``wire.REMEMBER``.

    Args:
        own_card: what this machine has told others; only what it shows is exchanged.
        counted: told what became of each answer.
        local_only: by the settings, no prompt leaves this machine, so no answer does.
    """

    def __init__(
        self,
        partners: FleetPort,
        pool: EnginePool,
        models: ModelStore,
        own_card: Callable[[], Card],
        counted: Callable[[Fate], None] = lambda fate: None,
        *,
        local_only: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._partners = partners
        self._pool = pool
        self._models = models
        self._own_card = own_card
        self._counted = counted
        self._local_only = local_only
        self._monotonic = monotonic
        self._telling = Allowance()
        # By member.
        self._taking: dict[str, Allowance] = {}
        self._sending: set[asyncio.Task[None]] = set()

    # ---- answers of this machine -------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Ask the engine for the answer's tokens where another machine is to be told them."""
        job, folder = request.job, request.folder_here
        how = job.request.speculate
        may = job.shareable and not self._local_only and (how is None or how.enabled)
        wanted = folder is not None and may and any(True for _ in self._interested(folder))
        request.generate = msgspec.structs.replace(request.generate, ids=wanted)

    async def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        """The answer's events without its tokens, which others are told once it is complete."""
        folder = request.folder_here
        if folder is None or not isinstance(event, Finished) or not event.ids:
            return event
        if event.reason in _COMPLETE and len(event.ids) >= _LEAST_TOKENS:
            self._tell(request.job, folder, event.ids)
        return msgspec.structs.replace(event, ids=[])

    def _tell(self, job: Job, folder: ModelFolder, tokens: list[int]) -> None:
        """Does not wait, and what goes wrong concerns nobody."""
        if (own := self._held(folder)) is None or not self._telling.take(self._monotonic()):
            return
        key = past_key(job.request.speculate.key if job.request.speculate is not None else "")
        body = messages.encode(messages.Past(own.digest, key, tokens))
        for machine in self._interested(folder):
            if len(self._sending) >= limits.PAST_SENDING:
                return
            task = asyncio.create_task(self._send(machine.card.node_id, body))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, node_id: str, body: bytes) -> None:
        try:
            stream = self._partners.request(node_id, messages.REMEMBER, body)
            try:
                stream.end()
                async with asyncio.timeout(limits.PAST_SEND_S):
                    await stream.receive()
            finally:
                stream.cancel()
        except (FleetError, TimeoutError):
            return
        self._counted("sent")

    def _interested(self, folder: ModelFolder) -> Iterator[Member]:
        """Machines that remember, may see it, and have the very model loaded."""
        if (own := self._held(folder)) is None:
            return
        for machine in self._partners.machines():
            card = machine.card
            if (
                card.remembers
                and machine.sees_prompts
                and machine.reach == USABLE
                and not card.draining
                and any(m.digest == own.digest and m.state == "loaded" for m in card.models)
            ):
                yield machine

    def _held(self, folder: ModelFolder) -> ModelCard | None:
        return next((m for m in self._own_card().models if m.name == folder.name and m.digest), None)

    async def close(self) -> None:
        """Forget what is on its way."""
        for task in self._sending:
            task.cancel()
        if self._sending:
            await asyncio.wait(set(self._sending))

    # ---- answers of others -------------------------------------------------------------------------------

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """The handler of ``wire.REMEMBER``. Raises ProtocolError for what nobody honest sends."""
        self._counted("taken" if await self._take(peer, body) else "dropped")

    async def _take(self, peer: str, body: bytes) -> bool:
        if not self._taking.setdefault(peer, Allowance()).take(self._monotonic()):
            return False
        told = messages.decode(body, messages.Past)
        loaded = [m for m in self._own_card().models if m.digest == told.digest and m.state == "loaded"]
        if not loaded:
            return False
        try:
            folder = await asyncio.to_thread(self._models.resolve, loaded[0].name)
        except FleetError:
            return False  # it has just been removed
        engine = self._pool.engine(folder)
        facts = engine.facts if engine is not None else None
        if engine is None or facts is None or max(told.tokens) >= facts.vocab_size:
            return False
        engine.remember(Remember(told.key, told.tokens))
        return True
