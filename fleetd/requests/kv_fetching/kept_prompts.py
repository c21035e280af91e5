"""What this machine keeps of prompts, by their texts: for its own placement, and for machines that ask.

A prompt is tokenized only where it is answered. Where that should be is decided before, so what is kept must
be found by the text: in memory by what was read lately, on the disk by the blocks that the text fills.
Prompts that may not leave this machine are in neither.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from fleetd import limits
from fleetd.cache.service import DiskCache
from fleetd.engine.protocol import Event, KvStored, Loading
from fleetd.errors import EngineDied
from fleetd.models.folder import ModelFolder
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan.affinity import BLOCK_CHARS, Affinity, chain
from fleetd.plan.beginnings import KeptBeginning
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.job import CHARS_PER_TOKEN
from fleetd.requests.kv_fetching.messages import TextFound
from fleetd.requests.pipeline import ANSWER, PipelineStep
from fleetd.requests.request import Request

# This key is the same on all machines: links are compared. Only machines that may see prompts are told any.
_KEY = b"fleetd text 1"
LINK_TOKENS = BLOCK_CHARS // CHARS_PER_TOKEN


def links(text: str) -> list[bytes]:
    """The links of the beginnings of a text that may be asked for, the shortest first."""
    return chain(text, _KEY)[: limits.FETCH_LINKS]


def beginning_of(found: TextFound) -> KeptBeginning:
    """The beginning in tokens, as prices count them before a prompt is tokenized."""
    return KeptBeginning(
        found.in_memory * LINK_TOKENS,
        found.on_disk * LINK_TOKENS,
        found.n_bytes,
        found.bytes_per_s,
        found.cached,
    )


# Parts of the memory: texts that this machine computed, and texts that began with rows of another machine.
_OWN, _SENT = "", "sent"


class _ReadLately(msgspec.Struct, frozen=True):
    """A prompt whose blocks its worker may be writing: their names, as other machines ask for them."""

    digest: str
    names: frozenset[bytes]
    folder: ModelFolder


class KeptPrompts(PipelineStep):
    """The step that notes which texts were read here.

    Args:
        disk: where their blocks are.
        own_model: the model of a name as this machine's card has it.
        write_now: lets a model's worker write what it has queued, though it computes.
    """

    events = (KvStored, *ANSWER)

    def __init__(
        self,
        disk: DiskCache,
        own_model: Callable[[str], ModelCard | None],
        write_now: Callable[[ModelFolder], None] = lambda folder: None,
    ) -> None:
        self._disk = disk
        self._own_model = own_model
        self._write_now = write_now
        self._lately: deque[_ReadLately] = deque(maxlen=limits.KEPT_LATELY)
        self._memory = Affinity(_KEY)
        self._writing = BackgroundTasks()
        # Requests whose prompts began with what another machine sent.
        self._sent: set[str] = set()

    def look(self, digest: str, asked: list[bytes], *, own: bool = False) -> TextFound:
        """How much of a text is here; ``own``: of what no other machine has sent, which alone is told to
        others. Blocks."""
        on_disk = self._disk.longest(digest, asked, own=own)
        chars = [
            self._memory.cached_chars(part, digest, asked) for part in (_OWN, *(() if own else (_SENT,)))
        ]
        in_memory = max(chars) // BLOCK_CHARS
        cached = on_disk.cached or 0.0
        return TextFound(in_memory, on_disk.links, on_disk.nbytes, on_disk.bytes_per_s, cached)

    # ---- what is not on the disk yet: other machines are served from there alone -------------------------

    def hurry(self, names: Sequence[bytes]) -> int:
        """Have these blocks written now if a prompt fills them that was read lately; returns how many of them
        it does, from the first one on."""
        for read in self._lately if names else ():
            if names[0] in read.names:
                self._write_now(read.folder)
                return next((n for n, name in enumerate(names) if name not in read.names), len(names))
        return 0

    def hurry_model(self, digest: str) -> None:
        """Have the prompts written that a model has read."""
        if (read := next((read for read in self._lately if read.digest == digest), None)) is not None:
            self._write_now(read.folder)

    def not_written(self, name: bytes) -> None:
        """A block has not come to the disk in time: its prompt is not waited for again."""
        for read in [read for read in self._lately if name in read.names]:
            self._lately.remove(read)

    # ---- the step ----------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        if self._tellable(request):
            request.attempt.generate = msgspec.structs.replace(request.attempt.generate, tells_blocks=True)

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        if isinstance(event, KvStored):
            if not event.own:
                self._sent.add(request.id)
            self._on_disk(request, event)
            return None
        if not request.answering and self._tellable(request):
            self._in_memory(request)
        return event

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        self._sent.discard(request.id)
        if isinstance(request.attempt.error, EngineDied) and request.folder_here is not None:
            for part in (_OWN, _SENT):
                self._memory.forget(part, self._digest(request))
        return None

    async def close(self) -> None:
        await self._writing.finish()

    def _tellable(self, request: Request) -> bool:
        """True for a whole prompt that is read here and that other machines may know of."""
        whole = request.job.request.keep is None and not request.job.images
        return whole and request.folder_here is not None and request.job.shareable

    def _in_memory(self, request: Request) -> None:
        found = self._own_model(request.model.name)
        digest, room_tokens = (found.digest, found.prefix_tokens) if found is not None else ("", 0)
        text = links(request.job.prompt_text)
        part = _SENT if request.id in self._sent else _OWN
        self._memory.computed(part, digest, text, room_chars=room_tokens * CHARS_PER_TOKEN)

    def _digest(self, request: Request) -> str:
        found = self._own_model(request.model.name)
        return found.digest if found is not None else ""

    def _on_disk(self, request: Request, kept: KvStored) -> None:
        names, text, tokens = kept.names, request.job.prompt_text, request.prompt_tokens
        asked, digest = links(text), self._digest(request)
        if names and kept.own and digest and request.folder_here is not None:
            self._lately.appendleft(_ReadLately(digest, frozenset(names), request.folder_here))
        if not asked or not names or not digest:
            return
        filled = tokens * BLOCK_CHARS / len(text) / limits.CACHE_BLOCK_TOKENS
        self._writing.start(asyncio.to_thread(self._disk.begin_with, digest, asked, names, filled))
