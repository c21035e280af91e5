"""What an admitted prompt begins with, from where it was stored: this machine's disk, then another machine.

    begin ─► restoring (DiskTier) ─► KvMissing ─► fetching (PeerFetch) ─► KvFetched
                  └── nothing to read, or no disk ──┘      └── nothing to fetch: the prompt goes on

What was found is the sequence's ``hit``, from which its prefill goes on. Memory comes first: the prefix cache
is asked for how much it has before either.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetd import limits
from fleetd.engine.loop.sequence import ScheduledSequence
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.peer_fetch import PeerFetch
from fleetd.engine.prefixes.prefix_cache import DENSE, PLAN, PrefixCache
from fleetd.engine.protocol import BLOCKS, KvStored, Report
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.streams.handed_over import HandedOverStreams


@dataclass(kw_only=True)
class StoredBeginnings:
    """``disk``: None if prompts are kept in memory only; then nothing is fetched either.

    ``chunk_tokens``: how many tokens a turn may compute now. ``wake``: called on any thread when there is
    something to do.
    """

    disk: DiskTier | None
    prefix: PrefixCache
    budget: KvBudget
    sharable: Sharable | None
    streams: HandedOverStreams
    emit: Callable[[Report], None]
    chunk_tokens: Callable[[], int]
    wake: Callable[[], None]
    # Of the checks of what came: each is a bounded piece of work.
    steps: int = field(default=0, init=False)

    def begin(self, sequence: ScheduledSequence) -> bool:
        """Look for an admitted prompt's beginning. False if it is waited for nowhere."""
        request = sequence.prepared.request
        if self.disk is None or (request.echo and sequence.logprobs is not None):
            return False
        if sequence.sparse_in(self.prefix):
            return False
        arithmetics = (DENSE, PLAN) if self._offered(sequence) else (DENSE,)
        sequence.restoring = self.disk.begin(
            sequence.dense_tokens, self.prefix, arithmetics, local_only=request.local_only
        )
        if sequence.restoring is None:
            self._ask_others(sequence)
        return _waits(sequence)

    def poll(self, sequence: ScheduledSequence) -> bool:
        """Take what has come. True in the turn after which nothing more of it is waited for."""
        waited = _waits(sequence)
        self._restore(sequence)
        self._fetch(sequence)
        return waited and not _waits(sequence)

    def end(self, sequence: ScheduledSequence) -> None:
        """The sequence ends: wait for nothing more of it."""
        if sequence.restoring is not None:
            sequence.restoring.close()
            sequence.restoring = None
        self._end_fetch(sequence)

    def report_kept(self, sequence: ScheduledSequence) -> None:
        """Tell the daemon which blocks a prompt fills, if it wants that: other machines may ask for them,
        unless it began with what came from one."""
        request = sequence.prepared.request
        if self.disk is not None and request.tells_blocks and not request.local_only:
            names = self.disk.names_for_others(sequence.prepared.tokens[:-1])
            self.emit(KvStored(sequence.id, names[: limits.FETCH_BLOCKS], own=not sequence.origins))

    def _offered(self, sequence: ScheduledSequence) -> bool:
        """True if a prompt may have other accelerators' numbers in it: how it is labelled is not decided."""
        whole = sequence.kept is None and self.sharable is not None
        return whole and sequence.prepared.request.shared and not sequence.accepted

    def _restore(self, sequence: ScheduledSequence) -> None:
        """Take what has come from the disk, and go on once nothing more comes."""
        restoring = sequence.restoring
        if restoring is None or (hit := restoring.step()) is None:
            return
        sequence.restoring = None
        # Also where nothing was found: that time is spent, too.
        sequence.restore_s = restoring.seconds
        if hit.tokens:
            sequence.hit = hit
            sequence.restored = restoring.tokens
        self._ask_others(sequence)

    def _ask_others(self, sequence: ScheduledSequence) -> None:
        """Ask what other machines have of what is neither in memory nor on the disk."""
        request, tokens = sequence.prepared.request, sequence.dense_tokens
        if self.disk is None or not request.fetches or request.local_only:
            return
        have = sequence.hit.tokens if sequence.hit is not None else self.prefix.longest(tokens, DENSE)
        fetching = PeerFetch(
            self.disk,
            sequence.id,
            tokens,
            have,
            lambda: sequence.hit or self.prefix.fetch(tokens, DENSE),
            plan=self._offered(sequence),
            exact=self.sharable is not None and self.sharable.any_chunks,
            chunk=self.chunk_tokens,
            room=lambda more: self.budget.take(sequence.id, sequence.promised + more),
            wake=self.wake,
            draw=random.Random(),  # noqa: S311 — which tokens are checked; no sender can foresee it
        )
        if fetching.worth_asking and (question := fetching.question()) is not None:
            sequence.fetching = fetching
            self.emit(question)

    def _fetch(self, sequence: ScheduledSequence) -> None:
        """Take what has come from another machine, and go on once nothing more comes."""
        fetching = sequence.fetching
        if fetching is None:
            return
        if (stream := self.streams.take(sequence.id, BLOCKS)) is not None:
            fetching.take(*stream)
        if not fetching.ready:
            return
        ended = fetching.step()
        self.steps += fetching.checks
        if not ended:
            return
        self._end_fetch(sequence)
        if fetching.hit is not None:
            sequence.hit = fetching.hit
            sequence.fetched = fetching.tokens
        if fetching.front is not None:
            sequence.front_s = fetching.front.seconds
        sequence.fetch_s = fetching.elapsed_s - sequence.front_s

    def _end_fetch(self, sequence: ScheduledSequence) -> None:
        if (fetching := sequence.fetching) is not None:
            sequence.fetching = None
            fetching.close()
            self.budget.take(sequence.id, sequence.promised)
            if (report := fetching.report()) is not None:
                self.emit(report)


def _waits(sequence: ScheduledSequence) -> bool:
    return sequence.restoring is not None or sequence.fetching is not None
