"""What MLX keeps of a GPU's memory: how much of it for reuse, and what of it stays wired.

Only weights are wired. mlx-lm wires up to all that Metal recommends, caches and passing buffers with it:
memory that macOS can neither compress nor page out, and a set of resident buffers that changes with every
step, which is what kernels of macOS 26 panic on. Weights are read at every step and never change: wiring them
costs nothing that was not needed, and the set stays as it is.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx

from fleetd.limits import MIB, MLX_CACHE_PART

# Buffers are rounded up to pages, and small ones lie in a heap of their own.
_ROUNDING_BYTES = 16 * MIB


def prepare(device: str, total_bytes: int) -> None:
    """Before anything is computed: bound what MLX keeps, and leave what is wired to ``wire_weights``."""
    if device == "cpu":
        return
    mx.set_cache_limit(total_bytes // MLX_CACHE_PART)
    # The package's attribute of this name is a function of the module.
    generate: Any = importlib.import_module("mlx_lm.generate")
    generate.maybe_set_recommended_wired_limit = _leave_wired


def wire_weights(device: str, limit_bytes: int) -> None:
    """After a load: keep what is in memory now from being paged out; macOS before 15 ignores this.

    Args:
        limit_bytes: what Metal lets the GPU hold; more is never wired.
    """
    if device != "metal":
        return
    mx.synchronize()
    mx.clear_cache()
    mx.set_wired_limit(min(mx.get_active_memory() + _ROUNDING_BYTES, limit_bytes))


def _leave_wired() -> None:
    """mlx-lm sets no limit if no earlier one is given."""
