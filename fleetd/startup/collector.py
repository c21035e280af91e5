"""The garbage collector leaves alone what the imports of a process make, which lives as long as the process.

They make a hundred thousand objects. The collector would go through them again and again while more are made,
which is an eighth of a daemon's start, and later at every full collection, while nothing else runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_for_imports() -> Iterator[None]:
    """Nothing is collected meanwhile; what exists at the end is never looked at again: make no arrays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
