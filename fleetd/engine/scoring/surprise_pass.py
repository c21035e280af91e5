"""A pass over a whole model that reads how little each token of a text was expected.

    tokens ─► all layers ─► log-probabilities ─► -log p(token | those before it), in nats

A text that nobody asks about has no question whose attention could be read. What a model did not expect is
what the text says that its reader does not know already (self-information: Li et al., arXiv 2310.06201).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from fleetd.compression.token_scores import F32, I32, SegmentScores
from fleetd.engine.layers.prefill import give_back
from fleetd.engine.scoring.scoring_layout import LayoutPass
from fleetd.engine.sequence_state.parts import arrays

# Tokens of a step at most: log-probabilities of each are as many as the vocabulary is large.
STEP_TOKENS = 128
# No token is expected for certain, and the first one follows nothing: its surprise is not known.
_LEAST = 1e-4


@dataclass(slots=True)
class SurprisePass:
    """One pass, begun. Afterwards ``surprise`` (scored tokens,) has the nats of each, in f32."""

    model: Any
    work: LayoutPass
    done: int = 0
    surprise: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    _caches: list[Any] = field(default_factory=list)
    _found: list[F32] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.done >= len(self.work.tokens)

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more; returns how many."""
        if not self._caches:
            self._caches = make_prompt_cache(self.model)
        tokens = self.work.tokens[self.done : self.done + min(chunk_tokens, STEP_TOKENS)]
        following = self.work.tokens[self.done + 1 : self.done + 1 + len(tokens)]
        logits = self.model(mx.array([tokens]), cache=self._caches)[0, : len(following)].astype(mx.float32)
        if following:
            chosen = mx.take_along_axis(logits, mx.array(following)[:, None], axis=-1)[:, 0]
            self._found.append(np.array(mx.logsumexp(logits, axis=-1) - chosen))
        mx.eval(logits, arrays(self._caches))
        self.done += len(tokens)
        if self.finished:
            self._finish()
        give_back(done=self.finished)
        return len(tokens)

    def _finish(self) -> None:
        self._caches.clear()
        every = np.concatenate([np.zeros(1, np.float32), *self._found])
        self.surprise = every[self.work.own : self.work.own + self.work.count]
        self._found.clear()


def surprise_scores(starts: I32, ends: I32, surprise: F32) -> SegmentScores:
    """Scores of one made-up head and query whose softmax over the text is each token's share of all the
    surprise in it, so that segments merge as those of attention do."""
    logits = np.log(np.maximum(surprise, np.float32(_LEAST)))[None, None, :]
    return SegmentScores.of_logits(starts, ends, logits)
