"""What to draft next, and what of it is still good when the text goes on. Pure: a model does the guessing.

    text ─ d1 ─ d2 ─ d3 ─ d4 …        the main path: the model's likeliest tokens, ``ahead`` of them
            │    └─ e ─ c1 ─ c2       a detour: d2's runner-up, and what would follow it

The main path comes first. Once it is long enough, detours are drafted where a mistake is likeliest: where the
main path's tokens before are probable and so is the runner-up. Both are ready before the verdict is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd import limits


class Guess(msgspec.Struct, frozen=True):
    """A model's two likeliest next tokens, with their probabilities."""

    first: int
    second: int
    p_first: float
    p_second: float


@dataclass(slots=True)
class Lookahead:
    """The paths that are drafted after one text."""

    # End tokens: nothing is drafted after them.
    ends: frozenset[int] = frozenset()
    # Tokens of the main path.
    ahead: int = limits.DRAFT_AHEAD
    # Most detours, and tokens of each after the runner-up.
    detours: int = limits.DRAFT_DETOURS
    detour_tokens: int = limits.DRAFT_DETOUR_TOKENS
    # The guess that each token of the main path comes from.
    guesses: list[Guess] = field(default_factory=list)
    # By the place of the mistake on the main path: the guesses after the runner-up.
    detour_guesses: dict[int, list[Guess]] = field(default_factory=dict)

    @property
    def main_path(self) -> list[int]:
        return [guess.first for guess in self.guesses]

    def next(self) -> list[int] | None:
        """Tokens after the text whose successor should be guessed now; None if enough is drafted."""
        if (found := self._growing()) is None:
            return None
        before, guesses = found
        return [*before, *(guess.first for guess in guesses)]

    def guessed(self, guess: Guess) -> list[int]:
        """Take the guess that ``next`` asked for; returns the path that has grown by it."""
        if (found := self._growing()) is None:
            raise ValueError("nothing was asked for")
        before, guesses = found
        guesses.append(guess)
        return [*before, *(guess.first for guess in guesses)]

    def _growing(self) -> tuple[list[int], list[Guess]] | None:
        """The tokens before the path that grows next, and its guesses; None if all are long enough."""
        if len(self.guesses) < self.ahead and not self._over(self.guesses):
            return [], self.guesses
        for place in self._likeliest():
            after = self.detour_guesses.setdefault(place, [])
            if len(after) < self.detour_tokens and not self._over(after):
                return [*self.main_path[:place], self.guesses[place].second], after
        return None

    def committed(self, tokens: Sequence[int]) -> int:
        """Go on to a text with ``tokens`` more. Returns how many of them the main path had foreseen."""
        main_path, n = self.main_path, len(tokens)
        foreseen = next((i for i in range(n) if i >= len(main_path) or main_path[i] != tokens[i]), n)
        if foreseen == n:
            self.guesses = self.guesses[n:]
            self.detour_guesses = {
                place - n: after for place, after in self.detour_guesses.items() if place >= n
            }
            return foreseen
        after = self.detour_guesses.get(foreseen, [])
        known = n - foreseen - 1
        on_detour = foreseen < len(main_path) and self.guesses[foreseen].second == tokens[foreseen]
        if on_detour and [guess.first for guess in after[:known]] == list(tokens[foreseen + 1 :]):
            self.guesses = after[known:]
        else:
            self.guesses = []
        self.detour_guesses = {}
        return foreseen

    def _likeliest(self) -> list[int]:
        """Places on the main path at which detours begin, likeliest first."""
        reach, weights = 1.0, []
        for guess in self.guesses:
            weights.append(reach * guess.p_second if guess.second not in self.ends else 0.0)
            reach *= guess.p_first
        places = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
        return [place for place in places[: self.detours] if weights[place] > 0]

    def _over(self, guesses: Sequence[Guess]) -> bool:
        return bool(guesses) and guesses[-1].first in self.ends
