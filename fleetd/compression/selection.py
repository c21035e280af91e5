"""What selection decides about one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd.compression.document import Document
from fleetd.compression.words import Range, merged


class Selection(msgspec.Struct, frozen=True):
    """Which characters of each block are kept: sorted, disjoint ranges that do not touch, a tuple per block.

    ``declined``: why nothing was dropped; "" where something was. ``boundaries``: units were kept whole.
    Tokens are the scorer's, or estimates where nothing was scored; ``marked_tokens``: of the lines that say
    in the text form what is missing.
    """

    kept: tuple[tuple[Range, ...], ...]
    original_tokens: int
    kept_tokens: int
    declined: str = ""
    boundaries: bool = True
    marked_tokens: int = 0

    @property
    def text_tokens(self) -> int:
        """Estimated tokens of the text form."""
        return self.kept_tokens + self.marked_tokens

    @property
    def ratio(self) -> float:
        """Share of the tokens that is kept; 1 for an empty prompt."""
        return self.kept_tokens / self.original_tokens if self.original_tokens else 1.0

    def whole(self, document: Document, block: int) -> bool:
        text = document.blocks[block].text
        return not text or self.kept[block] == ((0, len(text)),)


def everything(document: Document, tokens: int, reason: str) -> Selection:
    """The selection that keeps everything, with the reason."""
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


def holes(document: Document, kept: Sequence[Sequence[Range]]) -> int:
    """How many markers the text form has."""
    found = 0
    for block, ranges in zip(document.blocks, kept, strict=True):
        edges = [0, *(edge for span in ranges for edge in span), len(block.text)]
        found += sum(edges[i] < edges[i + 1] for i in range(0, len(edges), 2))
    return found
