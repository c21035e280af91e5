"""Chunked prefill of one prompt into its own KV cache.

The schedule is mlx-lm's own: all tokens but the last in chunks, the last as a step of its own, so that a
prompt gives the same cache here as in ``mlx_lm.generate``. The finished cache is handed to the batch.

The first chunk makes room for the whole prompt: growing with it copied all that was read, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.layers.hidden_states import Taps, noted_states
from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import checkpoints, growth
from fleetd.models.memory_need import WORKING_BYTES

# Tokens per step while the prompt's own probabilities are wanted: each is a row of the whole vocabulary.
SCORED_TOKENS = 64
# What MLX may keep of a chunk's memory for the next one: asking the device for all of it anew costs time in
# each. A growing KV cache leaves arrays behind that nothing fits into, so it cannot keep everything.
KEPT_BYTES = WORKING_BYTES // 2


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows, of images, in the place of the embeddings of some of a prompt's tokens.

    ``embedded``: given a chunk's tokens (1, n) and the first one's place, what enters the first layer of
    ``stage``, the whole model, (1, n, D); None if the chunk has no rows.

    ``blocks``: [first, end) of tokens that see each other both ways, ascending. One is computed as a chunk,
    however long chunks are.

    ``read_on``: does a step of work for the rows of tokens [first, end); False once they are all there.
    """

    stage: Stage
    embedded: Callable[[mx.array, int], mx.array | None]
    blocks: Sequence[tuple[int, int]] = ()
    read_on: Callable[[int, int], bool] = lambda first, end: False

    def block(self, at: int) -> tuple[int, int] | None:
        """The first block that ends behind place ``at``."""
        return next((block for block in self.blocks if at < block[1]), None)

    def before(self, place: int) -> int:
        """``place``, or the beginning of the block that it is inside of."""
        block = self.block(place)
        return place if block is None else min(place, block[0])

    def run(self, hidden: mx.array, first: int, cache: list[Any]) -> None:
        """Have ``cache`` hold what the model keeps of a chunk that is a block or has none. Lazy.

        Args:
            hidden: what ``embedded`` gave for it.
            first: its first token's place.
        """
        block = self.block(first)
        both_ways = block is not None and block[0] <= first
        self.stage.run(hidden, cache, PassInputs(first, both_ways=both_ways))


