"""Where an admitted prompt's prefill begins: the order of the sources, from the nearest to the farthest.

    memory ─ another prompt that is being read ─ this machine's disk ─ another machine ─ helpers

Memory is asked how much it has before each of the others, and has the last word: a prompt for which nothing
was found elsewhere begins with what is in memory when its first turn comes. What was found is the sequence's
``hit``, and its ``beginning`` says what that took. ``phases`` has the rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.answer.logprobs import PromptLogprobs
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.loop.awaited_prefixes import AwaitedPrefixes
from fleetd.engine.loop.phases import Phase
from fleetd.engine.loop.sequence import ScheduledSequence
from fleetd.engine.loop.shared_prompts import SharedPrompts
from fleetd.engine.measure.chunk_size import Chunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.disk_restore import Restoring
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.peer_fetch import PeerFetch
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT, PrefixCache
from fleetd.engine.protocol import (
    BLOCKS,
    Accepted,
    FetchBlocks,
    KvStored,
    PrefillAlone,
    PrefillWithHelpers,
    Report,
)
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import SparsePrefiller
from fleetd.engine.streams.handed_over import HandedOverStreams


@dataclass(kw_only=True, eq=False)
class Beginnings:
    """See the module.

    ``leaders`` and ``helpers`` are two of the sources, which the scheduler asks for more than beginnings.
    """

    model: Any
    prefilling: list[ScheduledSequence]  # the scheduler's own list, in the order of admission
    prefix: PrefixCache
    disk: DiskTier | None  # None: prompts are kept in memory only, and nothing is fetched
    sharable: Sharable | None  # None: no other machine can help
    budget: KvBudget
    streams: HandedOverStreams
    emit: Callable[[Report], None]
    chunks: Chunks
    chunk_tokens: Callable[[], int]  # how many tokens a turn may compute now
    wake: Callable[[], None]  # called on any thread when there is something to do
    # Checks of what came: each is a bounded piece of work.
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.leaders = AwaitedPrefixes(self.prefilling, self.prefix, self.model)
        self.helpers = SharedPrompts(
            self.model, self.sharable, self.chunks, self.prefix, self.streams, self.emit
        )
        # By the phase in which a prompt waits for it. A source says whether the prompt waits, or has begun.
        self._sources: dict[Phase, Callable[[ScheduledSequence], bool]] = {
            Phase.FOLLOWING: self._follow,
            Phase.RESTORING: self._restore,
            Phase.FETCHING: self._fetch,
            Phase.OFFERED: self._offer,
        }

    def look(self, sequence: ScheduledSequence) -> None:
        """Go to the first source, of those that were not tried, that may have more of an admitted prompt than
        memory; to its prefill after the last."""
        for phase, source in self._sources.items():
            if phase > sequence.phase and source(sequence):
                return
        sequence.known = 0 if sequence.scores_prompt else sequence.longest_in(self.prefix)
        sequence.move(Phase.READING)

    def poll(self, sequence: ScheduledSequence) -> None:
        """Take what has come for a prompt, and go on once nothing more is waited for."""
        if sequence.restoring is not None and self._restored(sequence, sequence.restoring):
            self.look(sequence)
        if sequence.fetching is not None and self._fetched(sequence, sequence.fetching):
            self.look(sequence)
        self.helpers.poll(sequence)

    def due_s(self, sequence: ScheduledSequence) -> float | None:
        """When its wait ends even if nothing arrives, in monotonic seconds; None while it does not wait."""
        coming = sequence.restoring or sequence.fetching
        return self.helpers.due_s(sequence) if coming is None else coming.due_s

    def decide(self, request_id: str, decision: FetchBlocks | PrefillWithHelpers | PrefillAlone) -> None:
        """The daemon says what other machines do for a prompt."""
        sequence = next((each for each in self.prefilling if each.id == request_id), None)
        match decision:
            case FetchBlocks():
                if sequence is not None and sequence.fetching is not None:
                    sequence.fetching.decide(decision)
            case _ if sequence is None:
                self.streams.drop(request_id)
            case PrefillWithHelpers():
                self.helpers.share(sequence, decision)
            case PrefillAlone(_, reason):
                self.helpers.alone(sequence, reason)

    def accept(self, sequence: ScheduledSequence) -> None:
        """Report that a prompt is computed here, without helpers."""
        sequence.accepted = True
        self.emit(
            Accepted(
                sequence.id,
                len(sequence.prepared.tokens),
                kept=len(sequence.kept or ()),
                dense_reason=sequence.dense_reason,
                tools_by_grammar=sequence.prepared.tools_by_grammar,
            )
        )

    def start(self, sequence: ScheduledSequence) -> Prefiller | SparsePrefiller:
        """Begin a prompt's prefill on this machine alone, from what was found or is in memory."""
        tokens = sequence.prepared.tokens
        if sequence.scores_prompt and sequence.logprobs is not None:
            sequence.scored = PromptLogprobs(sequence.logprobs, tokens)
            cache = make_prompt_cache(self.model)
            scored = Prefiller(self.model, tokens, cache, score=sequence.scored.add)
            sequence.move(Phase.READING, prefiller=scored)
            return scored
        hit = sequence.hit or sequence.found_in(self.prefix)
        return sequence.begin_from(self.model, hit, self.prefix.state_bytes)

    def end(self, sequence: ScheduledSequence, *, intact: bool) -> None:
        """A prompt ends before its prefill does. ``intact``: what was computed of it is right."""
        if sequence.restoring is not None:
            sequence.restoring.close()
        if sequence.fetching is not None:
            self._close(sequence, sequence.fetching)
        self.leaders.end(sequence, intact=intact)
        self.helpers.end(sequence)

    def report_kept(self, sequence: ScheduledSequence) -> None:
        """Tell the daemon which blocks a prompt fills, if it wants that: other machines may ask for them,
        unless it began with what came from one."""
        request = sequence.prepared.request
        told = request.tells_blocks and not request.local_only and sequence.prepared.images is None
        if self.disk is not None and told:
            names = self.disk.names_for_others(sequence.prepared.tokens[:-1])
            self.emit(KvStored(sequence.id, names[: limits.FETCH_BLOCKS], own=not sequence.origins))

    # ---- the sources -----------------------------------------------------------------------------------

    def _follow(self, sequence: ScheduledSequence) -> bool:
        # Helpers are worth asking unless nearly all of the prompt is being read.
        if not sequence.accepted:
            if not self.leaders.covers(sequence):
                return False
            self.accept(sequence)
        return self.leaders.follow(sequence)

    def _restore(self, sequence: ScheduledSequence) -> bool:
        if self.disk is None or not self._takes_blocks(sequence):
            return False
        local_only = sequence.prepared.request.local_only
        arithmetics = (DENSE, EQUIVALENT) if self._takes_equivalent(sequence) else (DENSE,)
        restoring = self.disk.begin(sequence.dense_tokens, self.prefix, arithmetics, local_only=local_only)
        if restoring is not None:
            sequence.move(Phase.RESTORING, restoring=restoring)
        return restoring is not None

    def _fetch(self, sequence: ScheduledSequence) -> bool:
        """Ask what other machines have of what is neither in memory nor on the disk."""
        request, tokens = sequence.prepared.request, sequence.dense_tokens
        asks = request.fetches and not request.local_only and self._takes_blocks(sequence)
        # What is checked of other machines' blocks is computed from tokens alone.
        asks = asks and sequence.prepared.images is None
        if self.disk is None or not asks:
            return False
        fetching = PeerFetch(
            self.disk,
            sequence.id,
            tokens,
            sequence.hit.tokens if sequence.hit is not None else self.prefix.longest(tokens, DENSE),
            lambda: sequence.hit or self.prefix.fetch(tokens, DENSE),
            equivalent=self._takes_equivalent(sequence),
            exact=self.sharable is not None and self.sharable.any_chunks,
            chunk=self.chunk_tokens,
            room=lambda more: self.budget.take_memory(
                sequence.id, sequence.promised + more, sequence.beside_bytes
            ),
            wake=self.wake,
            draw=random.Random(),  # noqa: S311 — which tokens are checked; no sender can foresee it
        )
        if not fetching.worth_asking or (question := fetching.question()) is None:
            return False
        sequence.move(Phase.FETCHING, fetching=fetching)
        self.emit(question)
        return True

    def _offer(self, sequence: ScheduledSequence) -> bool:
        if sequence.accepted:
            return False
        if self.helpers.offer(sequence):
            return True
        self.accept(sequence)
        return sequence.hit is None and self.leaders.follow(sequence)

    def _takes_blocks(self, sequence: ScheduledSequence) -> bool:
        return not sequence.scores_prompt and not sequence.sparse_in(self.prefix)

    def _takes_equivalent(self, sequence: ScheduledSequence) -> bool:
        """True if a prompt may have other accelerators' numbers in it: how it is labelled is not decided."""
        possible = self.sharable is not None and sequence.kept is None and not sequence.accepted
        return possible and not sequence.prepared.request.exact

    # ---- what has come ---------------------------------------------------------------------------------

    def _restored(self, sequence: ScheduledSequence, restoring: Restoring) -> bool:
        """Take what has come from the disk. True once nothing more comes."""
        if (hit := restoring.step()) is None:
            return False
        if hit.tokens:
            sequence.hit = hit
        sequence.beginning = replace(
            sequence.beginning, restored_tokens=restoring.tokens, restore_s=restoring.seconds
        )
        return True

    def _fetched(self, sequence: ScheduledSequence, fetching: PeerFetch) -> bool:
        """Take what has come from another machine. True once nothing more comes."""
        if (stream := self.streams.take_stream(sequence.id, BLOCKS)) is not None:
            fetching.take_stream(*stream)
        if not fetching.ready:
            return False
        ended = fetching.step()
        self.steps += fetching.checks
        if not ended:
            return False
        self._close(sequence, fetching)
        sequence.hit = fetching.hit or sequence.hit
        front_s = fetching.front.seconds if fetching.front is not None else 0.0
        sequence.beginning = replace(
            sequence.beginning,
            fetched_tokens=fetching.tokens,
            fetch_s=fetching.elapsed_s - front_s,
            front_s=front_s,
        )
        return True

    def _close(self, sequence: ScheduledSequence, fetching: PeerFetch) -> None:
        fetching.close()
        self.budget.take_memory(sequence.id, sequence.promised, sequence.beside_bytes)
        if (report := fetching.report()) is not None:
            self.emit(report)
