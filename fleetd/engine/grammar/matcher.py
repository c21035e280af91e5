"""Holds one answer to its grammar: which tokens may come next, which must, which drafts can be right.

    committed tokens ──consume──► state ──masks(drafts)──► allowed tokens after 0, 1, … drafts
                                    └────forced────► tokens of the only text that can follow

The state is that after the tokens of the answer so far, and never that after a draft: masks of drafted rows
are computed on a copy. Nothing here raises: an answer shares its batch with others. What goes wrong is told
by ``failure``, and the answer that it belongs to fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from fleetd import limits

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
        #: Tokens of the answer that fit the grammar, from the first on.
        self.held = 0
        #: Why the answer cannot go on; "" if it can.
        self.failure = ""
        #: Most tokens might come next when masks were made last, as inside of a string.
        self.open = False
        # The drafts that masks were made for last, and these masks: the first is that of the state.
        self._drafts: Sequence[int] = ()
        self._masks: list[Mask] = []
        # A text was forced that is so long that its tokens are not looked for any more.
        self._long_forced = False

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens of the answer."""
        known = list(tokens) == list(self._drafts[: len(tokens)])
        self._drafts, self._masks = (), self._masks[len(tokens) : len(tokens) + 1] if known else []
        if self.failure:
            return
        fit = int(self._matcher.try_consume_tokens(list(tokens)))
        self.held += fit
        if fit == len(tokens):
            return
        # The token that ends a whole answer may be one that the table does not know as an end.
        if not self._matcher.is_error() and self._matcher.is_accepting():
            self.held += 1
        else:
            self._fail(self._matcher.get_error() or "A token does not fit the grammar.")

    def forced(self, most: int) -> list[int]:
        """Tokens of the text that has to follow, at most so many, as the tokenizer would write it; empty if
        more than one text can follow. The model may write the same text with other tokens."""
        if self.failure or self._long_forced:
            return []
        # All of the text is made each time, however few of its tokens are wanted.
        self._long_forced = len(self._matcher.compute_ff_bytes()) > limits.GRAMMAR_FORCED_BYTES
        return [] if self._long_forced else list(map(int, self._matcher.compute_ff_tokens()[:most]))

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first on, the grammar allows."""
        if self.failure:
            return 0
        known = [token for token in drafts if 0 <= token < self._tokens]
        return 0 if known != list(drafts) else int(self._matcher.validate_tokens(known))

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask]:
        """What may follow the answer, the answer and the first draft, and so on: (tokens,), True for each
        token that may. After a draft that the grammar forbids there are no more masks."""
        found, taken = self._masks[:1] or [self._mask()], []
        # A draft may be refused yet: what goes wrong behind it is no failure of the answer.
        trial = self._matcher.deep_copy() if drafts and not self.failure else self._matcher
        for draft in () if self.failure else drafts:
            if not 0 <= draft < self._tokens or trial.is_stopped() or not trial.try_consume_tokens([draft]):
                break
            mask = self._computed(trial)
            if mask is None:
                break
            taken.append(draft)
            found.append(mask)
        self._drafts, self._masks = tuple(taken), found
        self.open = 2 * int(np.count_nonzero(found[-1])) > self._tokens
        return list(found)

    def _mask(self) -> Mask:
        found = None if self.failure else self._computed(self._matcher)
        if found is not None:
            return found
        error = self._matcher.get_error()
        ended = not error or error.startswith("NoExtension")
        self._fail("No token of this model spells what has to come next." if ended else error)
        return np.ones(self._tokens, np.bool_)

    def _computed(self, matcher: LLMatcher) -> Mask | None:
        """The mask of a state; None if there is none."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._tokens, bitorder="little").view(np.bool_)
        return None if matcher.is_error() or not allowed.any() else allowed

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason.partition("\n")[0][:200]
