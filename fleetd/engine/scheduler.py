"""The compute thread's loop: admit, prefill a chunk, decode a step, repeat.

Answers that are being decoded take their steps together (``decoding.py``); prompts are prefilled one at a
time beside them, a chunk between two decode steps, so that a long prompt slows running answers by a bounded
amount instead of stopping them.
Of several waiting prompts the one with the least left to compute goes first, and none waits for ever.

A prompt may be shared with other machines, and parts of theirs may be computed here; both wait for each other
now and then, and a turn goes only to what can be computed now. The same holds for texts of other workers that
this one drafts for.

Everything here runs on one thread. Requests and commands arrive through a queue, reports leave through
``emit``; both ends are safe to use from other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.cached_results import CachedResult
from fleetd.engine.chunk_size import Chunks
from fleetd.engine.decoding import GROWTH_TOKENS, Decoding
from fleetd.engine.failures import failed
from fleetd.engine.inbox import Inbox, Stop
from fleetd.engine.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.memory import KvBudget
from fleetd.engine.output_text import AnswerText
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix_cache import PrefixCache
from fleetd.engine.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import (
    Accepted,
    AssistPrefill,
    Cancel,
    ChatPrompt,
    Delta,
    DraftFor,
    FinishReason,
    Heartbeat,
    Prefill,
    PrefillAlone,
    PrefillShared,
    Profile,
    Report,
)
from fleetd.engine.sampling import SamplingDefaults
from fleetd.engine.scoring.score_guests import ScoreGuests
from fleetd.engine.scoring.scoring_layout import ScoringLayout
from fleetd.engine.sequence import ScheduledSequence
from fleetd.engine.shared_prefill.helper_guests import HelperGuests
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.shared_prefill.shared_prompts import SharedAnswers
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller, leading, leading_cache
from fleetd.engine.speculation.draft_guests import DraftGuests
from fleetd.engine.speculation.draft_messages import DRAFTS
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.speculation import WorkerSpeculation
from fleetd.engine.steppable import wait_s
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import ContextLengthExceeded

# Turns after which a waiting prompt goes before shorter ones that came later.
PATIENCE_TURNS = 16


@dataclass
class Scheduler:
    """See the module. ``context_tokens`` bounds prompt plus answer; ``sharable`` is None where no machine can
    help another with ``model``, ``sparse`` where all of a prompt must be computed. ``vocab_size``: token ids
    that the model can take; 0 where it neither drafts nor takes drafts from others. ``drafts`` holds streams
    of drafts, ``streams`` all others; ``profile`` is where that of the model is found again."""

    model: Any
    tokenizer: Any
    context_tokens: int
    chunks: Chunks
    max_streams: int
    budget: KvBudget
    prefix: PrefixCache
    emit: Callable[[Report], None]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sharable: Sharable | None = None
    sparse: Sparse | None = None
    inbox: Inbox = field(default_factory=Inbox)
    streams: HandedOverStreams | None = None
    speculation: WorkerSpeculation | None = None
    vocab_size: int = 0
    drafts: HandedOverStreams | None = None
    profile: CachedResult[Profile] | None = None
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        streams = HandedOverStreams(self.inbox.wake) if self.streams is None else self.streams
        self._shared = SharedAnswers(self.model, self.sharable, self.prefix, streams, self.emit)
        self._assists = HelperGuests(self.sharable, self.context_tokens, self.budget, streams, self.emit)
        self._scoring = ScoreGuests(
            self.model, self.tokenizer, self.context_tokens, self.budget, self.emit, self.profile
        )
        self._waiting: list[ScheduledSequence] = []
        self._prefilling: list[ScheduledSequence] = []
        self._decoding = Decoding(
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
        )
        self._drafts = HandedOverStreams(self.inbox.wake) if self.drafts is None else self.drafts
        self._follows = DraftGuests(
            model=self.model,
            ends=frozenset(int(token) for token in self.tokenizer.eos_token_ids),
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            budget=self.budget,
            prefix=self.prefix,
            streams=self._drafts,
            emit=self.emit,
        )
        self._beat_at = 0.0

    # ---- from other threads --------------------------------------------------------------------------

    def tell(self, command: PrefillShared | PrefillAlone | AssistPrefill | DraftFor | Cancel) -> None:
        self.inbox.put(command)

    def stop(self) -> None:
        self.inbox.put(Stop())

    # ---- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until ``stop``.

        What goes wrong in one request's own steps fails that request. An exception from here is a bug or a
        failing device and ends the worker.
        """
        while self.turn():
            self._beat()
        self._close()

    def turn(self) -> bool:
        """Take what has arrived, then a step of each kind of work. False once it is to stop."""
        if not self._receive():
            return False
        self._admit()
        self._attach_drafts()
        for answer in list(self._prefilling):
            self._shared.look(answer)
        self._prefill_turn()
        self._assists.turn()
        self._scoring.turn(self.chunks.size(shared=bool(self._decoding)))
        self._follows.turn(self.chunks.size(shared=bool(self._decoding)))
        self._decoding.turn()
        return True

    def _close(self) -> None:
        for answer in self._prefilling:
            self._shared.end(answer)
        self._assists.close()
        self._scoring.close()
        self._follows.close()
        self._shared.streams.close()
        self._drafts.close()
        self._decoding.close()

    @property
    def _busy(self) -> bool:
        """Whether there is something to compute now."""
        others = self._assists.visits.ready or self._follows.visits.ready or self._scoring.ready
        return bool(self._decoding) or others or any(a.ready for a in self._prefilling)

    def _receive(self) -> bool:
        deadlines = [self._shared.due_s(answer) for answer in self._prefilling]
        deadlines += [*self._assists.visits.deadlines, *self._follows.visits.deadlines]
        for item in self.inbox.take(0.0 if self._busy else wait_s(deadlines)):
            match item:
                case Stop():
                    return False
                case Cancel(request_id):
                    self._cancelled(request_id)
                case PrefillShared() | PrefillAlone():
                    self._word(item)
                case AssistPrefill():
                    self._assists.begin(item)
                case ScoringLayout():
                    self._scoring.begin(item)
                case DraftFor():
                    self._follows.begin(item)
                case PreparedPrompt():
                    self._arrived(item)
        return True

    def _word(self, word: PrefillShared | PrefillAlone) -> None:
        answer = next((a for a in self._prefilling if a.id == word.id), None)
        if answer is None:
            self._shared.streams.drop(word.id)
        elif isinstance(word, PrefillShared):
            self._shared.share(answer, word)
        else:
            self._shared.alone(answer, word.reason)

    def _attach_drafts(self) -> None:
        """Give answers the streams of drafts that came for them."""
        for request_id in self._drafts.jobs(DRAFTS):
            groups = (*self._waiting, *self._prefilling)
            answer = next((a for a in groups if a.id == request_id), None) or self._decoding.find(request_id)
            if answer is not None and self.vocab_size:
                connect = partial(self._drafts.connect(request_id), DRAFTS)
                tokens, begun = answer.prepared.tokens, answer.generated > 0
                self._decoding.attach(request_id, RemoteSource(connect, tokens, self.vocab_size, begun=begun))
            elif request_id not in self._follows:
                # Streams are given once a request or a Follow is accepted: this one's has ended.
                self._drafts.drop(request_id)

    def _arrived(self, prepared: PreparedPrompt) -> None:
        request = prepared.request
        try:
            answer = self._new_answer(prepared)
        except Exception as error:
            self._failed(request.id, error)
            return
        # What would wait for memory first is not worth an agreement with others.
        if request.shared and not self._waiting and self._fits(answer):
            self._prefilling.append(answer)
            if self._shared.accept(answer, self.chunks.size(shared=False)):
                return
        else:
            self._waiting.append(answer)
        self.emit(
            Accepted(
                request.id,
                len(prepared.tokens),
                kept=len(answer.kept or ()),
                dense_reason=answer.dense_reason,
            )
        )

    def _new_answer(self, prepared: PreparedPrompt) -> ScheduledSequence:
        request, n = prepared.request, len(prepared.tokens)
        scoring = request.echo and request.max_tokens == 0
        if n + (0 if scoring else 1) > self.context_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {n} tokens; this model's context holds {self.context_tokens}.",
                hint="Shorten the prompt or choose a model with a longer context.",
                param="messages",
            )
        kept, dense_reason = self._kept(prepared)
        slots = n if kept is None else len(kept)
        wanted = self.context_tokens if request.max_tokens is None else request.max_tokens
        self.budget.check_alone(slots + min(wanted, 1))
        max_tokens = min(wanted, self.context_tokens - n, self.budget.capacity_tokens - slots)
        return ScheduledSequence(
            prepared=prepared,
            text=AnswerText(
                request.id,
                self.tokenizer,
                request.stop,
                prepared.tools,
                prepared.initial,
                prepared.primed,
                None if isinstance(request.prompt, ChatPrompt) else prepared.tokens[-1],
            ),
            max_tokens=max_tokens,
            promised=slots + min(max_tokens, GROWTH_TOKENS),
            arrived_s=time.monotonic(),
            logprobs=None if request.top_logprobs is None else Logprobs(self.tokenizer, request.top_logprobs),
            kept=kept,
            dense_reason=dense_reason,
        )

    def _kept(self, prepared: PreparedPrompt) -> tuple[list[int] | None, str]:
        """What of the prompt is prefilled, None for all of it; and why a Keep is not followed."""
        if prepared.kept is None:
            return None, prepared.dense_reason
        if self.sparse is None:
            return None, "This model's prompts can only be prefilled whole."
        if prepared.request.echo:
            return None, "The prompt is to be echoed."
        kept = self.sparse.kept(prepared.kept, len(prepared.tokens))
        return (kept, "") if len(kept) < len(prepared.tokens) else (None, "Nothing of it can be left out.")

    def _admit(self) -> None:
        """Move waiting requests to prefill while memory and streams allow, first come first served."""
        while self._waiting and self._fits(self._waiting[0]):
            self._prefilling.append(self._waiting.pop(0))

    def _fits(self, answer: ScheduledSequence) -> bool:
        """Reserve a stream and memory. False, and nothing is reserved, where one of them lacks."""
        free = len(self._prefilling) + len(self._decoding) < self.max_streams
        return free and self.budget.take(answer.id, answer.promised)

    def _prefill_turn(self) -> None:
        if (answer := self._choose()) is None:
            return
        try:
            prefiller = self._prefill(answer)
            if prefiller.remaining == 0:
                self._prefilling.remove(answer)
                self._begin_decode(answer, prefiller)
        except Exception as error:
            if answer in self._prefilling:
                self._prefilling.remove(answer)
            self._fail(answer, error)

    def _prefill(self, answer: ScheduledSequence) -> Prefiller | SharedPrefill | SparsePrefiller:
        """The next chunk of one prompt."""
        answer.started_s = answer.started_s or time.monotonic()
        if answer.prefiller is None:
            answer.prefiller = self._start(answer)
        self._show_prefill(answer)
        prefiller = answer.prefiller
        begun = time.monotonic()
        try:
            tokens = prefiller.step(self.chunks.size(shared=bool(self._decoding)))
        except Exception as error:
            if not isinstance(prefiller, SharedPrefill):
                raise
            self._shared.give_up(answer, error)
            return answer.prefiller
        if tokens:
            if not isinstance(prefiller, SharedPrefill):
                self.chunks.took(tokens, time.monotonic() - begun)
            self.steps += 1
            self._show_prefill(answer)
        answer.prefill_s += time.monotonic() - begun
        return prefiller

    def _show_prefill(self, answer: ScheduledSequence, *, again: bool = False) -> None:
        """Report progress. It never goes back, whatever is computed a second time."""
        prefiller = answer.prefiller
        if prefiller is None:
            return
        total = answer.slots
        reached = prefiller.progress if isinstance(prefiller, SharedPrefill) else prefiller.done
        done = max(answer.shown, reached)
        if again or done > answer.shown:
            answer.shown = done
            self.emit(Prefill(answer.id, done, total, answer.cached))

    def _choose(self) -> ScheduledSequence | None:
        """The prompt with the least left; one that was passed over too often goes first."""
        ready = [answer for answer in self._prefilling if answer.ready]
        if not ready:
            return None
        for answer in ready:
            answer.turns += 1
        overdue = [a for a in ready if a.turns > PATIENCE_TURNS]
        chosen = overdue[0] if overdue else min(ready, key=lambda a: a.left)
        chosen.turns = 0
        return chosen

    def _start(self, answer: ScheduledSequence) -> Prefiller | SparsePrefiller:
        tokens = answer.prepared.tokens
        if answer.kept is not None:
            # The KV of a token rests on all tokens before it: what follows a gap is in no dense cache.
            hit = self.prefix.fetch(tokens[: leading(answer.kept) + 1])
            answer.cached = hit.tokens
            return SparsePrefiller.begin(self.model, tokens, answer.kept, hit.cache, hit.tokens)
        if answer.prepared.request.echo and answer.logprobs is not None:
            answer.scored = PromptLogprobs(answer.logprobs, tokens)
            return Prefiller(self.model, tokens, make_prompt_cache(self.model), score=answer.scored.add)
        hit = self.prefix.fetch(tokens)
        if hit.cache is not None:
            answer.cached = hit.tokens
            return Prefiller(self.model, tokens, hit.cache, hit.tokens)
        return Prefiller(self.model, tokens, make_prompt_cache(self.model))

    def _begin_decode(
        self, answer: ScheduledSequence, prefiller: Prefiller | SharedPrefill | SparsePrefiller
    ) -> None:
        request = answer.prepared.request
        cache = prefiller.cache
        if isinstance(prefiller, SharedPrefill):
            self._shared.finish(answer, prefiller)
        answer.prefiller = None
        if request.echo:
            self._echo(answer)
        if answer.kept is not None:
            self._remember_leading(answer, answer.kept, cache)
        else:
            self._decoding.remember(answer, prefiller.tokens[:-1], cache)
        if answer.max_tokens <= 0:
            self._finish(answer, "length")
            return
        self._decoding.begin(answer, prefiller.tokens, cache)

    def _remember_leading(self, answer: ScheduledSequence, kept: list[int], cache: list[Any]) -> None:
        """Keep what a sparse prompt has in common with a dense one: the system prompt, as a rule."""
        dense = leading_cache(kept, cache)
        if dense is not None:
            mx.eval([layer.state for layer in dense])
            self.prefix.store(answer.prepared.tokens[: leading(kept)], dense, answer.namespace)

    def _echo(self, answer: ScheduledSequence) -> None:
        text = self.tokenizer.decode(answer.prepared.tokens)
        answer.text.offset = len(text)
        self.emit(Delta(answer.id, text, tokens=0, logprobs=answer.scored.entries if answer.scored else None))
        answer.scored = None

    def _cancelled(self, request_id: str) -> None:
        if any(part.cancel(request_id) for part in (self._assists, self._follows, self._scoring)):
            return
        for group in (self._waiting, self._prefilling):
            for answer in group:
                if answer.id == request_id:
                    group.remove(answer)
                    self._abandon(answer)
                    self._finish(answer, "cancelled")
                    return
        if (running := self._decoding.find(request_id)) is not None:
            self._decoding.leave(running)
            self._finish(running, "cancelled")

    def _abandon(self, answer: ScheduledSequence) -> None:
        """End a prefill half way; what it computed stays useful."""
        if isinstance(answer.prefiller, SharedPrefill):
            done, cache = answer.prefiller.verified
        elif answer.prefiller is not None:
            done, cache = answer.prefiller.done, answer.prefiller.cache
        else:
            done, cache = 0, []
        self._shared.end(answer)
        if done > answer.cached:
            self._decoding.remember(answer, answer.prepared.tokens[:done], cache)

    def _finish(self, answer: ScheduledSequence, reason: FinishReason) -> None:
        if reason != "cancelled":
            try:
                pieces = answer.text.finish()
            except Exception as error:
                self._fail(answer, error)
                return
            for piece in pieces:
                self.emit(piece)
            if answer.text.tool_calls and reason == "stop":
                reason = "tool_calls"
        self._ended(answer)
        self._beat_at = 0.0  # tell at once that there is less to do
        self.emit(answer.finished(reason))

    def _fail(self, answer: ScheduledSequence, error: Exception) -> None:
        self._shared.end(answer)
        self._ended(answer)
        self._beat_at = 0.0
        self._failed(answer.id, error)

    def _ended(self, answer: ScheduledSequence) -> None:
        """Give back what was reserved for it."""
        self._decoding.detach(answer.id)
        self.budget.give_back(answer.id)

    def _failed(self, request_id: str, error: Exception) -> None:
        self.emit(failed(request_id, error, "The answer could not be computed"))

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + limits.ENGINE_BEAT_S
        self._shared.streams.sweep()
        self._drafts.sweep()
        for answer in self._prefilling:
            if not answer.ready:
                self._show_prefill(answer, again=True)
        helping = len(self._assists) + len(self._follows) + len(self._scoring)
        work = bool(self._prefilling or self._decoding or helping)
        parts = (self._decoding, self._assists, self._follows, self._scoring)
        self.emit(
            Heartbeat(
                steps=self.steps + sum(part.steps for part in parts),
                prefilling=len(self._prefilling),
                decoding=len(self._decoding),
                waiting=len(self._waiting),
                assisting=helping,
                blocked=work and not self._busy,
                kv_bytes=self.budget.used_bytes,
                prefix_bytes=self.prefix.nbytes,
                prefix_entries=len(self.prefix),
                prefix_queries=self.prefix.queries,
                prefix_hits=self.prefix.hits,
                memory_bytes=mx.get_active_memory(),
            )
        )
