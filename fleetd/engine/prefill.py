"""Chunked prefill of one prompt into its own KV cache.

The schedule is mlx-lm's own: all tokens but the last in chunks, the last as a step of its own, so that a
prompt gives the same cache here as in ``mlx_lm.generate``. The finished cache is handed to the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(slots=True)
class Prefiller:
    """``done`` tokens of ``tokens`` are in ``cache``; the last token is never computed here.

    With ``score`` the log-probabilities of the prompt's own tokens are kept: ``scores[i]`` belongs to token
    i + 1 and is (V,) f32.
    """

    model: Any
    tokens: list[int]
    cache: list[Any]
    done: int = 0
    score: bool = False
    scores: list[mx.array] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - 1 - self.done

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more; returns how many."""
        n = min(chunk_tokens, self.remaining)
        if n <= 0:
            return 0
        chunk = mx.array(self.tokens[self.done : self.done + n])[None]  # (1, n)
        logits = self.model(chunk, cache=self.cache)  # (1, n, V); lazy: not computed unless scored
        if self.score:
            logits = logits[0].astype(mx.float32)
            rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(rows)
            self.scores += list(rows)
        mx.eval([layer.state for layer in self.cache])
        mx.clear_cache()
        self.done += n
        return n
