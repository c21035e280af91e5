"""A budget spent on pieces, the best first, each with its frames.

A text form has a line for every gap, and that line has tokens too: a piece beside a kept one is cheaper than
one that stands alone, and one that fills a gap cheaper still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fleetd.compression.unit_list import TextUnit
from fleetd.compression.words import Range

# What "[... 212 tokens omitted ...]" on a line of its own comes to.
MARKER_TOKENS = 9
# Of a budget, for such lines; still more of them, as in a talk of many short messages, go over it.
_MARKED = 0.33
# Shorter gaps are closed first of all: they are hardly worth their line.
_GAP_TOKENS = 12
# More than this has only a piece that could not be cut.
_LONG_TOKENS = 256
# Of the free budget; the rest is for the neighbours of the best pieces, which are this share.
_BY_SCORE, _NEIGHBOURED = 0.8, 0.1


class Piece(msgspec.Struct, frozen=True):
    """A unit with its range of the document's text and its tokens; ``index`` and ``frames`` count all
    pieces.
    """

    index: int
    block: int
    unit: TextUnit
    span: Range
    tokens: int
    frames: tuple[int, ...]


class KeptPieces:
    """The pieces kept so far and their ``tokens``. Each gap between them costs ``marker`` tokens."""

    def __init__(self, pieces: Sequence[Piece], marker: int) -> None:
        self._all = pieces
        self._marker = marker
        self.indexes: set[int] = set()
        self.tokens = 0
        # Each block is one gap at first.
        self._gaps = len({piece.block for piece in pieces})

    @property
    def pieces(self) -> list[Piece]:
        return [self._all[i] for i in sorted(self.indexes)]

    @property
    def length(self) -> int:
        """Tokens of the text form: kept pieces and markers of gaps."""
        return self.tokens + self._marker * self._gaps

    def fits(self, piece: Piece, room: float) -> bool:
        """True if a piece fits into ``room`` together with the markers, which may take a share of it."""
        tokens, gaps = self._with(piece)
        return tokens + min(self._marker * gaps, _MARKED * room) <= room

    def used(self, room: float) -> float:
        return self.tokens + min(self._marker * self._gaps, _MARKED * room)

    def add(self, piece: Piece) -> None:
        self.tokens, self._gaps = self._with(piece)
        self.indexes.update(self._missing(piece))

    def _with(self, piece: Piece) -> tuple[int, int]:
        """Tokens and number of gaps after adding a piece with its frames."""
        added: set[int] = set()
        tokens, gaps = self.tokens, self._gaps
        for i in self._missing(piece):
            tokens += self._all[i].tokens
            gaps += sum(self._dropped(i, i + step, added) for step in (-1, 1)) - 1
            added.add(i)
        return tokens, gaps

    def beside(self, piece: Piece) -> Iterator[Piece]:
        """The pieces before and after it in the same block, frames skipped."""
        for step in (-1, 1):
            at = piece.index + step
            while 0 <= at < len(self._all) and self._all[at].unit.is_frame:
                at += step
            if 0 <= at < len(self._all) and self._all[at].block == piece.block:
                yield self._all[at]

    def close_for_nothing(self) -> None:
        """Keep each gap that is no longer than the marker that would stand for it."""
        for run in list(self.gaps()):
            if sum(piece.tokens for piece in run) <= self._marker:
                for piece in run:
                    self.add(piece)

    def gaps(self) -> Iterator[list[Piece]]:
        """Runs of dropped pieces of one block."""
        run: list[Piece] = []
        for piece in self._all:
            if run and (piece.block != run[0].block or piece.index in self.indexes):
                yield run
                run = []
            if piece.index not in self.indexes:
                run.append(piece)
        if run:
            yield run

    def _missing(self, piece: Piece) -> list[int]:
        return sorted({piece.index, *piece.frames} - self.indexes)

    def _dropped(self, i: int, beside: int, added: set[int]) -> bool:
        """True if the piece's neighbour is in the same block and not kept."""
        if not 0 <= beside < len(self._all) or self._all[beside].block != self._all[i].block:
            return False
        return beside not in self.indexes and beside not in added


def fill(
    kept: KeptPieces, order: Sequence[Piece], room: int, *, least: int = 0, strict: bool = False
) -> None:
    """Add pieces in ``order`` while they fit, and what belongs to the best of them.

    The very first is added even where what is always kept leaves no room: there is no point in all the rest
    without it. Not if ``strict``, nor if it is a line as long as a text. At least ``least`` tokens are kept,
    as far as pieces have them.
    """
    first = [] if strict else [piece for piece in order[:1] if piece.tokens <= max(room, _LONG_TOKENS)]
    for piece in first:
        kept.add(piece)
    used = kept.used(room)
    taken = [*first, *_take(kept, order, used + _BY_SCORE * (room - used))]
    best = taken[: max(1, int(_NEIGHBOURED * len(taken)))]
    _take(kept, [beside for piece in best for beside in kept.beside(piece)], room)
    _close(kept, room)
    _take(kept, order, room)
    _close(kept, room)
    for piece in order:
        if kept.tokens >= least:
            break
        if piece.index not in kept.indexes:
            kept.add(piece)
    kept.close_for_nothing()


def _close(kept: KeptPieces, room: int) -> None:
    """Keep small gaps while there is room."""
    for run in list(kept.gaps()):
        if sum(piece.tokens for piece in run) <= _GAP_TOKENS:
            _take(kept, run, room)


def _take(kept: KeptPieces, order: Sequence[Piece], room: float) -> list[Piece]:
    taken = []
    for piece in order:
        if piece.index not in kept.indexes and kept.fits(piece, room):
            kept.add(piece)
            taken.append(piece)
    return taken
