"""Prompt lookup: what followed the same few tokens the last time they were there.

    … the quick brown fox jumps …          the quick brown ?
      └── 3 equal tokens ──┘ └ drafts ┘     └─ the end ─┘

The longest match within ``LONGEST`` wins, of equally long ones the most recent; below ``SHORTEST`` nothing is
proposed, and nothing is ever padded (Saxena, prompt-lookup-decoding, 2023; with one token matched, nearly all
drafts are wrong). An index of three-token keys finds it without reading the text again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.engine.speculation.sources import Context

SHORTEST, LONGEST = 3, 5
# Earlier places of the same three tokens that are compared, newest first.
CANDIDATES = 32
_NONE = -1


class PromptLookup:
    """A source over one answer's prompt and what it has said so far."""

    name = "lookup"
    hidden_layers = ()

    def __init__(self) -> None:
        # By three tokens: the index of the token after them where they stood last.
        self._newest: dict[tuple[int, int, int], int] = {}
        # For each such index, from ``_first`` on: the one before it after the same three tokens, or _NONE.
        self._before: list[int] = []
        # The first index that is looked at: of a long text only the end is kept.
        self._first = _NONE

    def propose(self, context: Context) -> list[int]:
        tokens = context.tokens
        if not self._index(tokens) or len(tokens) < SHORTEST:
            return []
        best, length = _NONE, 0
        place = self._newest.get(_key(tokens, len(tokens)), _NONE)
        for _ in range(CANDIDATES):
            if place == _NONE:
                break
            matched = _matched(tokens, place)
            if matched > length:
                best, length = place, matched
            if length == LONGEST:
                break
            place = self._before[place - self._first]
        return list(tokens[best : best + context.width]) if length else []

    def committed(self, tokens: Sequence[int]) -> None:
        """Nothing to do: ``propose`` reads what is new."""

    def close(self) -> None:
        self._newest, self._before = {}, []

    def _index(self, tokens: Sequence[int]) -> bool:
        """Take up some of what is new; False while there is more of it."""
        if self._first == _NONE:
            self._first = max(0, len(tokens) - limits.SPEC_INDEX_TOKENS)
        at = self._first + len(self._before)
        end = min(len(tokens), at + limits.SPEC_INDEX_STEP)
        # A place is indexed once there is a token at it: the end of the text is no match for itself.
        for place in range(at, end):
            if place < self._first + SHORTEST:
                self._before.append(_NONE)
                continue
            key = _key(tokens, place)
            self._before.append(self._newest.get(key, _NONE))
            self._newest[key] = place
        return end == len(tokens)


def _key(tokens: Sequence[int], place: int) -> tuple[int, int, int]:
    return tokens[place - 3], tokens[place - 2], tokens[place - 1]


def _matched(tokens: Sequence[int], place: int) -> int:
    """How many tokens before ``place`` equal those at the end, at most ``LONGEST``."""
    n, end = SHORTEST, len(tokens)
    while n < LONGEST and n < place and tokens[place - 1 - n] == tokens[end - 1 - n]:
        n += 1
    return n
