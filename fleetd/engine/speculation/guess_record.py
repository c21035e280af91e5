"""How often the first guesses of a model's drafter were right, in all answers of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

# After so many guesses a drafter that is hardly ever right is taken to be another model's; how rarely.
JUDGED, HARDLY = 64, 0.02


@dataclass(slots=True)
class GuessRecord:
    # First guesses that were held against the text, and how many were right.
    judged: int = field(init=False, default=0)
    right: int = field(init=False, default=0)

    @property
    def off(self) -> str:
        """Why it drafts no more; "" while it does."""
        if self.judged < JUDGED or self.right > HARDLY * self.judged:
            return ""
        return f"off: {self.right} of its {self.judged} drafts were right; it may be another model's"

    def judge(self, *, right: bool) -> None:
        self.judged, self.right = self.judged + 1, self.right + right
