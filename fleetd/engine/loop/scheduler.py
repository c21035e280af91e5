"""The compute loop of a worker that has a whole model: admit, prefill a chunk, decode a step, repeat.

Sequences that are being decoded take their steps together (``decoding.py``). Prompts are prefilled one at a
time beside them, a chunk between two decode steps: a long prompt slows running answers by a bounded amount
instead of stopping them. The prompt with the least left to compute goes first, and none waits for ever: one
that was passed over often has a chunk before shorter ones. But a prompt that takes one chunk never waits for
more than one of another's.

A prompt may be shared with other machines, and guests' tasks are computed in turns beside it. Shared work
waits for other machines now and then; a turn goes only to work that can be computed now.
"""

from __future__ import annotations

import socket
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from fleetd.cache.write_behind import WriterFigures
from fleetd.engine.failures import failed, require
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.loop.beginnings import Beginnings
from fleetd.engine.loop.compute_loop import ComputeLoop
from fleetd.engine.loop.decoding import Decoding
from fleetd.engine.loop.inbox import Item
from fleetd.engine.loop.left_prompts import LeftPrompts
from fleetd.engine.loop.phases import BEFORE_DECODING, Phase
from fleetd.engine.loop.sequence import ScheduledSequence, new_sequence
from fleetd.engine.measure.chunk_size import Chunks
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import SPARSE, Hit, PrefixCache
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import (
    Cancel,
    Delta,
    DraftFor,
    FetchBlocks,
    FinishReason,
    ForgetOrigins,
    Heartbeat,
    IdleTime,
    Prefill,
    PrefillAlone,
    PrefillWithHelpers,
    StreamTag,
    WriteNow,
)
from fleetd.engine.sampling.parameters import SamplingDefaults
from fleetd.engine.scoring.profile_search import ProfileSearch
from fleetd.engine.scoring.score_guests import ScoreGuests
from fleetd.engine.scoring.scoring_layout import ScoringLayout
from fleetd.engine.sequence_state import rollback
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller, leading, leading_cache
from fleetd.engine.speculation.draft_guests import DraftGuests
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import HiddenRows
from fleetd.engine.speculation.speculation import WorkerSpeculation
from fleetd.engine.streams.handed_over import HandedOverStreams

# Turns after which a waiting prompt goes before shorter ones that came later.
PATIENCE_TURNS = 16
# Short prompts that are admitted before a longer one which came first and for which memory is short.
PASSING_MOST = 4


