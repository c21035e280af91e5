"""Drafts of a model's MTP head for one answer, and what a worker knows of the head.

    the text             ──────────────── t(n-2) │ t(n-1), due │ what comes
    the head's rows      ──────── row(n-2) of hidden state n-2 and token n-1, which guesses token n
    then, on its own             row(n-1)* of what it gave and its guess, which guesses token n+1, and so on

Row i belongs to the text's token i, so that it turns positions as the model does. A row with * is taken back
as soon as the guess is made: it comes again with the true hidden state, once its token is in the text. So the
head's rows are never those of a token that the text does not have.

The rows begin with the end of the text, or as much of it as was computed here and the answer can bear to have
read; what is missing costs guesses, and no answer. They are read when a draft is asked for. Once there are
``ROWS``, they begin anew with the last ones, so that a text of any length costs the head the same memory.
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
from fleetd.engine.speculation.hidden_source import LEAST_ROWS, HiddenSource, NotedStates, WorkerDrafter
from fleetd.engine.speculation.local_sources import MTP
from fleetd.engine.speculation.sources import Context, HiddenRows
from fleetd.models.heads import ROWS

# More rows at once are the prompt's, or those of a time in which the head was not asked.
_FEW = 2 * limits.SPEC_WIDTH


@dataclass(slots=True)
class WorkerHead(WorkerDrafter):
    """A model's head, for all answers of a worker."""

    head: MtpHead

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
        found = cls(DraftPrice(0.0, min(seconds)), head)
        row_s = min(found.reading_s(LEAST_ROWS, clock) for _ in range(2)) / LEAST_ROWS
        found.reading = DraftPrice(0.0, row_s)
        return found

    def reading_s(self, rows: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds that it takes to read ``rows`` tokens' hidden states into an empty cache."""
        begun, cache = clock(), self.head.make_cache()
        _read(self.head, mx.array([[1] * rows]), mx.zeros((rows, self.head.width)), cache)
        return clock() - begun

    @property
    def text(self) -> str:
        """What is said of it once it is loaded."""
        return f"{MTP}: {1000 * self.price.token_s:.1f} ms a token"

    def source(self) -> MtpSource | None:
        """The source of a new answer; None while the head is off."""
        return None if self.off else MtpSource(self)


@dataclass(slots=True)
class MtpSource(HiddenSource):
    """See the module."""

    worker: WorkerHead
    name: ClassVar[str] = MTP
    _noted: NotedStates = field(init=False, default_factory=NotedStates)
    # The head's rows, how many they are, and the token up to which they are complete.
    _cache: list[Any] = field(init=False, default_factory=list)
    _rows: int = field(init=False, default=0)
    _fed: int = field(init=False, default=0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.worker.head.hidden_layer,)

    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""
        if (states := hidden.states.get(self.hidden_layers[0])) is None:
            return
        if hidden.start > self._noted.end:
            # Rows turn positions: those of a text with gaps would not be the text's.
            self._noted.clear()
        self._noted.add(hidden.start, states)

    def due_rows(self, text: int) -> int:
        due = self._noted.count(self._fed, text - 1)
        return due - 1 if due > _FEW else 0

    def propose(self, context: Context) -> list[int]:
        self.spent_s = 0.0
        # The last token whose hidden state and next token are known.
        newest, head = len(context.tokens) - 2, self.worker.head
        if not self._cache or self._rows + newest + 1 - self._fed > ROWS:
            self._cache, self._rows, self._fed = head.make_cache(), 0, 0
        places, states = self._due(newest)
        if states is None or places[-1] != newest:
            return []
        begun = time.perf_counter()
        if (self._rows and places[0] > self._fed) or len(places) > max(_FEW, self.most_rows):
            # Rows are missing in between, or there are more than the answer can bear.
            self._cache, self._rows = head.make_cache(), 0
            places, states = places[-self.most_rows :], states[-self.most_rows :]
        if not self.known_tokens:
            self._begin(len(places), newest + 1)
        following = mx.array([[context.tokens[at + 1] for at in places]])
        early = len(places) - 1 if len(places) > _FEW else 0
        if early:
            _read(head, following[:, :early], states[:early], self._cache)
            self.worker.reading.took(early, time.perf_counter() - begun)
        drafting = time.perf_counter()
        given = head(following[:, early:], head.normed(states[None, early:]), self._cache)[:, -1:]
        found = self._guesses(given, context.width)
        ended = time.perf_counter()
        self._rows, self._fed = self._rows + len(places), newest + 1
        self.spent_s = ended - begun
        self.worker.price.took(context.width, ended - drafting)
        self.guess = found[0]
        return found

    def close(self) -> None:
        self._noted.clear()
        self._cache = []

    def _due(self, newest: int) -> tuple[list[int], mx.array | None]:
        """The tokens up to ``newest`` that have a hidden state and no row yet, and their hidden states."""
        places: list[int] = []
        parts = []
        for start, states in self._noted.between(self._fed, newest + 1):
            places += range(start, start + states.shape[0])
            parts.append(states)
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


def _read(head: MtpHead, following: mx.array, states: mx.array, cache: list[Any]) -> None:
    """Make the rows of ``states``, (rows, D), that ``following``, (1, rows), come after, without a guess."""
    with unread_logits():
        head(following, head.normed(states[None]), cache)
    mx.eval(arrays(cache))
