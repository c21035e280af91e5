"""One prompt's beginning on its way from the disk into caches with room for the whole prompt."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.pricing import PrefillCost, restore_s
from fleetd.cache.restoring import BlockReader, Restore, RestoreState
from fleetd.engine.prefixes.prefix_cache import DENSE, NO_ORIGINS, Hit, PrefixCache
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot, BlockLayout, block_rows
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated

_BLOCK = limits.CACHE_BLOCK_TOKENS


class BlockTier(Protocol):
    """What has to be known of a disk tier. ``empty``: its model's caches in which nothing is."""

    reader: BlockReader
    cost: PrefillCost
    empty: list[Any]

    def layout(self) -> BlockLayout: ...

    def worth(self, tokens: int, n_bytes: int) -> float: ...


class Arrival:
    """Rows and a snapshot on their way from the disk into caches of their own, from when this is made.

    Args:
        restore: what was found.
        room: tokens that the caches are to have room for.
        first: the number of the first block that is read.
        before: what holds all blocks before that, a cache for each part with rows; None: there are none.
        worth: as in ``BlockReader.read``.
    """

    def __init__(
        self,
        tier: BlockTier,
        restore: Restore,
        room: int,
        *,
        worth: float,
        first: int = 0,
        before: Sequence[Any] | None = None,
    ) -> None:
        layout = tier.layout()
        self._tier, self._restore, self._layout = tier, restore, layout
        self._rows = [
            preallocated(shape, room, prefix)
            for shape, prefix in zip(layout.rows, before or [None] * len(layout.rows), strict=True)
        ]
        self._snapshot = ArrivingSnapshot(layout)
        buffers = [RowBuffer(part) for part in self._rows]

        def targets(number: int, header: BlockHeader) -> list[memoryview]:
            if header != layout.header(number):
                raise BlockDamaged("a block of another layout")
            return block_rows(buffers, number)

        tier.reader.read(restore, first, worth, targets, self._snapshot)

    @property
    def blocks(self) -> int:
        """Blocks that are there, once nothing more comes."""
        return self._restore.state_blocks if self._layout.states else self._restore.blocks

    @property
    def snapshot_bytes(self) -> int:
        return self._snapshot.nbytes

    def caches(self) -> list[Any]:
        """Caches that hold these blocks, once nothing more comes."""
        for part in self._rows:
            kind_of(part).set_held(part, self.blocks * _BLOCK)
        return self._snapshot.cache(self._tier.empty, self._rows)


class Restoring:
    """``have``: tokens of the prompt that the prefix cache holds."""

    def __init__(
        self, tier: BlockTier, tokens: list[int], prefix: PrefixCache, have: int, restore: Restore
    ) -> None:
        self._tier = tier
        self._tokens = tokens
        self._prefix = prefix
        self._have = have
        self._restore = restore
        self._begun_s = time.monotonic()
        self._arrival: Arrival | None = None
        self._first = 0
        self._memory_origins = NO_ORIGINS
        self.tokens = 0
        self.n_bytes = 0

    @property
    def ready(self) -> bool:
        """True if ``step`` has something to do."""
        return (
            self._restore.state in (RestoreState.FOUND, RestoreState.DONE)
            or time.monotonic() >= self._restore.due_s
        )

    @property
    def reads(self) -> bool:
        """True once blocks are read into memory."""
        return self._arrival is not None

    @property
    def due_s(self) -> float:
        """When it is ready even if the disk hangs, in monotonic seconds."""
        return self._restore.due_s

    @property
    def seconds(self) -> float:
        """Since the prompt was looked for."""
        return time.monotonic() - self._begun_s

    def step(self) -> Hit | None:
        """Go on, if it is ready. At the end the restored beginning, which has 0 tokens where the disk was of
        no use; None before that."""
        try:
            return self._step()
        except Exception:
            # A bug, or a library's: what the disk has is a miss, and the prompt is computed.
            traceback.print_exc()
            self.close()
            return self._none()

    def _step(self) -> Hit | None:
        if self._restore.state is RestoreState.FOUND:
            if not self._pays():
                return self._none()
            self._read()
            return None
        if self._restore.state is not RestoreState.DONE:
            if not self.ready:
                return None
            self.close()
        return self._hit()

    def close(self) -> None:
        """Wait for nothing more."""
        self._tier.reader.give_up(self._restore)

    def _pays(self) -> bool:
        """True if reading is predicted to be sooner than computing what the prefix cache lacks."""
        found = self._restore.found
        self._first = self._have // _BLOCK
        blocks = found.blocks - self._first
        if found.blocks * _BLOCK <= self._have:
            return False
        n_bytes = found.nbytes * blocks // found.blocks + found.state_bytes
        computed_s = self._tier.cost.seconds(self._have, found.blocks * _BLOCK)
        return restore_s(n_bytes, found.bytes_per_s) < computed_s

    def _read(self) -> None:
        chosen = self._restore.chosen
        memory = self._prefix.fetch(self._tokens, chosen.namespace) if self._first else Hit(0, None)
        self._memory_origins = memory.origins
        # Of two namespaces the other one may have had more.
        self._first = min(self._first, memory.tokens // _BLOCK)
        before = None if memory.cache is None else self._tier.layout().in_rows(memory.cache)
        self._begin(before)

    def _begin(self, before: Sequence[Any] | None = None) -> None:
        """Read what was found behind ``before``, the rows of the blocks before the first one."""
        found = self._restore.found
        worth = self._tier.worth(found.blocks * _BLOCK, found.nbytes + found.state_bytes)
        self._arrival = Arrival(
            self._tier, self._restore, len(self._tokens), worth=worth, first=self._first, before=before
        )

    def _hit(self) -> Hit:
        restore, arrival = self._restore, self._arrival
        if arrival is None or (blocks := arrival.blocks) * _BLOCK <= self._have:
            return self._none()
        cache = arrival.caches()
        self.tokens = (blocks - self._first) * _BLOCK
        header = self._tier.layout().header(0)
        self.n_bytes = (blocks - self._first) * header.nbytes + arrival.snapshot_bytes
        saved_s = self._tier.cost.seconds(self._have, blocks * _BLOCK) - self.seconds
        self._tier.reader.count(restore, self.tokens, self.n_bytes, saved_s)
        origins = self._memory_origins | restore.origins
        return Hit(blocks * _BLOCK, cache, restore.chosen.namespace, origins=origins)

    def _none(self) -> Hit:
        self._arrival, self.tokens, self.n_bytes = None, 0, 0
        return Hit(0, None, DENSE)
