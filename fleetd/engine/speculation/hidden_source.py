"""What the sources have in common that draft from a model's hidden states.

They take time of this device, and show only by their guesses whether they belong to the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fleetd import limits
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.sources import Context, HiddenRows

# After so many guesses a drafter that is hardly ever right is taken to be another model's; how rarely.
JUDGED, HARDLY = 64, 0.02


@dataclass(slots=True)
class WorkerDrafter(ABC):
    """What drafts from a model's hidden states, for all answers of a worker."""

    # First guesses that were held against the text, and how many were right.
    judged: int = field(init=False, default=0)
    right: int = field(init=False, default=0)
    # Seconds that a pass takes longer if it notes what is drafted from; 0 unless other machines send it.
    taps_s: float = field(init=False, default=0.0)

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


@dataclass(slots=True)
class HiddenSource(ABC):
    """A ``DraftSource`` of one answer whose drafts take time of this device."""

    worker: WorkerDrafter
    name: ClassVar[str]
    # Seconds of the last ``propose``, without what was made up for of the prompt.
    spent_s: float = field(init=False, default=0.0)
    # Tokens that the first draft knew the hidden states of.
    known_tokens: int = field(init=False, default=0)
    # Of how many it would have known them, had all of the text been computed here.
    wanted_tokens: int = field(init=False, default=0)
    # The first guess of the last draft, until the text goes on.
    guess: int | None = field(init=False, default=None)

    @property
    def taps_s(self) -> float:
        """Seconds that a pass takes longer if it notes the hidden states."""
        return self.worker.taps_s

    @property
    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def price(self) -> DraftPrice:
        """What drafts take, as far as is known now."""

    @abstractmethod
    def note(self, hidden: HiddenRows) -> None:
        """These hidden states have been computed. They are given even if the source is not asked."""

    @abstractmethod
    def propose(self, context: Context) -> list[int]: ...

    @abstractmethod
    def close(self) -> None: ...

    def _begin(self, known: int, text: int) -> None:
        """The first draft is made, after ``text`` tokens, of ``known`` of which there are hidden states."""
        self.wanted_tokens = min(text, limits.SPEC_HIDDEN_ROWS)
        self.known_tokens = min(known, self.wanted_tokens)

    def committed(self, tokens: Sequence[int]) -> None:
        if self.guess is not None and tokens:
            self.worker.judge(right=tokens[0] == self.guess)
            self.guess = None
