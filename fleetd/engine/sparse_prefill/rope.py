"""Tokens at positions of their own, and a view of queries and keys, without touching a model's code.

Each attention's ``rope`` is wrapped once, when the model is loaded. Where tokens are comes with the offset
that the attention reads from its cache, so requests never see each other and a pass with plain offsets runs
as before.

    cache.expect(positions)   cache.offset ── attention ──► PosRoPE(x, offset) ──► the model's own rope
    model(tokens, cache=caches)   └─ a plain int again after the pass  └─► who looks on: ``watched``

The caches that take such offsets are those of ``sparse_caches.py``: ``sparse_cache`` makes them of a model's
own, and before each pass ``expect`` tells every one of them where the tokens are (``range(done, done + n)``
where there are no gaps). With mlx-lm's own, masks fail: MLX takes no subclass of int there.

``mx.fast.rope`` takes an offset per row of the batch. Tokens moved into the batch axis thus get any position
each from the model's own kernel, in the bits of a pass without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# Sees what one layer rotates: layer, x before, x after, (B, heads, T, D) each. Every attention rotates its
# queries and its keys, most of them in this order; layers without positions that do not ask their rope are
# not seen.
Look = Callable[[int, mx.array, mx.array], None]


class RopeOffset(int):
    """How many slots of a cache are in use, and for the pass that reads it from there the tokens' positions:
    the first of a run without gaps, or one per token (T,).

    Arithmetic gives a plain int: a cache that counts on from it forgets the rest.
    """

    positions: mx.array | int

    def __new__(cls, slots: int, positions: mx.array | int) -> RopeOffset:
        made = super().__new__(cls, slots)
        made.positions = positions
        return made

    @classmethod
    def at(cls, slots: int, positions: Sequence[int]) -> RopeOffset:
        """The rotation of tokens at ``positions``, ascending, one each."""
        run = positions[-1] - positions[0] == len(positions) - 1
        return cls(slots, positions[0] if run else mx.array(list(positions), dtype=mx.int32))


class PosRoPE(nn.Module):  # type: ignore[misc]
    """``rope`` of a layer, for plain offsets, offsets per batch row, and, with one row, an ``RopeOffset``."""

    def __init__(self, rope: Any, layer: int) -> None:
        super().__init__()
        self.rope = rope
        self.layer = layer
        self.look: Look | None = None

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        rotated = self._rotated(x, offset)
        if self.look is not None:
            self.look(self.layer, x, rotated)
        return rotated

    def _rotated(self, x: mx.array, offset: Any) -> mx.array:
        positions = offset.positions if isinstance(offset, RopeOffset) else offset
        if not isinstance(offset, RopeOffset) or isinstance(positions, int):
            rotated: mx.array = self.rope(x, offset=positions)
            return rotated
        tokens = x[0].transpose(1, 0, 2)[:, :, None]  # (T, heads, 1, D)
        moved = self.rope(tokens, offset=positions)[:, :, 0].transpose(1, 0, 2)[None]
        # Laid out as the rope itself does it: products round otherwise where the layout is another.
        return mx.contiguous(moved)


@contextmanager
def watched(ropes: Iterable[PosRoPE], look: Look) -> Iterator[None]:
    """``look`` sees what ``ropes`` rotate in here. A pass calls them while it is put together, on the one
    thread that computes."""
    ropes = list(ropes)
    for rope in ropes:
        rope.look = look
    try:
        yield
    finally:
        for rope in ropes:
            rope.look = None


def install(model: Any) -> list[PosRoPE]:
    """Wrap every layer's rope that is not wrapped yet. Returns the wrappers: none if there are no ropes."""
    found: list[PosRoPE] = []
    for number, layer in enumerate(model.layers):
        for _, module in layer.named_modules():
            rope = None if isinstance(module, PosRoPE) else module.get("rope")
            if isinstance(rope, nn.Module):
                if not isinstance(rope, PosRoPE):
                    rope = module.rope = PosRoPE(rope, number)
                found.append(rope)
    return found
