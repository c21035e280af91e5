"""One request in the scheduler, from admission to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from fleetd.control.prefill_trace import GroupStage, Speculated
from fleetd.engine.answer.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.failures import require
from fleetd.engine.guests import can_step
from fleetd.engine.layers.prefill import Prefiller, PromptRows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.loop.phases import HELD, HOLDS, NEXT, IllegalMove, Phase
from fleetd.engine.measure.memory import GROWTH_TOKENS, KvBudget
from fleetd.engine.prefixes.disk_restore import Restoring
from fleetd.engine.prefixes.peer_fetch import PeerFetch
from fleetd.engine.prefixes.prefix_cache import DENSE, NO_ORIGINS, SPARSE, Hit, Origins, PrefixCache
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, check_length
from fleetd.engine.protocol import ChatPrompt, Finished, FinishReason, PrefillWithHelpers, Timings, Usage
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller, leading


@dataclass(slots=True)
class Undecided:
    """A prompt that waits for the daemon to decide whether others help, then for the streams to them."""

    sharable: Sharable
    until_s: float
    share: PrefillWithHelpers | None = None


@dataclass(slots=True)
class AwaitedPrefix:
    """The first ``tokens`` of a prompt, which another prompt that begins alike computes for both."""

    leader: ScheduledSequence
    tokens: int


@dataclass(frozen=True, slots=True)
class BeginningReport:
    """What a prompt's prefill began from, and what it took to have it."""

    cached_tokens: int = 0  # that its prefill began from, those of ``front_tokens`` among them
    front_tokens: int = 0  # computed for it itself, towards those that came from another machine
    front_s: float = 0.0
    restored_tokens: int = 0  # from the disk
    restore_s: float = 0.0  # also if nothing was found
    fetched_tokens: int = 0  # from another machine
    fetch_s: float = 0.0  # from the question on, without ``front_s``; also if nothing came


