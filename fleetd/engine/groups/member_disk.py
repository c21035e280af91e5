"""A member's part of kept prompts, on its own disk: the keys and values of its layers.

    FindKept ─► looked for ─► KeptTold ─► ReadKept ─► read ─► KeptTold
                                   └────► LeaveKept

A member never sees a prompt's tokens: the worker that answers names the blocks. What they are called on this
disk rests on that name, on these layers, on how this machine computes and on the machine that asks: what one
machine had written is never read for another, which would have to believe it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.cache.restoring import Restore, RestoreState
from fleetd.engine.groups.messages import FindKept, Kept, KeptTold, LeaveKept, ReadKept, StoreKept
from fleetd.engine.prefixes.disk_restore import Arrival
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import DENSE, NO_ORIGINS, Origins
from fleetd.engine.sequence_state.copies import copy_on_write

_BLOCK = limits.CACHE_BLOCK_TOKENS


@dataclass(frozen=True)
class PartDisk:
    """``tier``: of these layers. ``basis``: what decides the bytes of their rows besides what the worker that
    answers calls a block, and whose they are. ``origins``: the label of the machine that asks: what it had
    written is thrown away with all else that came from it."""

    tier: DiskTier
    basis: bytes
    origins: Origins = NO_ORIGINS

    def names(self, names: Sequence[bytes]) -> list[bytes]:
        """What blocks of these names are called here."""
        return [hashlib.sha256(b"fleetd part 1" + self.basis + name).digest() for name in names]


@dataclass(slots=True)
class _Lookup:
    """What the machine that answers asks. ``told``: it has heard what was found."""

    restore: Restore
    told: bool = False
    arrival: Arrival | None = None
    new: int = 0


class MemberDisk:
    """``keep``: takes caches that were read, under their new number. ``most_bytes``: of one prompt's."""

    def __init__(
        self, disk: PartDisk | None, keep: Callable[[int, list[Any]], None], most_bytes: int
    ) -> None:
        self._disk, self._keep, self._most_bytes = disk, keep, most_bytes
        self._questions: dict[int, _Lookup] = {}
        # What cannot be answered from a disk.
        self._told: list[KeptTold] = []

    # ---- what is asked ---------------------------------------------------------------------------------

    def change(
        self,
        change: Kept,
        held: Callable[[int], list[Any]],
        noted: Callable[[int], list[Any]],
    ) -> None:
        """``held``, ``noted``: the caches, and the saved states, of a number; they raise ProtocolError."""
        match change:
            case FindKept(kept, names):
                self._find(kept, names)
            case ReadKept(kept, new, blocks, room):
                self._read(kept, new, blocks, room)
            case LeaveKept(kept):
                self._leave(kept)
            case StoreKept(number, tokens, names, states):
                self._store(held(number), tokens, names, {at: noted(state) for at, state in states})

    def _find(self, kept: int, names: list[bytes]) -> None:
        if self._disk is None or kept in self._questions or len(self._questions) >= limits.GROUP_STREAMS:
            self._told.append(KeptTold(kept))
            return
        tier = self._disk.tier
        self._questions[kept] = _Lookup(tier.look([(DENSE, self._disk.names(names))]))

    def _read(self, kept: int, new: int, blocks: int, room: int) -> None:
        question = self._questions.get(kept)
        if question is None or self._disk is None or not question.told or question.arrival is not None:
            self._told.append(KeptTold(kept))
            return
        tier = self._disk.tier
        row_bytes = tier.layout().header(0).nbytes // _BLOCK
        if not 0 < blocks <= question.restore.found.blocks or room * row_bytes > self._most_bytes:
            self._leave(kept)
            self._told.append(KeptTold(kept))
            return
        found = question.restore.found = question.restore.found.cut(blocks)
        worth = tier.worth(blocks * _BLOCK, found.nbytes + found.state_bytes)
        question.new = new
        question.arrival = Arrival(tier, question.restore, max(room, blocks * _BLOCK), worth=worth)

    def _leave(self, kept: int) -> None:
        question = self._questions.pop(kept, None)
        if question is not None and self._disk is not None:
            self._disk.tier.reader.give_up(question.restore)

    def _store(
        self, caches: list[Any], tokens: int, names: list[bytes], states: Mapping[int, list[Any]]
    ) -> None:
        if self._disk is None:
            return
        # What is held under this number may be added to.
        caches = [copy_on_write(cache) for cache in caches]
        mx.eval([cache.state for cache in caches])
        tier = self._disk.tier
        tier.store_blocks(self._disk.names(names), tokens, caches, states, self._disk.origins)

    # ---- what is told ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if ``step`` tells something."""
        return bool(self._told) or any(_has_come(each) for each in self._questions.values())

    @property
    def due_s(self) -> float | None:
        """When it is told that nothing is there, even if the disk hangs."""
        waiting = [each.restore.due_s for each in self._questions.values() if not _waits_for_them(each)]
        return min(waiting, default=None)

    def step(self) -> list[KeptTold]:
        """What is known now, and was not told."""
        told, self._told = self._told, []
        for kept, question in list(self._questions.items()):
            if _has_come(question):
                told.append(self._answer(kept, question))
        return told

    def _answer(self, kept: int, question: _Lookup) -> KeptTold:
        restore = question.restore
        if question.arrival is None:
            found = restore.found if restore.state is RestoreState.FOUND else None
            if found is None or not found.blocks:
                self._leave(kept)
                return KeptTold(kept)
            question.told = True
            n_bytes = found.nbytes + found.state_bytes
            return KeptTold(kept, found.blocks, found.stops, n_bytes, found.bytes_per_s)
        arrival = question.arrival
        self._leave(kept)
        if arrival.blocks:
            self._keep(question.new, arrival.caches())
        return KeptTold(kept, arrival.blocks)

    def close(self) -> None:
        for kept in list(self._questions):
            self._leave(kept)


def _waits_for_them(question: _Lookup) -> bool:
    return question.told and question.arrival is None


def _has_come(question: _Lookup) -> bool:
    if _waits_for_them(question):
        return False
    if time.monotonic() >= question.restore.due_s:
        return True
    if question.arrival is None:
        return question.restore.state in (RestoreState.FOUND, RestoreState.DONE)
    return question.restore.state is RestoreState.DONE
