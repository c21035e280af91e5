"""Log-probabilities as clients read them: a token's text, bytes and natural-log probability, and the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from fleetd.engine.protocol import TokenLogprob, TopLogprob
from fleetd.engine.text import token_bytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """``top`` alternatives per token, 0 for none."""

    tokenizer: Any
    top: int

    def of(self, token: int, logprobs: mx.array, text_offset: int) -> TokenLogprob:
        """One sampled token; ``logprobs`` is (V,)."""
        row = np.array(logprobs.astype(mx.float32), copy=False)
        raw = token_bytes(self.tokenizer, token)
        return TokenLogprob(_text(raw), float(row[token]), raw, self._best(row), text_offset)

    def of_prompt(self, tokens: list[int], scores: list[mx.array]) -> list[TokenLogprob]:
        """The prompt's own tokens; the first has nothing before it and gets 0."""
        entries: list[TokenLogprob] = []
        offset = 0
        for i, token in enumerate(tokens):
            raw = token_bytes(self.tokenizer, token)
            if i == 0 or i > len(scores):
                entries.append(TokenLogprob(_text(raw), 0.0, raw, [], offset))
            else:
                row = np.array(scores[i - 1], copy=False)
                entries.append(TokenLogprob(_text(raw), float(row[token]), raw, self._best(row), offset))
            offset += len(_text(raw))
        return entries

    def _best(self, row: np.ndarray[Any, np.dtype[np.float32]]) -> list[TopLogprob]:
        if not self.top:
            return []
        some = np.argpartition(row, -self.top)[-self.top :]
        # Best first; equal probabilities by id, so that the order never depends on the sort.
        some = some[np.lexsort((some, -row[some]))]
        best = []
        for i in some:
            raw = token_bytes(self.tokenizer, int(i))
            best.append(TopLogprob(_text(raw), float(row[i]), raw))
        return best


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
