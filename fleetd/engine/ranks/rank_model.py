"""A model of which this machine has a part of each layer, and answers.

    tokens ─► all ranks are told ─► the same layers, on every rank's part ─► norm, head ─► logits

For all that calls it, it is one of mlx-lm's models. Batches, kept prompts, drafts, sampling and grammars are
here alone. The other ranks repeat each pass on what they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.groups.remote_rows import KeptThere, divided
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import dividing
from fleetd.engine.ranks.rank_pass import run_pass
from fleetd.engine.ranks.remote_rank import RemoteRank


class RankModel(nn.Module):  # type: ignore[misc]
    """``stage``: all layers, divided, of which this process has rank 0. ``ring``: the group of all ranks."""

    def __init__(self, stage: Stage, ring: Any, progress: PassProgress) -> None:
        super().__init__()
        self.weights = stage.weights
        self._ring, self._stage, self._progress = ring, stage, progress
        self._others: tuple[RemoteRank, ...] = ()
        # Seconds of one sum over all ranks; 0 before they have begun.
        self.sum_s = 0.0

    def begin_together(self) -> None:
        """Wait until all ranks have read their weights. Raises MemberLost."""
        self.sum_s = dividing.begin_together(self._stage, self._ring, self._progress).sum_s

    def join(self, others: Sequence[RemoteRank]) -> None:
        """Have the other ranks compute the same from now on."""
        self._others = tuple(others)

    @property
    def kept(self) -> KeptThere:
        """What each rank keeps of sequences."""
        return KeptThere.of(self._stage.empty)

    @property
    def layers(self) -> list[Any]:
        return list(self.weights.layers)

    def make_cache(self) -> list[Any]:
        """What this machine's layers keep, then an entry for each other rank."""
        own = [cache for cache in self._stage.make_caches() if cache is not None]
        return own + [other.rows() for other in self._others]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:  # (B, T) -> (B, T, V)
        own, rest = divided(cache or self.make_cache(), len(self._others))
        # In a batch each row has a position of its own, which its caches know.
        start = rest[0].tokens if rest and tokens.shape[0] == 1 else 0
        for other, rows in zip(self._others, rest, strict=True):
            other.announce(rows, tokens)
        return self._stage.finish(run_pass(self._stage, tokens, own, start, self._ring, self._progress))
