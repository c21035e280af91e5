"""What image encoders of several families do alike. In shapes L is the number of patches, W the width."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from fleetd.models.memory_need import WORKING_BYTES

# Patches of one step of attention: all of a large image at once would take gigabytes.
QUERIES = 512
# Numbers in memory between two steps, for each of a patch's width: of the layer's beginning, of queries, keys
# and values, and of what attention gave so far.
_HELD_WIDTHS = 8
# The same of a feed-forward network's inner width, in a step that computes one: activations make copies.
_STEP_INNERS = 8
# Copies of a step's attention: what each patch makes of each other one, before and after the softmax.
_SCORES = 2
# Bytes of a patch's pixel while it is normalised and converted: of each colour two copies, each in f32.
_PIXEL_BYTES = 3 * 2 * 4


class PassSizes(msgspec.Struct, frozen=True):
    """What decides how much memory an encoder's pass over an image takes.

    ``inner``: the width of its feed-forward networks. ``patch``: pixels of a patch's side. ``item_bytes``: of
    a number that it computes with.
    """

    width: int
    inner: int
    heads: int
    patch: int
    item_bytes: int

    def held_bytes(self, patches: int) -> int:
        """What is held between two steps of a pass over so many patches."""
        return self.item_bytes * patches * _HELD_WIDTHS * self.width

    def step_bytes(self, patches: int) -> int:
        """The most that one step takes besides."""
        scores = _SCORES * self.heads * min(patches, QUERIES)
        numbers = patches * max(_STEP_INNERS * self.inner, scores)
        return max(self.item_bytes * numbers, patches * self.patch**2 * _PIXEL_BYTES)

    def pass_bytes(self, patches: int) -> int:
        """What a pass takes of the memory for prompts: there are WORKING_BYTES besides for each step."""
        return self.held_bytes(patches) + max(0, self.step_bytes(patches) - WORKING_BYTES)


def activation(name: str) -> Any:
    """An activation function by the name that configs have for it. Raises ValueError."""
    known = {"silu": nn.silu, "gelu": nn.gelu, "gelu_pytorch_tanh": nn.gelu_approx}
    if name not in known:
        raise ValueError(f"unknown activation {name!r}")
    return known[name]


def by_heads(rows: mx.array, heads: int) -> mx.array:
    """(1, L, W) → (1, heads, L, W / heads)."""
    _, count, width = rows.shape
    return rows.reshape(1, count, heads, width // heads).transpose(0, 2, 1, 3)


def attended(q: mx.array, k: mx.array, v: mx.array) -> Generator[None, None, mx.array]:
    """Attention in which each patch sees all others: three (1, heads, L, head) → (1, L, W), in steps."""
    _, heads, count, head = q.shape
    found: list[mx.array] = []
    for at in range(0, count, QUERIES):
        if found:
            # Before the next one begins: together they would take gigabytes after all.
            mx.eval(found[-1])
            yield
        found.append(mx.fast.scaled_dot_product_attention(q[:, :, at : at + QUERIES], k, v, scale=head**-0.5))
    return mx.concatenate(found, axis=2).transpose(0, 2, 1, 3).reshape(1, count, heads * head)
