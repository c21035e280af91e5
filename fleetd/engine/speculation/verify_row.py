"""One answer, decoded on a cache of its own, several tokens per pass where drafts are right.

    in    [ due | d1 d2 d3 ]        the token that was chosen last, and guesses at those after it
    out     x1 | x2 x3 x4           what follows each of them; x2 counts only if x1 = d1, x3 only if x2 = d2 …
    x1 = d1, x2 ≠ d2: x1 and x2 are the answer's next tokens, x2 is due in the next pass, d2 and d3 are undone

Tokens are chosen row by row exactly as mlx-lm's batch does it (processors on what the answer has so far, log
probabilities, sampler), and a seeded sampler's noise belongs to the token's index in the answer. So verifying
is a test of equality for sampled answers as it is for greedy ones, and every token, its log-probabilities
included, is what plain decoding gives wherever a block's arithmetic is that of single steps (``probe.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from fleetd.engine.sampling import LogitsProcessor, Sampler, SeededSampler
from fleetd.engine.speculation import rollback


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token of an answer; ``logprobs`` is (V,)."""

    token: int
    logprobs: mx.array


@dataclass(slots=True)
class VerifyRow:
    """``tokens``: prompt and answer; all but the last, which is due, have their rows in ``cache``.

    ``generated``: how many of them are the answer's. Both lists belong to this object.
    """

    model: Any
    tokens: list[int]
    cache: list[Any]
    sampler: Sampler
    processors: Sequence[LogitsProcessor] = ()
    generated: int = 0
    _context: TokenBuffer | None = field(init=False, default=None)

    def advance(self, drafts: Sequence[int]) -> list[Chosen]:
        """One pass; at least one token, at most one more than ``drafts``.

        ``drafts`` must fit in ``rollback.room(cache)``, with one more for the token that is due.
        """
        logits = self.model(mx.array([[self.tokens[-1], *drafts]]), cache=self.cache)  # (1, n, V)
        rows = [logits[:, i, :] for i in range(len(drafts) + 1)]
        chosen = self._choose(rows, drafts)
        # The cache has the due token and all drafts; what was accepted is due token and all but the last.
        rollback.take_back(self.cache, len(rows) - len(chosen))
        self._commit([c.token for c in chosen])
        return chosen

    def _choose(self, rows: list[mx.array], drafts: Sequence[int]) -> list[Chosen]:
        if self.sampler is greedy_sampler and not self.processors:
            # Cheap enough to do for rows that may not count; then they are computed together.
            found = [_normalised(row) for row in rows]
            picked = mx.concatenate([self.sampler(logprobs) for logprobs in found])
            mx.eval(picked, found)
            tokens = [int(token) for token in np.array(picked)]
            right = 0
            while right < len(drafts) and tokens[right] == drafts[right]:
                right += 1
            return [Chosen(tokens[i], found[i][0]) for i in range(right + 1)]
        out: list[Chosen] = []
        for i, row in enumerate(rows):
            logprobs, token = self._sample(row, drafts[:i])
            out.append(Chosen(token, logprobs[0]))
            if i < len(drafts) and token != drafts[i]:
                break
        return out

    def _sample(self, logits: mx.array, accepted: Sequence[int]) -> tuple[mx.array, int]:
        """The token after the ``accepted`` ones, as ``GenerationBatch._step`` chooses it."""
        if self.processors:
            context = self._seen()
            if accepted:
                context = mx.concatenate([context, mx.array(list(accepted), dtype=mx.int32)])
            for processor in self.processors:
                logits = processor(context, logits)
        logprobs = _normalised(logits)
        if isinstance(self.sampler, SeededSampler):
            self.sampler.index = self.generated + len(accepted)
        token = self.sampler(logprobs)
        mx.eval(token, logprobs)
        return logprobs, int(np.array(token)[0])

    def _seen(self) -> mx.array:
        """The tokens so far, int32; only built for processors, which look at them."""
        if self._context is None:
            self._context = TokenBuffer(self.tokens)
        seen: mx.array = self._context.tokens
        return seen

    def _commit(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.generated += len(tokens)
        if self._context is not None:
            self._context.update_and_fetch(mx.array(tokens, dtype=mx.int32))

    def taken(self, tokens: int) -> tuple[list[int], list[Any]]:
        """The text's first ``tokens`` tokens, as far as their rows are known, and those rows; ends this."""
        kept = min(tokens, rollback.held(self.cache))
        rollback.take_back(self.cache, rollback.held(self.cache) - kept)
        return self.tokens[:kept], rollback.compact(self.cache)


def _normalised(logits: mx.array) -> mx.array:
    """(1, V) → log-probabilities."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
