"""Forced tokens: if a grammar allows one text alone, as the next key of an object, its tokens are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetd.engine.speculation.sources import Context

if TYPE_CHECKING:
    from fleetd.engine.grammar.matcher import AnswerMatcher


class ForcedTokens:
    """A source over the grammar that one answer is held to."""

    name = "grammar"
    hidden_layers = ()

    def __init__(self, matcher: AnswerMatcher) -> None:
        self._matcher = matcher

    def propose(self, context: Context) -> list[int]:
        return self._matcher.forced(context.width)

    def committed(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the matcher is told by what decodes the answer."""

    def close(self) -> None:
        """Nothing to do: the matcher is the answer's."""
