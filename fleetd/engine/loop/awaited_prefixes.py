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
from fleetd.engine.loop.sequence import AwaitedPrefix, ScheduledSequence
from fleetd.engine.prefixes.prefix_cache import DENSE, SPARSE, Hit, PrefixCache
from fleetd.engine.sequence_state.rollback import can_go_back, prefix_copy
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill


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

    def admitted(self, sequence: ScheduledSequence) -> None:
        """Let a prompt that has not begun wait for its leader, or begin at once from what that has. Nothing
        happens where it has none, or the prefix cache has as much."""
        awaited = self._leader(sequence)
        if awaited is None or awaited.tokens - self._cached(sequence) < limits.FOLLOW_LEAST_TOKENS:
            return
        sequence.awaited, sequence.prefill_interleaved = awaited, True
        if awaited.leader.computed >= awaited.tokens:
            self._take(sequence, awaited.tokens)

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
            if end > awaited.tokens and not _with_help(leader) and not can_go_back(_cache(leader)):
                self._take(sequence, leader.computed)

    def after_step(self, leader: ScheduledSequence) -> None:
        """Copies for those whose beginning is computed."""
        for sequence, awaited in self._waiting_for(leader):
            if leader.namespace != DENSE:
                sequence.awaited = None  # another accelerator had a part in it
            elif leader.computed >= awaited.tokens:
                self._take(sequence, awaited.tokens)

    def ended(self, leader: ScheduledSequence, *, intact: bool) -> None:
        """The leader's prefill ends before its time. ``intact``: what it computed is right."""
        followers = [sequence for sequence, _ in self._waiting_for(leader)]
        if followers and intact and leader.computed and leader.namespace == DENSE:
            self._take(followers[0], leader.computed)
        for sequence in followers:
            sequence.awaited = None
            if sequence.prefiller is None:
                self.admitted(sequence)

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
            if _scored(sequence) or _scored(other) or other.namespace != DENSE:
                continue
            common = _common(other.slot_tokens, sequence.slot_tokens)
            tokens = min(common, sequence.slots - 1, other.slots - 1)
            # What helpers compute is complete at the end only.
            whole = not _with_help(other) or other.slots - 1 - tokens < limits.SHARE_LEAST_TOKENS
            if whole and tokens >= least:
                best, least = AwaitedPrefix(other, tokens), tokens + 1
        return best

    def _cached(self, sequence: ScheduledSequence) -> int:
        """Tokens of a prompt that the prefix cache has."""
        return sequence.longest_in(self._prefix)

    def _take(self, sequence: ScheduledSequence, tokens: int) -> None:
        """Begin a prompt from a copy of its leader's KV; without it where that cannot be made.

        Args:
            tokens: so many if the two have so many in common.
        """
        awaited, sequence.awaited = sequence.awaited, None
        if awaited is None or awaited.leader.prefiller is None or not tokens:
            return
        # A leader that begins with a longer hit in the prefix cache is past the end of what they share.
        tokens = min(tokens, awaited.tokens)
        try:
            cache = prefix_copy(_cache(awaited.leader), tokens, awaited.leader.computed)
            if cache is None:
                return
            mx.eval([layer.state for layer in cache])
        except Exception:
            # The leader must not fail of it; if memory is short, the prompt's own prefill will say so.
            return
        namespace, origins = DENSE if sequence.kept is None else SPARSE, awaited.leader.origins
        hit = Hit(tokens, cache, namespace, origins=origins)
        sequence.begin_from(self._model, hit, self._prefix.state_bytes)

    def _waiting_for(self, leader: ScheduledSequence) -> list[tuple[ScheduledSequence, AwaitedPrefix]]:
        return [(s, s.awaited) for s in self._prefilling if s.awaited and s.awaited.leader is leader]

    def _shortest(self, sequence: ScheduledSequence) -> int:
        return min([sequence.slots, *(self._shortest(waiting) for waiting, _ in self._waiting_for(sequence))])


def _scored(sequence: ScheduledSequence) -> bool:
    """True for a prompt whose own probabilities are wanted: it computes all of its tokens."""
    return sequence.prepared.request.echo and sequence.logprobs is not None


def _with_help(sequence: ScheduledSequence) -> bool:
    return sequence.undecided is not None or isinstance(sequence.prefiller, SharedPrefill)


def _cache(sequence: ScheduledSequence) -> list[Any]:
    return [] if sequence.prefiller is None else sequence.prefiller.cache


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared quickly
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
