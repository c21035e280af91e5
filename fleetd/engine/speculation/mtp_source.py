"""Drafts of a model's MTP head for one answer, and what a worker knows of the head.

    the text             ──────────────── t(n-2) │ t(n-1), due │ what comes
    the head's rows      ──────── row(n-2) of hidden state n-2 and token n-1, which guesses token n
    then, on its own             row(n-1)* of what it gave and its guess, which guesses token n+1, and so on

Row i belongs to the text's token i, so that it turns positions as the model does. A row with * is taken back
as soon as the guess is made: it comes again with the true hidden state, once its token is in the text. So the
head's rows are never those of a token that the text does not have.

The rows begin with the end of the prompt, or as much of it as was computed here; what is missing costs
guesses, and no answer. Once there are ``ROWS``, they begin anew with the last ones, so that a text of any
length costs the head the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx

from fleetd import limits
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.parts import arrays
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.hidden_source import HiddenSource, WorkerDrafter
from fleetd.engine.speculation.local_sources import MTP
from fleetd.engine.speculation.sources import Context, HiddenRows
from fleetd.models.heads import ROWS

# More rows at once are the prompt's, or those of a time in which the head was not asked.
_FEW = 2 * limits.SPEC_WIDTH
# The share of a guess's seconds that is believed at once.
_BELIEVED = 0.2


@dataclass(slots=True)
class WorkerHead(WorkerDrafter):
    """A model's head, for all answers of a worker."""

    head: MtpHead
    # Seconds of the device that a guess takes, as measured last.
    token_s: float

    @classmethod
    def measured(cls, head: MtpHead, clock: Callable[[], float] = time.perf_counter) -> WorkerHead:
        """A head that has computed its first guesses. Raises ValueError if it does not fit its model."""
        width = head.width
        seconds = []
        for _ in range(4):
            begun, cache = clock(), head.make_cache()
            given = head(mx.array([[1]]), mx.zeros((1, 1, width)), cache)
            token = head.likeliest(given)
            mx.eval(head.likeliest(head(token, head.fed_back(given), cache)))
            seconds.append((clock() - begun) / 2)
        return cls(head, min(seconds))

    @property
    def text(self) -> str:
        """What is said of it once it is loaded."""
        return f"{MTP}: {1000 * self.token_s:.1f} ms a token"

    def source(self) -> MtpSource | None:
        """The source of a new answer; None while the head is off."""
        return None if self.off else MtpSource(self)

    def took(self, seconds: float) -> None:
        """A guess took ``seconds``."""
        self.token_s += _BELIEVED * (seconds - self.token_s)


@dataclass(slots=True)
class MtpSource(HiddenSource):
    """See the module."""

    worker: WorkerHead
    name: ClassVar[str] = MTP
    # The newest hidden states, (rows, D) each, with the tokens of their first rows.
    _noted: list[tuple[int, mx.array]] = field(init=False, default_factory=list)
    # The head's rows, how many they are, and the token up to which they are complete.
    _cache: list[Any] = field(init=False, default_factory=list)
    _rows: int = field(init=False, default=0)
    _fed: int = field(init=False, default=0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.worker.head.hidden_layer,)

    @property
    def price(self) -> DraftPrice:
        """What guesses take, as far as is known now."""
        return DraftPrice(0.0, self.worker.token_s)

    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""
        if (states := hidden.states.get(self.hidden_layers[0])) is None:
            return
        known, end = self._end, hidden.start + states.shape[0]
        if end > known:
            first = max(hidden.start, known)
            self._noted.append((first, states[first - hidden.start :]))
            oldest = end - limits.SPEC_HIDDEN_ROWS
            self._noted = [(at, rows) for at, rows in self._noted if at + rows.shape[0] > oldest]

    def propose(self, context: Context) -> list[int]:
        self.spent_s = 0.0
        # The last token whose hidden state and next token are known.
        newest, head = len(context.tokens) - 2, self.worker.head
        if not self._cache or self._rows + newest + 1 - self._fed > ROWS:
            self._cache, self._rows, self._fed = head.make_cache(), 0, 0
        places, states = self._due(newest)
        if states is None or places[-1] != newest:
            return []
        begins, begun = not self._rows, time.perf_counter()
        if not self.known_tokens:
            self._begin(len(places), newest + 1)
        following = mx.array([[context.tokens[at + 1] for at in places]])
        early = len(places) - _FEW if len(places) > _FEW else 0
        if early:
            with unread_logits():
                head(following[:, :early], head.normed(states[None, :early]), self._cache)
            mx.eval(arrays(self._cache))
        drafting = time.perf_counter()
        given = head(following[:, early:], head.normed(states[None, early:]), self._cache)[:, -1:]
        found = self._guesses(given, context.width)
        ended = time.perf_counter()
        self._rows, self._fed = self._rows + len(places), newest + 1
        # What is read of the prompt belongs to its prefill.
        self.spent_s = ended - (drafting if begins else begun)
        self.worker.took((ended - drafting) / context.width)
        self.guess = found[0]
        return found

    def close(self) -> None:
        self._noted, self._cache = [], []

    @property
    def _end(self) -> int:
        """The token after the newest one whose hidden state was noted."""
        return self._noted[-1][0] + self._noted[-1][1].shape[0] if self._noted else 0

    def _due(self, newest: int) -> tuple[list[int], mx.array | None]:
        """The tokens up to ``newest`` that have a hidden state and no row yet, and their hidden states."""
        places: list[int] = []
        parts = []
        for start, states in self._noted:
            first, end = max(start, self._fed), min(start + states.shape[0], newest + 1)
            if first < end:
                places += range(first, end)
                parts.append(states[first - start : end - start])
        return places, mx.concatenate(parts) if parts else None

    def _guesses(self, given: mx.array, width: int) -> list[int]:
        """``width`` guesses, each of what the head gave for the one before it; the rows are taken back."""
        head = self.worker.head
        guesses = [head.likeliest(given)]
        for _ in range(width - 1):
            given = head(guesses[-1], head.fed_back(given), self._cache)
            guesses.append(head.likeliest(given))
        found: list[int] = mx.concatenate(guesses, axis=1)[0].tolist()  # type: ignore[assignment]
        rollback.take_back(self._cache, width - 1)
        return found
