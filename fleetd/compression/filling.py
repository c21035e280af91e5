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
# More than this has only a piece that could not be cut.
_LONG_TOKENS = 256
# After so many pieces come neighbours of one, the best first: what stands beside a fact may be part of it.
_NEIGHBOURED = 8


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
    """Add pieces in ``order``, and now and then neighbours of the best of them, if they fit.

    A larger room leaves out what a smaller one has only for something that goes before it and did not fit.

    The very first is added even where what is always kept leaves no room: there is no point in all the rest
    without it. Not if ``strict``, nor if it is a line as long as a text. At least ``least`` tokens are kept,
    as far as pieces have them.
    """
    order = [piece for piece in order if piece.index not in kept.indexes]
    if order and not strict and order[0].tokens <= max(room, _LONG_TOKENS):
        kept.add(order[0])
    for piece in _with_neighbours(kept, order):
        if piece.index not in kept.indexes and kept.fits(piece, room):
            kept.add(piece)
    for piece in order:
        if kept.tokens >= least:
            break
        if piece.index not in kept.indexes:
            kept.add(piece)
    kept.close_for_nothing()


def _with_neighbours(kept: KeptPieces, order: Sequence[Piece]) -> Iterator[Piece]:
    for number, piece in enumerate(order, 1):
        yield piece
        if number % _NEIGHBOURED == 0:
            yield from kept.beside(order[number // _NEIGHBOURED - 1])
