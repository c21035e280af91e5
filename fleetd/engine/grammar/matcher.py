"""Holds one answer to its grammar: which tokens may come next, which must, which drafts can be right.

    committed tokens ──consume──► state ──masks(drafts)──► allowed tokens after 0, 1, … drafts
                                    └────forced────► tokens of the only text that can follow

The state is that after the tokens of the answer so far, and never that after a draft: masks of drafted rows
are computed on the way there and back. Nothing here raises: an answer shares its batch with others. What goes
wrong is told by ``failure``, and the answer that it belongs to fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class AnswerMatcher:
    """The state of one answer in its grammar.

    Args:
        matcher: at the beginning of the grammar.
        tokens: how many tokens its masks tell of, from id 0 on.
    """

    def __init__(self, matcher: LLMatcher, tokens: int) -> None:
        self._matcher = matcher
        self._tokens = tokens
        #: Tokens of the answer so far.
        self.consumed = 0
        #: Why the answer cannot go on; "" if it can.
        self.failure = ""
        # The drafts that masks were made for last, and these masks: the first is that of the state.
        self._drafts: Sequence[int] = ()
        self._masks: list[Mask] = []

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens of the answer."""
        self.consumed += len(tokens)
        known = list(tokens) == list(self._drafts[: len(tokens)])
        self._drafts, self._masks = (), self._masks[len(tokens) : len(tokens) + 1] if known else []
        if self.failure or self._matcher.try_consume_tokens(list(tokens)) == len(tokens):
            return
        # The token that ends a whole answer may be one that the table does not know as an end.
        if not self._matcher.is_accepting():
            self._fail("A token does not fit the grammar.")

    @property
    def open(self) -> bool:
        """True if most tokens may come next, as inside of a string; False if that is not known yet."""
        return bool(self._masks) and 2 * int(np.count_nonzero(self._masks[0])) > self._tokens

    def forced(self, most: int) -> list[int]:
        """Tokens of the text that has to follow, at most so many, as the tokenizer would write it; empty if
        more than one text can follow. The model may write the same text with other tokens."""
        if self.failure:
            return []
        return [int(token) for token in self._matcher.compute_ff_tokens()[:most]]

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first on, the grammar allows."""
        if self.failure:
            return 0
        known = [token for token in drafts if 0 <= token < self._tokens]
        return 0 if known != list(drafts) else int(self._matcher.validate_tokens(known))

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask]:
        """What may follow the answer, the answer and the first draft, and so on: (tokens,), True for each
        token that may. After a draft that the grammar forbids there are no more masks."""
        found, taken = self._masks[:1] or [self._mask()], 0
        for draft in drafts:
            if self.failure or not 0 <= draft < self._tokens:
                break
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([draft]):
                break
            taken += 1
            found.append(self._mask())
        if taken and not self._matcher.rollback(taken):
            self._fail("The state could not be taken back.")
        self._drafts, self._masks = tuple(drafts[:taken]), found
        return list(found)

    def _mask(self) -> Mask:
        if not self.failure:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=self._tokens, bitorder="little").view(np.bool_)
            if not self._matcher.is_error() and allowed.any():
                return allowed
            error = self._matcher.get_error()
            ended = not error or error.startswith("NoExtension")
            self._fail("No token of this model spells what has to come next." if ended else error)
        return np.ones(self._tokens, np.bool_)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason.partition("\n")[0][:200]
