"""Rows of other machines' prompts that a helper still has, for the next turns of their conversations.

They are kept for the machine whose prompt it was, and for no other. They take only memory that nothing else
wants, and are the first to go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetd import limits
from fleetd.control.model_facts import KvBits
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.shared_prefill.frame_payloads import Place
from fleetd.plan.prefill.split import WarmRows


@dataclass(frozen=True, slots=True, eq=False)
class WarmCaches:
    """``rows``: what it is of; ``caches``: one of ``rows.tokens`` for each place that has a row per token.
    ``home``: the label of the machine whose prompt it was, which holds rows in ``kv_bits``."""

    home: str
    kv_bits: KvBits
    rows: WarmRows
    caches: Mapping[Place, Any]

    @property
    def key(self) -> tuple[str, KvBits, WarmRows]:
        """What it is found by: rows of the same prompt are another machine's if that one asked for them."""
        return self.home, self.kv_bits, self.rows

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for cache in self.caches.values() for array in kind_of(cache).arrays(cache))


@dataclass(slots=True)
class WarmStore:
    """Bounded by what ``trim`` is given, and by ``SHARE_WARM_PROMPTS``; least recently used goes first."""

    _kept: list[WarmCaches] = field(default_factory=list)

    def find(self, home: str, rows: WarmRows | None, kv_bits: KvBits = 0) -> WarmCaches | None:
        """What is kept under exactly these figures for this machine."""
        asked = (home, kv_bits, rows)
        found = next((one for one in self._kept if home and one.key == asked), None)
        if found is not None:
            self._kept.remove(found)
            self._kept.append(found)
        return found

    def keep(self, new: WarmCaches, most_bytes: int, instead_of: WarmCaches | None = None) -> bool:
        """Keep it, if it fits ``most_bytes`` at all; ``instead_of`` goes. False if it does not."""
        if not new.home or not new.caches or new.nbytes > most_bytes:
            return False
        self._kept = [one for one in self._kept if one is not instead_of and one.key != new.key]
        self._kept.append(new)
        del self._kept[: -limits.SHARE_WARM_PROMPTS]
        self.trim(most_bytes)
        return True

    def trim(self, most_bytes: int) -> None:
        """Drop the oldest until at most ``most_bytes`` remain."""
        while self._kept and self.nbytes > most_bytes:
            del self._kept[0]

    def forget(self, labels: Collection[str]) -> None:
        """Drop what is kept for the machines with these labels."""
        self._kept = [one for one in self._kept if one.home not in labels]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._kept)

    def __len__(self) -> int:
        return len(self._kept)
