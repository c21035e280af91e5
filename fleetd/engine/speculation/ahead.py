"""Whether it pays to send blocks of an answer before others have come back. Pure: no clock, no chance.

    flight    from when nothing of an answer is under way until nothing is again
    gain      what the flight's tokens would have taken one block at a time, over what they took
    promise   the gain that the controller expects of a flight, by its formula
    factor    the gains of flights, of what was promised

The gain of a flight is known without trying the other way (``AheadFlight``): which tokens came is known, and
so is what a block takes that is alone (``pass_costs``). What dropped blocks cost the next one counts as well.

Blocks go ahead if promise times factor is clearly more than 1. An answer begins with the factor that the
worker's answers before it have left, and soon goes by what it finds itself. If blocks do not go ahead, a
flight now and then tries it, more rarely each time that it lost. If they do, a block alone now and then keeps
the costs up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# A flight has to promise so much more than one block at a time: the promise is an estimate.
CLEAR = 1.15
# The factor that is assumed at first, and the plain steps of evidence that it counts for.
PRIOR, PRIOR_STEPS = 0.8, 2.0
# Evidence loses this share of its weight with each flight: texts change.
FADES = 0.1
# The most plain steps of evidence that an answer takes over from the answers before it.
REMEMBERED = 8.0
# A flight counts as so many times as long as one block at a time, at most: more says more of the machine.
OFF = 2.0
# Plain steps that a block is late behind one that was dropped, until that is measured: the machine that sends
# would have idled, but the next one may still be busy with it.
LATE = 0.1
# Flights of which one tries the other way: at first, at most, and while blocks go ahead.
REST, LONGEST_REST, REFRESH = 2, 64, 16


@dataclass(slots=True)
class AheadFlight:
    """One flight of several blocks, and how its tokens would have come one block at a time.

    ``width``: tokens that a block would have now if it were alone. ``guess``: those that the flight can give,
    as far as is known; behind them there is nothing to verify. ``ratio``: plain steps that a block takes.
    """

    width: int
    guess: int
    ratio: Callable[[int], float]
    # Plain steps of the blocks alone that the tokens so far need.
    alone: float = 0.0
    seconds: float = 0.0
    # Tokens so far, and those that the blocks alone could have given.
    _tokens: int = 0
    _covered: int = 0

    def goes_on(self, width: int, guess: int) -> None:
        """A block alone would have ``width`` tokens now, and from here on ``guess`` may come."""
        self.width, self.guess = width, self._tokens + guess

    def took(self, tokens: int, seconds: float) -> None:
        """A block gave ``tokens``, in ``seconds`` since the one before."""
        self._tokens += tokens
        self.seconds += seconds
        while self._covered < self._tokens:
            width = max(1, min(self.width, self.guess - self._covered))
            self._covered += width
            self.alone += self.ratio(width)


@dataclass(slots=True)
class GainEvidence:
    """What flights have gained, of what was promised; fading, in plain steps."""

    # What they would have taken one block at a time.
    alone: float = PRIOR * PRIOR_STEPS
    # What they took, times the gain that was promised.
    promised: float = PRIOR_STEPS
    # By how much a block is late behind one that was dropped.
    late: float = LATE

    @property
    def factor(self) -> float:
        return self.alone / self.promised

    def add(self, alone: float, promised: float) -> None:
        """Note one more flight."""
        self.alone = self.alone * (1 - FADES) + alone
        self.promised = self.promised * (1 - FADES) + promised

    def delay(self, steps: float) -> None:
        """Note a block that came ``steps`` late."""
        self.promised += steps
        self.late += FADES * (steps - self.late)

    def remembered(self) -> GainEvidence:
        """The same factor, with no more weight than a new answer gives it."""
        part = min(1.0, REMEMBERED / self.promised)
        return GainEvidence(self.alone * part, self.promised * part, self.late)


@dataclass(slots=True)
class GroupFlights:
    """What all answers of a worker have found, and when the other way is tried next."""

    evidence: GainEvidence = field(default_factory=GainEvidence)
    # Flights since it was tried, and how many there have to be if blocks do not go ahead.
    since: int = 0
    rest: int = REST


@dataclass(slots=True)
class AheadGain:
    """Decides for one answer. For each flight that could have several blocks: ``next``; then ``flew`` if it
    had them."""

    group: GroupFlights
    own: GainEvidence = field(init=False)
    # Of the flight that is under way.
    _promise: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.own = self.group.evidence.remembered()

    def next(self, promise: float) -> bool:
        """True if the blocks of the next flight go ahead of each other. ``promise``: what that would gain."""
        self._promise = promise
        if promise <= CLEAR:
            return False
        pays = promise * self.own.factor > CLEAR
        self.group.since += 1
        if self.group.since < (REFRESH if pays else self.group.rest):
            return pays
        self.group.since = 0
        return not pays

    def flew(self, alone: float, ahead: float) -> None:
        """A flight with several blocks took ``ahead`` plain steps; one block at a time would have taken
        ``alone``."""
        for evidence in (self.group.evidence, self.own):
            evidence.add(alone, min(ahead, OFF * alone) * self._promise)
        if self._promise * self.own.factor > CLEAR:
            self.group.rest = REST
        elif ahead > alone:
            self.group.rest = min(2 * self.group.rest, LONGEST_REST)

    def delayed(self, steps: float) -> None:
        """A block came ``steps`` plain steps late, as machines were busy with others that were dropped."""
        for evidence in (self.group.evidence, self.own):
            evidence.delay(min(max(0.0, steps), OFF))
