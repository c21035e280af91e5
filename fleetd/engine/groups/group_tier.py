"""The disks of a group as one: each machine keeps the keys and values of its own layers, under names that the
worker that answers gives.

    own disk ─┐
    member ───┼─► the longest beginning that all have ─► each reads its part ─► one beginning
    member ───┘

If one machine has less of a prompt than the others, the others read no more than that. If one cannot read
what it has found, the prompt is computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.cache.index import FoundBlocks
from fleetd.cache.pricing import restore_s
from fleetd.cache.restoring import Restore, RestoreState
from fleetd.engine.groups.disk_there import KeptPart
from fleetd.engine.groups.flight import GroupStages
from fleetd.engine.groups.messages import KeptTold
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.disk_restore import Restoring
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import DENSE, NO_ORIGINS, Hit, Origins, PrefixCache
from fleetd.engine.sequence_state import rollback

_BLOCK = limits.CACHE_BLOCK_TOKENS


class LayersAlone:
    """Some layers of a model, for what a disk tier asks of one: caches, and what they hold after a token."""

    def __init__(self, stage: Stage, dtype: mx.Dtype) -> None:
        self._stage, self._dtype = stage, dtype

    def make_cache(self) -> list[Any]:
        """Caches of the layers that keep something."""
        return [cache for cache in self._stage.make_caches() if cache is not None]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Run them on hidden states of zeros."""
        hidden = mx.zeros((*tokens.shape, self._stage.width), self._dtype)
        out = self._stage.run(hidden, self._stage.spread(cache), self._stage.inputs(tokens, 0))
        mx.eval(out, [each.state for each in cache])
        return out


@dataclass
class GroupTier(DiskTier):
    """``model``: this machine's layers alone. ``members``: the other machines."""

    members: GroupStages = field(default_factory=GroupStages)

    def store_blocks(
        self,
        names: list[bytes],
        tokens: int,
        cache: list[Any],
        states: Mapping[int, list[Any]],
        origins: Origins = NO_ORIGINS,
    ) -> None:
        if not names or len(names) > limits.GROUP_KEPT_BLOCKS:
            return
        own = len(self.empty)
        super().store_blocks(
            names, tokens, cache[:own], {at: state[:own] for at, state in states.items()}, origins
        )
        for number, member in enumerate(self.members.stages, own):
            saved = {at: state[number] for at, state in states.items() if state[number] is not None}
            member.disk.store(cache[number], names, tokens, saved)

    def names_for_others(self, tokens: list[int], arithmetic: str = DENSE) -> list[bytes]:
        """None: other machines cannot ask for what is kept in parts."""
        return []

    def _restoring(
        self, tokens: list[int], prefix: PrefixCache, have: int, named: Sequence[tuple[str, list[bytes]]]
    ) -> Restoring:
        namespace, names = named[0]
        names = names[: limits.GROUP_KEPT_BLOCKS]
        parts = [member.disk.find(names) for member in self.members.stages] if names else []
        restore = self.look([(namespace, names)])
        return GroupRestoring(self, tokens, prefix, have, restore, parts)


class GroupRestoring(Restoring):
    """``parts``: the members', in the order of their layers. What is in memory is read again: it lies on all
    machines, and joining it to what comes would take one more copy on each."""

    def __init__(
        self,
        tier: GroupTier,
        tokens: list[int],
        prefix: PrefixCache,
        have: int,
        restore: Restore,
        parts: Sequence[KeptPart],
    ) -> None:
        super().__init__(tier, tokens, prefix, have, restore)
        self._group, self._parts = tier.members, parts
        self._until_s = time.monotonic() + limits.GROUP_LOOKUP_S

    @property
    def ready(self) -> bool:
        self._group.pass_on()
        if time.monotonic() >= self.due_s:
            return True
        if self._restore.state is RestoreState.DONE and not self.reads:
            return True
        waits = self._restore.state in (RestoreState.LOOKING, RestoreState.READING)
        return not waits and not any(part.waits for part in self._parts)

    @property
    def due_s(self) -> float:
        if self._restore.state in (RestoreState.LOOKING, RestoreState.READING):
            return min(self._restore.due_s, self._until_s)
        return self._until_s

    def _step(self) -> Hit | None:
        if not self.ready:
            return None
        overdue = time.monotonic() >= self.due_s
        if not overdue and not self.reads and self._restore.state is RestoreState.FOUND:
            if self._pays():
                self._read()
                return None
            overdue = True
        found = self._none() if overdue or not self.reads else self._hit()
        self.close()
        return found

    def close(self) -> None:
        super().close()
        for part, member in zip(self._parts, self._group.stages, strict=False):
            member.disk.leave(part)

    def _pays(self) -> bool:
        """True if all machines have something, and reading it is predicted to be sooner than computing it."""
        found = self._restore.found
        told = [part.found for part in self._parts if part.found is not None]
        blocks = longest_common(found, told)
        if blocks * _BLOCK <= self._have:
            return False
        self._first = 0
        sizes = [(found.nbytes + found.state_bytes, found.blocks, found.bytes_per_s)]
        sizes += [(each.nbytes, each.blocks, each.bytes_per_s) for each in told]
        slowest_s = max(restore_s(size * blocks // most, speed) for size, most, speed in sizes)
        self._restore.found = found.cut(blocks)
        return slowest_s < self._tier.cost.seconds(self._have, blocks * _BLOCK)

    def _read(self) -> None:
        self._until_s = time.monotonic() + limits.GROUP_STEP_S
        blocks = self._restore.found.blocks
        for part, member in zip(self._parts, self._group.stages, strict=True):
            member.disk.read(part, blocks, len(self._tokens))
        self._begin()

    def _hit(self) -> Hit:
        hit = super()._hit()
        if hit.cache is None:
            return hit
        rows = [part.rows for part in self._parts if part.rows is not None]
        held = [hit.tokens] * len(hit.cache) + [each.tokens for each in rows]
        hit.cache += rows
        # A block that one of them could not read is the end of what all have.
        tokens = min(held)
        longer = [(cache, has) for cache, has in zip(hit.cache, held, strict=True) if has > tokens]
        if tokens <= self._have or not rollback.can_go_back([cache for cache, _ in longer]):
            return self._none()
        for cache, has in longer:
            cache.trim(has - tokens)
        self.tokens = hit.tokens = tokens
        return hit


def longest_common(own: FoundBlocks, members: Sequence[KeptTold]) -> int:
    """The most blocks, from the first one on, after which the beginning may end on each machine; 0 if there
    is no such number."""
    most = min([own.blocks, *(each.blocks for each in members)])
    ends = [set(stops) for stops in (own.stops, *(each.stops for each in members)) if stops]
    if not ends:
        return most
    return max((blocks for blocks in set.intersection(*ends) if blocks <= most), default=0)
