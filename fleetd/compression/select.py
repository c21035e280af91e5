"""Which units of a prompt are kept.

    document ─► units ─┬─ pinned ──────────────────────────────────────────────► kept
                       └─ others ─► attention, question's words ─► rank ─► as many as the budget holds

Whether the task permits dropping anything is ``gate.judge``'s to say, before.

Deterministic: equal scores go by the order of the text. Takes some tenths of a second for 100,000 tokens:
call it in a thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from fleetd.compression.anchors import relevance
from fleetd.compression.budget import budget
from fleetd.compression.document import Document
from fleetd.compression.filling import MARKER_TOKENS, KeptPieces, Piece, fill
from fleetd.compression.gate import least_share
from fleetd.compression.history import Aged
from fleetd.compression.pins import pins
from fleetd.compression.policy import SmartPrefillPolicy, wanted_ratio
from fleetd.compression.selection import Selection, by_block, everything, holes
from fleetd.compression.text_units import units
from fleetd.compression.words import Range, estimate_tokens

if TYPE_CHECKING:  # needs numpy, which a daemon does not load before there are scores
    from fleetd.compression.token_scores import TokenScores

# Longest unit of several sentences or lines, in characters: about a sentence, whatever the budget. Longer
# ones bring more of what nobody asked for, and a unit that differs with the budget ranks differently.
_UNIT_CHARS = 64
_USUAL_RATIO = 0.2
# Of a frame's text, what is read: its beginning tells whose it is.
_FRAME_CHARS = 200
# Not worth the risk where so little could be dropped.
_NEARLY_ALL = 0.9


class Weights(msgspec.Struct, frozen=True):
    """How much the ranks by attention and by the question's words count. The unit at rank ``half`` is
    worth half of the first. Chosen by `python -m eval.tune`."""

    attention: float = 0.5
    words: float = 0.5
    half: float = 4.0


_WEIGHTS = Weights()


class Forecast(NamedTuple):
    """What is known of a selection before there are scores; tokens are estimated.

    ``declined``: why everything is kept, or "". ``pinned_tokens``: kept whatever the scores say.
    """

    declined: str
    pinned_tokens: int


def forecast(document: Document, policy: SmartPrefillPolicy, aged: Aged | None = None) -> Forecast:
    """What ``select`` will not need scores for. As ``aged``: see there."""
    pieces = _pieces(document, policy, _Meter(document.text, None), aged or Aged())
    tokens = sum(piece.tokens for piece in pieces)
    pinned = _pinned(document, policy, pieces, tokens).tokens
    return Forecast(_always_whole(document, policy, pinned, tokens), pinned)


def select(
    document: Document,
    scores: TokenScores | None,
    policy: SmartPrefillPolicy,
    aged: Aged | None = None,
    weights: Weights = _WEIGHTS,
) -> Selection:
    """Keep what matters for the question.

    Args:
        scores: of the document's text; tokens that they do not have (the question's) are estimated. None: by
            the question's words alone.
        aged: blocks that were decided before and the ranges of them that are kept (see ``history``). They are
            not looked at again, and the policy's ratio is one of the others.
    """
    aged = aged or Aged()
    meter = _Meter(document.text, scores)
    pieces = _pieces(document, policy, meter, aged)
    # As they were counted when they were decided: the same prompt has the same tokens when it comes again.
    old = aged.kept_tokens
    tokens = sum(piece.tokens for piece in pieces)

    def done(kept: Sequence[Piece]) -> Selection:
        flat = [piece.span for piece in kept]
        flat += [document.flat(i, span) for i, spans in aged.items() for span in spans]
        ranges = by_block(document, flat)
        return Selection(
            ranges,
            tokens + aged.original_tokens,
            sum(piece.tokens for piece in kept) + old,
            boundaries=policy.preserve_boundaries,
            marked_tokens=MARKER_TOKENS * holes(document, ranges),
        )

    def decline(reason: str) -> Selection:
        if aged:
            # What was decided stays decided: another prefix would be another cache.
            return done(pieces)
        return everything(document, tokens, reason)

    kept = _pinned(document, policy, pieces, tokens)
    if reason := _always_whole(document, policy, kept.tokens, tokens):
        return decline(reason)
    # What is kept of any document, as it asks or ends it, is not ranked; what is kept of this one because
    # there is room for it, is: ranks are the same for each budget.
    always = {piece.index for piece in _touched(pieces, pins(document, 0))}
    ranked = [piece for piece in pieces if piece.index not in always and not piece.unit.is_frame]
    attention = None if scores is None else _attention(ranked, pieces, meter)
    asked = "" if policy.without_question else document.question
    by_words = relevance(asked, [_context(piece, pieces, document.text) for piece in ranked])
    if attention is None and by_words and max(by_words) <= 0:
        return decline("no word of the question stands in the text, and nothing was scored")
    bounded = _left(policy, old)
    at_least = 0.0 if attention is None or policy.without_question else least_share(attention, by_words)
    free = [i for i, piece in enumerate(ranked) if piece.index not in kept.indexes]
    costs = [ranked[i].tokens for i in free]
    massive = None if attention is None else [attention[i] for i in free]
    room = budget(bounded, tokens, kept.tokens, costs, massive, at_least)
    order = _order(ranked, attention, by_words, weights)
    fill(kept, order, room, least=bounded.min_keep_tokens, strict=policy.max_keep_tokens > 0)
    if kept.length > _NEARLY_ALL * tokens:
        return decline(f"{kept.tokens} of {tokens} tokens matter, and what is left out would be marked")
    return done(kept.pieces)


def _pinned(
    document: Document, policy: SmartPrefillPolicy, pieces: Sequence[Piece], tokens: int
) -> KeptPieces:
    """What is kept whatever the scores say."""
    kept = KeptPieces(pieces, 0 if policy.mode == "sparse" else MARKER_TOKENS)
    for piece in _touched(pieces, pins(document, _about(policy, tokens))):
        kept.add(piece)
    return kept


def _always_whole(document: Document, policy: SmartPrefillPolicy, pinned: int, tokens: int) -> str:
    """Why everything is kept whatever the scores say, or ""."""
    if not document.questions and not policy.without_question:
        return "nothing in the prompt asks for anything"
    if policy.target_ratio >= 1:
        return "all of it is to be kept"
    return f"{pinned} of {tokens} tokens are always kept" if pinned > _NEARLY_ALL * tokens else ""


# ---- Ranking -------------------------------------------------------------------------------------------


def _context(piece: Piece, pieces: Sequence[Piece], text: str) -> str:
    """A piece behind its frames: a statement goes by its function's name, a value by its keys."""
    around = "".join(text[slice(*pieces[i].span)][:_FRAME_CHARS] for i in piece.frames)
    return f"{around}\n{text[slice(*piece.span)]}"