@dataclass(kw_only=True)
class Scheduler(ComputeLoop):
    """See the module."""

    model: Any
    tokenizer: Any
    chunks: Chunks
    max_streams: int  # sequences that are prefilled or decoded at once
    prefix: PrefixCache
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sparse: Sparse | None = None  # None: all of a prompt must be computed
    speculation: WorkerSpeculation | None = None  # None: nothing is drafted
    # Token ids that the model can take; 0: it neither drafts nor takes drafts from others.
    vocab_size: int = 0
    search: ProfileSearch | None = None  # of the model's scoring profile; None: it begins without one
    disk: DiskTier | None = None  # None: prompts are kept in memory only
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prefix_bytes = self.prefix.max_bytes
        # Streams of drafts, for and from other machines; ``streams`` has all others.
        self._draft_streams = HandedOverStreams(self.inbox.wake, eager=True)
        self._search = self.search or ProfileSearch(
            model=self.model, tokenizer=self.tokenizer, context_tokens=self.context_tokens
        )
        self._scores = ScoreGuests(search=self._search, budget=self.budget, emit=self.emit)
        self._idle_until_s = 0.0
        self._drafts = DraftGuests(
            model=self.model,
            ends=frozenset(int(token) for token in self.tokenizer.eos_token_ids),
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            budget=self.budget,
            prefix=self.prefix,
            streams=self._draft_streams,
            emit=self.emit,
        )
        self.guests += [self._scores, self._drafts]
        if self.disk is not None:
            self.disk.wake = self.inbox.wake
        self._waiting: list[ScheduledSequence] = []
        # The last chunk was one of several that its prompt takes.
        self._was_long = False
        self._prefilling: list[ScheduledSequence] = []
        self._beginnings = Beginnings(
            model=self.model,
            prefilling=self._prefilling,
            prefix=self.prefix,
            disk=self.disk,
            sharable=self.sharable,
            budget=self.budget,
            streams=self.streams,
            emit=self.emit,
            chunks=self.chunks,
            chunk_tokens=lambda: self._chunk_tokens,
            wake=self.inbox.wake,
        )
        self._leaders, self._helped = self._beginnings.leaders, self._beginnings.helpers
        self._left = LeftPrompts(self._prefilling, self._leaders, self._beside_prefill)
        self.decoding = Decoding(
            model=self.model,
            tokenizer=self.tokenizer,
            max_streams=self.max_streams,
            budget=self.budget,
            prefix=self.prefix,
            emit=self.emit,
            finish=self._finish,
            fail=self._fail,
            defaults=self.defaults,
            speculation=self.speculation,
            disk=self.disk,
        )

    def put_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        if tag.name == DRAFTS:
            self._draft_streams.put(tag, sock)
        else:
            super().put_stream(tag, sock)

    @property
    def busy(self) -> bool:
        """True while a sequence waits, is prefilled or decoded, or something has arrived."""
        return bool(self._waiting or self._prefilling or self.decoding or not self.inbox.empty())

    def validate(self) -> None:
        """Check what must hold between two turns. For tests; raises AssertionError."""
        known = [*self._waiting, *self._prefilling, *self.decoding.sequences]
        ids = [sequence.id for sequence in known]
        running = ids[len(self._waiting) :]
        require(len(ids) == len(set(ids)), f"a sequence is in two places: {ids}")
        require(len(running) <= self.max_streams, f"{len(running)} of {self.max_streams} streams are used")
        self.budget.validate(running, [task for guests in self.guests for task in guests.ids])
        self.prefix.validate()
        self.decoding.validate(ids)
        self._leaders.validate()
        for sequence in known:
            sequence.validate()
        groups = (self._waiting, {Phase.WAITING}), (self.decoding.sequences, {Phase.DECODING})
        for group, phases in (*groups, (self._prefilling, BEFORE_DECODING)):
            wrong = [(each.id, each.phase.name) for each in group if each.phase not in phases]
            require(not wrong, f"sequences are where their phase does not belong: {wrong}")
        if not running and not self._occupied:
            require(len(self.streams) == 0, "streams are left of prompts that have ended")

    # ---- the loop --------------------------------------------------------------------------------------

    def _compute(self) -> None:
        if not self._only_decodes:
            self._turn_others()
        if len(self.decoding) > 1 or not self._only_decodes:
            for sequence in self.decoding.sequences:
                sequence.decode_interleaved = True
        self.decoding.turn(beside=bool(self._prefilling) or super()._occupied)
        if self.disk is not None:
            self.disk.writer.paced = self._occupied

    def _beside_prefill(self) -> bool:
        """True if a prompt waits for its turn, or an answer is written."""
        return bool(self._waiting or self.decoding)

    @property
    def _only_decodes(self) -> bool:
        """True if nothing but running answers has a turn: nearly all turns are such, one for each token."""
        others = self._waiting or self._prefilling or len(self._draft_streams)
        return not others and not super()._occupied

    def _turn_others(self) -> None:
        """A turn for what waits, for what is prefilled, and for guests."""
        for sequence in self._left.ending:
            self._end_left(sequence)
        self._admit()
        self._attach_drafts()
        for sequence in list(self._prefilling):
            self._beginnings.poll(sequence)
        self._prefill_turn()
        self._turn_guests(self._chunk_tokens)

    @property
    def _chunk_tokens(self) -> int:
        """Tokens that one turn may compute now."""
        return self.chunks.size(shared=bool(self.decoding))

    def _close(self) -> None:
        for sequence in self._prefilling:
            self._abandon(sequence)
        super()._close()
        self._draft_streams.close()
        self.decoding.close()
        if self.disk is not None:
            self.disk.close()
            # With what was written in the end.
            self.emit(self._figures())

    @property
    def _idles(self) -> bool:
        """True where the daemon has given time for the search of a profile, and nothing is asked for."""
        within = self._idle_until_s > 0 and self._search.due_s <= time.monotonic() < self._idle_until_s
        return within and self._search.state.left > 0 and not self._waiting and not self._occupied

    def _idle_step(self) -> None:
        # As short as beside running answers: a request that arrives meanwhile waits for this step.
        self._search.step(self.chunks.size(shared=True))
        if not self._search.state.left:
            self._heartbeat_at = 0.0

    @property
    def _ready(self) -> bool:
        return bool(self.decoding) or any(s.ready or s.arrived for s in self._prefilling) or super()._ready

    @property
    def _occupied(self) -> bool:
        return bool(self._prefilling or self.decoding) or super()._occupied

    def _deadlines(self) -> list[float | None]:
        return [*map(self._beginnings.due_s, self._prefilling), *super()._deadlines()]

    def _take_item(self, item: Item) -> None:
        match item:
            case Cancel(request_id):
                if not self._cancel_guest(request_id):
                    self._cancel(request_id)
            case FetchBlocks() | PrefillWithHelpers() | PrefillAlone():
                self._beginnings.decide(item.id, item)
            case ScoringLayout():
                self._scores.begin(item)
            case DraftFor():
                self._drafts.begin(item)
            case IdleTime(seconds):
                self._idle_until_s = time.monotonic() + seconds
            case ForgetOrigins(labels):
                self.prefix.forget(labels)
                super()._take_item(item)
            case WriteNow():
                if self.disk is not None:
                    self.disk.writer.write_now()
            case PreparedPrompt():
                self._begin(item)
            case _:
                super()._take_item(item)

    def _free_memory(self, prompts: bool) -> None:
        if prompts:
            self.prefix.trim(0)
            if self.disk is not None:
                self.disk.free_memory()
        super()._free_memory(prompts)

    def _lose(self, n_bytes: int) -> None:
        # Old prompts give way first.
        self.prefix.max_bytes = max(0, self._prefix_bytes - n_bytes)
        self.prefix.trim(self.prefix.max_bytes)
        super()._lose(max(0, n_bytes - self._prefix_bytes))

    @property
    def _spare_bytes(self) -> int:
        return max(0, self.prefix.max_bytes - self.prefix.nbytes)

    def _attach_drafts(self) -> None:
        """Give sequences the draft streams that came for them."""
        for request_id in self._draft_streams.jobs(DRAFTS):
            groups = (*self._waiting, *self._prefilling)
            sequence = next((a for a in groups if a.id == request_id), None) or self.decoding.find(request_id)
            if sequence is not None and self.vocab_size:
                connect = partial(self._draft_streams.connect(request_id), DRAFTS)
                tokens, begun = sequence.prepared.tokens, sequence.generated > 0
                self.decoding.attach(request_id, RemoteSource(connect, tokens, self.vocab_size, begun=begun))
            elif request_id not in self._drafts:
                # Streams are given once a request or a Follow is accepted: this one's has ended.
                self._draft_streams.drop(request_id)

    def _begin(self, prepared: PreparedPrompt) -> None:
        request = prepared.request
        try:
            sequence = new_sequence(prepared, self.tokenizer, self.sparse, self.budget, self.context_tokens)
        except Exception as error:
            self._failed(request.id, error)
            return
        # What came in the same moment waits for its turn only.
        self._admit()
        # A prompt that must wait for memory is not offered to other machines.
        offered = request.shared and not self._waiting
        if offered and (self._fits(sequence) or self._fits_without_left(sequence)):
            self._prefilling.append(sequence)
            self._beginnings.look(sequence)
        else:
            self._waiting.append(sequence)
            self._beginnings.accept(sequence)

    def _admit(self) -> None:
        """Move waiting requests to prefill while memory and streams allow, first come first served; but a few
        that take one chunk may pass the first."""
        while (sequence := self._next_admitted()) is not None:
            self._waiting.remove(sequence)
            self._prefilling.append(sequence)
            self._beginnings.look(sequence)
        for sequence in self._waiting:
            if sequence.prepared.images is not None:
                # No memory is reserved for it.
                sequence.prepared.images.wait()

    def _next_admitted(self) -> ScheduledSequence | None:
        """A waiting request for which a stream and memory are reserved now; None if there is none."""
        if not self._waiting or self._fits(first := self._waiting[0]):
            return self._waiting[0] if self._waiting else None
        if first.passed >= PASSING_MOST:
            return None
        chunk = self._chunk_tokens
        short = (each for each in self._waiting[1:] if each.left <= chunk)
        if (found := next(filter(self._fits, short), None)) is not None:
            first.passed += 1
        return found

    def _fits(self, sequence: ScheduledSequence) -> bool:
        """Reserve a stream and memory. False, and nothing is reserved, if either is short."""
        free = len(self._prefilling) + len(self.decoding) < self.max_streams
        return free and self.budget.take_memory(sequence.id, sequence.promised, sequence.beside_bytes)

    def _fits_without_left(self, sequence: ScheduledSequence) -> bool:
        """``_fits``, once no prompt is read any more whose client has left."""
        left = self._left.all
        for each in left:
            self._end_left(each)
        return bool(left) and self._fits(sequence)

    def _end_left(self, sequence: ScheduledSequence) -> None:
        """End a prefill whose client has left."""
        self._prefilling.remove(sequence)
        self._abandon(sequence)
        self._release(sequence)

    def _prefill_turn(self) -> None:
        if (sequence := self._choose()) is None:
            return
        try:
            if sequence.fetching is not None:
                if sequence.fetching.compute():
                    self.steps += 1
                return
            prefiller = self._prefill(sequence)
            if prefiller.remaining == 0:
                self._prefilling.remove(sequence)
                self._begin_decode(sequence, prefiller)
        except Exception as error:
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
            self._fail(sequence, error)

    def _prefill(self, sequence: ScheduledSequence) -> Prefiller | SharedPrefill | SparsePrefiller:
        """The next chunk of one prompt."""
        sequence.started_s = sequence.started_s or time.monotonic()
        prefiller = sequence.prefiller or self._beginnings.start(sequence)
        if isinstance(prefiller, Prefiller) and self.speculation is not None:
            prefiller.hidden_layers = self.speculation.hidden_layers(sequence.prepared.request)
        self._show_prefill(sequence)
        begun = time.monotonic()
        try:
            context = sequence.slots - sequence.left
            chunk = self.chunks.size(shared=bool(self.decoding), context=context)
            self._leaders.before_step(sequence, chunk)
            tokens = prefiller.step(chunk)
        except Exception as error:
            if not isinstance(prefiller, SharedPrefill):
                raise
            return self._helped.give_up(sequence, error)
        if tokens or not isinstance(prefiller, SharedPrefill):
            # Also one that read an image: that is progress, too.
            self.steps += 1
        if tokens and not isinstance(prefiller, SharedPrefill):
            self.chunks.learn(tokens, time.monotonic() - begun)
        self._show_prefill(sequence)
        if sequence.prepared.images is not None:
            # Those that are behind it have given their memory back.
            self.budget.take_memory(sequence.id, sequence.promised, sequence.beside_bytes)
        sequence.prefill_s += time.monotonic() - begun
        self._leaders.after_step(sequence)
        return prefiller

    def _show_prefill(self, sequence: ScheduledSequence, *, again: bool = False) -> None:
        """Report progress, if there is any. It never goes back, even if tokens are computed a second time."""
        if sequence.prefiller is None and sequence.phase is not Phase.FOLLOWING:
            return
        done = max(sequence.shown, sequence.progress)
        image_steps = 0 if sequence.prepared.images is None else sequence.prepared.images.steps
        if again or done > sequence.shown or image_steps > sequence.shown_image_steps:
            sequence.shown, sequence.shown_image_steps = done, image_steps
            cached = sequence.beginning.cached_tokens
            self.emit(Prefill(sequence.id, done, sequence.slots, cached, image_steps))

    def _choose(self) -> ScheduledSequence | None:
        """The prompt with the least left, for itself or one that waits for it. One that was passed over too
        often goes first, but not behind another long one's chunk and before a prompt that takes one chunk."""
        ready = [sequence for sequence in self._prefilling if sequence.ready]
        if not ready:
            self._was_long = False
            return None
        for sequence in ready:
            sequence.turns += 1
        chunk = self._chunk_tokens
        chosen = min(ready, key=self._leaders.left)
        if not (self._was_long and self._leaders.left(chosen) <= chunk):
            chosen = next((a for a in ready if a.turns > PATIENCE_TURNS), chosen)
        self._was_long = self._leaders.left(chosen) > chunk
        chosen.turns = 0
        # Those that have begun stand still meanwhile, and this one does while answers go on.
        for sequence in ready:
            passed = sequence is not chosen and sequence.started_s
            sequence.prefill_interleaved |= bool(passed or self.decoding or super()._occupied)
        return chosen

    def _begin_decode(
        self, sequence: ScheduledSequence, prefiller: Prefiller | SharedPrefill | SparsePrefiller
    ) -> None:
        request = sequence.prepared.request
        cache = prefiller.cache
        if isinstance(prefiller, SharedPrefill):
            self._helped.finish(sequence, prefiller)
        if request.echo:
            self._echo(sequence)
        if sequence.kept is not None:
            self._remember_sparse(sequence, sequence.kept, cache)
        else:
            states = None if isinstance(prefiller, SparsePrefiller) else prefiller.states
            self.decoding.remember(sequence, prefiller.tokens[:-1], cache, states)
            self._beginnings.report_kept(sequence)
        if sequence.left_s:
            self._release(sequence)
            return
        if sequence.max_tokens <= 0:
            self._finish(sequence, "length")
            return
        sequence.move(Phase.DECODING)
        noted = prefiller.hidden if isinstance(prefiller, Prefiller) else []
        hidden = [HiddenRows(first, states) for first, states in noted]
        self.decoding.begin(sequence, prefiller.tokens, cache, hidden)

    def _remember_sparse(self, sequence: ScheduledSequence, kept: list[int], cache: list[Any]) -> None:
        """Keep the part that a sparse prompt shares with a dense one, which is the system prompt as a rule;
        and all of it for a prompt that leaves out the same tokens."""
        dense = leading_cache(kept, cache)
        if dense is not None:
            tokens = sequence.prepared.tokens[: leading(kept)]
            self.decoding.keep(sequence, tokens, dense, sequence.namespace)
        self.decoding.keep(sequence, sequence.slot_tokens[:-1], rollback.compact(cache), SPARSE)

    def _echo(self, sequence: ScheduledSequence) -> None:
        text = self.tokenizer.decode(sequence.prepared.tokens)
        sequence.text.offset = len(text)
        self.emit(
            Delta(sequence.id, text, tokens=0, logprobs=sequence.scored.entries if sequence.scored else None)
        )
        sequence.scored = None

    def _cancel(self, request_id: str) -> None:
        for group in (self._waiting, self._prefilling):
            for sequence in group:
                if sequence.id == request_id and not sequence.left_s:
                    if self._left.keep(sequence):
                        self._report_end(sequence, "cancelled")
                        return
                    group.remove(sequence)
                    self._abandon(sequence)
                    self._finish(sequence, "cancelled")
                    return
        if (running := self.decoding.find(request_id)) is not None:
            self.decoding.leave(running)
            self._finish(running, "cancelled")

    def _abandon(self, sequence: ScheduledSequence) -> None:
        """End a prefill half way; what was read of it stays useful."""
        read, cached, states = self._read_so_far(sequence), sequence.beginning.cached_tokens, None
        if isinstance(sequence.prefiller, Prefiller):
            states = sequence.prefiller.states
        self._beginnings.end(sequence, intact=True)
        tokens = sequence.slot_tokens if read.namespace == SPARSE else sequence.numbers
        if read.cache is not None and read.tokens > cached:
            # Without the room for what is not read any more.
            cache = rollback.compact(read.cache)
            self.decoding.keep(sequence, tokens[: read.tokens], cache, read.namespace, states, read.origins)
        # A few tokens of another machine's are kept, and serve no prompt.
        served = self.prefix.longest(tokens, read.namespace)
        if sequence.shared is not None and served <= cached:
            self._helped.lost(sequence)

    def _read_so_far(self, sequence: ScheduledSequence) -> Hit:
        try:
            return sequence.read_so_far()
        except Exception:
            # A check of what helpers sent may fail as any prefill may; the sequence ends anyway.
            traceback.print_exc()
            return Hit(0, None)

    def _finish(self, sequence: ScheduledSequence, reason: FinishReason) -> None:
        if reason != "cancelled":
            try:
                pieces = sequence.text.finish(cut=reason == "length")
            except Exception as error:
                self._fail(sequence, error)
                return
            for piece in pieces:
                self.emit(piece)
            if sequence.text.stopped_by is not None:
                reason = "stop"  # its last tokens' text came only now
            if sequence.text.tool_calls and reason == "stop":
                reason = "tool_calls"
            if sequence.text.cut_call and sequence.text.stopped_by is None:
                reason = "length"  # half a call must not look like a whole answer
        self._release(sequence)
        self._report_end(sequence, reason)

    def _report_end(self, sequence: ScheduledSequence, reason: FinishReason) -> None:
        self._heartbeat_at = 0.0  # report at once that there is less to do
        self.emit(sequence.finished(reason))

    def _fail(self, sequence: ScheduledSequence, error: Exception) -> None:
        self._beginnings.end(sequence, intact=False)
        self._release(sequence)
        self._heartbeat_at = 0.0
        if not sequence.left_s:
            self._failed(sequence.id, error)

    def _release(self, sequence: ScheduledSequence) -> None:
        """Give back what was reserved for a sequence."""
        sequence.move(Phase.ENDED)
        if sequence.prepared.images is not None:
            sequence.prepared.images.end()
        self.decoding.detach(sequence.id)
        self.budget.give_back(sequence.id)

    def _failed(self, request_id: str, error: Exception) -> None:
        self.emit(failed(request_id, error, "The answer could not be computed"))

    def _sweep(self) -> None:
        super()._sweep()
        self._draft_streams.sweep()

    def _figures(self) -> Heartbeat:
        for sequence in self._prefilling:
            if not sequence.ready:
                self._show_prefill(sequence, again=True)
        guests = super()._figures()
        disk = self.disk.figures if self.disk is not None else WriterFigures()
        return msgspec.structs.replace(
            guests,
            steps=guests.steps + self.steps + self.decoding.steps + self._beginnings.steps,
            prefilling=len(self._prefilling),
            decoding=len(self.decoding),
            waiting=len(self._waiting),
            prefix_bytes=self.prefix.nbytes,
            prefix_entries=len(self.prefix),
            scoring=self._search.state,
            disk_queued_bytes=disk.queued_bytes,
            disk_written_bytes=disk.written_bytes,
            disk_dropped=disk.dropped,
            disk_note=disk.note,
            draft_head=self.speculation.headless if self.speculation is not None else "",
        )
