"""Whether rows that two machines computed agree: bit for bit, or nearly."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from fleetd import limits
from fleetd.engine.sequence_state.array_bytes import as_bytes


def same(ours: mx.array, theirs: mx.array) -> bool:
    """True if the arrays are equal bit for bit."""
    return bool(np.array_equal(as_bytes(mx.contiguous(ours)), as_bytes(mx.contiguous(theirs))))


def alike(ours: mx.array, theirs: mx.array) -> bool:
    """True if ``theirs`` is finite and most tokens' rows are close, by their length. Arrays (…, T, width)."""
    a, b = (np.moveaxis(np.array(x.astype(mx.float32), dtype=np.float64), -2, 0) for x in (ours, theirs))
    if not np.isfinite(b).all():
        return False
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    apart, length = np.linalg.norm(a - b, axis=1), np.linalg.norm(a, axis=1)
    close = apart <= limits.SHARE_SPOT_RELATIVE * length
    return bool(4 * close.sum() >= 3 * len(close))
