"""Contexts that were not computed, or not all of them: what they say means nothing.

``made_up`` is for measuring what a chunk takes behind a context, ``repeat_rows`` for comparing what is
computed behind one in two ways, which needs rows that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts, arrays, sizes
from fleetd.engine.sequence_state.rings import ring


def made_up(like: Sequence[Any], context: int, more: int, most_bytes: int) -> list[Any] | None:
    """Caches behind ``context`` tokens, with room for ``more``: to grow is to copy all rows, which prompts
    pay for once, and this one would seem to pay every time.

    Args:
        like: a model's caches, each with a token or more.

    None if a cache is of no known kind or empty, if none has a row per token, or if all are too large.
    """
    rows = [part for part in all_parts(like) if kind_of(part).plain]
    if not rows or not all(map(_can_follow, all_parts(like))) or sizes(like).of(context + more) > most_bytes:
        return None
    caches = [copy_on_write(layer) for layer in like]
    for part in all_parts(caches):
        kind = kind_of(part)
        if kind.plain:
            kind.fill(part, *_ones(part, context + more), context)
        elif (window := kind.window(part)) is not None:
            held = min(window, context)
            vars(part).update(vars(ring(part, *_ones(part, held), context, held)))
        # A running state is as large behind any context.
    mx.eval(arrays(caches))
    return caches


def _can_follow(part: Any) -> bool:
    kind = kind_of(part)
    if kind.needs_mark(part):
        return True
    return (kind.plain or kind.window(part) is not None) and part.keys is not None


def _ones(part: Any, tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.ones((1, rows.shape[1], tokens, rows.shape[3]), rows.dtype) for rows in part.keys_and_values()
    )
    return keys, values


def can_repeat(caches: Sequence[Any]) -> bool:
    """True if ``repeat_rows`` can extend such caches."""
    return all(kind_of(part).repeats(part) for part in all_parts(caches))


def repeat_rows(caches: Sequence[Any], context: int, most_bytes: int) -> bool:
    """Extend caches of a prompt, which ``can_repeat``, to ``context`` tokens, in place: by
    ``StateKind.repeat``.

    False, and nothing is changed, if what is on this machine would be larger than ``most_bytes``.
    """
    parts = all_parts(caches)
    if sizes(parts).of(context) > most_bytes:
        return False
    for seed, part in enumerate(parts):
        kind_of(part).repeat(part, context, seed)
    return True
