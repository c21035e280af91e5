"""The tokens of a shared prefill, by slot: the row that each of them has in every cache.

    whole prompt      slot 0 1 2 3 4 …    at position 0 1 2 3 4 …
    a part is kept    slot 0 1 2 3 4 …    at position 0 1 2 7 9 …

Splits, frames and caches count slots only. Positions ride beside the ids, and matter to nothing but RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split

_INT32 = "<i4"


class Slots(msgspec.Struct, frozen=True):
    """``ids`` int32 (T,); ``positions`` too, ascending, or None if each slot is its position."""

    ids: Any
    positions: Any = None

    @classmethod
    def of(cls, tokens: Sequence[int], kept: Sequence[int] | None = None) -> Slots:
        """A prompt's slots, without its last token. ``kept``: indices of the tokens that are computed."""
        ids = np.array(tokens[:-1], dtype=_INT32)
        if kept is None:
            return cls(ids)
        positions = np.array(kept[:-1], dtype=_INT32)
        return cls(ids[positions], positions)

    @classmethod
    def arrived(cls, payload: memoryview, split: Split) -> Slots:
        """The slots in another machine's ``payload``. Raises ProtocolError for positions that cannot be."""
        numbers = np.frombuffer(payload, dtype=_INT32)
        if not split.prompt_span:
            return cls(numbers)
        ids, positions = np.ascontiguousarray(numbers.reshape(-1, 2).T)
        ascending = bool((positions[1:] > positions[:-1]).all())
        if not ascending or positions[0] < 0 or positions[-1] >= split.prompt_span:
            raise ProtocolError(
                "On home came positions that do not ascend, "
                f"or not within the prompt of {split.prompt_span} tokens."
            )
        # Cached rows are those of a whole prompt.
        if split.cached and positions[split.cached - 1] != split.cached - 1:
            raise ProtocolError(f"On home came {split.cached} cached tokens between which some are left out.")
        return cls(ids, positions)

    @property
    def payload(self) -> Any:
        """What other machines are sent, int32 (T,) or (T, 2): ids, each with its position if it has one."""
        return self.ids if self.positions is None else np.stack([self.ids, self.positions], axis=1)

    def tokens(self, slots: range) -> mx.array:
        """(1, T) of the ids."""
        return mx.array(self.ids[slots.start : slots.stop])[None]

    def where(self, slots: range) -> list[int] | None:
        """The positions of ``slots``; None if each slot is its position."""
        if self.positions is None:
            return None
        found: list[int] = self.positions[slots.start : slots.stop].tolist()
        return found
