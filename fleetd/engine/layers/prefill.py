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
from fleetd.engine.sequence_state import checkpoints, growth
from fleetd.models.memory_need import WORKING_BYTES

# Tokens per step while the prompt's own probabilities are wanted: each is a row of the whole vocabulary.
SCORED_TOKENS = 64
# What MLX may keep of a chunk's memory for the next one: asking the device for all of it anew costs time in
# each. A growing KV cache leaves arrays behind that nothing fits into, so it cannot keep everything.
KEPT_BYTES = WORKING_BYTES // 2


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

    ``embedded``: what stands for some of the prompt's tokens in the place of their embeddings: given a chunk
    (1, n) and its first place, the embeddings (1, n, D), or None if the model's own serve. None: they all do.
    """

    model: Any
    tokens: list[int]
    cache: list[Any]
    done: int = 0
    score: Callable[[mx.array], None] | None = None
    state_bytes: int = 0
    borders: Sequence[int] = ()
    hidden_layers: tuple[int, ...] = ()
    embedded: Callable[[mx.array, int], mx.array | None] | None = None
    hidden: list[tuple[int, dict[int, mx.array]]] = field(default_factory=list, init=False)
    states: dict[int, list[Any]] = field(default_factory=dict, init=False)
    # Hidden states that are on their way, with their first token: by layer, (1, rows, D).
    _coming: list[tuple[int, Callable[[], dict[int, mx.array]]]] = field(default_factory=list, init=False)
    _places: list[int] = field(default_factory=list, init=False)
    _begun: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._begun = self.done
        if self.state_bytes and checkpoints.needed(self.cache):
            self._places = checkpoints.places(len(self.tokens), self.borders, self.done)
            if self.done and not self.done % limits.CHECKPOINT_BLOCK_TOKENS:
                # What it begins from may come from the disk, or leave memory before this prompt does.
                self._save(self.done)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - 1 - self.done

    def step(self, chunk_tokens: int) -> int:
        """Compute at most ``chunk_tokens`` more; returns how many."""
        if self.score is not None:
            chunk_tokens = min(chunk_tokens, SCORED_TOKENS)
        # After a place the chunks go on as if it were not there: a split of the prompt has the same ones.
        n = min(chunk_tokens - (self.done - self._begun) % chunk_tokens, self.remaining)
        if n <= 0:
            return 0
        if self._places:
            n = min(n, self._places[0] - self.done)
        chunk = mx.array(self.tokens[self.done : self.done + n])[None]  # (1, n)
        given = self.embedded(chunk, self.done) if self.embedded is not None else None
        with growth.at_once(self.cache, self.remaining):
            if self.score is None and self.remaining - n < limits.SPEC_HIDDEN_ROWS and self.hidden_layers:
                self._read_noting(chunk, given)
            elif self.score is None:
                read(self.model, chunk, self.cache, self.remaining, given)
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
            self.model(chunk, cache=self.cache, **_instead(given))
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


def read(
    model: Any, tokens: mx.array, cache: list[Any], room: int, embeddings: mx.array | None = None
) -> None:
    """Have ``cache`` hold what a model keeps of ``tokens`` (1, n), behind which ``room`` - n follow. Lazy.

    A model over several machines would wait for logits that nobody wants.

    Args:
        embeddings: (1, n, D), in the place of those of the tokens; None: theirs. Not for such a model.
    """
    if hasattr(model, "read"):
        model.read(tokens, cache, room)
    else:
        with unread_logits():
            model(tokens, cache=cache, **_instead(embeddings))


def _instead(embeddings: mx.array | None) -> dict[str, mx.array]:
    """The argument of mlx-lm's models for embeddings in the place of the tokens' own."""
    return {} if embeddings is None else {"input_embeddings": embeddings}


def give_back(*, done: bool) -> None:
    """Free memory that MLX keeps for reuse, if it is much or the prefill is ``done``."""
    if done or mx.get_cache_memory() > KEPT_BYTES:
        mx.clear_cache()
