"""The forward passes of a shared prefill, as single bounded steps.

    chunk-major  (layers are split)   chunk 0 through all own layers, chunk 1 through all own layers, …
    layer-major  (tokens are split)   layer 0 on all own chunks, layer 1 on all own chunks, …

Both give the bytes of local prefill with the same chunks. Of the last layer that keeps anything only keys and
values are computed: what comes out of it would be needed for the last token alone, and that one is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import arrays


class _EnoughError(Exception):
    """Raised through a layer's call once its cache has the keys and values."""


class _OnlyRows:
    """A cache that ends the call of the layer that has filled it.

    Laziness alone does not do it: on a CPU attention is computed when it is called (``cpu/products.py``).
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._cache.update_and_fetch(keys, values)
        raise _EnoughError


def run(
    part: Stage,
    hidden: mx.array,
    caches: Sequence[Any],
    inputs: PassInputs | None = None,
) -> mx.array | None:
    """Hidden states (1, T, D) through ``part``; None after the last layer of a prefill. Nothing is evaluated.

    ``inputs``: of the tokens, as ``Stage.inputs`` makes them.
    """
    if part.last < part.prefilled:
        return part.run(hidden, list(caches), inputs)
    if not kind_of(part.empty[-1]).attention:
        # Only its state is asked for: what that does not need is not computed, but for attention on a CPU.
        part.run(hidden, list(caches), inputs)
        return None
    try:
        part.run(hidden, [*caches[:-1], _OnlyRows(caches[-1])], inputs)
    except _EnoughError:
        return None
    raise RuntimeError("the last layer never asked for its cache")


def evaluate(caches: Sequence[Any], *more: mx.array | None) -> None:
    mx.eval(arrays(caches), [x for x in more if x is not None])


class LayerMajor:
    """All layers of ``stage`` on the chunks of a slice of the prompt, one layer and chunk at a time.

    Args:
        prompt: (1, T), its tokens.
        chunks: of the slice; may be none.
    """

    def __init__(self, stage: Stage, prompt: mx.array, chunks: Sequence[range]) -> None:
        stage = stage.prefilling
        self._chunks = chunks
        self.parts = [stage.part(layer, layer + 1) for layer in range(stage.first, stage.last)]
        self.layer = 0
        self.chunk = 0
        tokens = [prompt[:, chunk.start : chunk.stop] for chunk in chunks]
        self._hidden = [stage.embed(each) for each in tokens]
        self._inputs = [stage.inputs(each, chunk.start) for each, chunk in zip(tokens, chunks, strict=True)]

    @property
    def begins(self) -> bool:
        """True if the next step is a layer's first: what its cache has to hold before must be there."""
        return self.chunk == 0

    @property
    def next(self) -> range:
        """The tokens of the next step, if there is one."""
        return self._chunks[self.chunk]

    @property
    def finished(self) -> bool:
        return self.layer == len(self.parts) or not self._hidden

    @property
    def fraction(self) -> float:
        if self.finished:
            return 1.0
        return (self.layer + self.chunk / len(self._hidden)) / len(self.parts)

    def step(self, cache: Any) -> bool:
        """The next chunk through the next layer, whose cache this is. True if that ends the layer."""
        at = self.chunk
        out = run(self.parts[self.layer], self._hidden[at], [cache], self._inputs[at])
        evaluate([cache], out)
        if out is not None:
            self._hidden[self.chunk] = out
        self.chunk += 1
        if self.chunk < len(self._hidden):
            return False
        self.chunk, self.layer = 0, self.layer + 1
        mx.clear_cache()
        return True
