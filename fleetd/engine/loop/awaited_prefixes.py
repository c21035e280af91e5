"""Prompts that begin alike, at the same time: the beginning is computed once.

A prompt waits where another one, its leader, computes its beginning (the choices of one request, subagents
with the same instructions, a request that its client repeats), and goes on from a copy of the leader's KV.
Waiting costs it nothing: one chunk is computed at a time anyway, and the leader takes the turns of the
shortest prompt that waits for it. If the leader ends early, the first that waited goes on from what is
computed, and the others follow that one. The leader's own numbers and chunks do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.failures import require
from fleetd.engine.loop.phases import Phase
from fleetd.engine.loop.sequence import AwaitedPrefix, ScheduledSequence
from fleetd.engine.prefixes.prefix_cache import DENSE, SPARSE, Hit, PrefixCache
from fleetd.engine.sequence_state.rollback import can_go_back, prefix_copy


class AwaitedPrefixes:
    """A prompt follows only such as were admitted before it, so none can wait for itself.

    ``prefilling``: the scheduler's own list, in the order of admission; it changes as the scheduler works.
    """

    def __init__(self, prefilling: list[ScheduledSequence], prefix: PrefixCache, model: Any) -> None:
        self._prefilling = prefilling
        self._prefix = prefix
        self._model = model

    def covers(self, sequence: ScheduledSequence) -> bool:
        """True for a new prompt whose leader computes so much of it that helpers are not worth asking."""
        awaited = self._leader(sequence)
        return awaited is not None and sequence.slots - 1 - awaited.tokens < limits.SHARE_LEAST_TOKENS

    def follow(self, sequence: ScheduledSequence) -> bool:
        """Let a prompt that has not begun wait for its leader, or begin at once from what that has. False if
        it has none, or the prefix cache has as much."""
        awaited = self._leader(sequence)
        cached = sequence.longest_in(self._prefix)
        if awaited is None or awaited.tokens - cached < limits.FOLLOW_LEAST_TOKENS:
            return False
        sequence.prefill_interleaved = True
        if awaited.leader.computed >= awaited.tokens:
            return self._copied(sequence, awaited, awaited.tokens)
        sequence.move(Phase.FOLLOWING, awaited=awaited)
        return True

    def leads(self, sequence: ScheduledSequence) -> bool:
        """True if another prompt waits for this one."""
        return bool(self._waiting_for(sequence))

    def left(self, sequence: ScheduledSequence) -> int:
        """Tokens to compute until this prompt, or the shortest of those that wait for it, is read."""
        return self._shortest(sequence) - (sequence.slots - sequence.left)

    def before_step(self, leader: ScheduledSequence, chunk: int) -> None:
        """Copies for those that would be passed by the next chunk, where the cache cannot go back to them."""
        end = min(leader.computed + chunk, leader.slots - 1)
        for sequence, awaited in self._waiting_for(leader):
            if end > awaited.tokens and leader.shared is None and not can_go_back(_cache(leader)):
                self._go_on(sequence, awaited, leader.computed)

    def after_step(self, leader: ScheduledSequence) -> None:
        """Copies for those whose beginning is computed."""
        for sequence, awaited in self._waiting_for(leader):
            if leader.namespace != DENSE:
                sequence.move(Phase.READING)  # another accelerator had a part in it
            elif leader.computed >= awaited.tokens:
                self._go_on(sequence, awaited, awaited.tokens)

    def end(self, leader: ScheduledSequence, *, intact: bool) -> None:
        """The leader's prefill ends before its time. ``intact``: what it computed is right."""
        intact = intact and leader.namespace == DENSE
        for number, (sequence, awaited) in enumerate(self._waiting_for(leader)):
            if intact and number == 0 and self._copied(sequence, awaited, leader.computed):
                continue
            if not self.follow(sequence):
                sequence.move(Phase.READING)

    def validate(self) -> None:
        """Check that each leader is still there."""
        for sequence in self._prefilling:
            led = sequence.awaited is None or sequence.awaited.leader in self._prefilling
            require(led, f"{sequence.id} waits for a prompt that is gone")

    def _leader(self, sequence: ScheduledSequence) -> AwaitedPrefix | None:
        """The earlier prompt that computes the longest beginning of this one; None if none is long."""
        best: AwaitedPrefix | None = None
        least = limits.FOLLOW_LEAST_TOKENS
        for other in itertools.takewhile(lambda other: other is not sequence, self._prefilling):
            if sequence.scores_prompt or other.scores_prompt or other.namespace != DENSE:
                continue
            common = _common(other.slot_tokens, sequence.slot_tokens)
            tokens = min(common, sequence.slots - 1, other.slots - 1)
            # What helpers compute is complete at the end only.
            helped = other.phase is Phase.OFFERED or other.shared is not None
            whole = not helped or other.slots - 1 - tokens < limits.SHARE_LEAST_TOKENS
            if whole and tokens >= least:
                best, least = AwaitedPrefix(other, tokens), tokens + 1
        return best

    def _go_on(self, sequence: ScheduledSequence, awaited: AwaitedPrefix, tokens: int) -> None:
        """Read a prompt that has waited, from a copy of its leader's KV if that can be made."""
        if not self._copied(sequence, awaited, tokens):
            sequence.move(Phase.READING)

    def _copied(self, sequence: ScheduledSequence, awaited: AwaitedPrefix, tokens: int) -> bool:
        """Begin a prompt from a copy of its leader's KV. False if that cannot be made.

        Args:
            tokens: so many if the two have so many in common.
        """
        if awaited.leader.prefiller is None or not tokens:
            return False
        # A leader that begins with a longer hit in the prefix cache is past the end of what they share.
        tokens = min(tokens, awaited.tokens)
        try:
            cache = prefix_copy(_cache(awaited.leader), tokens, awaited.leader.computed)
            if cache is None:
                return False
            mx.eval([layer.state for layer in cache])
        except Exception:
            # The leader must not fail of it; if memory is short, the prompt's own prefill will say so.
            return False
        namespace, origins = DENSE if sequence.kept is None else SPARSE, awaited.leader.origins
        hit = Hit(tokens, cache, namespace, origins=origins)
        sequence.begin_from(self._model, hit, self._prefix.state_bytes)
        return True

    def _waiting_for(self, leader: ScheduledSequence) -> list[tuple[ScheduledSequence, AwaitedPrefix]]:
        return [(s, s.awaited) for s in self._prefilling if s.awaited and s.awaited.leader is leader]

    def _shortest(self, sequence: ScheduledSequence) -> int:
        return min([sequence.slots, *(self._shortest(waiting) for waiting, _ in self._waiting_for(sequence))])


def _cache(sequence: ScheduledSequence) -> list[Any]:
    return [] if sequence.prefiller is None else sequence.prefiller.cache


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared quickly
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
