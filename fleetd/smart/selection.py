"""What selection decides about one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetd.smart.document import Document
from fleetd.smart.text import Range, merged


@dataclass(frozen=True, slots=True)
class Selection:
    """Which characters of each block are kept: sorted, disjoint ranges that do not touch, a tuple per block.

    ``declined``: why nothing was dropped; "" where something was. ``boundaries``: units were kept whole.
    Tokens are the scorer's, or estimates where nothing was scored.
    """

    kept: tuple[tuple[Range, ...], ...]
    original_tokens: int
    kept_tokens: int
    declined: str = ""
    boundaries: bool = True

    @property
    def ratio(self) -> float:
        """Share of the tokens that is kept; 1 of an empty prompt."""
        return self.kept_tokens / self.original_tokens if self.original_tokens else 1.0

    def whole(self, document: Document, block: int) -> bool:
        text = document.blocks[block].text
        return not text or self.kept[block] == ((0, len(text)),)

    @property
    def parts(self) -> dict[int, list[Range]]:
        """Kept ranges by message, as ``Keep`` wants them."""
        return {i: list(ranges) for i, ranges in enumerate(self.kept)}


def everything(document: Document, tokens: int, reason: str) -> Selection:
    """Nothing is dropped, and why."""
    kept = tuple(((0, len(block.text)),) if block.text else () for block in document.blocks)
    return Selection(kept, tokens, tokens, declined=reason)


def by_block(document: Document, flat: Sequence[Range]) -> tuple[tuple[Range, ...], ...]:
    """Ranges of the document's text, each within one block, as ranges of the blocks."""
    found: list[list[Range]] = [[] for _ in document.blocks]
    for start, end in flat:
        block = document.block_at(start)
        first = document.starts[block]
        found[block].append((start - first, min(end - first, len(document.blocks[block].text))))
    return tuple(tuple(merged(ranges)) for ranges in found)
