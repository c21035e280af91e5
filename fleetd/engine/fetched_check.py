"""Whether what another machine sent of a prompt is what this one computes: a little of it is computed here.

Rows: a few tokens at a place drawn now. Of snapshots, which cannot be cut at a token, two come: from the
earlier one the tokens up to the later one are computed, and all that the model keeps then must be there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.shared_prefill.spot_check import alike, same
from fleetd.errors import PeerWrong

_BLOCK = limits.CACHE_BLOCK_TOKENS


class FetchedCheck:
    """``exact``: bytes must be those that are computed here, wherever chunks end; else they must be alike.

    Every method raises PeerWrong.
    """

    def __init__(self, model: Any, tokens: Sequence[int], draw: random.Random, *, exact: bool) -> None:
        self._model = model
        self._tokens = tokens
        self._draw = draw
        self._agree = same if exact else alike

    def rows(
        self, cache_of: Callable[[int], list[Any]], theirs: Sequence[Any], first: int, last: int
    ) -> None:
        """``theirs``: parts with a row per token, of which those of tokens [first, last) came.

        Args:
            cache_of: caches of so many of the tokens, to be added to.
        """
        count = limits.SHARE_SPOT_TOKENS
        start = self._draw.randint(first, last - count)
        self._finite(theirs, first, last)
        self._compare_rows(
            self._computed(cache_of(start), start, start + count), theirs, start, start + count
        )

    def states(self, earlier: list[Any], at: int, theirs: list[Any], first: int, last: int) -> None:
        """``earlier``, to be added to, as it was after ``at`` tokens; ``theirs`` as it was after ``last``, of
        whose rows those of tokens [first, last) came."""
        ours = self._computed(earlier, at, last)
        in_rows = [part for part in all_parts(theirs) if kind_of(part).has_rows(part)]
        self._finite(in_rows, first, last)
        self._compare_rows(ours, in_rows, at, last)
        for mine, sent in zip(_states(ours), _states(theirs), strict=True):
            for a, b in zip(_lasting(mine), _lasting(sent), strict=True):
                self._compare(a, b)

    def _computed(self, cache: list[Any], start: int, stop: int) -> list[Any]:
        for at in range(start, stop, _BLOCK):
            self._model(mx.array([self._tokens[at : min(at + _BLOCK, stop)]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        return cache

    def _finite(self, parts: Sequence[Any], first: int, last: int) -> None:
        for part in parts:
            for array in kind_of(part).arrays(part):
                if not mx.all(mx.isfinite(array[..., first:last, :])):
                    raise _wrong()

    def _compare_rows(self, ours: list[Any], theirs: Sequence[Any], start: int, stop: int) -> None:
        mine = [part for part in all_parts(ours) if kind_of(part).has_rows(part)]
        for own, sent in zip(mine, theirs, strict=True):
            for a, b in zip(kind_of(own).arrays(own), kind_of(sent).arrays(sent), strict=True):
                self._compare(a[..., start:stop, :], b[..., start:stop, :])

    def _compare(self, ours: mx.array, theirs: mx.array) -> None:
        # An index of the context has keys only.
        if ours.shape != theirs.shape or (ours.size and not self._agree(ours, theirs)):
            raise _wrong()


def _states(cache: list[Any]) -> list[Any]:
    return [part for part in all_parts(cache) if not kind_of(part).has_rows(part)]


def _lasting(part: Any) -> list[mx.array]:
    """What the next token reads of it: a window's rows in the order of their tokens, wherever it has rotated,
    without those that the last chunk left besides."""
    arrays = list(kind_of(part).kept(part))
    if (window := kind_of(part).window(part)) is None:
        return arrays
    at = RingState.of(part).index
    return [mx.concatenate([a[..., at:, :], a[..., :at, :]], axis=-2)[..., -window:, :] for a in arrays]


def _wrong() -> PeerWrong:
    return PeerWrong("Its keys and values are not those that this machine computes.")
