"""What the sources have in common that draft from a model's hidden states.

They take time of this device, and show only by their guesses whether they belong to the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetd import limits
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.sources import Context, HiddenRows

# After so many guesses a drafter that is hardly ever right is taken to be another model's; how rarely.
JUDGED, HARDLY = 64, 0.02
# A draft after a time without drafts begins with so many of the last tokens, or more if the answer bears it.
LEAST_ROWS = 32


class NotedStates:
    """The hidden states of the last ``SPEC_HIDDEN_ROWS`` tokens that were noted, (rows, width) each."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, Any]] = deque()
        # The token after the newest one that was noted; 0 if none was.
        self.end = 0

    def add(self, start: int, states: Any) -> None:
        """Add those of the tokens from ``start`` on. Those that are there already are left out."""
        end = start + states.shape[0]
        if end <= self.end:
            return
        first = max(start, self.end)
        self._parts.append((first, states[first - start :]))
        self.end = end
        while self._parts[0][0] + self._parts[0][1].shape[0] <= end - limits.SPEC_HIDDEN_ROWS:
            self._parts.popleft()

    def between(self, first: int, end: int) -> Iterator[tuple[int, Any]]:
        """Those of the tokens [first, end), as far as they were noted: pieces with their first tokens."""
        for start, states in self._parts:
            at, until = max(start, first), min(start + states.shape[0], end)
            if at < until:
                yield at, states[at - start : until - start]

    def count(self, first: int, end: int) -> int:
        """How many of the tokens [first, end) were noted."""
        counted = 0
        for start, states in reversed(self._parts):
            until = start + states.shape[0]
            if until <= first:
                break
            counted += max(0, min(until, end) - max(start, first))
        return counted

    def clear(self) -> None:
        self._parts.clear()
        self.end = 0


@dataclass(slots=True)
class WorkerDrafter(ABC):
    """What drafts from a model's hidden states, for all answers of a worker."""

    # What drafts take, as far as is known now.
    price: DraftPrice
    # First guesses that were held against the text, and how many were right.
    judged: int = field(init=False, default=0)
    right: int = field(init=False, default=0)
    # Seconds that a pass takes longer if it notes what is drafted from; 0 unless other machines send it.
    taps_s: float = field(init=False, default=0.0)
    # What it takes to read tokens' hidden states without drafting; 0 if nothing is read.
    reading: DraftPrice = field(init=False, default_factory=lambda: DraftPrice(0.0, 0.0))

    @property
    @abstractmethod
    def text(self) -> str:
        """What is said of it once it is loaded: the name of its source, and what drafts take."""

    @abstractmethod
    def source(self) -> HiddenSource | None:
        """The source of a new answer; None while it is off."""

    @property
    def off(self) -> str:
        """Why it drafts no more; "" while it does."""
        if self.judged < JUDGED or self.right > HARDLY * self.judged:
            return ""
        return f"off: {self.right} of its {self.judged} drafts were right; it may be another model's"

    def judge(self, *, right: bool) -> None:
        self.judged, self.right = self.judged + 1, self.right + right

    @property
    def row_s(self) -> float:
        """Seconds that it takes to read a token's hidden state without drafting."""
        return self.reading.token_s

    def forget(self, tokens: int) -> None:
        """Note that ``tokens`` of an answer came without a draft of this."""
        self.price.forget(tokens)
        self.reading.forget(tokens)


@dataclass(slots=True)
class HiddenSource(ABC):
    """A ``DraftSource`` of one answer whose drafts take time of this device."""

    worker: WorkerDrafter
    name: ClassVar[str]
    # Seconds of the last ``propose``.
    spent_s: float = field(init=False, default=0.0)
    # Tokens that the first draft knew the hidden states of.
    known_tokens: int = field(init=False, default=0)
    # Of how many it would have known them, had all of the text been computed here.
    wanted_tokens: int = field(init=False, default=0)
    # The first guess of the last draft, until the text goes on.
    guess: int | None = field(init=False, default=None)
    # The most tokens whose hidden states the next ``propose`` may read.
    most_rows: int = field(init=False, default=limits.SPEC_HIDDEN_ROWS)

    @property
    def taps_s(self) -> float:
        """Seconds that a pass takes longer if it notes the hidden states."""
        return self.worker.taps_s

    @property
    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]: ...

    @property
    def price(self) -> DraftPrice:
        """What drafts take, as far as is known now, with what they are made from."""
        return self.worker.price

    @abstractmethod
    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""

    @abstractmethod
    def propose(self, context: Context) -> list[int]: ...

    @abstractmethod
    def close(self) -> None: ...

    def due_rows(self, text: int) -> int:
        """Tokens whose hidden states a draft after ``text`` tokens would read first, beyond the newest
        ones that every draft reads."""
        return 0

    def begin_s(self, text: int) -> float:
        """Seconds that a draft after ``text`` tokens takes at least before its first token."""
        return min(self.due_rows(text), LEAST_ROWS) * self.worker.row_s

    def bear(self, seconds: float) -> None:
        """Let the next ``propose`` take so long for what it reads first."""
        row_s, most = self.worker.row_s, limits.SPEC_HIDDEN_ROWS
        self.most_rows = most if most * row_s <= seconds else max(LEAST_ROWS, int(seconds / row_s))

    def _begin(self, known: int, text: int) -> None:
        """The first draft is made, after ``text`` tokens, of ``known`` of which there are hidden states."""
        self.wanted_tokens = min(text, limits.SPEC_HIDDEN_ROWS)
        self.known_tokens = min(known, self.wanted_tokens)

    def committed(self, tokens: Sequence[int]) -> None:
        if self.guess is None:
            self.worker.forget(len(tokens))
        elif tokens:
            self.worker.judge(right=tokens[0] == self.guess)
            self.guess = None