@dataclass(slots=True)
class Prefiller:
    """``done`` tokens of ``tokens`` are in ``cache``; the last token is never computed here.

    ``score`` is given the log-probabilities that follow each computed token, (n, V) f32 per step; row 0 of
    the first step belongs to token 1.

    ``states``: by token, the states of layers that cannot be taken back later, at most ``state_bytes`` of
    them, at ``checkpoints.places``, which ``borders`` are for. A step ends where one is kept.

    ``hidden``: what those ``hidden_layers`` give for the prompt's last tokens, at most
    ``limits.SPEC_HIDDEN_ROWS`` of them, as far as they are computed here: for each chunk the first such
    token, and by layer (rows, D).

    ``rows``: what stands for some of the prompt's tokens in the place of their embeddings; None: nothing.
    """

    model: Any
    tokens: list[int]
    cache: list[Any]
    done: int = 0
    score: Callable[[mx.array], None] | None = None
    state_bytes: int = 0
    borders: Sequence[int] = ()
    hidden_layers: tuple[int, ...] = ()
    rows: PromptRows | None = None
    hidden: list[tuple[int, dict[int, mx.array]]] = field(default_factory=list, init=False)
    states: dict[int, list[Any]] = field(default_factory=dict, init=False)
    # Hidden states that are on their way, with their first token: by layer, (1, rows, D).
    _coming: list[tuple[int, Callable[[], dict[int, mx.array]]]] = field(default_factory=list, init=False)
    _places: list[int] = field(default_factory=list, init=False)
    _begun: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._begun = self.done
        if self.state_bytes and checkpoints.needed(self.cache):
            places = checkpoints.places(len(self.tokens), self.borders, self.done)
            if self.rows is not None:
                places = sorted({at for at in map(self.rows.before, places) if at > self.done})
            self._places = places
            if self.done and not self.done % limits.CHECKPOINT_BLOCK_TOKENS:
                # What it begins from may come from the disk, or leave memory before this prompt does.
                self._save(self.done)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - 1 - self.done

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more, none while their rows are not there; returns how many."""
        if self.score is not None:
            chunk_tokens = min(chunk_tokens, SCORED_TOKENS)
        n = self._next(chunk_tokens)
        if n <= 0:
            return 0
        if self.rows is not None and self.rows.read_on(self.done, self.done + n):
            give_back(done=False)
            return 0
        chunk = mx.array(self.tokens[self.done : self.done + n])[None]  # (1, n)
        given = None if self.rows is None else self.rows.embedded(chunk, self.done)
        with growth.at_once(self.cache, self.remaining):
            if self.score is None and self.remaining - n < limits.SPEC_HIDDEN_ROWS and self.hidden_layers:
                self._read_noting(chunk, given)
            elif given is not None:
                with unread_logits():
                    self._compute(chunk, given)
            elif self.score is None:
                read(self.model, chunk, self.cache, self.remaining)
            else:
                logits = self.model(chunk, cache=self.cache)[0].astype(mx.float32)  # (n, V)
                self.score(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval([layer.state for layer in self.cache])
        self.done += n
        if self._places and self.done == self._places[0]:
            self._save(self._places.pop(0))
        if not self.remaining:
            self._take_coming()
        give_back(done=not self.remaining)
        return n

    def _next(self, chunk_tokens: int) -> int:
        """Tokens of the next chunk."""
        # After a place the chunks go on as if it were not there: a split of the prompt has the same ones.
        n = chunk_tokens - (self.done - self._begun) % chunk_tokens
        if self._places:
            n = min(n, self._places[0] - self.done)
        if self.rows is not None and (block := self.rows.block(self.done)) is not None:
            first, end = block
            # A beginning that was taken over may end inside a block, of which it was computed with all.
            n = end - self.done if first <= self.done else min(n, first - self.done)
        return min(n, self.remaining)

    def _compute(self, chunk: mx.array, given: mx.array | None) -> None:
        """Call the model for a chunk, or its layers for what is ``given`` in the place of embeddings."""
        if self.rows is None or given is None:
            self.model(chunk, cache=self.cache)
        else:
            self.rows.run(given, self.done, self.cache)

    def _read_noting(self, chunk: mx.array, given: mx.array | None) -> None:
        """``read`` a chunk that has some of the last tokens, and note their hidden states."""
        first = max(0, len(self.tokens) - 1 - limits.SPEC_HIDDEN_ROWS - self.done)
        if hasattr(self.model, "read"):
            # Its last layers may be computing still: other chunks go on meanwhile.
            taps = Taps(self.hidden_layers, chunk.shape[1] - first)
            flight = self.model.read(chunk, self.cache, self.remaining, taps)
            self._coming.append((self.done + first, flight.states))
            return
        with noted_states(self.model, self.hidden_layers) as states, unread_logits(states_are_read=True):
            self._compute(chunk, given)
        found = {layer: noted[0][0, first:] for layer, noted in states.items() if noted}
        mx.eval(found)
        self.hidden.append((self.done + first, found))

    def _take_coming(self) -> None:
        """Wait for the hidden states that other machines have: the answer's first token needs them anyway."""
        self.hidden += [
            (start, {layer: rows[0] for layer, rows in states().items()}) for start, states in self._coming
        ]
        self._coming = []

    def _save(self, place: int) -> None:
        self.states[place] = checkpoints.saved(self.cache)
        # If they do not all fit, the later ones are of more use: a conversation is edited at its end.
        while sum(checkpoints.nbytes(state) for state in self.states.values()) > self.state_bytes:
            del self.states[min(self.states)]


def read(model: Any, tokens: mx.array, cache: list[Any], room: int) -> None:
    """Have ``cache`` hold what a model keeps of ``tokens`` (1, n), behind which ``room`` - n follow. Lazy.

    A model over several machines would wait for logits that nobody wants.
    """
    if hasattr(model, "read"):
        model.read(tokens, cache, room)
    else:
        with unread_logits():
            model(tokens, cache=cache)


def give_back(*, done: bool) -> None:
    """Free memory that MLX keeps for reuse, if it is much or the prefill is ``done``."""
    if done or mx.get_cache_memory() > KEPT_BYTES:
        mx.clear_cache()
