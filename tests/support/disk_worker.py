"""A worker whose prompts stay on a disk: its scheduler, without the process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from decoded_reports import DecodedReports

from fleetd import limits
from fleetd.cache.block_names import LateBasis
from fleetd.cache.pricing import PrefillCost
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.loop.scheduler import Scheduler
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import DENSE, Hit, PrefixCache
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import Delta, Failed, Finished, Generate, Sampling, TokenPrompt
from fleetd.engine.sequence_state.array_bytes import as_bytes

SLOW = PrefillCost(token_s=1.0)
BLOCK = limits.CACHE_BLOCK_TOKENS
# Tokens outside of a vocabulary are tested elsewhere.
VOCAB = 1 << 16
ROOM = 1 << 30


def settings_in(folder: Path) -> DiskCacheSettings:
    return DiskCacheSettings(str(folder / "kv"), str(folder / "identity" / "kv.key"), ROOM)


def tier(model: Any, settings: DiskCacheSettings, **options: Any) -> DiskTier:
    basis = LateBasis(lambda: b"this model on this machine")
    fields = {"basis": basis, "cost": SLOW, "most_queued_bytes": 1 << 30} | options
    return DiskTier(settings=settings, model=model, model_name="tiny", **fields)


def blocks_of(settings: DiskCacheSettings) -> list[Path]:
    return sorted((Path(settings.folder) / "blocks").glob("*"))


class Worker:
    """A scheduler of one worker's life, with blocks in a folder that outlives it."""

    def __init__(self, model: Any, tokenizer: Any, settings: DiskCacheSettings, **options: Any) -> None:
        self.events = DecodedReports()
        self.tokenizer = tokenizer
        own = {name: options.pop(name) for name in ("basis", "cost") if name in options}
        self.tier = tier(model, settings, **own)
        self.scheduler = Scheduler(
            model=model,
            tokenizer=tokenizer,
            context_tokens=4096,
            chunks=FixedChunks(128, 128),
            max_streams=4,
            budget=KvBudget.of(1 << 30, 1024),
            prefix=PrefixCache(1 << 30),
            emit=self.events.take,
            disk=self.tier,
            **options,
        )

    def put(self, name: str, tokens: list[int], **fields: Any) -> None:
        asked: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "max_tokens": 8} | fields
        request = Generate(name, TokenPrompt(tokens), **asked)
        self.scheduler.inbox.put(prepare(request, self.tokenizer, VOCAB))

    def turn(self) -> None:
        assert self.scheduler.turn()
        self.scheduler.validate()

    def finish(self, name: str) -> Finished:
        while not (ended := [e for e in self.events if isinstance(e, Finished | Failed) and e.id == name]):
            self.turn()
        assert isinstance(ended[0], Finished), ended[0]
        return ended[0]

    def ask(self, name: str, tokens: list[int], **fields: Any) -> Finished:
        self.put(name, tokens, **fields)
        return self.finish(name)

    def text(self, name: str) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.id == name)

    def stop(self) -> None:
        """As a worker ends: what is queued is written."""
        self.scheduler._close()


def bytes_of(cache: list[Any] | None) -> list[bytes]:
    assert cache
    return [
        as_bytes(part[..., :n, :]).tobytes() for c in cache for n in [c.offset] for part in (c.keys, c.values)
    ]


def written(disk: DiskTier) -> None:
    """However busy the machine is."""
    assert disk.writer.flush(30.0)
    disk.close()


def restored(model: Any, settings: DiskCacheSettings, tokens: list[int]) -> Hit:
    disk = tier(model, settings)
    disk.wake = (woken := threading.Semaphore(0)).release
    restoring = disk.begin(tokens, PrefixCache(0), [DENSE], local_only=False)
    assert restoring is not None
    while (hit := restoring.step()) is None:
        assert woken.acquire(timeout=30)
    disk.close()
    return hit
