"""Single steps computed as two rows, where a device multiplies one row by another kernel than several.

From the M3 on MLX multiplies one row with quantised weights by ``qmv``, and two to some ten rows by
``qmv_wide``, which adds in another order: a block then never has the bytes of single steps. If single steps
are two rows wide as well, one family of kernels serves both:

    block of n   [ due d1 … ]   qmv_wide
    one row      [ due ]        qmv          other bytes than the block's first row
    two rows     [ due due ]    qmv_wide     the same bytes
                       └─ taken back from the cache; its logits are not used

That reads the weights once, as one row does; what it costs beyond that is measured (``exactness_probe``).
Answers of a batch share a pass, which has as many rows as there are answers and is not widened.

Over several machines every machine computes both rows, and each takes the second one back.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from fleetd.engine.layers.hidden_states import NO_TAPS, Taps
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.kinds import kind_of

# Rows of a step where it is widened, and how many times as long as one row it may take.
ROWS = 2
DEAREST = 1.02


def can_widen(cache: list[Any]) -> bool:
    """True if a row can be taken back from each of these caches whatever is in them."""
    return all(kind_of(layer).widens(layer) for layer in cache)


class WideSteps:
    """``model``, but passes over one token are computed over ``ROWS`` while fewer than ``context`` tokens are
    in the cache. So what decides on a token's kernels is its place in the text, never a draft."""

    def __init__(self, model: Any, context: int) -> None:
        self._model, self._context = model, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:  # (B, T) -> (B, T, V)
        if not self._widens(tokens, cache):
            narrow: mx.array = self._model(tokens, cache=cache)
            return narrow
        logits: mx.array = self._model(mx.repeat(tokens, ROWS, axis=1), cache=cache)
        rollback.take_back(cache, ROWS - 1)
        return logits[:, :1]

    def begin(self, tokens: mx.array, cache: list[Any], *, taps: Taps = NO_TAPS) -> Any:
        """``GroupModel.begin``. What a step gives has ``ROWS`` rows, of which the first counts."""
        if not self._widens(tokens, cache):
            return self._model.begin(tokens, cache, taps=taps)
        flight = self._model.begin(mx.repeat(tokens, ROWS, axis=1), cache, taps=taps)
        rollback.take_back(cache, ROWS - 1)
        return flight

    def _widens(self, tokens: mx.array, cache: list[Any]) -> bool:
        return tokens.size == 1 and can_widen(cache) and (rollback.held(cache) or 0) < self._context
