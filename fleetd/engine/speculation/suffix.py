"""Drafts from the longest end of the answer that was there before, in the prompt or in the answer.

A draft is no longer than the match it rests on (SuffixDecoding, arXiv 2411.04975): a long match says much
about what follows, a short one little.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.engine.speculation.automaton import Automaton
from fleetd.engine.speculation.sources import Context

SHORTEST = 3


class SuffixSource:
    """A source over one answer's prompt and the answer itself."""

    name = "suffix"
    hidden_layers = ()

    def __init__(self) -> None:
        self._automaton = Automaton()
        self._skipped = -1

    def propose(self, context: Context) -> list[int]:
        known = self._automaton
        if not self._read(context.tokens) or known.matched < SHORTEST:
            return []
        return known.text[known.matched_end : known.matched_end + min(context.width, known.matched)]

    def committed(self, tokens: Sequence[int]) -> None:
        """Nothing to do: ``propose`` reads what is new."""

    def close(self) -> None:
        self._automaton = Automaton()

    def _read(self, tokens: Sequence[int]) -> bool:
        """Take up some of what is new; False while there is more of it."""
        if self._skipped < 0:
            self._skipped = max(0, len(tokens) - limits.SPEC_INDEX_TOKENS)
        at = self._skipped + len(self._automaton)
        end = min(len(tokens), at + limits.SPEC_INDEX_STEP)
        for token in tokens[at:end]:
            self._automaton.append(token)
        return end == len(tokens)
