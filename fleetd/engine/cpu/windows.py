# ruff: noqa: N803 — mlx-lm's name of an argument
"""Keys and values of sliding windows in the order of their tokens, as attention on a CPU reads them.

mlx-lm's caches write a new row over the oldest one, and hand out the rows as they lie:

    tokens   8 9 10 3 4 5 6 7      a window of 8 after token 10
    read     3 4 5 6 7 8 9 10

Where a row lies depends on how the prompt was cut and on what else is in the batch, and a sum in another
order has other bits. What is kept stays as it lies. What is read is a copy of the window for each layer and
step, once it has rotated; attention reads all of it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache


def install() -> None:
    """Replace what caches of sliding windows hand out, and the masks that fit it. Once."""
    RotatingKVCache.keys_and_values = _rows
    RotatingKVCache.make_mask = _mask(RotatingKVCache.make_mask)
    BatchRotatingKVCache.keys_and_values = _batch_rows
    BatchRotatingKVCache.make_mask = _batch_mask(BatchRotatingKVCache.make_mask)


def _rows(self: RotatingKVCache) -> tuple[mx.array, mx.array]:
    """Keys and values (1, heads, rows, width): the first ``keep``, then the others, the oldest first."""
    keys, values, seen, keep, _, index = self.state
    held = keys.shape[2]
    if seen < held:
        return keys[..., :seen, :], values[..., :seen, :]
    return _turned(keys, keep, index), _turned(values, keep, index)


def _batch_rows(self: BatchRotatingKVCache) -> tuple[mx.array, mx.array]:
    """Keys and values (B, heads, rows, width), the oldest first, behind the padding."""
    keys, values, _, _, _, seen, index, rotated = self.state
    if seen < keys.shape[2]:
        return keys[..., :seen, :], values[..., :seen, :]
    return (_turned(keys, 0, index), _turned(values, 0, index)) if rotated else (keys, values)


def _turned(rows: mx.array, keep: int, index: int) -> mx.array:
    if index in (keep, rows.shape[2]):
        return rows
    return mx.concatenate([rows[..., :keep, :], rows[..., index:, :], rows[..., keep:index, :]], axis=2)


def _mask(stock: Callable[..., Any]) -> Any:
    def make_mask(
        self: RotatingKVCache, N: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        if N > 1:
            return stock(self, N, window_size=window_size, return_array=return_array)
        rows = min(int(self.offset) + 1, self.max_size)
        if window_size is None or rows <= window_size:
            return None
        return mx.arange(rows) >= rows - window_size

    return make_mask


def _batch_mask(stock: Callable[..., mx.array]) -> Any:
    def make_mask(
        self: BatchRotatingKVCache, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        mask = stock(self, N, window_size=window_size, return_array=return_array)
        *_, index, rotated = self.state
        if N > 1 or not (rotated or index >= self.max_size):
            return mask
        # It is that of the rows as they lie once the token is written, which is at the index.
        shift = -1 if index >= self.max_size else -index - 1
        return mx.roll(mask, shift, axis=-1)  # type: ignore[call-arg]

    return make_mask
