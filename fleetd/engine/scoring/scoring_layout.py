"""Which tokens of a text a scorer computes, in which order.

    text      ├─ head ─┤ · · · ├──── segment ────┤ · · ├─ question ─┤
    a pass    [bos] head | piece of the segment | newline | question

A segment that is longer than one pass takes, or that is computed sooner in several, is cut into pieces, each
with head and question around it. The
head is what the text begins with: a model leans on its first tokens whatever they are, and a piece that had
none would give that weight to its own first words.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from fleetd import limits
from fleetd.compression.token_scores import I32
from fleetd.engine.protocol import Score
from fleetd.errors import BadRequest, ContextLengthExceeded, InvalidValue, ModelUnsupported

HEAD_TOKENS = 256
# Longer questions lose their beginnings: what they ask stands at the end.
QUESTION_TOKENS = 512
# The least share of a context, and the fewest tokens, that are scored; head and question share the rest.
_OWN_SHARE, _OWN_TOKENS = 0.5, 32
_SEPARATOR = "\n\n"


class LayoutPass(msgspec.Struct, frozen=True):
    """Token ids of one pass. Of these [own, own + count) are scored and the last ``asking`` ask; the scored
    ones are numbers [first, first + count) of ``ScoringLayout.starts``."""

    tokens: list[int]
    own: int
    count: int
    asking: int
    first: int


class ScoringLayout(msgspec.Struct, frozen=True):
    """A ``Score`` whose text is tokens. ``starts``, ``ends`` (N,): characters of the tokens to be scored."""

    request: Score
    starts: I32
    ends: I32
    passes: list[LayoutPass]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> int:
        return sum(len(each.tokens) for each in self.passes)


def lay_out(request: Score, tokenizer: Any, context_tokens: int) -> ScoringLayout:
    """Tokenize and cut into passes that the context holds. Runs outside the compute thread. The whole text is
    tokenized wherever the segment lies, so that every token is in one segment only.

    Raises:
        InvalidValue: ranges that are not in the text.
        BadRequest: there is no text besides the question, or no question.
        ContextLengthExceeded: a context that does not hold a question and some of the text.
        ModelUnsupported: a tokenizer that does not tell where its tokens lie.
    """
    chars, (first, last) = len(request.text), request.segment
    if any(not 0 <= a <= b <= chars for a, b in [*request.questions, (first, last)]):
        raise InvalidValue(f"A range lies outside a text of {chars} characters.", param="questions")
    ids, starts, ends = _tokenized(tokenizer, request.text)
    if request.without_question:
        asks = np.zeros(len(starts), dtype=np.bool_)
    else:
        asks = _asking(starts, ends, request.questions)
    within = (starts >= first) & (starts < (last or chars + 1))
    own = np.flatnonzero(within & ~asks)
    question = ids[asks][-QUESTION_TOKENS:].tolist()
    if not len(own) or not (question or request.without_question):
        raise BadRequest(
            "There is no text besides the question, or no question, so nothing can be scored.",
            hint="Give the question apart from the text: `question`, or `fleetctl compress --question`.",
            param="text",
        )
    question = question[-max(1, context_tokens // 8) :]
    opening = _opening(tokenizer)
    closing = _ids(tokenizer, _SEPARATOR) + question if question else []
    head = np.flatnonzero(~asks)[: min(HEAD_TOKENS, context_tokens // 8)]
    room = context_tokens - len(opening) - len(closing) - len(head)
    if room < max(context_tokens * _OWN_SHARE, _OWN_TOKENS):
        raise ContextLengthExceeded(f"A context of {context_tokens} tokens is too short for scoring.")
    asking = min(len(question), limits.SCORE_QUERIES)
    passes = []
    fewest = max(-(-len(own) // room), min(request.passes, len(own) // limits.SMART_PASS_TOKENS))
    for at, end in itertools.pairwise(_cuts(starts[own], room, fewest)):
        piece = own[at:end]
        before = head[head < piece[0]]
        tokens = [*opening, *ids[before].tolist(), *ids[piece].tolist(), *closing]
        passes.append(LayoutPass(tokens, len(opening) + len(before), end - at, asking, at))
    return ScoringLayout(request, starts[own], ends[own], passes)


def _cuts(starts: I32, room: int, fewest: int) -> list[int]:
    """Where tokens are cut into ``fewest`` pieces of about the same length, or a few more to make them fit.
    Those that start together are parts of one character, and stay together: nothing could tell their order
    once they are apart."""
    n = len(starts)
    for pieces in range(fewest, 2 * fewest + 1):
        even = n * np.arange(1, pieces) // pieces
        cuts = np.unique([0, *np.searchsorted(starts, starts[even]), n])
        if np.diff(cuts).max() <= room:
            return [int(at) for at in cuts]
    raise ContextLengthExceeded(f"A pass has room for {room} tokens, too few for a character of this text.")


def _asking(starts: I32, ends: I32, questions: Sequence[tuple[int, int]]) -> Any:
    """(N,) bool: tokens with a character in one of the ranges, or the last ones where there is none."""
    asks = np.zeros(len(starts), dtype=np.bool_)
    for first, last in questions:
        asks |= (starts < last) & (ends > first)
    if not asks.any():
        asks[max(1, len(asks) - limits.SCORE_QUERIES) :] = True
    return asks


def _tokenized(tokenizer: Any, text: str) -> tuple[Any, I32, I32]:
    """Ids (N,), and the characters [start, end) of each."""
    fast = getattr(tokenizer, "_tokenizer", tokenizer)
    if not getattr(fast, "is_fast", False):
        raise ModelUnsupported(
            "This model's tokenizer does not tell which characters a token is.",
            hint="Choose another model for scoring.",
        )
    found = fast(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    spans = np.array(found["offset_mapping"], dtype=np.int32).reshape(-1, 2)
    return np.array(found["input_ids"], dtype=np.int64), spans[:, 0].copy(), spans[:, 1].copy()


def _opening(tokenizer: Any) -> list[int]:
    """The token that every text of this model begins with, if there is one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    begins = _ids(tokenizer, "", special=True)[:1]
    return begins if bos is not None and begins == [bos] else []


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=special)]
