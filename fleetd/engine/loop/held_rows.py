"""Rows of a batch whose answers are held to grammars: their logits come from the model with masks on them.

mlx-lm begins each step of a batch before it reads the tokens of the step before. A mask needs that token: a
call with such rows has the device begin, reads the tokens, which the device had before, and makes the masks
while the step is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.sampling.sampler import masked


class HeldRows:
    """``model`` for mlx-lm's batch. ``expect`` says before each step which rows its calls are for.

    Args:
        newest: the batch's tokens (n,) that are the input of the call under way. The call has a view of them,
            which could be read only after all that the call computes.
    """

    def __init__(self, model: Any, newest: Callable[[], mx.array]) -> None:
        self._model, self._newest = model, newest
        self._due: deque[Sequence[AnswerMatcher | None]] = deque()
        self._joining: Sequence[AnswerMatcher | None] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def expect(self, rows: Sequence[AnswerMatcher | None], joining: Sequence[AnswerMatcher | None]) -> None:
        """The matchers of the rows of each call to come; None for a row that is held to nothing.

        Args:
            rows: those that were in the batch before. Each call brings tokens that no matcher knows yet.
            joining: those whose newest token is known, as they have not been in a step of the batch.
        """
        self._due = deque(group for group in (rows, joining) if group)
        self._joining = joining

    def __call__(self, tokens: mx.array, *, cache: list[Any]) -> mx.array:  # (n, 1) -> (n, 1, V)
        rows = self._due.popleft() if self._due else ()
        logits: mx.array = self._model(tokens, cache=cache)
        if not any(rows):
            return logits
        if len(rows) != tokens.shape[0]:
            raise RuntimeError(f"{tokens.shape[0]} rows were computed and {len(rows)} expected")
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if rows is not self._joining:
            read: Any = self._newest().tolist()
            for matcher, token in zip(rows, read, strict=True):
                if matcher is not None:
                    matcher.consume([token])
        masks = [None if matcher is None else matcher.masks()[0] for matcher in rows]
        whole = np.ones(logits.shape[-1], np.bool_)
        allowed = [whole if mask is None else np.pad(mask, (0, len(whole) - len(mask))) for mask in masks]
        return masked(logits, np.stack(allowed)[:, None])
