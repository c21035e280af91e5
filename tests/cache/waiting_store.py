"""A store of blocks that a test makes slow."""

from __future__ import annotations

import threading
from typing import Any

from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings

SOON_S = 30.0


class WaitingStore(BlockStore):
    """Writes a block only when it is let."""

    def __init__(self, settings: DiskCacheSettings) -> None:
        super().__init__(settings)
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def write(self, *args: Any, **kwargs: Any) -> int:
        self.begun.release()
        assert self.let.acquire(timeout=SOON_S)
        return super().write(*args, **kwargs)
