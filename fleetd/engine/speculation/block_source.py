"""Drafts of a block drafter for one answer, and what a worker knows of the drafter.

    the text              ───────────────── t(n-2) │ t(n-1), due │ what comes
    the drafter's rows    ───────────────── row(n-2)
    then, in one pass                              block: t(n-1), mask, mask, … guesses tokens n, n+1, …

Rows are those of committed tokens alone, and nothing of a block is kept: a wrong draft, another answer or a
cancelled one leaves nothing to undo. They begin with the end of the text, or as much of it as was computed
here and the answer can bear to have read, and the oldest are left out when there are many, so that a
text of any length costs the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from fleetd import limits
from fleetd.engine.heads.block_drafter import BlockDrafter, BlockRows
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.hidden_source import LEAST_ROWS, HiddenSource, NotedStates, WorkerDrafter
from fleetd.engine.speculation.local_sources import DFLASH
from fleetd.engine.speculation.sources import Context, HiddenRows

# More rows at once are the prompt's, or those of a time in which the drafter was not asked.
_FEW = 2 * limits.SPEC_WIDTH


@dataclass(slots=True)
class WorkerBlocks(WorkerDrafter):
    """A block drafter, for all answers of a worker."""

    drafter: BlockDrafter

    @classmethod
    def measured(cls, drafter: BlockDrafter, clock: Callable[[], float] = time.perf_counter) -> WorkerBlocks:
        """A drafter that has computed its first blocks. Raises ValueError if it does not fit its model."""
        config, cache = drafter.config, drafter.make_cache()
        width = len(config.target_layer_ids) * config.hidden_size
        drafter.read(mx.zeros((limits.SPEC_WIDTH, width)), 0, cache)
        mx.eval([kept.arrays for kept in cache])

        def seconds(count: int) -> float:
            begun = clock()
            mx.eval(drafter.guesses(1, limits.SPEC_WIDTH, count, cache))
            return clock() - begun

        most = min(config.most, limits.SPEC_WIDTH - 1)
        one, all_s = (min(seconds(count) for _ in range(4)) for count in (1, most))
        found = cls(DraftPrice.between(one, all_s, most), drafter)

        def reading_s() -> float:
            begun, kept = clock(), drafter.make_cache()
            drafter.read(mx.zeros((LEAST_ROWS, width)), 0, kept)
            mx.eval([rows.arrays for rows in kept])
            return clock() - begun

        found.reading = DraftPrice(0.0, min(reading_s() for _ in range(2)) / LEAST_ROWS)
        return found

    @property
    def text(self) -> str:
        """What is said of it once it is loaded."""
        most = self.drafter.config.most
        taps = f", and {1000 * self.taps_s:.1f} ms a pass on the way" if self.taps_s else ""
        return f"{DFLASH}: {1000 * self.price.seconds(most):.1f} ms for {most} tokens{taps}"

    def source(self) -> BlockSource | None:
        """The source of a new answer; None while the drafter is off."""
        return None if self.off else BlockSource(self)


@dataclass(slots=True)
class BlockSource(HiddenSource):
    """See the module."""

    worker: WorkerBlocks
    name: ClassVar[str] = DFLASH
    # Those of all layers side by side: (rows, k·D).
    _noted: NotedStates = field(init=False, default_factory=NotedStates)
    # The drafter's rows, and the token up to which they are complete.
    _cache: list[BlockRows] = field(init=False, default_factory=list)
    _fed: int = field(init=False, default=0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.worker.drafter.config.target_layer_ids

    @property
    def price(self) -> DraftPrice:
        own = self.worker.price
        return DraftPrice(own.once_s + self.taps_s, own.token_s)

    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""
        if any(layer not in hidden.states for layer in self.hidden_layers):
            return
        states = mx.concatenate([hidden.states[layer] for layer in self.hidden_layers], axis=-1)
        self._noted.add(hidden.start, states)

    def due_rows(self, text: int) -> int:
        due = self._noted.count(self._fed, text - 1)
        return due if due > _FEW else 0

    def propose(self, context: Context) -> list[int]:
        self.spent_s = 0.0
        newest, drafter = len(context.tokens) - 1, self.worker.drafter
        if self._noted.end < newest:
            return []
        begun = time.perf_counter()
        self._cache = self._cache or drafter.make_cache()
        due = self._noted.count(self._fed, newest)
        first = max(self._fed, newest - self.most_rows) if due > max(_FEW, self.most_rows) else self._fed
        if not self.known_tokens:
            self._begin(self._noted.count(first, newest), newest)
        self._read(first, newest)
        if due > _FEW:
            mx.eval([kept.arrays for kept in self._cache])
            self.worker.reading.took(min(due, newest - first), time.perf_counter() - begun)
        drafting = time.perf_counter()
        count = min(context.width, drafter.config.most)
        found: list[int] = drafter.guesses(context.tokens[-1], newest, count, self._cache).tolist()  # type: ignore[assignment]
        ended = time.perf_counter()
        self.spent_s = ended - begun
        self.worker.price.took(count, ended - (drafting if due > _FEW else begun))
        self.guess = found[0]
        return found

    def close(self) -> None:
        self._noted.clear()
        self._cache = []

    def _read(self, first: int, newest: int) -> None:
        """Make rows of the noted tokens [first, newest)."""
        for start, states in self._noted.between(first, newest):
            self.worker.drafter.read(states, start, self._cache)
        self._fed = newest
