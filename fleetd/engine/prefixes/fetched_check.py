"""Whether what another machine sent of a prompt is what this one computes: a little of it is computed here.

Rows: the last ones that came, which in all layers but the last rest on all before them, and a few at a place
drawn now, because a wrong row of the last layer shows nowhere else. Of snapshots, which cannot be cut at a
token, two come: from the earlier one the tokens up to the later one are computed, and all that the model
keeps then must be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.sequence_state.agreement import alike, same
from fleetd.engine.sequence_state.array_bytes import all_finite
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.rings import RingState
from fleetd.errors import PeerWrong


class FetchedCheck:
    """Its methods yield after each chunk or FETCH_TURN_S, so that answers that run go on meanwhile, and raise
    PeerWrong.

    Args:
        exact: bytes must be those that are computed here, wherever chunks end; else they must be alike.
        chunk: how many tokens may be computed at once now.
    """

    def __init__(self, model: Any, tokens: list[int], chunk: Callable[[], int], *, exact: bool) -> None:
        self._model = model
        self._tokens = tokens
        self._chunk = chunk
        self._agree = same if exact else alike

    def finite(self, theirs: Sequence[Any], first: int, last: int) -> Iterator[None]:
        """``theirs``: parts with a row per token, of which rows of tokens [first, last) came."""
        yield from in_turns(self._finite(theirs, first, last))

    def rows(
        self, cache: list[Any], at: int, theirs: Sequence[Any], *, onward: bool = False
    ) -> Generator[None, None, int]:
        """``theirs``: the parts of ``cache``, of whose rows the first ``at`` count for the moment. All of
        them must have a row per token. What is computed is written over what came, for a while: rows of a
        long prompt are not copied for a few tokens.

        ``onward``: the prompt is computed on from there in the same chunk, which costs less than one of its
        own. Returns how many tokens ``cache`` has then.
        """
        stop = at + limits.FETCH_SPOT_TOKENS
        arrays = [array for part in theirs for array in kind_of(part).arrays(part)]
        came = [mx.contiguous(array[..., at:stop, :]) for array in arrays]
        mx.eval(came)
        done = yield from self._compute(cache, at, stop, onward=onward)
        arrays = [array for part in theirs for array in kind_of(part).arrays(part)]
        sent = iter(came)
        for part in theirs:
            kind, own = kind_of(part), kind_of(part).arrays(part)
            mine = tuple(array[..., at:stop, :] for array in own)
            came_there = tuple(next(sent) for _ in own)
            for a, b in zip(kind.numbers(part, mine), kind.numbers(part, came_there), strict=True):
                self._compare(a, b)
            for array, rows in zip(own, came_there, strict=True):
                array[..., at:stop, :] = rows
        mx.eval(arrays)
        return done

    def states(self, earlier: list[Any], at: int, theirs: list[Any], first: int, last: int) -> Iterator[None]:
        """``theirs``: as they were after ``last`` tokens."""
        in_rows = [part for part in all_parts(theirs) if kind_of(part).has_rows(part)]
        yield from self.finite(in_rows, first, last)
        yield from self._compute(earlier, at, last)
        self._compare_rows(earlier, in_rows, at, last)
        for mine, sent in zip(_states(earlier), _states(theirs), strict=True):
            for a, b in zip(_lasting(mine), _lasting(sent), strict=True):
                self._compare(a, b)

    def _compute(
        self, cache: list[Any], start: int, stop: int, *, onward: bool = False
    ) -> Generator[None, None, int]:
        """Compute to ``stop``, or past it to the chunk's end; returns how far."""
        tokens = self._tokens if onward else self._tokens[: stop + 1]
        prefiller = Prefiller(self._model, tokens, cache, start)
        while prefiller.done < stop:
            prefiller.step(self._chunk())
            yield
        return prefiller.done

    def _finite(self, parts: Sequence[Any], first: int, last: int) -> Iterator[None]:
        for part in parts:
            for array in kind_of(part).floats(part):
                if not all_finite(array, first, last):
                    raise _wrong()
            yield

    def _compare_rows(self, ours: list[Any], theirs: Sequence[Any], start: int, stop: int) -> None:
        mine = [part for part in all_parts(ours) if kind_of(part).has_rows(part)]
        for own, sent in zip(mine, theirs, strict=True):
            kind = kind_of(own)
            rows = [
                kind.numbers(own, tuple(array[..., start:stop, :] for array in kind.arrays(part)))
                for part in (own, sent)
            ]
            for a, b in zip(*rows, strict=True):
                self._compare(a, b)

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


def in_turns(
    steps: Iterable[None], seconds: Callable[[], float] = lambda: limits.FETCH_TURN_S
) -> Iterator[None]:
    """Take the steps; yields whenever those since the last time have taken so many ``seconds``, so that the
    work does not hold up the answers that run beside it."""
    begun_s = time.monotonic()
    for _ in steps:
        if time.monotonic() - begun_s >= seconds():
            yield
            begun_s = time.monotonic()
