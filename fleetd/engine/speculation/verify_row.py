"""One answer, decoded on a cache of its own, several tokens per pass where drafts are right.

    in    [ due | d1 d2 d3 ]        the token that was chosen last, and guesses at those after it
    out     x1 | x2 x3 x4           what follows each of them; x2 counts only if x1 = d1, x3 only if x2 = d2 …
    x1 = d1, x2 ≠ d2: x1 and x2 are the answer's next tokens, x2 is due in the next pass, d2 and d3 are undone

Where a pass can only be undone as a whole, because a running state has no earlier tokens
(``rollback.mark``), a wrong draft undoes all of it. What was right is then ``pending``: the next pass
computes it again, before the token that is due.

    in    [ due x1 | x2 | d4 d5 ]   after a pass as above; only what follows x2 counts

Without drafts a pass is a single step, and the next one can be begun before its token is read: the device
computes while the host shows the token. The step over the due token is then ``under_way``.

Over several machines (``sends_blocks``) blocks can follow each other before the first has come back, as if
all of it were right. ``send`` begins one, ``take`` waits for the oldest. After a wrong draft the later ones
are undone, and every machine drops those that it has not computed.

    sent    [ due d1 ] [ d2 d3 ] [ d4 d5 ]          x1 … x6 follow; x3 ≠ d3: all but due, d1 and d2 is undone

An answer that is held to a grammar has a mask for each row, made while the device computes.

Tokens are chosen row by row exactly as mlx-lm's batch does it (mask, processors on what the answer has so
far, log probabilities, sampler), and a seeded sampler's noise belongs to the token's index in the answer. So
verifying is a test of equality for sampled answers as it is for greedy ones, and every token, its
log-probabilities included, is what plain decoding gives wherever a block's arithmetic is that of single steps
(``exactness_probe.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.grammar.matcher import AnswerMatcher, Mask
from fleetd.engine.layers.hidden_states import NO_TAPS, Taps, noted_states
from fleetd.engine.sampling.sampler import LogitsProcessor, Sampler, SeededSampler, masked
from fleetd.engine.sequence_state import rollback
from fleetd.engine.speculation.controller import Draft, leading
from fleetd.engine.speculation.sources import HiddenRows


class Chosen(msgspec.Struct, frozen=True):
    """One token of an answer."""

    token: int
    # Log-probabilities, (1, V).
    row: mx.array

    @property
    def logprobs(self) -> mx.array:  # (V,)
        """Cut out when it is asked for: few answers are."""
        return self.row[0]


def sends_blocks(model: Any, cache: list[Any]) -> bool:
    """True if several blocks of a sequence can be under way. ``cache``: one in which nothing is yet.

    Not where a block can only be undone as a whole, nor where none can.
    """
    several = getattr(model, "machines", 1) > 1
    return several and rollback.room(cache) > 0 and not rollback.needs_mark(cache)


class SentBlock(msgspec.Struct, frozen=True):
    """One that was sent: its tokens, the source that guessed them, and what comes out (``Flight``)."""

    tokens: list[int]
    source: str
    flight: Any


@dataclass(slots=True)
class VerifyRow:
    """One answer's text and cache, which belong to this object."""

    model: Any
    # Prompt and answer. The last token is due: the next pass computes its row, unless a step is under way.
    tokens: list[int]
    # The rows of all tokens but the one that is due and the ``pending`` ones before it.
    cache: list[Any]
    sampler: Sampler
    processors: Sequence[LogitsProcessor] = ()
    # Tokens of the answer.
    generated: int = 0
    # What the answer is held to; None: nothing.
    matcher: AnswerMatcher | None = None
    # Tokens before the due one that the next pass computes again.
    pending: int = field(init=False, default=0)
    # Layers whose hidden states passes note; and those of the last pass's tokens that are in the text now.
    hidden_layers: tuple[int, ...] = field(init=False, default=())
    hidden: HiddenRows | None = field(init=False, default=None)
    # Where a pass can only be undone as a whole: the tokens held before the last one, and the mark.
    _before: tuple[int, list[Any]] | None = field(init=False, default=None)
    # Of the step over the due token: the token that it chooses, (1,), log-probabilities, (1, V), and states.
    _next: tuple[mx.array, mx.array, HiddenRows | None] | None = field(init=False, default=None)
    # Those that were sent and not taken, in order; the first one begins with the due token.
    _blocks: deque[SentBlock] = field(init=False, default_factory=deque)
    # True if the last pass dropped blocks that were sent: machines may be busy with them.
    dropped: bool = field(init=False, default=False)
    # The tokens so far, as far as processors have asked for them.
    _context: TokenBuffer = field(init=False, default_factory=TokenBuffer)
    _in_context: int = field(init=False, default=0)

    @property
    def under_way(self) -> bool:
        """True if the step over the due token has begun; then the next pass can only be ``step``."""
        return self._next is not None

    @property
    def held(self) -> int:
        """Tokens whose rows are in the cache."""
        return len(self.tokens) - 1 - self.pending + self.under_way + self._sent

    @property
    def _sent(self) -> int:
        return sum(len(block.tokens) for block in self._blocks)

    @property
    def blocks(self) -> int:
        """How many were sent and not taken."""
        return len(self._blocks)

    @property
    def guessed(self) -> list[int]:
        """The drafts that were sent, in order; the first follows the due token."""
        return [token for block in self._blocks for token in block.tokens][1:]

    def advance(self, drafts: Sequence[int]) -> list[Chosen]:
        """Make one pass. Returns at least one token, and at most one more than ``drafts``.

        ``drafts`` must fit in ``rollback.room(cache)``, with the token that is due and what is ``pending``.
        """
        if not drafts:
            return [self.step()]
        known = self.tokens[self.held :]
        if rollback.needs_mark(self.cache):
            self._before = self.held, rollback.mark(self.cache)
        start = self.held
        with noted_states(self.model, self.hidden_layers) as states:
            logits = self.model(mx.array([[*known, *drafts]]), cache=self.cache)  # (1, n, V)
        masks = self._masks(logits, drafts)
        rows = [logits[:, i, :] for i in range(len(known) - 1, len(known) + len(drafts))]
        chosen = self._choose(rows, masks, drafts)
        # The cache has the due token and all drafts; what was accepted is due token and all but the last.
        undone = len(rows) - len(chosen)
        self.hidden = _rows_of(states, start, len(known) + len(chosen) - 1)
        if self._before is None:
            rollback.take_back(self.cache, undone)
        elif undone:
            rollback.return_to(self.cache, self._before[1], len(known) + len(drafts))
            self.pending = len(known) + len(chosen) - 1
        else:
            self.pending = 0
        self._commit([c.token for c in chosen])
        return chosen

    def send(self, drafts: Sequence[int], source: str = "") -> None:
        """Begin a block and do not wait for it: the due token, unless it was sent, and ``drafts``, which
        follow what was sent. They must fit in ``rollback.room(cache)``."""
        tokens = [*drafts] if self._blocks else [self.tokens[-1], *drafts]
        layers = Taps(self.hidden_layers) if self.hidden_layers else NO_TAPS
        flight = self.model.begin(mx.array([tokens]), self.cache, taps=layers)
        self._blocks.append(SentBlock(tokens, source, flight))

    def take(self) -> tuple[list[Chosen], Draft]:
        """Wait for the block that was sent first. Returns what it gives to the answer, at least one token,
        and the drafts that were held against it."""
        block = self._blocks[0]
        later = self._blocks[1] if len(self._blocks) > 1 else None
        inner = block.tokens[1:]
        # While the other machines compute.
        masks = self._masks_of(inner)
        logits = block.flight.logits()
        self._blocks.popleft()
        checked = [*inner, later.tokens[0]] if later else inner
        rows = [logits[:, i, :] for i in range(len(block.tokens))]
        chosen = self._choose(rows, masks, checked)
        found = [one.token for one in chosen]
        self.dropped = False
        if leading(checked, found) < len(checked):
            self._undo(len(rows) - len(chosen))
        # Its first token is the due one; as many are in the text as were chosen after it.
        states = {layer: [noted] for layer, noted in block.flight.states().items()}
        self.hidden = _rows_of(states, len(self.tokens) - 1, len(chosen))
        self._commit(found)
        source = block.source or (later.source if later else "")
        return chosen, Draft(source, tuple(checked))

    def _undo(self, more: int = 0) -> None:
        """Take back all that was sent and not taken, and ``more`` tokens before that."""
        rollback.take_back(self.cache, self._sent + more)
        flights = [block.flight for block in self._blocks]
        self._blocks.clear()
        self.dropped = bool(flights)
        if flights:
            self.model.undo(flights)

    def settle(self) -> None:
        """Compute what is ``pending``, and undo what was sent, so that all tokens but the last have their
        rows in ``cache``."""
        self._undo()
        if self.pending:
            with unread_logits():
                self.model(mx.array([self.tokens[self.held : -1]]), cache=self.cache)
            self.pending = 0
            self._before = None

    def step(self, *, ahead: bool = False) -> Chosen:
        """Make a single step. ``ahead``: begin the step after it before this one's token is read."""
        token, logprobs, self.hidden = self._next or self._begin(
            mx.array(self.tokens[self.held :]), self.generated
        )
        self.pending = 0
        self._next = self._begin(token, self.generated + 1, unread=True) if ahead else None
        # They have been computed together.
        chosen = Chosen(_id(token), logprobs)
        self._commit([chosen.token])
        return chosen

    def _begin(
        self, tokens: mx.array, index: int, *, unread: bool = False
    ) -> tuple[mx.array, mx.array, HiddenRows | None]:
        """Begin the step over the last of ``tokens``, which chooses the answer's token ``index``. The device
        computes it in the background. The tokens before the last are the pending ones."""
        self._before = None
        start = len(self.tokens) - tokens.size + unread
        with noted_states(self.model, self.hidden_layers) as states:
            logits = self.model(tokens[None], cache=self.cache)[:, -1, :]
        mask = self._masks(logits, tokens if unread else ())[-1]
        context = self._seen()
        if unread and context is not None:
            context = self._context_with(tokens)
        logprobs = self._logprobs(logits, context, mask)
        chosen = self._sample(logprobs, index)
        mx.async_eval(chosen, logprobs)  # type: ignore[no-untyped-call]
        return chosen, logprobs, _rows_of(states, start, tokens.size)

    def _masks(self, logits: mx.array, drafts: Sequence[int] | mx.array) -> list[Mask | None]:
        """The mask of each row: of the due token's, and of those of ``drafts``. Begins to compute ``logits``,
        unless nothing is masked."""
        if self.matcher is None:
            return [None] * (1 + len(drafts))
        # First, so that the device does not wait. A token that is not read yet is there before them.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return self._masks_of([_id(drafts)] if isinstance(drafts, mx.array) else drafts)

    def _masks_of(self, drafts: Sequence[int]) -> list[Mask | None]:
        if self.matcher is None:
            return [None] * (1 + len(drafts))
        found: list[Mask | None] = [*self.matcher.masks(drafts)]
        # Behind a draft that is forbidden no row counts.
        return found + [None] * (1 + len(drafts) - len(found))

    def _choose(
        self, rows: list[mx.array], masks: Sequence[Mask | None], drafts: Sequence[int]
    ) -> list[Chosen]:
        if self.sampler is greedy_sampler:
            # Cheap enough to do for rows that may not count; then they are computed together.
            found = [self._logprobs(row, self._seen(drafts[:i]), masks[i]) for i, row in enumerate(rows)]
            picked = mx.concatenate([self.sampler(logprobs) for logprobs in found])
            mx.eval(picked, found)
            tokens = [int(token) for token in np.array(picked)]
            # Where the draft behind the last row is known, all rows may be right.
            count = min(len(rows), leading(drafts, tokens) + 1)
            return [Chosen(tokens[i], found[i]) for i in range(count)]
        out: list[Chosen] = []
        for i, row in enumerate(rows):
            logprobs = self._logprobs(row, self._seen(drafts[:i]), masks[i])
            token = self._sample(logprobs, self.generated + i)
            mx.eval(token, logprobs)
            out.append(Chosen(_id(token), logprobs))
            if i < len(drafts) and out[i].token != drafts[i]:
                break
        return out

    def _logprobs(self, logits: mx.array, context: mx.array | None, mask: Mask | None) -> mx.array:
        """Log-probabilities of the token after ``context``, as ``GenerationBatch._step`` computes them."""
        if mask is not None:
            logits = masked(logits, mask[None])
        if context is not None:
            for processor in self.processors:
                logits = processor(context, logits)
        return _normalised(logits)

    def _sample(self, logprobs: mx.array, index: int) -> mx.array:
        """The answer's token ``index``."""
        if isinstance(self.sampler, SeededSampler):
            self.sampler.index = index
        return self.sampler(logprobs)

    def _seen(self, drafts: Sequence[int] = ()) -> mx.array | None:
        """The tokens so far and ``drafts``, int32; None without processors: only they look at them."""
        if not self.processors:
            return None
        new = self.tokens[self._in_context :]
        seen = self._context_with(mx.array(new, dtype=mx.int32)) if new else self._context.tokens
        return mx.concatenate([seen, mx.array(list(drafts), dtype=mx.int32)]) if drafts else seen

    def _context_with(self, tokens: mx.array) -> mx.array:
        self._in_context += tokens.size
        seen: mx.array = self._context.update_and_fetch(tokens)
        return seen

    def _commit(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.generated += len(tokens)
        if self.matcher is not None:
            self.matcher.consume(tokens)

    def taken(self, tokens: int) -> tuple[list[int], list[Any]]:
        """The text's first ``tokens`` tokens, if their rows are known, and those rows. Ends this object.

        Fewer tokens come back if the last pass went past them and can only be undone as a whole.
        """
        self._undo()
        kept = min(tokens, self.held)
        undone = self.held - kept
        if undone and self._before is not None:
            kept, marked = self._before
            rollback.return_to(self.cache, marked, self.held - kept)
        else:
            rollback.take_back(self.cache, undone)
        self._next = None
        return self.tokens[:kept], rollback.compact(self.cache)


def _rows_of(states: Mapping[int, list[mx.array]], start: int, count: int) -> HiddenRows | None:
    """The first ``count`` rows of what a pass noted, the first of which is the text's token ``start``."""
    if not states:
        return None
    return HiddenRows(start, {layer: noted[0][0, :count] for layer, noted in states.items() if noted})


def _id(token: mx.array) -> int:  # (1,)
    found: Any = token.item()
    return int(found)


def _normalised(logits: mx.array) -> mx.array:
    """(1, V) → log-probabilities."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
