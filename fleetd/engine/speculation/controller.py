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
Otherwise it is asked for a single token now and then, as nothing else shows that it has become right. What it
took is lost whatever comes of it.

No answer may take much longer than without drafts. So the time that drafts have saved and lost so far is
added up, in plain steps, and a pass may only risk what they have saved and a small share of the answer: the
steps that it takes beyond one, if no draft is right. Losses end drafts until the answer can bear them again,
whatever was expected of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd.engine.speculation.ahead import LATE, AheadFlight, AheadGain
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.rounds import Promise

# A wider pass has to promise this much more than a plain step: the promise is an estimate.
MARGIN = 1.05
# The assumed acceptance of a new source, and how many tokens of evidence that counts for.
PRIOR, PRIOR_TOKENS = 0.6, 3.0
# Evidence loses this share of its weight with each draft that is judged: texts change.
FADES = 0.15
# The highest acceptance assumed; (1 - a) must not be 0.
SUREST = 0.98
# Plain steps that drafts may lose: at the beginning of an answer, and for each of its tokens. Together less
# than 2 % of an answer of 50 tokens or more.
RISK, RISK_PER_TOKEN = 0.25, 0.015
# Tokens of the answer after which a source that takes time, and did not pay, is asked for a token again.
TRIAL_TOKENS = 48


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

    @property
    def acceptance(self) -> float:
        """Chance that a draft is right where all before it were."""
        return min(SUREST, self._right / self._judged)

    def judge(self, right: int, *, wrong: bool) -> None:
        """Count a draft whose first ``right`` tokens were accepted; ``wrong``: the next one was rejected."""
        if right or wrong:
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
    # By source: how its drafts have done in this answer.
    records: dict[str, SourceStats] = field(default_factory=dict)
    # Seconds that drafts have saved so far; negative if they have lost some.
    saved_s: float = 0.0
    # Passes of this answer, and the tokens that they gave.
    passes: int = 0
    tokens: int = 0
    # Plain steps that drafts may lose now.
    _bearable: float = RISK
    # What each source guessed, from the token that is due on, and how much of it has come.
    _guesses: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    # Tokens of the answer, and how many of them there were when each source that takes time was last asked.
    _seen: int = 0
    _asked: dict[str, int] = field(default_factory=dict)
    # Seconds that sources have taken since the last pass.
    _drafting_s: float = 0.0
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
            self._flight = self._flight if going else None
            return alone
        found, gain = self._best(proposals, room, machines)
        if going:
            if self._flight is not None and found.tokens:
                self._flight.goes_on(1 + len(alone.tokens), 1 + len(found.tokens))
            return found
        self._flight = None
        if self.always:
            return found
        if len(found.tokens) < max(1, found.block) or gain <= alone_gain:
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
            block, found = self._block(self._record(name).acceptance, usable, machines)
            if found > gain:
                drafts = tokens[: min(usable, block * machines - 1)]
                best, gain = Draft(name, tuple(drafts), block if machines > 1 else 0), found
        return best, gain if best.tokens else 1.0

    def wanted(self, source: str, price: DraftPrice, beside: Draft, room: int) -> int:
        """How many tokens ``source`` is to draft, if that takes ``price`` of this device; 0 if it is not
        expected to bring more than ``beside``."""
        most = min(self.most, room)
        if most <= len(beside.tokens) or self.always:
            return most if most > len(beside.tokens) else 0
        promised = self.promise(beside)
        block, found = self._block(self._record(source).acceptance, most, 1, price)
        if found > max(MARGIN, promised.tokens * self.costs.step_s / promised.seconds):
            return block - 1
        due = self._seen - self._asked.get(source, 0) >= TRIAL_TOKENS
        bearable_s = self._bearable * self.costs.step_s
        return 1 if due and not beside.tokens and price.seconds(1) <= bearable_s else 0

    def drafted(self, source: str, seconds: float) -> None:
        """Note that ``source`` was asked, and took ``seconds`` of this device."""
        self._asked[source] = self._seen
        self._drafting_s += seconds

    def tapped(self, seconds: float) -> None:
        """Note that the pass that is told next took ``seconds`` longer for what is drafted from."""
        self._drafting_s += seconds

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
        step_s, drafting_s = self.costs.step_s, self._drafting_s
        self._drafting_s = 0.0
        if beside is Beside.PROMPT:
            # As if nothing had been saved or lost.
            seconds, self._flight = step_s * len(emitted), None
        if beside is Beside.NOTHING:
            self.costs.add_pass(again + 1 + len(draft.tokens), seconds - drafting_s)
        self._add_to_flight(1 + len(draft.tokens), len(emitted), seconds, beside, left)
        self.on_tokens(emitted)
        self.passes += 1
        self.tokens += len(emitted)
        if draft.tokens:
            record = self._record(draft.source)
            record.drafted += len(draft.tokens)
            record.accepted += leading(draft.tokens, emitted)
            record.passes += 1
        elif not again:
            self.saved_s -= drafting_s
            self._bearable -= drafting_s / step_s
            return
        alone_s = len(emitted) * step_s - seconds
        self.saved_s += alone_s if saved_s is None else saved_s
        self._bearable += alone_s / step_s

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
        self._bearable += RISK_PER_TOKEN * len(tokens)
        self._seen += len(tokens)
        for name, (guess, seen) in list(self._guesses.items()):
            rest = guess[seen:]
            right = leading(rest, tokens)
            wrong = right < min(len(rest), len(tokens))
            if wrong or seen + right == len(guess):
                self._record(name).judge(seen + right, wrong=wrong)
                del self._guesses[name]
            else:
                self._guesses[name] = (guess, seen + right)

    def _record(self, name: str) -> SourceStats:
        return self.records.setdefault(name, SourceStats())

    def _block(
        self, acceptance: float, drafts: int, machines: int, price: DraftPrice | None = None
    ) -> tuple[int, float]:
        """The tokens of a block, the due one included, that bring most tokens per time, and how many times a
        plain step's that is. ``drafts``: how many there are; ``price``: what making them takes, if anything.

        Blocks that would lose more than the answer can bear, if every draft were wrong, are left out.
        """
        best, gain = 1, 1.0
        for width in range(1, min(self.most, drafts) + 2):
            blocks = min(machines, -(-(drafts + 1) // width))
            late = self.ahead.own.late if self.ahead is not None else LATE
            at_worst = self.costs.ratio(width) - 1
            if blocks > 1:
                at_worst += max(late * (blocks - 1), self._late(blocks) * self.costs.ratio(width))
            if self.again and width > 1:
                at_worst += self.costs.ratio(2) - 1
            drafting = price.seconds(width - 1) / self.costs.step_s if price is not None else 0.0
            if at_worst + drafting > self._bearable:
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
        return max(0.0, blocks * self._slowest - 1) if blocks > 1 else 0.0

    def _ratio(self, drafts: int, all_right: float) -> float:
        """Plain steps that a pass over ``drafts`` drafts takes, and the next pass for what it computes again.

        ``all_right``: the chance that no draft is wrong.
        """
        ratio = self.costs.ratio(1 + drafts)
        return ratio + (1 - all_right) * (ratio - 1) if self.again else ratio


def leading(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    same = 0
    while same < min(len(guess), len(tokens)) and guess[same] == tokens[same]:
        same += 1
    return same
