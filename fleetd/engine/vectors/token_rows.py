"""Texts of one pass, laid end to end: nothing is padded, so a text's vector depends on that text alone.

    tokens   [ a a a | b b b | c c c c c ]     shorter texts first
    runs     (start 0, 2 texts of 3), (start 6, 1 text of 5)

Products and norms take all rows at once. Attention takes a run at a time: texts of one length need no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx


class TokenRow(NamedTuple):
    """A text as a model reads it."""

    tokens: list[int]
    # Which of a pair each token belongs to, 0 or 1; None: all to the first.
    types: list[int] | None = None


class Run(NamedTuple):
    """Texts of one length that lie next to each other."""

    start: int
    texts: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.texts * self.length


Between = Callable[[mx.array], None]


def _goes_on(states: mx.array) -> None:
    """A pass that nothing holds up."""


@dataclass
class Pass:
    """Texts that are computed together, the shorter ones first."""

    rows: Sequence[TokenRow]
    # What encoders call with their states after each layer: a pass may be held up there.
    between_layers: Between = _goes_on
    runs: list[Run] = field(init=False)
    ends: list[int] = field(init=False)
    _near: dict[tuple[int, int], mx.array] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.runs, self.ends, start = [], [], 0
        for length, same in groupby(len(row.tokens) for row in self.rows):
            run = Run(start, len(list(same)), length)
            self.runs.append(run)
            self.ends += range(start + length, run.end + 1, length)
            start = run.end

    @property
    def tokens(self) -> mx.array:
        return mx.array([token for row in self.rows for token in row.tokens])

    @property
    def types(self) -> mx.array:
        return mx.array([kind for row in self.rows for kind in row.types or [0] * len(row.tokens)])

    @property
    def positions(self) -> mx.array:
        """The place of each token in its text, from 0."""
        return mx.array([place for row in self.rows for place in range(len(row.tokens))])

    def near(self, length: int, window: int) -> mx.array:
        """True (length, length) where two places are at most ``window`` apart, as many layers ask."""
        if (length, window) not in self._near:
            places = mx.arange(length)
            self._near[length, window] = mx.abs(places[:, None] - places[None]) <= window
        return self._near[length, window]

    @property
    def starts(self) -> list[int]:
        return [0, *self.ends[:-1]]


def by_run(rows: mx.array, run: Run) -> mx.array:
    """The rows (T, ...) of a run's texts, as (texts, length, ...)."""
    return rows[run.start : run.end].reshape(run.texts, run.length, *rows.shape[1:])


def joined(parts: Sequence[mx.array]) -> mx.array:
    """What was computed of each run, as (texts, length, D), laid end to end again: (T, D)."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    return flat[0] if len(flat) == 1 else mx.concatenate(flat)
