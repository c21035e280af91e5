"""How many drafts of which source one answer's next pass verifies. Pure: no clock, no chance, no mlx.

With acceptance a, k drafts bring (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., 2023) for the time of
tv(k+1) / t1 plain steps; the k with the most tokens per time is taken, or none where that is not clearly more
than one.

Over m machines of a group, blocks of w tokens follow each other without waiting for the one before, as if all
of it were right: at most one for each machine, since each computes one. Blocks that were sent behind a wrong
draft are waste. A guess of K blocks brings (1 - a^(K·w)) / (1 - a) tokens. The first block takes its whole
way. The N - 1 that are expected to count after it come as fast as the slowest machine gives them; s is its
part of a block's whole way, an m-th if all are equally fast. Behind a wrong draft the slowest machine may
still be busy with blocks that are dropped, and the next one is late. With k = min(K, m) blocks at a time:

    tv(w) / t1 · (1 + (N - 1) · max(s, 1 / k) + (1 - a^(K·w)) · max(0, k · s - 1))
    N = (1 - a^(K·w)) / (1 - a^w)

Where a wrong draft undoes its whole pass (``rollback.mark``), what was right in it is computed again in the
next pass, which is so much wider. That is taken into account at its most: all k tokens, as often as any is
wrong.

A draft that is not verified is judged all the same, by the tokens that come without it: so a source that is
off costs nothing and is on again as soon as it would have been right.

A source may take time of this device for its drafts. It is asked only if that pays as well.
Otherwise it is tried with a single token now and then, as nothing else shows that it has become right.
What it
took is lost whatever comes of it. How seldom it is tried is a matter of all answers of the worker, which also
begin with what earlier ones found (``source_history``).

No answer may take much longer than without drafts. So the time that drafts have saved and lost so far is
added up, in plain steps, and a pass may only risk what they have saved and a small share of the answer: the
steps that it takes beyond one, if no draft is right. Losses end drafts until the answer can bear them again,
whatever was expected of them. Each source has an account of its own as well: what one has saved is not
another one's to lose.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd.engine.speculation.ahead import LATE, AheadFlight, AheadGain
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.rounds import Promise
from fleetd.engine.speculation.source_history import (
    CARRIED,
    PRIOR,
    PRIOR_TOKENS,
    TRIAL_SHARE,
    DraftHistory,
    SourceHistory,
)

# A wider pass has to promise this much more than a plain step: the promise is an estimate.
MARGIN = 1.05
# Evidence loses this share of its weight with each draft that is judged: texts change.
FADES = 0.12
# The highest acceptance assumed; (1 - a) must not be 0.
SUREST = 0.98
# Plain steps that drafts may lose: at the beginning of an answer, and for each of its tokens. Together less
# than 2 % of an answer of 50 tokens or more, also with what is carried over from earlier answers.
RISK, RISK_PER_TOKEN = 0.25, 0.012
# The part of what an answer can bear that may go into reading hidden states before a draft.
SPARED = 0.25
# So many tokens before a trial the hidden states are noted that it drafts from.
NOTED_BEFORE = 64


@dataclass(slots=True)
class SourceStats:
    """How one source's drafts have done in this sequence."""

    # Tokens that were verified, and how many of them were right.
    drafted: int = 0
    accepted: int = 0
    # Passes in which drafts of this source were verified.
    passes: int = 0
    # Weights of the drafts that were right, and of all that were judged.
    _right: float = PRIOR * PRIOR_TOKENS
    _judged: float = PRIOR_TOKENS
    # Plain steps that its drafts may lose now; and those that earlier answers have left for this one.
    bearable: float = RISK
    advance: float = RISK

    @classmethod
    def after(cls, past: SourceHistory, tokens: int) -> SourceStats:
        """A source that first drafts after ``tokens`` tokens of an answer, with what earlier ones found."""
        right, judged = past.remembered()
        advance = min(CARRIED, past.account)
        return cls(_right=right, _judged=judged, bearable=_granted(advance, tokens), advance=advance)

    @property
    def acceptance(self) -> float:
        """Chance that a draft is right where all before it were."""
        return min(SUREST, self._right / self._judged)

    def judge(self, right: int, *, wrong: bool) -> None:
        """Count a draft whose first ``right`` tokens were accepted; ``wrong``: the next one was rejected."""
        self._right = self._right * (1 - FADES) + right
        self._judged = self._judged * (1 - FADES) + right + wrong


