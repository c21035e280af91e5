"""Workers that are ranks and that fail when a test says so: one adds wrongly, or has no memory left.

A worker adds wrongly, by the factor in the file, once ``wrong(pid)`` exists; it is short of memory from its
next pass on once ``short_stages.path(pid)`` exists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import short_stages


def wrong(pid: int) -> Path:
    return Path(os.environ[short_stages.FOLDER]) / f"{pid}.sums"


def install() -> None:
    """Into a process that is to become a worker."""
    import mlx.core as mx

    from fleetd.engine.layers.stage import Stage

    all_sum = mx.distributed.all_sum

    def summed(x: mx.array, **options: Any) -> mx.array:
        found = all_sum(x, **options)
        file = wrong(os.getpid())
        return found * float(file.read_text()) if file.exists() else found

    mx.distributed.all_sum = summed
    # In the middle of a pass: a rank computes its layers nowhere else.
    Stage.run = short_stages.scarce(Stage.run)  # type: ignore[method-assign]