def _attention(ranked: Sequence[Piece], pieces: Sequence[Piece], meter: _Meter) -> list[float]:
    """Each piece's attention, and its part of what its frames have.

    A frame is kept with any of its pieces, so its attention is divided among them: that of a function's name
    says much about the two statements in it, and that of a table's header little about each of its rows.
    """
    framed = Counter(i for piece in ranked for i in piece.frames)
    around = {i: meter.attention(pieces[i].span) / many for i, many in framed.items()}
    return [
        meter.attention(piece.span) + max((around[i] for i in piece.frames), default=0.0) for piece in ranked
    ]


def _order(
    ranked: Sequence[Piece],
    attention: Sequence[float] | None,
    by_words: Sequence[float],
    weights: Weights,
) -> list[Piece]:
    """The pieces, the best first."""
    worth = [weights.words * rank for rank in _ranked(by_words, weights.half)]
    if attention is not None:
        ranks = _ranked(attention, weights.half)
        worth = [w + weights.attention * rank for w, rank in zip(worth, ranks, strict=True)]
    return [ranked[i] for i in sorted(range(len(ranked)), key=lambda i: (-worth[i], i))]


def _ranked(values: Sequence[float], half: float) -> list[float]:
    """1 for the best, falling with the rank; equal values share the mean of their ranks, and 0 is worth
    nothing.

    The mean, because equal values tell nothing about each other. All rows of a table have the attention that
    its header gets: if each had the best of their ranks, all would go before what the question names.
    """
    descending = sorted(-value for value in values if value > 0)

    def rank(value: float) -> float:
        return (bisect_left(descending, -value) + bisect_right(descending, -value) - 1) / 2

    return [half / (half + rank(value)) if value > 0 else 0.0 for value in values]


# ---- Pieces --------------------------------------------------------------------------------------------


class _Meter:
    """Tokens of ranges of a text, and how much these matter."""

    def __init__(self, text: str, scores: TokenScores | None) -> None:
        self._text = text
        self._starts: list[int] = [] if scores is None else scores.starts.tolist()
        self._values: list[float] = [] if scores is None else scores.values.tolist()

    def tokens(self, span: Range) -> int:
        """How many tokens begin in the range; an estimate if none was scored."""
        if span[0] >= span[1]:
            return 0
        first, last = bisect_left(self._starts, span[0]), bisect_left(self._starts, span[1])
        return last - first or estimate_tokens(self._text[slice(*span)])

    def attention(self, span: Range) -> float:
        """The mean over the range's tokens, or half of the highest if that is more: a name in a long
        paragraph.
        """
        values = self._values[bisect_left(self._starts, span[0]) : bisect_left(self._starts, span[1])]
        return max(sum(values) / len(values), 0.5 * max(values)) if values else 0.0


def _pieces(
    document: Document, policy: SmartPrefillPolicy, meter: _Meter, aged: Mapping[int, Sequence[Range]]
) -> list[Piece]:
    found: list[Piece] = []
    for index, block in enumerate(document.blocks):
        if index in aged:
            continue
        first = len(found)
        for unit in units(block.text, _UNIT_CHARS, boundaries=policy.preserve_boundaries):
            span = document.flat(index, (unit.start, unit.end))
            frames = tuple(first + frame for frame in unit.frames)
            found.append(Piece(len(found), index, unit, span, meter.tokens(span), frames))
    return found


def _left(policy: SmartPrefillPolicy, old: int) -> SmartPrefillPolicy:
    """The policy, its bounds of the whole prompt reduced by what earlier turns kept."""
    most = max(1, policy.max_keep_tokens - old) if policy.max_keep_tokens else 0
    return replace(policy, min_keep_tokens=max(0, policy.min_keep_tokens - old), max_keep_tokens=most)


def _about(policy: SmartPrefillPolicy, tokens: int) -> float:
    """The budget in tokens as far as it is known before ranking."""
    wanted = (wanted_ratio(policy) or _USUAL_RATIO) * tokens
    return min(wanted, policy.max_keep_tokens) if policy.max_keep_tokens else wanted


def _touched(pieces: Sequence[Piece], spans: Sequence[Range]) -> Iterator[Piece]:
    """Pieces that share a character with one of the sorted spans."""
    starts = [piece.span[0] for piece in pieces]
    for start, end in spans:
        at = max(0, bisect_left(starts, start + 1) - 1)
        while at < len(pieces) and pieces[at].span[0] < end:
            if pieces[at].span[1] > start:
                yield pieces[at]
            at += 1
