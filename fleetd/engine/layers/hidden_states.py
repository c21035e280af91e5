"""Hidden states between a model's layers, for drafters that read them (MTP heads, EAGLE, DFlash).

mlx-lm's models return logits only. A layer is called through its class, so while states are noted the layer
has a subclass that notes what it returns. The computation is the same; nothing is evaluated here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import msgspec

_NOTED = "_noted_states"


class Taps(msgspec.Struct, frozen=True):
    """Hidden states of single layers that what drafts from them needs of a block: of ``layers``, from 0, for
    the last ``rows`` tokens; 0 for all of them."""

    layers: tuple[int, ...] = ()
    rows: int = 0


NO_TAPS = Taps()


@contextmanager
def noted_states(model: Any, layers: Collection[int]) -> Iterator[dict[int, list[mx.array]]]:
    """While the block runs, note what ``layers`` of ``model`` (indices from 0) return.

    Yields, by layer, a (B, T, D) for each call of the model, lazy. Missing are layers that the model does not
    have, and what is not one state for each token. Without ``layers`` nothing is touched. A model of which
    other machines have layers notes by itself (``GroupModel.noting``).
    """
    states: dict[int, list[mx.array]] = {}
    if not layers:
        yield states
        return
    if hasattr(model, "noting"):
        with model.noting(layers) as found:
            yield found
        return
    noting = [(index, layer) for index, layer in enumerate(model.layers) if index in layers]
    for index, layer in noting:
        kind: Any = type(layer)
        vars(layer)[_NOTED] = states[index] = []
        layer.__class__ = _noting(kind)
    try:
        yield states
    finally:
        for _, layer in noting:
            layer.__class__ = type(layer).__base__
            del vars(layer)[_NOTED]


@functools.cache
def _noting(kind: Any) -> Any:
    """A subclass of a layer's class."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        returned = kind.__call__(self, *args, **keywords)
        # Some layers also return keys for later ones, after the state.
        state = returned[0] if isinstance(returned, tuple) else returned
        if state.ndim == 3:
            vars(self)[_NOTED].append(state)
        return returned

    return type(kind.__name__, (kind,), {"__call__": call})