class Draft(msgspec.Struct, frozen=True):
    """What the next pass verifies besides the token that is due: ``tokens`` of ``source``, or none.

    ``block``: over several machines they are cut into blocks of so many tokens, the due one included; 0: they
    are not.
    """

    source: str = ""
    tokens: tuple[int, ...] = ()
    block: int = 0


NO_DRAFT = Draft()


class Beside(enum.Enum):
    """What machines were busy with when a block was sent, or until it came back."""

    NOTHING = enum.auto()
    # Other blocks, of this answer or another.
    BLOCKS = enum.auto()
    # Blocks of this answer that were dropped.
    DROPPED = enum.auto()
    # A prompt: how long the block itself took is not known.
    PROMPT = enum.auto()


@dataclass(slots=True)
class Controller:
    """Decides for one sequence. Each turn: ``choose``, then ``verified`` with the result of the pass."""

    # What passes take on this device; one curve for all answers of a worker.
    costs: Costs
    # Most drafts of one pass.
    most: int
    # True: verify whatever there is. For measuring.
    always: bool = False
    # Whether blocks go ahead of each other; None: whenever that is expected to be faster.
    ahead: AheadGain | None = None
    # True if what was right beside a wrong draft is computed again.
    again: bool = False
    # What earlier answers of the worker found.
    history: DraftHistory = field(default_factory=DraftHistory)
    # By source: how its drafts have done in this answer.
    records: dict[str, SourceStats] = field(default_factory=dict)
    # Seconds that drafts have saved so far; negative if they have lost some.
    saved_s: float = 0.0
    # Passes of this answer, and the tokens that they gave.
    passes: int = 0
    tokens: int = 0
    # As of ``SourceStats``, for drafts of all sources.
    _bearable: float = RISK
    _advance: float = RISK
    # What each source guessed, from the token that is due on, and how much of it has come.
    _guesses: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    # Tokens of the answer.
    _seen: int = 0
    # By source: seconds that it has taken since the last pass.
    _drafting: dict[str, float] = field(default_factory=dict)
    # Sources that are being tried.
    _trying: set[str] = field(default_factory=set)
    # By source that was asked: seconds per token without it, of a plain step or of what other drafts
    # promised.
    _instead: dict[str, float] = field(default_factory=dict)
    _flight: AheadFlight | None = None
    # The slowest machine's part of a block's way; 0 if all are taken to be equally fast.
    _slowest: float = 0.0

    def choose(
        self,
        proposals: Mapping[str, Sequence[int]],
        room: int,
        machines: int = 1,
        *,
        going: bool = False,
        slowest: float = 0.0,
    ) -> Draft:
        """The drafts to verify, at most ``room``; sources in order of preference. ``machines``: that can each
        compute another block. ``going``: the first of these blocks are under way. ``slowest``: the part of a
        plain step that the slowest machine takes; 0 if that is not known."""
        self._slowest = slowest
        alone, alone_gain = self._best(proposals, room, 1)
        if machines == 1:
            self._flight = None
            return alone
        found, gain = self._best(proposals, room, machines)
        if going:
            if self._flight is not None and found.tokens:
                self._flight.goes_on(1 + len(alone.tokens), 1 + len(found.tokens))
            return found
        self._flight = None
        if self.always:
            return found
        if gain <= alone_gain:
            return alone
        if self.ahead is None:
            return found
        if not self.ahead.next(gain / alone_gain):
            return alone
        self._flight = AheadFlight(1 + len(alone.tokens), 1 + len(found.tokens), self.costs.ratio)
        return found

    def _best(self, proposals: Mapping[str, Sequence[int]], room: int, machines: int) -> tuple[Draft, float]:
        """The drafts that bring most tokens per time, and how many times a plain step's that is."""
        best, gain = NO_DRAFT, MARGIN
        for name, tokens in proposals.items():
            if not tokens:
                continue
            # No more than one block's, so that a source is judged as soon as on one machine.
            self._guesses.setdefault(name, (tuple(tokens[: max(1, self.most)]), 0))
            usable = min(len(tokens), room, (self.most + 1) * machines - 1)
            if self.always:
                if usable > len(best.tokens):
                    block = -(-(usable + 1) // machines) if machines > 1 else 0
                    best = Draft(name, tuple(tokens[:usable]), block)
                continue
            block, found = self._block(self._record(name), usable, machines)
            if found > gain:
                drafts = tokens[: min(usable, block * machines - 1)]
                best, gain = Draft(name, tuple(drafts), block if machines > 1 else 0), found
        return best, gain if best.tokens else 1.0

    def wanted(self, source: str, price: DraftPrice, beside: Draft, room: int, begin_s: float = 0.0) -> int:
        """How many tokens ``source`` is to draft, if that takes ``price`` of this device; 0 if it is not
        expected to bring more than ``beside``.

        ``begin_s``: seconds that it takes once, before its first token. They have to be bearable; whether
        drafts pay is a matter of those that follow as well.
        """
        self._trying.discard(source)
        most = min(self.most, room)
        if most <= len(beside.tokens) or self.always:
            return most if most > len(beside.tokens) else 0
        promised, record = self.promise(beside), self._record(source)
        instead_s = self._instead[source] = promised.seconds / promised.tokens
        least = max(MARGIN, self.costs.step_s / instead_s)
        block, found = self._block(record, most, 1, price, begin_s)
        if found > least:
            return block - 1
        if beside.tokens or self._pays(record.acceptance, price, most) > least:
            # Something else drafts, or it would be asked if the answer could bear it.
            return 0
        cost = self._trial_steps(price) + begin_s / self.costs.step_s
        past = self.history.source(source)
        # An answer in which it was wrong more often than before does not outweigh all the others.
        if self._pays(past.acceptance, price, most) > least and past.known:
            return 1 if cost <= self._bearable_of(record) else 0
        if cost > min(past.allowance, self._bearable_of(record)):
            return 0
        self._trying.add(source)
        return 1

    def notes(self, source: str, price: DraftPrice) -> bool:
        """True if ``source`` is expected to pay, or will be due to be tried in ``NOTED_BEFORE`` tokens: then
        what it drafts from has to be noted."""
        if self.always:
            return True
        acceptance = self._record(source).acceptance
        past = self.history.source(source)
        if max(self._pays(each, price, self.most) for each in (acceptance, past.acceptance)) > MARGIN:
            return True
        return self._trial_steps(price) <= min(CARRIED, past.allowance + TRIAL_SHARE * NOTED_BEFORE)

    def off(self, source: str, price: DraftPrice | None = None) -> str:
        """Why ``source`` is not asked at the moment, going by all answers so far; "" if it is, or if
        too little is known."""
        past = self.history.source(source)
        if self.always or not past.known or self._pays(past.acceptance, price, self.most) > MARGIN:
            return ""
        return f"off: pays less than it costs (right in {100 * past.acceptance:.0f} %)"

    def spare_s(self, source: str, price: DraftPrice, count: int) -> float:
        """Seconds that ``source`` may take once, before ``count`` tokens: a part of what the answer
        could still bear if all of them were wrong."""
        at_worst = self._at_worst(1 + count) + price.seconds(count) / self.costs.step_s
        if self.always:
            return math.inf
        bearable = self._bearable_of(self._record(source))
        if source in self._trying:
            bearable = min(bearable, self.history.source(source).allowance)
        return SPARED * max(0.0, bearable - at_worst) * self.costs.step_s

    def drafted(self, source: str, seconds: float) -> None:
        """Note that ``source``, or what it drafts from, took ``seconds`` since the last pass."""
        self._drafting[source] = self._drafting.get(source, 0.0) + seconds

    def promise(self, draft: Draft, drafting_s: float = 0.0) -> Promise:
        """What the pass over ``draft`` is expected to bring. ``drafting_s``: what the draft itself takes."""
        acceptance = self._record(draft.source).acceptance if draft.tokens else 0.0
        count = len(draft.tokens)
        tokens = sum(acceptance**k for k in range(count + 1))
        return Promise(tokens, self._ratio(count, acceptance**count) * self.costs.step_s + drafting_s)

    def verified(
        self,
        draft: Draft,
        emitted: Sequence[int],
        seconds: float,
        saved_s: float | None = None,
        *,
        again: int = 0,
        beside: Beside = Beside.NOTHING,
        left: int = 0,
    ) -> None:
        """The pass over ``draft`` gave ``emitted`` in ``seconds``: tokens that were right, and the next one.
        The seconds include what sources have taken (``drafted``).

        ``saved_s``: seconds that the pass saved, given if plain decoding would have been steps of a batch.
        ``again``: tokens that the pass computed a second time. ``beside``: what else was under way.
        ``left``: blocks of the same flight that still are.
        """
        step_s, drafting = self.costs.step_s, self._drafting
        self._drafting = {}
        drafting_s = sum(drafting.values())
        if beside is Beside.PROMPT:
            # As if nothing had been saved or lost.
            seconds, self._flight = step_s * len(emitted), None
        if beside is Beside.NOTHING:
            self.costs.add_pass(again + 1 + len(draft.tokens), seconds - drafting_s)
            if draft.tokens and len(emitted) == 1:
                # If a plain step was held up, wrong drafts would seem to cost nothing for a while.
                seconds = max(seconds, step_s * self.costs.ratio(1 + len(draft.tokens)) + drafting_s)
        self._add_to_flight(1 + len(draft.tokens), len(emitted), seconds, beside, left)
        self.on_tokens(emitted)
        self.passes += 1
        self.tokens += len(emitted)
        for source, took in drafting.items():
            if source != draft.source:
                self._gained(source, -took / step_s)
        if draft.tokens:
            record = self._record(draft.source)
            record.drafted += len(draft.tokens)
            record.accepted += leading(draft.tokens, emitted)
            record.passes += 1
            instead_s = self._instead.get(draft.source, step_s) if draft.source in drafting else step_s
            others_s = drafting_s - drafting.get(draft.source, 0.0)
            self._gained(draft.source, (len(emitted) * instead_s - seconds + others_s) / step_s)
        elif not again:
            self.saved_s -= drafting_s
            self._bearable -= drafting_s / step_s
            return
        alone_s = len(emitted) * step_s - seconds
        self.saved_s += alone_s if saved_s is None else saved_s
        self._bearable += alone_s / step_s

    def _gained(self, source: str, steps: float) -> None:
        """Note that ``source`` has saved so many plain steps, or lost them if below 0."""
        self._record(source).bearable += steps
        past = self.history.source(source)
        past.gained(steps)
        if source in self._trying:
            past.tried(steps)
            self._trying.discard(source)

    def _add_to_flight(self, width: int, tokens: int, seconds: float, beside: Beside, left: int) -> None:
        """Add what a block gave; after the last one hold it against one block at a time."""
        if self.ahead is None:
            return
        if self._flight is None:
            if beside is Beside.DROPPED:
                self.ahead.delayed(seconds / self.costs.step_s - self.costs.ratio(width))
            return
        self._flight.took(tokens, seconds)
        if not left:
            self.ahead.flew(self._flight.alone, self._flight.seconds / self.costs.step_s)
            self._flight = None

    def on_tokens(self, tokens: Sequence[int]) -> None:
        """Hold guesses against tokens of the answer, drafted or not."""
        before, self._seen = self._seen, self._seen + len(tokens)
        self._bearable += _granted(self._advance, self._seen) - _granted(self._advance, before)
        for record in self.records.values():
            record.bearable += _granted(record.advance, self._seen) - _granted(record.advance, before)
        self.history.on_tokens(len(tokens))
        for name, (guess, seen) in list(self._guesses.items()):
            rest = guess[seen:]
            right = leading(rest, tokens)
            wrong = right < min(len(rest), len(tokens))
            if wrong or seen + right == len(guess):
                self._record(name).judge(seen + right, wrong=wrong)
                self.history.source(name).judge(seen + right, wrong=wrong)
                del self._guesses[name]
            else:
                self._guesses[name] = (guess, seen + right)

    def _record(self, name: str) -> SourceStats:
        if (record := self.records.get(name)) is None:
            record = self.records[name] = SourceStats.after(self.history.source(name), self._seen)
            before, self._advance = self._advance, max(self._advance, record.advance)
            self._bearable += _granted(self._advance, self._seen) - _granted(before, self._seen)
        return record

    def _bearable_of(self, record: SourceStats) -> float:
        """Plain steps that drafts of a source may lose now."""
        return min(self._bearable, record.bearable)

    def _at_worst(self, width: int) -> float:
        """Plain steps that a pass over ``width`` tokens takes beyond one, if no draft is right."""
        again = self.costs.ratio(2) - 1 if self.again and width > 1 else 0.0
        return self.costs.ratio(width) - 1 + again

    def _trial_steps(self, price: DraftPrice) -> float:
        """Plain steps that a draft of one token loses if it is wrong."""
        return self._at_worst(2) + price.seconds(1) / self.costs.step_s

    def _pays(self, acceptance: float, price: DraftPrice | None, most: int) -> float:
        """How many times a plain step's tokens per time drafts would bring, whatever can be borne."""
        return max(
            (
                self._gain(min(SUREST, acceptance), width, 1, width - 1, self._steps(price, width - 1))
                for width in range(2, min(self.most, most) + 2)
            ),
            default=0.0,
        )

    def _steps(self, price: DraftPrice | None, drafts: int) -> float:
        """Plain steps that making ``drafts`` drafts takes."""
        return price.seconds(drafts) / self.costs.step_s if price is not None else 0.0

    def _block(
        self,
        record: SourceStats,
        drafts: int,
        machines: int,
        price: DraftPrice | None = None,
        begin_s: float = 0.0,
    ) -> tuple[int, float]:
        """The tokens of a block, the due one included, that bring most tokens per time, and how many times a
        plain step's that is. ``drafts``: how many there are; ``price``: what making them takes, if anything;
        ``begin_s``: what it takes once.

        Blocks that would lose more than the answer can bear, if every draft were wrong, are left out.
        """
        acceptance, bearable = record.acceptance, self._bearable_of(record)
        best, gain = 1, 1.0
        for width in range(1, min(self.most, drafts) + 2):
            blocks = min(machines, -(-(drafts + 1) // width))
            late = self.ahead.own.late if self.ahead is not None else LATE
            drafting = self._steps(price, width - 1)
            at_worst = self._at_worst(width) + drafting
            at_worst += max(late * (blocks - 1), self._late(blocks) * self.costs.ratio(width))
            # More than one draft may not cost the answer all that it can bear: the next pass may be right.
            if at_worst + begin_s / self.costs.step_s > bearable / (2 if width > 2 else 1):
                break
            found = self._gain(acceptance, width, blocks, drafts, drafting)
            if found > gain:
                best, gain = width, found
        return best, gain

    def _gain(self, acceptance: float, width: int, blocks: int, drafts: int, drafting: float = 0.0) -> float:
        """Tokens per time of blocks of ``width`` tokens, so many under way at a time, over a plain step's.
        ``drafting``: plain steps that making the drafts takes."""
        right = acceptance**width
        # On one machine the next block is chosen anew.
        all_blocks = 1 if blocks == 1 else -(-(drafts + 1) // width)
        tokens = (1 - acceptance ** min(drafts + 1, width * all_blocks)) / (1 - acceptance)
        counted = (1 - right**all_blocks) / (1 - right)
        ratio = self._ratio(width - 1, acceptance ** (width - 1))
        all_right = right**all_blocks
        way = 1 + (counted - 1) * max(self._slowest, 1 / blocks) + (1 - all_right) * self._late(blocks)
        return tokens / (ratio * way + drafting)

    def _late(self, blocks: int) -> float:
        """The part of its way by which a block is late behind ``blocks`` that were dropped: machines may be
        busy with them."""
        return max(0.0, blocks * self._slowest - 1)

    def _ratio(self, drafts: int, all_right: float) -> float:
        """Plain steps that a pass over ``drafts`` drafts takes, and the next pass for what it computes again.

        ``all_right``: the chance that no draft is wrong.
        """
        ratio = self.costs.ratio(1 + drafts)
        return ratio + (1 - all_right) * (ratio - 1) if self.again else ratio


def _granted(advance: float, tokens: int) -> float:
    """Plain steps that drafts may lose in ``tokens`` tokens of an answer, if they save nothing.
    ``advance`` is had at once, and is no more than what would be had later."""
    return max(advance, RISK + RISK_PER_TOKEN * tokens)


def leading(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    same = 0
    while same < min(len(guess), len(tokens)) and guess[same] == tokens[same]:
        same += 1
    return same
