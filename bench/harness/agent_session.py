"""A coding session as an agent sends it: the same tools each time, and all earlier turns before each new one.

Pure: lengths in tokens and seeds; whoever replays it makes the words. The answers are part of the recording,
so for a machine they are as new as the rest: what a model says to the replay is of no matter.

    system and tools | task | answer, result | answer, result | ... | restart | ... | another machine
    system and tools | summary | answer, result | ...                               (after the compaction)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One message: of so many tokens, made from the seed."""

    role: Role
    seed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: the whole conversation so far. ``restarted``: the machine was restarted just before.

    ``machine``: 0, and 1 from the second half on. ``new_tokens``: those that no earlier request began with.
    """

    pieces: tuple[Piece, ...]
    machine: int
    restarted: bool
    new_tokens: int

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """``scale``: of all lengths but the system prompt's. Turns are counted from 0."""

    system_tokens: int = 10_000
    turns: int = 20
    restart_at: int = 5
    moves_at: int = 10
    compacts_at: int = 14
    scale: float = 1.0
    seed: int = 1

    def __iter__(self) -> Iterator[Turn]:
        draw, number = random.Random(self.seed), itertools.count(1000 * self.seed)

        def piece(role: Role, least: int, most: int) -> Piece:
            return Piece(role, next(number), max(8, int(draw.randint(least, most) * self.scale)))

        system = Piece("system", next(number), self.system_tokens)
        said = [system, piece("user", 100, 300)]
        before: list[tuple[Piece, ...]] = []
        for turn in range(self.turns):
            if turn:
                said += [piece("assistant", 40, 200), piece("tool", 100, 1200)]
            if turn == self.compacts_at:
                said = [system, piece("user", 600, 900)]
            known = max((_shared(said, earlier) for earlier in before), default=0)
            whole = tuple(said)
            before.append(whole)
            new = sum(each.tokens for each in whole) - known
            yield Turn(whole, int(turn >= self.moves_at), turn == self.restart_at, new)


def _shared(said: list[Piece], earlier: tuple[Piece, ...]) -> int:
    """Tokens at the beginning that both have."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, earlier, strict=False))
    return sum(mine.tokens for mine, _ in pairs)