@dataclass(slots=True)
class ScheduledSequence:
    """``move`` alone changes the phase and what belongs to it: ``awaited`` to ``prefiller``."""

    prepared: PreparedPrompt
    text: AnswerText
    max_tokens: int  # of the answer
    promised: int  # tokens of KV that memory is reserved for, the prompt's included
    arrived_s: float
    logprobs: Logprobs | None
    # The prompt's own probabilities, while they are computed.
    scored: PromptLogprobs | None = None
    # Accepted was reported, and said that no helper is waited for.
    accepted: bool = False
    phase: Phase = Phase.WAITING
    awaited: AwaitedPrefix | None = None
    restoring: Restoring | None = None
    fetching: PeerFetch | None = None
    undecided: Undecided | None = None
    # The beginning that was found for it, which its prefill takes over; None: what is in memory by then.
    hit: Hit | None = None
    prefiller: Prefiller | SharedPrefill | SparsePrefiller | None = None
    # Indices of the prompt tokens that are prefilled, ascending; None: all of them. Or why not only those.
    kept: list[int] | None = None
    dense_reason: str = ""
    # Where the prefix cache keeps its KV: what its prefill began from, and who took part, decide.
    namespace: str = DENSE
    # Labels of the machines that some of it came from, as in a Hit.
    origins: Origins = NO_ORIGINS
    # The drafts' figures; set when it leaves decoding.
    speculated: Speculated | None = None
    # What the machines of a group took for its steps; set when it leaves decoding.
    stages: Sequence[GroupStage] = ()
    beginning: BeginningReport = BeginningReport()
    # When its client left, if it is still read together with helpers: for one that asks again.
    left_s: float = 0.0
    shown: int = -1  # prefilled tokens as last reported; -1 before the first report
    shown_image_steps: int = 0
    generated: int = 0  # tokens of the answer
    turns: int = 0  # for which its prefill was passed over
    passed: int = 0  # by how many later ones, while it waited for memory
    # Leading tokens of it that were in memory when its prefill was due.
    known: int = 0
    prefill_s: float = 0.0  # of its own turns
    # Others were computed beside it.
    prefill_interleaved: bool = False
    decode_interleaved: bool = False
    # Of its prefill, its first token and its last one; 0 before that.
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    def move(
        self,
        phase: Phase,
        *,
        awaited: AwaitedPrefix | None = None,
        restoring: Restoring | None = None,
        fetching: PeerFetch | None = None,
        undecided: Undecided | None = None,
        prefiller: Prefiller | SharedPrefill | SparsePrefiller | None = None,
    ) -> None:
        """Go to ``phase``, with what belongs to it; what belonged to the phase before is let go, but for a
        ``hit`` on the way to a prefill. Raises IllegalMove for a phase that may not follow."""
        if phase not in NEXT[self.phase]:
            raise IllegalMove(f"{self.id} cannot go from {self.phase.name} to {phase.name}.")
        self.phase = phase
        self.awaited, self.restoring, self.fetching = awaited, restoring, fetching
        self.undecided, self.prefiller = undecided, prefiller
        if prefiller is not None or phase > Phase.READING:
            self.hit = None

    def validate(self) -> None:
        """Check that it holds what belongs to its phase."""
        held = {name for name in HELD if getattr(self, name) is not None}
        must, may = HOLDS[self.phase]
        require(must <= held <= must | may, f"{self.id} holds {held} while it is {self.phase.name}")
        require(self.hit is None or self.prefiller is None, f"{self.id} has a hit that its prefill took over")

    @property
    def id(self) -> str:
        return self.prepared.request.id

    @property
    def scores_prompt(self) -> bool:
        """True if the prompt's own probabilities are wanted: all of its tokens are computed, here."""
        return self.prepared.request.echo and self.logprobs is not None

    @property
    def numbers(self) -> list[int]:
        """A number for each token of the prompt: the token, and for a row of an image what stands for its
        content. The prefix cache compares these."""
        return self.prepared.keys or self.prepared.tokens

    def numbered(self, tokens: list[int]) -> list[int]:
        """``tokens``, the prompt's first ones or it and what follows, as ``numbers`` has them."""
        keys = self.prepared.keys[: len(tokens)]
        return keys + tokens[len(keys) :] if keys else tokens

    @property
    def dense_tokens(self) -> list[int]:
        """The prompt, or as much of it as is prefilled without a gap and one token more. The KV of a token
        rests on all tokens before it, so what follows a gap is in no dense cache."""
        tokens, kept = self.numbers, self.kept
        return tokens if kept is None else tokens[: leading(kept) + 1]

    @property
    def slot_tokens(self) -> list[int]:
        """A number for each token that is prefilled: the token, and its position too if some are left out.
        What two prompts' lists begin with alike has the same KV."""
        tokens, kept = self.numbers, self.kept
        return tokens if kept is None else [at << 32 | tokens[at] for at in kept]

    @property
    def slots(self) -> int:
        """Tokens of KV that the prompt takes."""
        return len(self.prepared.tokens) if self.kept is None else len(self.kept)

    @property
    def ahead(self) -> int:
        """Tokens of the prompt that take no KV: so much are positions ahead of slots."""
        return len(self.prepared.tokens) - self.slots

    @property
    def held(self) -> int:
        """Tokens of KV in use."""
        return self.slots + self.generated

    @property
    def beside_bytes(self) -> int:
        """Memory that it needs beside keys and values: of images, until a prefill is behind them."""
        return 0 if self.prepared.images is None else self.prepared.images.held_bytes

    @property
    def shared(self) -> SharedPrefill | None:
        """Its prefill, while helpers take part in it."""
        return self.prefiller if isinstance(self.prefiller, SharedPrefill) else None

    @property
    def left(self) -> int:
        """Tokens to prefill. The last of the prompt is left to decoding."""
        if self.prefiller is not None:
            return self.prefiller.remaining
        return self.slots - 1 - (self.hit.tokens if self.hit is not None else self.known)

    @property
    def computed(self) -> int:
        """Leading prompt tokens that its prefill has computed or found, and that others may use: with helpers
        none before the end, when all that they sent is checked."""
        if self.prefiller is None or (self.shared is not None and self.shared.remaining):
            return 0
        return self.prefiller.done

    @property
    def progress(self) -> int:
        """Prompt tokens that the work done so far amounts to, for people."""
        if self.awaited is not None:
            return min(self.awaited.leader.progress, self.awaited.tokens)
        return self.computed if self.shared is None else self.shared.progress

    @property
    def ready(self) -> bool:
        """True if a step of its prefill can be taken now."""
        if self.fetching is not None:
            return self.fetching.computes
        return self.phase is Phase.READING and (self.shared is None or can_step(self.shared))

    @property
    def arrived(self) -> bool:
        """True if something of its beginning has come that can be taken in now, or will not come any more."""
        coming = (self.restoring, self.fetching)
        return any(each is not None and each.ready for each in coming)

    def begin_from(self, model: Any, hit: Hit, state_bytes: int) -> Prefiller | SparsePrefiller:
        """Prefill what ``hit`` lacks, which is the prefill's own from now on.

        ``state_bytes``: memory for states at earlier tokens of a dense prompt.
        """
        self._begins_from(hit)
        return self.go_on_from(model, hit, state_bytes)

    def begin_with(self, shared: SharedPrefill, hit: Hit) -> None:
        """``begin_from``, together with other machines."""
        self._begins_from(hit)
        self.move(Phase.READING, prefiller=shared)
        self.namespace, self.origins = shared.namespace, shared.origins

    def _begins_from(self, hit: Hit) -> None:
        self.beginning = replace(self.beginning, cached_tokens=hit.tokens, front_tokens=hit.front)

    def go_on_from(self, model: Any, hit: Hit, state_bytes: int) -> Prefiller | SparsePrefiller:
        """``begin_from``, of a prefill that has begun already: ``hit`` is how far it came."""
        tokens, borders = self.prepared.tokens, self.prepared.borders
        if self.prepared.images is not None:
            self.prepared.images.begin_behind(hit.tokens)
        # Tokens that are left out say nothing of whose numbers these are.
        self.namespace = DENSE if hit.namespace == SPARSE else hit.namespace
        self.origins = hit.origins
        begun: Prefiller | SparsePrefiller
        if self.kept is not None:
            sparse = hit.namespace == SPARSE
            begun = SparsePrefiller.begin(model, tokens, self.kept, hit.cache, hit.tokens, sparse=sparse)
        else:
            cache = hit.cache or make_prompt_cache(model)
            begun = Prefiller(
                model,
                tokens,
                cache,
                hit.tokens,
                state_bytes=state_bytes,
                borders=borders,
                rows=self._rows(model),
            )
        self.move(Phase.READING, prefiller=begun)
        return begun

    def _rows(self, model: Any) -> PromptRows | None:
        """The rows of the prompt's images; None if it has none."""
        images = self.prepared.images
        if images is None:
            return None
        stage = Stage.of(model)
        return PromptRows(stage, partial(images.embedded, stage.embed), images.blocks, images.read_on)

    def sparse_in(self, prefix: PrefixCache) -> int:
        """Tokens in memory of a prompt that leaves out the same ones, if those of dense prompts are fewer."""
        sparse = 0 if self.kept is None else prefix.longest(self.slot_tokens, SPARSE)
        return sparse if sparse > prefix.longest(self.dense_tokens) else 0

    def longest_in(self, prefix: PrefixCache) -> int:
        """Tokens that ``found_in`` would give; nothing is copied."""
        return self.sparse_in(prefix) or prefix.longest(self.dense_tokens)

    def found_in(self, prefix: PrefixCache) -> Hit:
        """The longest exact beginning that is in memory."""
        if self.sparse_in(prefix):
            return prefix.fetch(self.slot_tokens, SPARSE)
        return prefix.fetch(self.dense_tokens)

    def read_so_far(self) -> Hit:
        """What has been read of it, as far as it is checked, under the namespace of its numbers; nothing if
        no other prompt could use it.

        For a prefill that ends half way: what came from other machines is checked now.
        """
        if self.fetching is not None:
            return self.fetching.cut_short() or self.hit or Hit(0, None)
        if self.prefiller is None:
            return self.hit or Hit(0, None)
        if self.shared is not None:
            read = self.shared.read_so_far()
        else:
            read = Hit(self.prefiller.done, self.prefiller.cache, self.namespace, origins=self.origins)
        return read if self.kept is None else replace(read, namespace=SPARSE)

    def finished(self, reason: FinishReason) -> Finished:
        first, started, begun = self.first_s, self.started_s or time.monotonic(), self.beginning
        found_s = begun.restore_s + begun.fetch_s + begun.front_s
        return Finished(
            self.id,
            reason,
            Usage(
                prompt_tokens=len(self.prepared.tokens),
                cached_tokens=begun.cached_tokens - begun.front_tokens,
                completion_tokens=self.generated,
                reasoning_tokens=self.text.reasoning_tokens,
            ),
            Timings(
                queue_s=max(0.0, started - self.arrived_s - found_s),
                # The last prompt token is computed by the first decode step.
                prefill_s=begun.front_s + (first - started if first else self.prefill_s),
                decode_s=self.last_s - first if first else 0.0,
                restored_tokens=begun.restored_tokens,
                restore_s=begun.restore_s,
                fetched_tokens=begun.fetched_tokens,
                fetch_s=begun.fetch_s,
                prefill_interleaved=self.prefill_interleaved,
                decode_interleaved=self.decode_interleaved,
            ),
            self.text.stopped_by,
            self.speculated,
            [*self.stages],
        )


