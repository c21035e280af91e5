"""Log-probabilities as clients read them: a token's text, its bytes, its natural-log probability, and the
same of the likeliest alternatives."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from fleetd.engine.answer.token_bytes import token_bytes
from fleetd.engine.protocol import TokenLogprob, TopLogprob

IMPOSSIBLE = -9999.0


class Logprobs(msgspec.Struct, frozen=True):
    """``top`` alternatives per token, 0 for none."""

    tokenizer: Any
    top: int

    def of(self, token: int, logprobs: mx.array, text_offset: int) -> TokenLogprob:
        """One sampled token; ``logprobs`` is (V,)."""
        # Those of a bf16 model are up to 0.1 off together: their sum was rounded before it was subtracted.
        exact = logprobs.astype(mx.float32)
        row = np.array(exact - mx.logsumexp(exact), copy=False)
        raw = token_bytes(self.tokenizer, token)
        return TokenLogprob(_text(raw), _finite(row[token]), raw, self.best(row), text_offset)

    def best(self, row: np.ndarray[Any, np.dtype[np.float32]]) -> list[TopLogprob]:
        """The ``top`` likeliest tokens of a row (V,), best first."""
        if not self.top:
            return []
        top = min(self.top, len(row))
        some = np.argpartition(row, -top)[-top:]
        # Best first; equal probabilities by id, so that the order never depends on the sort.
        some = some[np.lexsort((some, -row[some]))]
        best = []
        for i in some:
            raw = token_bytes(self.tokenizer, int(i))
            best.append(TopLogprob(_text(raw), _finite(row[i]), raw))
        return best


@dataclass(slots=True)
class PromptLogprobs:
    """The prompt's own tokens, taken chunk by chunk: a row of the vocabulary for each is too much to keep."""

    logprobs: Logprobs
    tokens: list[int]
    entries: list[TokenLogprob] = field(default_factory=list)
    _offset: int = 0
    # A character of several tokens is counted with the last of them, so all of them are where it begins.
    _text_so_far: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def __post_init__(self) -> None:
        self._append(None)  # nothing comes before the first token, so it gets 0

    def add(self, rows: mx.array) -> None:
        """The log-probabilities (n, V) of what follows the next n tokens."""
        for row in np.array(rows, copy=False):
            self._append(row)

    def _append(self, row: np.ndarray[Any, np.dtype[np.float32]] | None) -> None:
        token = self.tokens[len(self.entries)]
        raw = token_bytes(self.logprobs.tokenizer, token)
        value, best = (0.0, []) if row is None else (_finite(row[token]), self.logprobs.best(row))
        self.entries.append(TokenLogprob(_text(raw), value, raw, best, self._offset))
        self._offset += len(self._text_so_far.decode(raw))


def _finite(logprob: np.float32) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for what cannot happen."""
    return max(float(logprob), IMPOSSIBLE) if np.isfinite(logprob) else IMPOSSIBLE


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
