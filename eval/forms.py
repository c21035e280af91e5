"""The same budget spent in different ways: by selection, at random, on the end of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fleetd.compression.document import Document
from fleetd.compression.pins import pins
from fleetd.compression.policy import Mode, SmartPrefillPolicy
from fleetd.compression.select import select
from fleetd.compression.selection import Selection, by_block
from fleetd.compression.text_units import units
from fleetd.compression.token_scores import TokenScores
from fleetd.compression.words import Range, estimate_tokens, merged

# Baselines are what people do without a selection: units at random, and the end of the prompt.
FORMS = ("text", "sparse", "words", "random", "truncated")


def policy(ratio: float, mode: Mode = "text") -> SmartPrefillPolicy:
    """``ratio`` 0: as many tokens as the scores call for."""
    return SmartPrefillPolicy(enabled=True, target_ratio=ratio, mode=mode)


def selected(document: Document, scores: TokenScores | None, ratio: float, mode: Mode = "text") -> Selection:
    return select(document, scores, policy(ratio, mode))


def unasked(document: Document, scores: TokenScores, ratio: float) -> Selection:
    """Of a text that nobody asks about."""
    asked = SmartPrefillPolicy(enabled=True, target_ratio=ratio, mode="text", without_question=True)
    return select(document, scores, asked)


def at_random(document: Document, ratio: float, seed: int) -> Selection:
    """What is always kept, and units in a random order until the budget is used."""
    pieces = _pieces(document)
    random.Random(seed).shuffle(pieces)
    return _until(document, pieces, ratio)


def truncated(document: Document, ratio: float) -> Selection:
    """What is always kept, and the end of the text."""
    return _until(document, _pieces(document)[::-1], ratio)


def _pieces(document: Document) -> list[Range]:
    return [
        document.flat(i, (unit.start, unit.end))
        for i, block in enumerate(document.blocks)
        for unit in units(block.text, 160)
    ]


def _until(document: Document, pieces: Sequence[Range], ratio: float) -> Selection:
    total = document.estimated_tokens
    kept = list(pins(document, ratio * total))
    used = sum(estimate_tokens(document.text[a:b]) for a, b in kept)
    for piece in pieces:
        tokens = estimate_tokens(document.text[slice(*piece)])
        if used + tokens <= ratio * total:
            kept.append(piece)
            used += tokens
    return Selection(by_block(document, _within(document, merged(kept))), total, min(used, total))


def _within(document: Document, spans: Sequence[Range]) -> list[Range]:
    """Spans cut where blocks end."""
    found = []
    for start, end in spans:
        for block in range(document.block_at(start), document.block_at(end - 1) + 1):
            first = document.starts[block]
            last = first + len(document.blocks[block].text)
            if max(start, first) < min(end, last):
                found.append((max(start, first), min(end, last)))
    return found