def new_sequence(
    prepared: PreparedPrompt, tokenizer: Any, sparse: Sparse | None, budget: KvBudget, context_tokens: int
) -> ScheduledSequence:
    """A sequence for a prompt, which may not have been admitted yet.

    Raises:
        ContextLengthExceeded, OutOfMemory: it would not fit even with nothing else running.
    """
    request, n = prepared.request, len(prepared.tokens)
    check_fits(prepared, sparse, budget, context_tokens)
    beside = 0 if prepared.images is None else prepared.images.held_bytes
    kept, dense_reason = _kept(prepared, sparse)
    slots = n if kept is None else len(kept)
    wanted = context_tokens if request.max_tokens is None else request.max_tokens
    max_tokens = min(wanted, context_tokens - n, budget.capacity_tokens - slots)
    return ScheduledSequence(
        prepared=prepared,
        text=AnswerText(
            request.id,
            tokenizer,
            request.stop,
            prepared.tools,
            prepared.initial,
            None if isinstance(request.prompt, ChatPrompt) else prepared.tokens[-1],
            call_pieces=request.call_pieces,
            min_tokens=request.min_tokens,
            plain=not isinstance(request.prompt, ChatPrompt),
            either=request.constraint is not None,
        ),
        max_tokens=max_tokens,
        # Alone it must fit with all of its images, or it would wait for ever.
        promised=min(slots + min(max_tokens, GROWTH_TOKENS), budget.capacity_beside(beside)),
        arrived_s=time.monotonic(),
        logprobs=None if request.top_logprobs is None else Logprobs(tokenizer, request.top_logprobs),
        kept=kept,
        dense_reason=dense_reason,
    )


def check_fits(
    prepared: PreparedPrompt, sparse: Sparse | None, budget: KvBudget, context_tokens: int
) -> None:
    """Raises ContextLengthExceeded, OutOfMemory: the prompt would not fit even with nothing else running.

    It reads nothing that computing changes, so any thread may call it.
    """
    check_length(prepared, context_tokens)
    kept, _ = _kept(prepared, sparse)
    slots = len(prepared.tokens) if kept is None else len(kept)
    beside = 0 if prepared.images is None else prepared.images.held_bytes
    budget.check_alone(slots + (0 if prepared.request.max_tokens == 0 else 1), beside)


def _kept(prepared: PreparedPrompt, sparse: Sparse | None) -> tuple[list[int] | None, str]:
    """The tokens to prefill, None for all of them; and why a Keep is not followed."""
    if prepared.kept is None:
        return None, prepared.dense_reason
    if prepared.images is not None:
        return None, "It has images."
    if sparse is None:
        return None, "This model's prompts can only be prefilled whole."
    if prepared.request.echo:
        return None, "The prompt is to be echoed."
    kept = sparse.kept(prepared.kept, len(prepared.tokens))
    return (kept, "") if len(kept) < len(prepared.tokens) else (None, "Nothing of it can be left out.")
