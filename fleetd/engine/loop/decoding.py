"""Sequences that are being decoded: apart, each with drafts, or in one batch, a token per step.

    begin(sequence) ──► apart: a pass each, of one or     ◄──►   the batch           ──► finish | fail | leave
                        several tokens, on caches of             (mlx-lm's BatchGenerator)
                        their own (``VerifyRow``)

Drafts are verified only if blocks of tokens give the bytes that the batch gives (``exactness_probe``), so the
place never changes an answer. A sequence that begins alone begins apart; else it joins the batch, and so do
those that are apart. All move apart again when each has good drafts and each gains (``rounds``). What a
sequence has computed goes to the prefix cache when it leaves.

A sequence that is alone and has no draft begins its next step before the token of this one is read, so that
the device does not wait for the host. A step that has begun ends before its sequence moves into the batch.

Over several machines (``sends_blocks``) a sequence that is apart has blocks under way between turns, and the
next begins before others have come back: ahead of its own, if its drafts are good, and beside those of other
sequences. So a batch also comes apart where no sequence has drafts, if it is sooner so.

Everything runs on the compute thread. What goes wrong in one sequence's text fails that sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.failures import require
from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.groups.step_times import slowest_part
from fleetd.engine.layers.hidden_states import noted_states
from fleetd.engine.loop.held_rows import HeldRows
from fleetd.engine.loop.sequence import ScheduledSequence
from fleetd.engine.measure.memory import GROWTH_TOKENS, KvBudget
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import SPARSE, Origins, PrefixCache
from fleetd.engine.protocol import FinishReason, Generate, Report
from fleetd.engine.sampling.parameters import SamplingDefaults
from fleetd.engine.sampling.sampler import (
    BatchSampler,
    LogitsProcessor,
    Sampler,
    SeededSampler,
    make_processors,
    make_sampler,
    without_ends,
)
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.kinds import all_plain
from fleetd.engine.sparse_prefill.sparse_caches import can_part, parted, rows
from fleetd.engine.speculation.controller import NO_DRAFT, Beside, Draft
from fleetd.engine.speculation.rounds import Promise, Rounds
from fleetd.engine.speculation.sources import DraftSource, HiddenRows
from fleetd.engine.speculation.speculation import SequenceDrafts, WorkerSpeculation
from fleetd.engine.speculation.verify_row import Chosen, VerifyRow, sends_blocks
from fleetd.errors import EngineError

# Moving costs a copy of the KV. Sequences leave the batch only after so many steps in which it did not
# change.
SETTLED_TOKENS = 8
LEAST_DRAFTS = 2
# Passes after which memory that MLX keeps for reuse is given back; as BatchGenerator has it.
CLEAR_PASSES = 512


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """``tokens``: prompt and answer. ``row`` while it is decoded apart, ``uid`` while it is in the batch."""

    sequence: ScheduledSequence
    tokens: list[int]
    sampler: Sampler
    processors: list[LogitsProcessor]
    # What the answer is held to; None: nothing.
    matcher: AnswerMatcher | None
    drafts: SequenceDrafts | None
    row: VerifyRow | None = None
    uid: int = -1
    # Seconds that sending its blocks took since the last one that was taken.
    sending_s: float = 0.0
    # What machines were busy with since the first of its blocks was sent.
    beside: Beside = Beside.NOTHING


@dataclass(slots=True)
class _SequencePass:
    """A pass of one sequence that is apart: the tokens that it gave, in ``seconds``.

    ``again``: tokens that it computed a second time. ``beside``: what else was under way. ``left``: blocks of
    the sequence that still are.
    """

    running: DecodingSequence
    draft: Draft
    chosen: list[Chosen]
    again: int
    seconds: float
    beside: Beside = Beside.NOTHING
    left: int = 0


@dataclass
class Decoding:
    """The sequences that are being decoded, apart or in the batch; see the module.

    ``finish`` and ``fail`` are called for each sequence that ends here by itself, after it has left.
    ``speculation`` is None if nothing is to be drafted.
    """

    model: Any
    tokenizer: Any
    max_streams: int
    budget: KvBudget
    prefix: PrefixCache
    emit: Callable[[Report], None]
    finish: Callable[[ScheduledSequence, FinishReason], None]
    fail: Callable[[ScheduledSequence, Exception], None]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    speculation: WorkerSpeculation | None = None
    disk: DiskTier | None = None
    rounds: Rounds = field(default_factory=Rounds)
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.speculation is not None:
            self.model = self.speculation.decoded_by(self.model)
        self.batch: dict[int, DecodingSequence] = {}
        self.apart: list[DecodingSequence] = []
        # Sequences that have joined the batch, and take their first step there apart from the others.
        self._joining: list[DecodingSequence] = []
        self._sampler = BatchSampler()
        # True if this turn is not the sequences' alone.
        self._beside = False
        # Steps of the batch since it changed.
        self._settled = 0
        # The sources of each request's drafts, from the time when its prompt is known here.
        self._sources: dict[str, list[DraftSource]] = {}
        self._ends = frozenset(int(t) for t in self.tokenizer.eos_token_ids)
        self._empty = make_prompt_cache(self.model)
        # In a batch a window's cache is laid out otherwise: a sequence with one does not come back.
        self._may_return = all_plain(self._empty)
        # Machines that can each compute another block.
        self._machines = self.model.machines if sends_blocks(self.model, self._empty) else 1
        self._stop_tokens = StopSequences([(t,) for t in sorted(self._ends)])
        self._held = HeldRows(self.model, lambda: self._generator._generation_batch._current_tokens)
        self._generator = BatchGenerator(
            self._held,
            completion_batch_size=self.max_streams,
            prefill_batch_size=self.max_streams,
            stream=mx.default_stream(mx.default_device()),
        )

    def __len__(self) -> int:
        """Sequences being decoded."""
        return len(self.batch) + len(self.apart)

    @property
    def sequences(self) -> list[ScheduledSequence]:
        return [running.sequence for running in self._all]

    @property
    def _all(self) -> list[DecodingSequence]:
        return [*self.batch.values(), *self.apart]

    def validate(self, known: Collection[str]) -> None:
        """Check what must hold between two turns, given the ids of all sequences. For tests."""
        require(set(self._sources) <= set(known), f"sources are left of {set(self._sources) - set(known)}")
        for uid, running in self.batch.items():
            require(running.uid == uid and running.row is None, f"{running.sequence.id} is in two places")
        for running in self.apart:
            row = running.row
            require(row is not None and row.tokens is running.tokens, f"{running.sequence.id} has no row")
            if row is not None:
                held, ahead = rollback.held(row.cache), running.sequence.ahead
                # A window counts positions, whatever was left out.
                require(held in (row.held - ahead, row.held, None), "a row's cache has other tokens")
        for running in self._all:
            sequence = running.sequence
            tokens = len(sequence.prepared.tokens) + sequence.generated
            require(
                len(running.tokens) == tokens, f"{sequence.id} has {len(running.tokens)} of {tokens} tokens"
            )
            require(sequence.generated <= sequence.max_tokens, f"{sequence.id} is longer than it may be")
            require(sequence.held <= sequence.promised, f"{sequence.id} holds more memory than was promised")

    def close(self) -> None:
        for request_id in list(self._sources):
            self.detach(request_id)
        self._generator.close()

    # ---- draft sources from outside --------------------------------------------------------------------

    def attach(self, request_id: str, source: DraftSource) -> None:
        """Add a source of drafts to a sequence that runs, or whose prompt is known here.

        The source sees the tokens that are committed from now on; it is closed when the sequence ends.
        """
        self._sources.setdefault(request_id, []).append(source)
        if (running := self._running(request_id)) is not None and running.drafts is not None:
            running.drafts.add(source)

    def detach(self, request_id: str) -> None:
        """Close the sources of a request that has ended."""
        for source in self._sources.pop(request_id, []):
            source.close()

    # ---- sequences -------------------------------------------------------------------------------------

    def find(self, request_id: str) -> ScheduledSequence | None:
        running = self._running(request_id)
        return None if running is None else running.sequence

    def begin(
        self,
        sequence: ScheduledSequence,
        tokens: list[int],
        cache: list[Any],
        hidden: Sequence[HiddenRows] = (),
    ) -> None:
        """Decode on from ``tokens``, all but the last of which are in ``cache``, which is not written to.

        ``hidden``: what was noted of the prompt's end for its drafts.
        """
        request, matcher = sequence.prepared.request, sequence.prepared.matcher
        sparse = sequence.kept is not None
        alone = not sparse or can_part(cache)
        running = DecodingSequence(
            sequence,
            list(tokens),
            make_sampler(request.sampling, self.defaults),
            self._processors(request, len(tokens)),
            matcher,
            # Hidden states of a prompt with gaps are none that a drafter was made for.
            self.speculation.new_drafts(request, matcher, hidden=not sparse)
            if self.speculation and alone
            else None,
        )
        if running.drafts is not None:
            for source in self._sources.get(sequence.id, []):
                running.drafts.add(source)
            for rows_of_chunk in hidden:
                running.drafts.note(rows_of_chunk)
        if not len(self) and alone:
            self._begin_apart(running, copy_on_write(cache))
        else:
            self._insert(running, cache)

    def _processors(self, request: Generate, prompt_tokens: int) -> list[LogitsProcessor]:
        processors = make_processors(request.sampling, self.defaults, prompt_tokens)
        if request.min_tokens and self._ends and not request.ignore_eos:
            # The last, so that a bias does not bring them back.
            processors.append(without_ends(self._ends, request.min_tokens, prompt_tokens))
        return processors

    def turn(self, *, beside: bool = False) -> None:
        """A token for every sequence, or several. ``beside``: a prompt is read as well, or guests have
        work, so that machines are not filled with guesses."""
        self._beside = beside
        if self.apart and (self.batch or self._better_together()):
            if any(running.row is not None and running.row.under_way for running in self.apart):
                self._turn_apart(moving=True)
                return
            self._join()
        elif self.batch and self._settled >= SETTLED_TOKENS and self._better_apart():
            self._take_apart()
        if self.apart and self._machines > 1:
            self._turn_sent()
        elif self.apart:
            self._turn_apart()
        elif self.batch:
            self._turn_batch()

    def leave(self, sequence: ScheduledSequence) -> None:
        """Take a running sequence out; what it computed stays useful to a retry or a next turn."""
        running = self._running(sequence.id)
        if running is None:
            return
        if running.row is not None:
            tokens, cache = running.row.taken(sequence.held + sequence.ahead)
        else:
            tokens, cache = self._out_of_batch(running)
        self._on_left(running, tokens, cache)

    def remember(
        self,
        sequence: ScheduledSequence,
        tokens: list[int],
        cache: list[Any],
        states: dict[int, list[Any]] | None = None,
    ) -> None:
        """Keep the KV of ``tokens``, and states at earlier ones, for later prompts that begin with them,
        unless some are missing."""
        if sequence.kept is None:
            self.keep(sequence, tokens, cache, sequence.namespace, states)

    def keep(
        self,
        sequence: ScheduledSequence,
        tokens: list[int],
        cache: list[Any],
        namespace: str,
        states: dict[int, list[Any]] | None = None,
        origins: Origins | None = None,
    ) -> None:
        """Keep the KV of ``tokens`` in memory and, if none are missing, on the disk. ``namespace``: of the
        prefix cache, in which SPARSE has tokens of its own. ``origins``: None if they are the sequence's."""
        mx.eval([layer.state for layer in cache])
        tokens = tokens if namespace == SPARSE else sequence.numbered(tokens)
        origins = sequence.origins if origins is None else origins
        self.prefix.store(tokens, cache, namespace, states, origins)
        if self.disk is not None and namespace != SPARSE:
            local_only = sequence.prepared.request.local_only
            self.disk.store(tokens, cache, namespace, states, local_only=local_only, origins=origins)

    def _running(self, request_id: str) -> DecodingSequence | None:
        return next((running for running in self._all if running.sequence.id == request_id), None)

    # ---- apart or in the batch -------------------------------------------------------------------------

    def _join(self) -> None:
        """Put all sequences that are apart into the batch."""
        self.rounds.end()
        for running in self.apart:
            if running.row is not None:
                running.row.settle()
        rows = [(running, running.row.cache) for running in self.apart if running.row is not None]
        self.apart = []
        for running, cache in rows:
            running.row = None
            self._insert(running, cache)

    def _take_apart(self) -> None:
        """Put all sequences of the batch apart."""
        for running in list(self.batch.values()):
            _, cache = self._out_of_batch(running)
            # The batch has computed the last token; here that is what the next pass begins with.
            rollback.take_back(cache, 1)
            self._begin_apart(running, cache)

    def _better_together(self) -> bool:
        """True if the sequences that are apart should join the batch."""
        if len(self.apart) < 2:
            return False
        short = any(
            running.row is None or self._room(running, running.row.cache) < 2 for running in self.apart
        )
        return short or self.rounds.losing

    def _better_apart(self) -> bool:
        """True if the batch should be taken apart: the drafts of every sequence must be worth the move."""
        if not self._may_return or (len(self.batch) > 1 and self.rounds.resting):
            return False
        promises = []
        # Of passes under way at the same time each takes its part of the machines.
        beside = min(self._machines, len(self.batch))
        for running in self.batch.values():
            drafts = running.drafts
            if drafts is None or self._room(running, self._empty) < 2:
                return False
            count, promise = drafts.prospect(running.tokens, partial(_left, running.sequence))
            if count < LEAST_DRAFTS and self._machines == 1:
                return False
            promises.append(Promise(promise.tokens, promise.seconds / beside))
        return len(promises) == 1 or self.rounds.worth(promises)

    def _insert(self, running: DecodingSequence, cache: list[Any]) -> None:
        """Into the batch, which copies ``cache``."""
        sequence = running.sequence
        if isinstance(running.sampler, SeededSampler):
            running.sampler.index = sequence.generated
        (running.uid,) = self._generator.insert(
            [running.tokens[-1:]],
            max_tokens=[sequence.max_tokens - sequence.generated],
            caches=[rows(cache)],
            all_tokens=[running.tokens[:-1]],
            samplers=[self._sampler],
            logits_processors=[running.processors],
            stop_sequences=[StopSequences() if sequence.prepared.request.ignore_eos else self._stop_tokens],
        )
        self.batch[running.uid] = running
        self._joining.append(running)
        self._settled = 0

    def _begin_apart(self, running: DecodingSequence, cache: list[Any]) -> None:
        """``cache`` is the sequence's own from now on."""
        if running.sequence.kept is not None:
            cache = parted(cache, running.sequence.ahead)
        running.row = VerifyRow(
            self.model,
            running.tokens,
            cache,
            running.sampler,
            running.processors,
            running.sequence.generated,
            running.matcher,
        )
        self.apart.append(running)

    def _out_of_batch(self, running: DecodingSequence) -> tuple[list[int], list[Any]]:
        del self.batch[running.uid]
        if running in self._joining:
            self._joining.remove(running)
        self._settled = 0
        cache, tokens = self._generator.remove([running.uid], return_prompt_caches=True)[running.uid]
        return tokens, cache

    def _on_left(self, running: DecodingSequence, tokens: list[int], cache: list[Any]) -> None:
        if running in self.apart:
            self.apart.remove(running)
            running.row = None
        sequence, drafts = running.sequence, running.drafts
        if drafts is not None:
            sequence.speculated = drafts.report
            drafts.close()
        sequence.stages = getattr(self.model, "stage_times", ())
        self.remember(sequence, tokens, cache)

    # ---- apart -----------------------------------------------------------------------------------------

    def _room(self, running: DecodingSequence, cache: list[Any]) -> int:
        """Tokens that one pass may have, besides what it computes again."""
        if self.speculation is None:
            return 0
        verdict = self.speculation.verdict
        pending = running.row.pending if running.row is not None else 0
        return min(rollback.room(cache), verdict.width - pending, verdict.context - len(running.tokens))

    def _turn_apart(self, *, moving: bool = False) -> None:
        """A pass for each; before they move into the batch, only for those whose step is under way.

        Their tokens are shown when all have had theirs, as in a batch.
        """
        begun = time.monotonic()
        passes = [
            self._pass(running, running.row, moving=moving)
            for running in self.apart
            if running.row is not None and (running.row.under_way or not moving)
        ]
        now = time.monotonic()
        step_s = None
        if len(passes) > 1:
            self.rounds.add_round({p.running.sequence.id: len(p.chosen) for p in passes}, now - begun)
            step_s = self.rounds.step_s(len(passes))
        for p in passes:
            saved_s = None if step_s is None else len(p.chosen) * step_s - (now - begun)
            self._on_pass(p, saved_s, now)

    def _on_pass(self, p: _SequencePass, saved_s: float | None, now: float) -> None:
        if p.running.drafts is not None:
            emitted = [c.token for c in p.chosen]
            p.running.drafts.verified(
                p.draft, emitted, p.seconds, saved_s, again=p.again, beside=p.beside, left=p.left
            )
        self._on_tokens(p.running, p.chosen, now)

    def _pass(self, running: DecodingSequence, row: VerifyRow, *, moving: bool) -> _SequencePass:
        begun = time.monotonic()
        sequence, draft, again = running.sequence, NO_DRAFT, row.pending
        # The device has computed a step that was under way while the prompt was read: its time is not known.
        beside = Beside.PROMPT if self._beside and row.under_way else Beside.NOTHING

        def room() -> int:
            # No draft past the sequence's end, nor past the memory that is promised.
            most = min(_left(sequence), sequence.promised - sequence.held)
            return max(0, min(most, self._room(running, row.cache) - 1))

        expected = 0
        if running.drafts is not None:
            row.hidden_layers = running.drafts.hidden_layers
            if row.under_way:
                # A draft that comes now is verified after that step, from the next token on.
                expected, _ = running.drafts.prospect(running.tokens, room)
            else:
                draft = running.drafts.next_draft(running.tokens, room, row.cache)
        if draft.tokens:
            chosen = row.advance(draft.tokens)
        else:
            last = moving or len(self.apart) > 1 or sequence.generated + 1 >= sequence.max_tokens
            chosen = [row.step(ahead=self._ahead(running) and not expected and not last)]
        if running.drafts is not None:
            running.drafts.note(row.hidden)
        self.steps += 1
        if self.steps % CLEAR_PASSES == 0:
            mx.clear_cache()
        return _SequencePass(running, draft, chosen, again, time.monotonic() - begun, beside)

    # ---- apart, over several machines ------------------------------------------------------------------

    def _turn_sent(self) -> None:
        """What was sent first of each sequence comes back. The next block of a sequence is sent before that
        of another one is waited for, so that the machines have something to do meanwhile."""
        begun = time.monotonic()
        together = list(self.apart)
        for running in together:
            if running.row is not None:
                self._send(running, running.row)
        given: dict[str, int] = {}
        step_s = self.rounds.step_s(len(together)) if len(together) > 1 else None
        for running in together:
            if running.row is None:
                continue
            p = self._take(running, running.row)
            given[running.sequence.id] = len(p.chosen)
            # Its share of a round.
            share_s = (step_s or 0.0) * len(p.chosen) - len(together) * p.seconds
            self._on_pass(p, None if step_s is None else share_s, time.monotonic())
            if running.row is not None and len(together) > 1:
                self._send(running, running.row)
        if len(together) > 1:
            self.rounds.add_round(given, time.monotonic() - begun)

    def _send(self, running: DecodingSequence, row: VerifyRow) -> None:
        """Send blocks until as many are under way as there shall be."""
        begun = time.monotonic()
        depth = self._depth
        if row.blocks >= depth:
            return
        if running.drafts is not None:
            row.hidden_layers = running.drafts.hidden_layers
        draft = self._draft_ahead(running, row, depth)
        if not row.blocks:
            running.beside = self._busy_with(row)
            row.send(draft.tokens[: draft.block - 1] if draft.block else draft.tokens, draft.source)
        while row.blocks < depth and (rest := draft.tokens[len(row.guessed) :][: draft.block]):
            row.send(rest, draft.source)
            running.beside = Beside.PROMPT if running.beside is Beside.PROMPT else Beside.BLOCKS
        running.sending_s += time.monotonic() - begun

    @property
    def _depth(self) -> int:
        """How many blocks of a sequence may be under way. Other sequences and prompts fill the machines as
        well as guesses do, and none of that is waste."""
        if self.speculation is None or not self.speculation.ahead or self._beside:
            return 1
        return max(1, self._machines // len(self.apart))

    def _busy_with(self, row: VerifyRow) -> Beside:
        """What the machines are busy with when the first block of a sequence is sent."""
        if len(self.apart) > 1:
            return Beside.BLOCKS
        if not self.model.busy:
            return Beside.NOTHING
        return Beside.DROPPED if row.dropped else Beside.PROMPT

    def _draft_ahead(self, running: DecodingSequence, row: VerifyRow, depth: int) -> Draft:
        """What to verify, with the drafts that were sent already; none if those are no longer guessed."""
        sequence, drafts, guessed = running.sequence, running.drafts, row.guessed
        if drafts is None or self.speculation is None:
            return NO_DRAFT
        verdict = self.speculation.verdict
        free = len(guessed) + rollback.room(row.cache) - (not row.blocks)
        most = min(sequence.max_tokens - sequence.generated, sequence.promised - sequence.held)
        room = min(most - 1, free, verdict.context - len(running.tokens) - 1)
        fitting = {
            name: tokens
            for name, tokens in drafts.proposals(running.tokens, depth).items()
            if len(tokens) > len(guessed) and tokens[: len(guessed)] == guessed
        }
        slowest = 0.0
        if fitting and depth > 1:
            slowest = slowest_part(self.model.stage_times, self.speculation.costs.step_s)
        draft = drafts.choose(fitting, max(0, room), depth, going=row.blocks > 0, slowest=slowest)
        if row.blocks or (draft.block and len(draft.tokens) >= draft.block):
            # Hidden states of what is under way are not known, so nothing can be drafted behind it.
            return draft
        return drafts.with_priced(draft, running.tokens, max(0, room), row.cache)

    def _take(self, running: DecodingSequence, row: VerifyRow) -> _SequencePass:
        begun = time.monotonic()
        chosen, draft = row.take()
        if running.drafts is not None:
            running.drafts.note(row.hidden)
        self.steps += 1
        if self.steps % CLEAR_PASSES == 0:
            mx.clear_cache()
        seconds = running.sending_s + time.monotonic() - begun
        found = _SequencePass(running, draft, chosen, 0, seconds, running.beside, row.blocks)
        running.sending_s = 0.0
        # The next one was under way while this one was.
        running.beside = Beside.BLOCKS
        return found

    def _ahead(self, running: DecodingSequence) -> bool:
        """True if steps are begun ahead. Not if there may be drafts and a pass computes while it is being
        built, as on a CPU: nothing is gained, and a draft is used a token later. Nor if the grammar leaves
        little choice now: what it forces after that is to be drafted at once."""
        if running.drafts is not None and running.matcher is not None and not running.matcher.open:
            return False
        return running.drafts is None or (self.speculation is not None and self.speculation.computes_ahead)

    def _on_tokens(self, running: DecodingSequence, chosen: Sequence[Chosen], now: float) -> None:
        sequence = running.sequence
        for one in chosen:
            ended = one.token in self._ends and not sequence.prepared.request.ignore_eos
            _count(sequence, now)
            try:
                _check_held(running)
                if not ended:
                    self._show(sequence, one.token, one)
            except Exception as error:
                self._end(sequence, error)
                return
            if ended or sequence.text.stopped_by is not None:
                self._end(sequence, "stop")
                return
            if sequence.generated >= sequence.max_tokens:
                self._end(sequence, "length")
                return
        if running.matcher is not None and running.matcher.failure:
            self._end(sequence, _not_held(running.matcher))
        elif not self._grow(sequence):
            self._end(sequence, self.budget.exhausted(sequence.held))

    def _end(self, sequence: ScheduledSequence, outcome: FinishReason | Exception) -> None:
        """Take a running sequence out, and report how it ended."""
        self.leave(sequence)
        self._report_end(sequence, outcome)

    def _report_end(self, sequence: ScheduledSequence, outcome: FinishReason | Exception) -> None:
        if isinstance(outcome, Exception):
            self.fail(sequence, outcome)
        else:
            self.finish(sequence, outcome)

    # ---- together --------------------------------------------------------------------------------------

    def _turn_batch(self) -> None:
        begun = time.monotonic()
        # In the order in which mlx-lm has them: as they were inserted, first those that are there already.
        groups = (
            [running for running in self.batch.values() if running not in self._joining],
            [*self._joining],
        )
        self._sampler.expect(*([running.sampler for running in group] for group in groups))
        self._held.expect(*([running.matcher for running in group] for group in groups))
        drafted = [running.drafts for running in self.batch.values() if running.drafts is not None]
        layers = {layer for drafts in drafted for layer in drafts.free_layers}
        with noted_states(self.model, layers) as states:
            _, responses = self._generator.next()
        if self._sampler.drew_all:
            self._joining.clear()
        now = time.monotonic()
        self.steps += 1
        # The first step of a batch that has changed also builds its caches. One beside a prompt was computed
        # while that was read.
        if self._settled and not self._beside and len(responses) == len(self.batch):
            self.rounds.add_step(len(responses), now - begun)
        self._settled += 1
        # The batch may only change once all of its tokens are taken.
        ending: list[tuple[ScheduledSequence, FinishReason | Exception]] = []
        for response in responses:
            running = self.batch[response.uid]
            if (outcome := self._on_response(running, response, now)) is not None:
                ending.append((running.sequence, outcome))
        if layers:
            _give_hidden([group for group in groups if group], states)
        for sequence, outcome in ending:
            self._end(sequence, outcome)

    def _on_response(
        self, running: DecodingSequence, response: Any, now: float
    ) -> FinishReason | Exception | None:
        """Take one sequence's token of the batch's step. Returns how the sequence ends if mlx-lm goes on with
        it and must not; None if it goes on, or has ended here."""
        sequence = running.sequence
        ended, left = response.finish_reason == "stop", response.finish_reason is not None
        _count(sequence, now)
        running.tokens.append(response.token)
        if running.drafts is not None:
            running.drafts.on_token(response.token)
        if left:
            del self.batch[response.uid]
            self._settled = 0
            self._on_left(running, response.all_tokens, response.prompt_cache)
        outcome: FinishReason | Exception | None = None
        try:
            _check_held(running)
            if not ended:
                self._show(sequence, response.token, response)
        except Exception as error:
            outcome = error
        else:
            if ended or sequence.text.stopped_by is not None:
                outcome = "stop"
            elif left:
                outcome = "length"
            elif running.matcher is not None and running.matcher.failure:
                outcome = _not_held(running.matcher)
            elif not self._grow(sequence):
                outcome = self.budget.exhausted(sequence.held)
        if left and outcome is not None:
            self._report_end(sequence, outcome)
            return None
        return outcome

    def _show(self, sequence: ScheduledSequence, token: int, chosen: Any) -> None:
        """``chosen`` has the token's log-probabilities (V,), which are only read where they are asked for."""
        entry = None
        if sequence.logprobs is not None:
            entry = sequence.logprobs.of(token, chosen.logprobs, sequence.text.length)
        for piece in sequence.text.push(token, entry, silent=token in self._ends):
            self.emit(piece)

    def _grow(self, sequence: ScheduledSequence) -> bool:
        """Promise more KV to a sequence that has used what it was promised."""
        if sequence.held < sequence.promised:
            return True
        more = min(sequence.promised + GROWTH_TOKENS, sequence.slots + sequence.max_tokens)
        if not self.budget.take_memory(sequence.id, more):
            return False
        sequence.promised = more
        return True


def _give_hidden(
    calls: Sequence[Sequence[DecodingSequence]], states: Mapping[int, Sequence[mx.array]]
) -> None:
    """Each row that a call of the model computed in a batch is that of its sequence's newest token."""
    for call, group in enumerate(calls):
        for row, running in enumerate(group):
            if running.drafts is not None:
                own = {layer: noted[call][row, :1] for layer, noted in states.items() if len(noted) > call}
                running.drafts.note(HiddenRows(len(running.tokens) - 1, own))


def _left(sequence: ScheduledSequence) -> int:
    """Tokens of the answer that may come after its next one."""
    return sequence.max_tokens - sequence.generated - 1


def _check_held(running: DecodingSequence) -> None:
    """Raises EngineError if the newest token that was counted does not fit the answer's grammar."""
    if running.matcher is not None and running.sequence.generated > running.matcher.held:
        raise _not_held(running.matcher)


def _not_held(matcher: AnswerMatcher) -> EngineError:
    return EngineError(
        f"The answer could not be held to its grammar: {matcher.failure}",
        hint="Simplify the schema or the grammar.",
    )


def _count(sequence: ScheduledSequence, now: float) -> None:
    if not sequence.generated:
        sequence.first_s = now
    sequence.last_s = now
    sequence.generated += 1
