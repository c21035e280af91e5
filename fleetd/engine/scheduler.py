"""The compute thread's loop: admit, prefill a chunk, decode a step, repeat.

Decoding streams share one ``BatchGenerator``; prompts are prefilled one at a time beside it, a chunk between
two decode steps, so that a long prompt slows running answers by a bounded amount instead of stopping them.
Of several waiting prompts the one with the least left to compute goes first, and none waits for ever.

Everything here runs on one thread. Requests and cancellations arrive through a queue, reports leave through
``emit``; both ends are safe to use from other threads.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.chunks import Chunks
from fleetd.engine.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.memory import KvBudget
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix import PrefixCache
from fleetd.engine.prompts import Prepared
from fleetd.engine.protocol import (
    Accepted,
    Beat,
    ChatPrompt,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Prefill,
    Report,
    Timings,
    Usage,
)
from fleetd.engine.sampling import Choice, make_processors, make_sampler
from fleetd.engine.text import AnswerText
from fleetd.errors import ContextLengthExceeded, EngineError, FleetError

# Turns after which a waiting prompt goes before shorter ones that came later.
PATIENCE_TURNS = 16
# KV is promised to an answer in steps of this many tokens, as it grows: most answers are far shorter than
# the context would allow, and promising all of that up front would let one chat fill the memory.
GROWTH_TOKENS = 512


@dataclass(slots=True)
class Answer:
    """One request from admission to its end."""

    prepared: Prepared
    text: AnswerText
    max_tokens: int
    promised: int  # tokens of KV, prompt included
    arrived_s: float
    logprobs: Logprobs | None
    scored: PromptLogprobs | None = None
    prefiller: Prefiller | None = None
    uid: int = -1  # in the batch; none before decoding
    cached: int = 0
    generated: int = 0
    turns: int = 0
    prefill_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def id(self) -> str:
        return self.prepared.request.id

    @property
    def held(self) -> int:
        """Tokens of KV in use."""
        return len(self.prepared.tokens) + self.generated


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: str


class _Stop:
    pass


@dataclass
class Scheduler:
    """See the module. ``context_tokens`` bounds prompt plus answer."""

    model: Any
    tokenizer: Any
    context_tokens: int
    chunks: Chunks
    max_streams: int
    budget: KvBudget
    prefix: PrefixCache
    emit: Callable[[Report], None]
    defaults: Choice = field(default_factory=Choice)
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[Prepared | _Cancel | _Stop] = queue.SimpleQueue()
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

    def submit(self, prepared: Prepared) -> None:
        self._inbox.put(prepared)

    def cancel(self, request_id: str) -> None:
        self._inbox.put(_Cancel(request_id))

    def stop(self) -> None:
        self._inbox.put(_Stop())

    # ---- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until ``stop``.

        What goes wrong in one request's own steps fails that request. An exception from here is a bug or a
        failing device and ends the worker.
        """
        while self._receive():
            self._admit()
            self._prefill_turn()
            self._decode_turn()
            self._beat()
        self._generator.close()

    def _receive(self) -> bool:
        """Take what has arrived; wait for something only when there is nothing to compute."""
        idle = not (self._prefilling or self._decoding)
        while True:
            try:
                item = (
                    self._inbox.get(block=idle, timeout=limits.ENGINE_BEAT_S)
                    if idle
                    else self._inbox.get_nowait()
                )
            except queue.Empty:
                return True
            idle = False
            match item:
                case _Stop():
                    return False
                case _Cancel(request_id):
                    self._cancelled(request_id)
                case Prepared():
                    self._arrived(item)

    def _arrived(self, prepared: Prepared) -> None:
        request = prepared.request
        try:
            answer = self._new_answer(prepared)
        except Exception as error:
            self._failed(request.id, error)
            return
        self.emit(Accepted(request.id, len(prepared.tokens)))
        self._waiting.append(answer)

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
        while self._waiting:
            answer = self._waiting[0]
            if len(self._prefilling) + len(self._decoding) >= self.max_streams:
                return
            if not self.budget.take(answer.id, answer.promised):
                return
            self._waiting.pop(0)
            self._prefilling.append(answer)

    def _prefill_turn(self) -> None:
        if not self._prefilling:
            return
        answer = self._choose()
        try:
            prefiller = self._prefill(answer)
            if prefiller.remaining == 0:
                self._prefilling.remove(answer)
                self._begin_decode(answer, prefiller)
        except Exception as error:
            if answer in self._prefilling:
                self._prefilling.remove(answer)
            self._fail(answer, error)

    def _prefill(self, answer: Answer) -> Prefiller:
        """The next chunk of one prompt."""
        if answer.prefiller is None:
            answer.started_s = time.monotonic()
            answer.prefiller = self._start(answer)
            total = len(answer.prepared.tokens)
            self.emit(Prefill(answer.id, answer.cached, total, answer.cached))
        prefiller = answer.prefiller
        begun = time.monotonic()
        if tokens := prefiller.step(self.chunks.size(shared=bool(self._decoding))):
            self.chunks.took(tokens, time.monotonic() - begun)
            self.steps += 1
            self.emit(Prefill(answer.id, prefiller.done, len(answer.prepared.tokens), answer.cached))
        answer.prefill_s += time.monotonic() - begun
        return prefiller

    def _choose(self) -> Answer:
        """The prompt with the least left; one that was passed over too often goes first."""
        for answer in self._prefilling:
            answer.turns += 1
        overdue = [a for a in self._prefilling if a.turns > PATIENCE_TURNS]
        chosen = overdue[0] if overdue else min(self._prefilling, key=self._left)
        chosen.turns = 0
        return chosen

    @staticmethod
    def _left(answer: Answer) -> int:
        return answer.prefiller.remaining if answer.prefiller else len(answer.prepared.tokens)

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

    def _begin_decode(self, answer: Answer, prefiller: Prefiller) -> None:
        request = answer.prepared.request
        if request.echo:
            self._echo(answer)
        self._remember(prefiller.tokens[:-1], prefiller.cache)
        if answer.max_tokens <= 0:
            self._finish(answer, "length")
            return
        (answer.uid,) = self._generator.insert(
            [prefiller.tokens[-1:]],
            max_tokens=[answer.max_tokens],
            caches=[prefiller.cache],
            all_tokens=[prefiller.tokens[:-1]],
            samplers=[make_sampler(request.sampling, self.defaults)],
            logits_processors=[make_processors(request.sampling, self.defaults, len(prefiller.tokens))],
            stop_sequences=[self._stop_tokens],
        )
        answer.prefiller = None
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
                self._remember(response.all_tokens, response.prompt_cache)
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
        self._remember(tokens, cache)

    def _remember(self, tokens: list[int], cache: list[Any]) -> None:
        mx.eval([layer.state for layer in cache])
        self.prefix.store(tokens, cache)

    def _cancelled(self, request_id: str) -> None:
        for group in (self._waiting, self._prefilling):
            for answer in group:
                if answer.id == request_id:
                    group.remove(answer)
                    if answer.prefiller is not None and answer.prefiller.done:
                        self._remember(
                            answer.prefiller.tokens[: answer.prefiller.done], answer.prefiller.cache
                        )
                    self._finish(answer, "cancelled")
                    return
        for answer in self._decoding.values():
            if answer.id == request_id:
                self._leave_batch(answer)
                self._finish(answer, "cancelled")
                return

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
        first, started = answer.first_s, answer.started_s or time.monotonic()
        self.emit(
            Finished(
                answer.id,
                reason,
                Usage(
                    prompt_tokens=len(answer.prepared.tokens),
                    cached_tokens=answer.cached,
                    completion_tokens=answer.generated,
                    reasoning_tokens=answer.text.reasoning_tokens,
                ),
                Timings(
                    queue_s=started - answer.arrived_s,
                    # The last prompt token is computed by the first decode step.
                    prefill_s=first - started if first else answer.prefill_s,
                    decode_s=answer.last_s - first if first else 0.0,
                ),
                answer.text.stopped_by,
            )
        )

    def _fail(self, answer: Answer, error: Exception) -> None:
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
        self.emit(
            Beat(
                steps=self.steps,
                prefilling=len(self._prefilling),
                decoding=len(self._decoding),
                waiting=len(self._waiting),
                kv_bytes=self.budget.used_bytes,
                prefix_bytes=self.prefix.nbytes,
                prefix_entries=len(self.prefix),
                prefix_queries=self.prefix.queries,
                prefix_hits=self.prefix.hits,
                memory_bytes=mx.get_active_memory(),
            )
        )
