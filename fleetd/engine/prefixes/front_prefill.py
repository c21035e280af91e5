"""A prompt's beginning, computed here while blocks behind it come from another machine, the last one first.

    computed ──►           ◄── come
    [held … done)          [lowest … last)

Nothing is computed that would keep the prompt waiting: a chunk is begun only if it is predicted to take less
time than what has not come yet would take to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.cache.pricing import PrefillCost
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.prefix_cache import NO_ORIGINS, Hit, Origins
from fleetd.engine.sequence_state.kinds import kind_of

_BLOCK = limits.CACHE_BLOCK_TOKENS


class FrontPrefill:
    """``held``: tokens that the prompt began with; ``seconds``: that computing took.

    Args:
        prefiller: of the prompt.
        namespace: of what it began with.
        last: the number of the block after those that come.
        block_s: what one probably takes, until some have come.
        cost: of this model's prefill on this machine.
        chunk: how many tokens a step may compute.
        origins: of what it began with.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        namespace: str,
        last: int,
        block_s: float,
        cost: PrefillCost,
        chunk: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        origins: Origins = NO_ORIGINS,
    ) -> None:
        self.prefiller = prefiller
        self._namespace, self._origins = namespace, origins
        self.held = prefiller.done
        self._last = self.lowest = last
        self._block_s, self._cost, self._chunk, self._clock = block_s, cost, chunk, clock
        self._begun_s = clock()
        # How far it will have computed after the chunk that runs.
        self._until = prefiller.done
        self.seconds = 0.0

    @property
    def done(self) -> int:
        return self.prefiller.done

    @property
    def computed(self) -> int:
        """Tokens that were computed here."""
        return self.done - self.held

    def read_so_far(self) -> Hit:
        """The prompt's beginning without the blocks that came."""
        return Hit(self.done, self.prefiller.cache, self._namespace, self.computed, self._origins)

    @property
    def met(self) -> bool:
        """True if nothing is left between what is computed and what has come."""
        return self.done >= self.lowest * _BLOCK

    def came(self, block: int) -> bool:
        """The block before those that have come is here. False if that is enough. Called on any thread."""
        self.lowest = block
        return block * _BLOCK > self._until

    @property
    def pays(self) -> bool:
        """True if a chunk is sooner computed than what is still to come would come."""
        gap = self.lowest * _BLOCK - self.done
        tokens = min(self._chunk(), gap)
        return tokens > 0 and self._cost.seconds(self.done, self.done + tokens) < self._to_come_s(gap)

    def _to_come_s(self, gap: int) -> float:
        come = self._last - self.lowest
        block_s = (self._clock() - self._begun_s) / come if come else self._block_s
        return gap / _BLOCK * block_s

    def step(self) -> int:
        """Compute a chunk towards the blocks; returns its tokens: none if they have come closer meanwhile."""
        tokens = min(self._chunk(), self.lowest * _BLOCK - self.done)
        if tokens <= 0:
            return 0
        self._until = self.done + tokens
        begun_s = self._clock()
        self.prefiller.step(tokens)
        self.seconds += self._clock() - begun_s
        return tokens

    def fill(self, rows: list[Any], computed: list[Any]) -> None:
        """Copy what was computed here before the blocks.

        Args:
            rows: the parts with rows that the blocks came into, in order.
            computed: the same parts of what ``prefiller`` has.
        """
        begin, end = self.held, self.lowest * _BLOCK
        if begin >= end:
            return  # nothing was computed, and an empty cache has no arrays
        for part, own in zip(rows, computed, strict=True):
            for array, mine in zip(kind_of(part).arrays(part), kind_of(own).arrays(own), strict=True):
                array[..., begin:end, :] = mine[..., begin:end, :]
                mx.eval(array)
