"""The compute thread's loop: admit, prefill a chunk, decode a step, repeat.

Decoding streams share one ``BatchGenerator``; prompts are prefilled one at a time beside it, a chunk between
two decode steps, so that a long prompt slows running answers by a bounded amount instead of stopping them.
Of several waiting prompts the one with the least left to compute goes first, and none waits for ever.

A prompt may be shared with other machines, and parts of theirs may be computed here; both wait for each other
now and then, and a turn goes only to what can be computed now.

Everything here runs on one thread. Requests and commands arrive through a queue, reports leave through
``emit``; both ends are safe to use from other threads.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.answer import Answer
from fleetd.engine.assists import Assists
from fleetd.engine.chunks import Chunks
from fleetd.engine.inbox import Inbox, Stop
from fleetd.engine.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.memory import KvBudget
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix import PrefixCache
from fleetd.engine.prompts import Prepared
from fleetd.engine.protocol import (
    Accepted,
    Alone,
    Assist,
    Beat,
    Cancel,
    ChatPrompt,
    Delta,
    Failed,
    FinishReason,
    Prefill,
    Report,
    Share,
)
from fleetd.engine.sampling import Choice, make_processors, make_sampler
from fleetd.engine.sharable import Sharable
from fleetd.engine.shared_answers import SharedAnswers
from fleetd.engine.sharing import SharedPrefill
from fleetd.engine.streams import Streams
from fleetd.engine.text import AnswerText
from fleetd.engine.turns import wait_s
from fleetd.errors import ContextLengthExceeded, EngineError, FleetError

# Turns after which a waiting prompt goes before shorter ones that came later.
PATIENCE_TURNS = 16
# KV is promised to an answer in steps of this many tokens, as it grows: most answers are far shorter than
# the context would allow, and promising all of that up front would let one chat fill the memory.
GROWTH_TOKENS = 512


@dataclass
class Scheduler:
    """See the module. ``context_tokens`` bounds prompt plus answer; ``sharable`` is None where no machine can
    help another with ``model``."""

    model: Any
    tokenizer: Any
    context_tokens: int
    chunks: Chunks
    max_streams: int
    budget: KvBudget
    prefix: PrefixCache
    emit: Callable[[Report], None]
    defaults: Choice = field(default_factory=Choice)
    sharable: Sharable | None = None
    inbox: Inbox = field(default_factory=Inbox)
    streams: Streams | None = None
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        streams = Streams(self.inbox.wake) if self.streams is None else self.streams
        self._shared = SharedAnswers(self.model, self.sharable, self.prefix, streams, self.emit)
        self._assists = Assists(self.sharable, self.context_tokens, self.budget, streams, self.emit)
        self._waiting: list[Answer] = []
        self._prefilling: list[Answer] = []
        self._decoding: dict[int, Answer] = {}
        self._stop_tokens = StopSequences([(int(t),) for t in self.tokenizer.eos_token_ids])
        self._generator = BatchGenerator(
            self.model,
            completion_batch_size=self.max_streams,
            prefill_batch_size=self.max_streams,
            stream=mx.default_stream(mx.default_device()),
        )
        self._beat_at = 0.0

    # ---- from other threads --------------------------------------------------------------------------

    def tell(self, command: Share | Alone | Assist | Cancel) -> None:
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
        for answer in list(self._prefilling):
            self._shared.look(answer)
        self._prefill_turn()
        self._assists.turn()
        self._decode_turn()
        return True

    def _close(self) -> None:
        for answer in self._prefilling:
            self._shared.end(answer)
        self._assists.close()
        self._shared.streams.close()
        self._generator.close()

    @property
    def _busy(self) -> bool:
        """Whether there is something to compute now."""
        return bool(self._decoding) or self._assists.ready or any(a.ready for a in self._prefilling)

    def _receive(self) -> bool:
        dues_s = [self._shared.due_s(answer) for answer in self._prefilling]
        for item in self.inbox.take(0.0 if self._busy else wait_s([*dues_s, *self._assists.dues_s])):
            match item:
                case Stop():
                    return False
                case Cancel(request_id):
                    self._cancelled(request_id)
                case Share() | Alone():
                    self._word(item)
                case Assist():
                    self._assists.begin(item)
                case Prepared():
                    self._arrived(item)
        return True

    def _word(self, word: Share | Alone) -> None:
        answer = next((a for a in self._prefilling if a.id == word.id), None)
        if answer is None:
            self._shared.streams.drop(word.id)
        elif isinstance(word, Share):
            self._shared.share(answer, word)
        else:
            self._shared.alone(answer, word.reason)

    def _arrived(self, prepared: Prepared) -> None:
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
        self.emit(Accepted(request.id, len(prepared.tokens)))

    def _new_answer(self, prepared: Prepared) -> Answer:
        request, n = prepared.request, len(prepared.tokens)
        scoring = request.echo and request.max_tokens == 0
        if n + (0 if scoring else 1) > self.context_tokens:
            raise ContextLengthExceeded(
                f"The prompt has {n} tokens; this model's context holds {self.context_tokens}.",
                hint="Shorten the prompt or choose a model with a longer context.",
                param="messages",
            )
        wanted = self.context_tokens if request.max_tokens is None else request.max_tokens
        self.budget.check_alone(n + min(wanted, 1))
        max_tokens = min(wanted, self.context_tokens - n, self.budget.capacity_tokens - n)
        return Answer(
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
            promised=n + min(max_tokens, GROWTH_TOKENS),
            arrived_s=time.monotonic(),
            logprobs=None if request.top_logprobs is None else Logprobs(self.tokenizer, request.top_logprobs),
        )

    def _admit(self) -> None:
        """Move waiting requests to prefill while memory and streams allow, first come first served."""
        while self._waiting and self._fits(self._waiting[0]):
            self._prefilling.append(self._waiting.pop(0))

    def _fits(self, answer: Answer) -> bool:
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

    def _prefill(self, answer: Answer) -> Prefiller | SharedPrefill:
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
            if isinstance(prefiller, Prefiller):
                self.chunks.took(tokens, time.monotonic() - begun)
            self.steps += 1
            self._show_prefill(answer)
        answer.prefill_s += time.monotonic() - begun
        return prefiller

    def _show_prefill(self, answer: Answer, *, again: bool = False) -> None:
        """Report progress. It never goes back, whatever is computed a second time."""
        prefiller = answer.prefiller
        if prefiller is None:
            return
        total = len(answer.prepared.tokens)
        reached = prefiller.progress if isinstance(prefiller, SharedPrefill) else prefiller.done
        done = max(answer.shown, reached)
        if again or done > answer.shown:
            answer.shown = done
            self.emit(Prefill(answer.id, done, total, answer.cached))

    def _choose(self) -> Answer | None:
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

    def _start(self, answer: Answer) -> Prefiller:
        tokens = answer.prepared.tokens
        if answer.prepared.request.echo and answer.logprobs is not None:
            answer.scored = PromptLogprobs(answer.logprobs, tokens)
            return Prefiller(self.model, tokens, make_prompt_cache(self.model), score=answer.scored.add)
        hit = self.prefix.fetch(tokens)
        if hit.cache is not None:
            answer.cached = hit.tokens
            return Prefiller(self.model, tokens, hit.cache, hit.tokens)
        return Prefiller(self.model, tokens, make_prompt_cache(self.model))

    def _begin_decode(self, answer: Answer, prefiller: Prefiller | SharedPrefill) -> None:
        request = answer.prepared.request
        cache = prefiller.cache
        if isinstance(prefiller, SharedPrefill):
            self._shared.finish(answer, prefiller)
        answer.prefiller = None
        if request.echo:
            self._echo(answer)
        self._remember(answer, prefiller.tokens[:-1], cache)
        if answer.max_tokens <= 0:
            self._finish(answer, "length")
            return
        (answer.uid,) = self._generator.insert(
            [prefiller.tokens[-1:]],
            max_tokens=[answer.max_tokens],
            caches=[cache],
            all_tokens=[prefiller.tokens[:-1]],
            samplers=[make_sampler(request.sampling, self.defaults)],
            logits_processors=[make_processors(request.sampling, self.defaults, len(prefiller.tokens))],
            stop_sequences=[self._stop_tokens],
        )
        self._decoding[answer.uid] = answer

    def _echo(self, answer: Answer) -> None:
        text = self.tokenizer.decode(answer.prepared.tokens)
        answer.text.offset = len(text)
        self.emit(Delta(answer.id, text, tokens=0, logprobs=answer.scored.entries if answer.scored else None))
        answer.scored = None

    def _decode_turn(self) -> None:
        if not self._decoding:
            return
        _, responses = self._generator.next()
        now = time.monotonic()
        self.steps += 1
        # The batch may only change once all of its tokens are taken.
        stopped: list[Answer] = []
        broken: list[tuple[Answer, Exception]] = []
        for response in responses:
            answer = self._decoding[response.uid]
            ended, left = response.finish_reason == "stop", response.finish_reason is not None
            self._count(answer, now)
            if left:
                del self._decoding[response.uid]
                self._remember(answer, response.all_tokens, response.prompt_cache)
            try:
                if not ended:
                    self._show(answer, response)
            except Exception as error:
                if left:
                    self._fail(answer, error)
                else:
                    broken.append((answer, error))
                continue
            if left:
                self._finish(answer, "stop" if ended or answer.text.stopped_by else "length")
            elif answer.text.stopped_by is not None:
                stopped.append(answer)
            elif not self._grow(answer):
                broken.append((answer, self.budget.exhausted(answer.held)))
        for answer in stopped:
            self._leave_batch(answer)
            self._finish(answer, "stop")
        for answer, reason in broken:
            self._leave_batch(answer)
            self._fail(answer, reason)

    @staticmethod
    def _count(answer: Answer, now: float) -> None:
        if not answer.generated:
            answer.first_s = now
        answer.last_s = now
        answer.generated += 1

    def _show(self, answer: Answer, response: Any) -> None:
        entry = None
        if answer.logprobs is not None:
            entry = answer.logprobs.of(response.token, response.logprobs, answer.text.length)
        for piece in answer.text.push(response.token, entry):
            self.emit(piece)

    def _grow(self, answer: Answer) -> bool:
        """Promise more KV to an answer that has used what it was promised."""
        if answer.held < answer.promised:
            return True
        more = min(answer.promised + GROWTH_TOKENS, len(answer.prepared.tokens) + answer.max_tokens)
        if not self.budget.take(answer.id, more):
            return False
        answer.promised = more
        return True

    def _leave_batch(self, answer: Answer) -> None:
        """Take a running answer out of the batch; what it computed stays useful to a retry or a next turn."""
        uid = answer.uid
        del self._decoding[uid]
        cache, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        self._remember(answer, tokens, cache)

    def _remember(self, answer: Answer, tokens: list[int], cache: list[Any]) -> None:
        mx.eval([layer.state for layer in cache])
        self.prefix.store(tokens, cache, answer.namespace)

    def _cancelled(self, request_id: str) -> None:
        if self._assists.cancel(request_id):
            return
        for group in (self._waiting, self._prefilling):
            for answer in group:
                if answer.id == request_id:
                    group.remove(answer)
                    self._abandon(answer)
                    self._finish(answer, "cancelled")
                    return
        for answer in self._decoding.values():
            if answer.id == request_id:
                self._leave_batch(answer)
                self._finish(answer, "cancelled")
                return

    def _abandon(self, answer: Answer) -> None:
        """End a prefill half way; what it computed stays useful."""
        if isinstance(answer.prefiller, SharedPrefill):
            done, cache = answer.prefiller.verified
        elif answer.prefiller is not None:
            done, cache = answer.prefiller.done, answer.prefiller.cache
        else:
            done, cache = 0, []
        self._shared.end(answer)
        if done > answer.cached:
            self._remember(answer, answer.prepared.tokens[:done], cache)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
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
        self.budget.give_back(answer.id)
        self._beat_at = 0.0  # tell at once that there is less to do
        self.emit(answer.finished(reason))

    def _fail(self, answer: Answer, error: Exception) -> None:
        self._shared.end(answer)
        self.budget.give_back(answer.id)
        self._beat_at = 0.0
        self._failed(answer.id, error)

    def _failed(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, FleetError):
            traceback.print_exception(error)
            error = EngineError(f"The answer could not be computed ({type(error).__name__}).")
        self.emit(Failed(request_id, error.code, error.message, error.hint, error.param))

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + limits.ENGINE_BEAT_S
        self._shared.streams.sweep()
        for answer in self._prefilling:
            if not answer.ready:
                self._show_prefill(answer, again=True)
        work = bool(self._prefilling or self._decoding or len(self._assists))
        self.emit(
            Beat(
                steps=self.steps + self._assists.steps,
                prefilling=len(self._prefilling),
                decoding=len(self._decoding),
                waiting=len(self._waiting),
                assisting=len(self._assists),
                held_up=work and not self._busy,
                kv_bytes=self.budget.used_bytes,
                prefix_bytes=self.prefix.nbytes,
                prefix_entries=len(self.prefix),
                prefix_queries=self.prefix.queries,
                prefix_hits=self.prefix.hits,
                memory_bytes=mx.get_active_memory(),
            )
        )
