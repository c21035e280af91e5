"""What to draft next, and what of it is still good when the text goes on. Pure: a model does the guessing.

    text ─ d1 ─ d2 ─ d3 ─ d4 …        the way: what the model takes for likeliest, ``ahead`` tokens of it
            │    └─ e ─ c1 ─ c2       a detour: d2's runner-up, and what would follow it

The way comes first. Once it is long enough, detours are gone where a mistake is likeliest: where the way's
tokens before are probable and so is the runner-up. Both are there before the verdict is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetd import limits


@dataclass(frozen=True, slots=True)
class Guess:
    """The likeliest next token and the one after it, with their probabilities."""

    first: int
    second: int
    p_first: float
    p_second: float


@dataclass(slots=True)
class Lookahead:
    """``ends``: tokens after which there is nothing."""

    ends: frozenset[int] = frozenset()
    ahead: int = limits.DRAFT_AHEAD
    detours: int = limits.DRAFT_DETOURS
    detour_tokens: int = limits.DRAFT_DETOUR_TOKENS
    # The guess that each token of the way comes from.
    guesses: list[Guess] = field(default_factory=list)
    # By the place of the mistake on the way: the guesses after the runner-up.
    gone: dict[int, list[Guess]] = field(default_factory=dict)

    @property
    def way(self) -> list[int]:
        return [guess.first for guess in self.guesses]

    def next(self) -> list[int] | None:
        """Tokens after the text whose successor should be guessed now; None where enough is drafted."""
        if len(self.guesses) < self.ahead and not self._over(self.guesses):
            return self.way
        for place in self._likeliest():
            after = self.gone.get(place, [])
            if len(after) < self.detour_tokens and not self._over(after):
                return self._detour(place)
        return None

    def guessed(self, guess: Guess) -> list[int]:
        """Take the answer to ``next``; returns the path that has grown by it."""
        if len(self.guesses) < self.ahead and not self._over(self.guesses):
            self.guesses.append(guess)
            return self.way
        for place in self._likeliest():
            after = self.gone.setdefault(place, [])
            if len(after) < self.detour_tokens and not self._over(after):
                after.append(guess)
                return self._detour(place)
        raise ValueError("nothing was asked for")

    def committed(self, tokens: Sequence[int]) -> int:
        """The text went on with ``tokens``. Returns how many of them the way had foreseen."""
        way, n = self.way, len(tokens)
        foreseen = next((i for i in range(n) if i >= len(way) or way[i] != tokens[i]), n)
        if foreseen == n:
            self.guesses = self.guesses[n:]
            self.gone = {place - n: after for place, after in self.gone.items() if place >= n}
            return foreseen
        after = self.gone.get(foreseen, [])
        known = n - foreseen - 1
        on_detour = foreseen < len(way) and self.guesses[foreseen].second == tokens[foreseen]
        if on_detour and [guess.first for guess in after[:known]] == list(tokens[foreseen + 1 :]):
            self.guesses = after[known:]
        else:
            self.guesses = []
        self.gone = {}
        return foreseen

    def _detour(self, place: int) -> list[int]:
        after = [guess.first for guess in self.gone.get(place, [])]
        return [*self.way[:place], self.guesses[place].second, *after]

    def _likeliest(self) -> list[int]:
        """Where detours are, likeliest first."""
        reach, weights = 1.0, []
        for guess in self.guesses:
            weights.append(reach * guess.p_second if guess.second not in self.ends else 0.0)
            reach *= guess.p_first
        places = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
        return [place for place in places[: self.detours] if weights[place] > 0]

    def _over(self, guesses: Sequence[Guess]) -> bool:
        return bool(guesses) and guesses[-1].first in self.ends
