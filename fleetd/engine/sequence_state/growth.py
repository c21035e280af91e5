"""Room that a ``KVCache`` gets for the tokens to come.

mlx-lm makes room in steps of ``KVCache.step`` tokens, and copies all rows that are there each time: a prompt
of n steps copies n²/2 of them. ``step`` is a detail of mlx-lm that only this module uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.cache import KVCache

from fleetd.engine.sequence_state.parts import all_parts

STEP = int(KVCache.step)


def in_steps(tokens: int) -> int:
    """The room that mlx-lm makes for ``tokens`` that come at once."""
    return -(-max(tokens, 1) // STEP) * STEP


@contextmanager
def at_once(cache: list[Any], tokens: int) -> Iterator[None]:
    """Meanwhile, a ``KVCache`` that must grow gets room for ``tokens`` more at once; afterwards it grows by a
    step again.

    A model's call makes the room while it is built, so this need not last until it is evaluated.
    """
    growing = [part for part in all_parts(cache) if isinstance(part, KVCache)]
    for part in growing:
        part.step = in_steps(tokens)
    try:
        yield
    finally:
        for part in growing:
            del part.step
