"""Drafting for a text that another worker writes: prefill what is known, then guess what follows.

    COMMIT ──► go back to what still holds ──► prefill what is new ──► guess, guess, … ──► DRAFT each

No answer waits for drafts or relies on them. The compute loop does this work in turns (``DraftGuests``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.prefixes.prefix_cache import Hit
from fleetd.engine.sequence_state.parts import arrays
from fleetd.engine.speculation import draft_messages as wire
from fleetd.engine.speculation import drafter_window
from fleetd.engine.speculation.draft_cache import DraftCache
from fleetd.engine.speculation.lookahead import Guess, Lookahead
from fleetd.engine.streams.frames import Frame, FrameHeader, FramePipe, Place
from fleetd.errors import FleetError, PeerLost, ProtocolError

# Guesses after which memory that MLX keeps for reuse is given back.
CLEAR_GUESSES = 512


class Guesser(Protocol):
    """A model that follows a text, and guesses what comes after the text and a ``path`` of guesses."""

    @property
    def held(self) -> int:
        """Tokens whose KV is in memory."""

    def missing(self, path: Sequence[int]) -> int:
        """Tokens of text and path that are still to be computed, without the last one."""

    def prefill(self, path: Sequence[int], most: int) -> None:
        """Compute at most ``most`` of the ``missing`` tokens."""

    def guess(self, path: Sequence[int]) -> Guess:
        """The likeliest tokens after text and path. Computes what is missing, and the last token anyway."""

    def committed(self, tokens: Sequence[int]) -> None:
        """The text went on with these tokens."""


class DraftModel:
    """A model and what it keeps of one text, which is taken back to wherever that goes on otherwise. Of a
    long text it sees the beginning and the end (``drafter_window``), and keeps no more.

    ``fetch`` finds KV of the beginning of what it sees that is left from earlier texts.

    Raises ModelUnsupported if what the model keeps cannot be taken back.
    """

    def __init__(self, model: Any, fetch: Callable[[list[int]], Hit] = lambda tokens: Hit(0, None)) -> None:
        self._model = model
        self._fetch = fetch
        self._cache = DraftCache(make_prompt_cache(model), [])
        self._guesses = 0
        # What is seen of the text, and how long the text is.
        self._text: list[int] = []
        self._length = 0
        # Leading tokens in the cache that are known to be the text's.
        self._same = 0

    @property
    def held(self) -> int:
        return len(self._cache)

    @property
    def kept(self) -> tuple[list[int], list[Any]]:
        """The tokens seen of the text itself that the cache holds, and the cache. Ends the use of this."""
        self._cache.go_back(self._common([]))
        return self._cache.tokens, self._cache.layers

    def committed(self, tokens: Sequence[int]) -> None:
        before = drafter_window.begins(self._length)
        self._length += len(tokens)
        begins = drafter_window.begins(self._length)
        # Tokens leave what is seen only at once, and many of them.
        first = not self._text
        self._text += tokens
        if begins > before:
            sink = limits.DRAFT_SINK_TOKENS
            del self._text[sink : sink + begins - before]
            self._cache, self._same = DraftCache(make_prompt_cache(self._model), []), 0
        if first and (hit := self._fetch([*self._text])).cache is not None:
            self._cache = DraftCache(hit.cache, self._text[: hit.tokens])

    def missing(self, path: Sequence[int]) -> int:
        return max(0, len(self._text) + len(path) - 1 - self._common(path))

    def prefill(self, path: Sequence[int], most: int) -> None:
        self._compute(path, min(most, self.missing(path)))
        mx.eval(arrays(self._cache.layers))
        mx.clear_cache()

    def guess(self, path: Sequence[int]) -> Guess:
        left = len(self._text) + len(path) - self._common(path)
        self._guesses += 1
        if self._guesses % CLEAR_GUESSES == 0:
            mx.clear_cache()
        logits = self._compute(path, max(1, left))  # (1, n, V)
        two, shares = _best_two(logits[0, -1])
        return Guess(two[0], two[1], shares[0], shares[1])

    def _compute(self, path: Sequence[int], count: int) -> mx.array:
        """Compute ``count`` tokens after those that the cache holds of text and path, or the last ones."""
        total = len(self._text) + len(path)
        stop = min(self._common(path) + count, total)
        self._cache.go_back(stop - count)
        # The text's last token may be computed once more.
        self._cache.save(len(self._text) - 1)
        chunk = self._between(path, len(self._cache), stop)
        logits: mx.array = self._model(mx.array(chunk)[None], cache=self._cache.layers)
        self._cache.tokens += chunk
        return logits

    def _common(self, path: Sequence[int]) -> int:
        """Leading tokens of text and path that the cache holds."""
        text, held = self._text, self._cache.tokens
        self._same = min(self._same, len(held))
        while self._same < min(len(held), len(text)) and held[self._same] == text[self._same]:
            self._same += 1
        common = self._same
        if common == len(text):
            for token in path:
                if common == len(held) or held[common] != token:
                    break
                common += 1
        return common

    def _between(self, path: Sequence[int], start: int, stop: int) -> list[int]:
        n = len(self._text)
        return [*self._text[start:stop], *path[max(0, start - n) : max(0, stop - n)]]


def _best_two(logits: mx.array) -> tuple[list[int], list[float]]:
    """The two best tokens of logits (V,), best first, and their probabilities."""
    logits = logits.astype(mx.float32)
    first = mx.argmax(logits)
    second = mx.argmax(mx.where(mx.arange(logits.size) == first, -mx.inf, logits))
    two = mx.stack([first, second])
    shares = mx.exp(logits[two] - mx.logsumexp(logits))
    mx.eval(two, shares)
    ids: list[int] = two.tolist()  # type: ignore[assignment]  # one dimension
    probabilities: list[float] = shares.tolist()  # type: ignore[assignment]
    return ids, probabilities


class DraftWriter:
    """Follows one text on one stream.

    Args:
        connect: opens the stream, given where its frames are to be written.
        context_tokens, vocab_size: the draft model's.
        grow: asked for room for so many tokens of KV before they are computed; raises OutOfMemory.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: Guesser,
        connect: Callable[[Place], FramePipe],
        lookahead: Lookahead,
        *,
        context_tokens: int,
        vocab_size: int,
        grow: Callable[[int], None] = lambda tokens: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._lookahead = lookahead
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._grow = grow
        self._clock = clock
        self._text_hash = wire.TextHash()
        self._error: FleetError | None = None
        self._heard_s = clock()
        # Tokens of the commits that have begun to come; the pipe's thread counts them.
        self._placed = 0
        # Tokens that were drafted; tokens that were judged since; and how many of these were right.
        self.drafted = self.judged = self.right = 0
        self._pipe = connect(self._place)

    @property
    def ready(self) -> bool:
        """True if ``step`` can do something or has an error to raise; takes in what has arrived."""
        self._receive()
        return self._error is not None or self._due is not None

    @property
    def due_s(self) -> float | None:
        """When, on the clock, ``step`` gives the text up if nothing comes."""
        return self._heard_s + limits.DRAFT_IDLE_S

    def step(self, chunk_tokens: int) -> None:
        """Prefill a chunk or guess one token, without waiting.

        Raises:
            FleetError: the stream broke, or there is no memory; nothing more will be drafted.
        """
        if not self.ready and self._clock() >= self._heard_s + limits.DRAFT_IDLE_S:
            self._error = PeerLost(f"Nothing came for {limits.DRAFT_IDLE_S:.0f} s.")
        if self._error is not None:
            raise self._error
        if (path := self._due) is None:
            return
        seen = drafter_window.seen(self._text_hash.length)
        self._grow(seen + self._lookahead.ahead + limits.DRAFT_DETOUR_TOKENS)
        if self._model.missing(path) > limits.DRAFT_AHEAD:
            self._model.prefill(path, chunk_tokens)
            return
        guess = self._model.guess(path)
        self._send(self._lookahead.guessed(guess))

    def close(self) -> None:
        """Idempotent."""
        self._pipe.close()

    @property
    def _due(self) -> list[int] | None:
        """The path after which the next guess is wanted; None if there is nothing to do."""
        # A stream that takes nothing is stalled: what it would be sent is of no use by then.
        if not self._text_hash.length or self._pipe.backlog > limits.KIB:
            return None
        path = self._lookahead.next()
        if path is None:
            return None
        if drafter_window.seen(self._text_hash.length) + len(path) >= self._context_tokens:
            return None
        return path

    def _send(self, path: list[int]) -> None:
        self.drafted += 1
        branch = path[: limits.DRAFT_BRANCH_TOKENS]
        self._pipe.send(*wire.draft(self._text_hash.length, self._text_hash.hash, [branch]))

    def _place(self, head: FrameHeader) -> list[memoryview]:
        # Commits follow each other, so those that wait to be read are one text at most.
        if head.start != self._placed:
            raise ProtocolError(f"A commit goes on from a text of {head.start} tokens; {self._placed} came.")
        self._placed = head.end
        return wire.place_commit(head)

    def _receive(self) -> None:
        if self._error is not None:
            return
        try:
            while (frame := self._pipe.receive()) is not None:
                self._heard_s = self._clock()
                self._take_commit(frame)
        except FleetError as error:
            self._error = error

    def _take_commit(self, frame: Frame) -> None:
        head = frame.head
        if (head.start, head.prefix) != (self._text_hash.length, self._text_hash.hash):
            raise ProtocolError(
                f"A commit goes on from another text of {head.start} tokens than the one here."
            )
        tokens = wire.tokens_of(frame, self._vocab_size)
        if self._text_hash.length:
            foreseen = self._lookahead.committed(tokens)
            self.judged += min(len(tokens), foreseen + 1)
            self.right += foreseen
        self._model.committed(tokens)
        self._text_hash.extend(tokens)
