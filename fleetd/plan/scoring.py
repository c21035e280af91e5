"""Whether smart prefill pays: a small model scores a prompt, then a large one prefills what matters.

    smart = scoring on the slowest scorer + prefill of the part that is kept      dense = the best other plan

If a share q of the prompt is kept, linear work shrinks with q and attention with q² (SpecPrefill, arXiv
2502.02789, section 4). Each term is priced from the machines' own measurements.

Several scorers share a prompt by segments. A scorer computes its segment in passes that do not see each
other, each with the prompt's head and the question around it: attention in one pass over n tokens costs n²,
in passes of p tokens n · p. Small machines are preferred: large ones are needed for models that only they can
hold.

If the memory of the machine that answers holds the model that scores or the one that answers, and not both,
they take turns there, and the loads are part of the price. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.plan.costs import MEASURED_TOKENS, LinkSpeed, PrefillSpeed
from fleetd.plan.prompt_forms import FormChoice
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import ADVANTAGE, SHARING

Code = Literal["", "no_scorer", "out_of_memory", "slower", "margin"]

# The prompt's head and the question around each pass, in tokens. They are a part of the whole text.
AROUND_TOKENS = 384
# A scorer stops within the last layer of its profile, once that layer's keys are computed. Where the profile
# is not known here, this share of the layers is assumed.
EXIT_SHARE = 0.6
_LAST_LAYER = 0.5
# Fewer passes are taken if they take at most so many times as long as the best number of them.
_NEARLY = 1.05
# Bytes per token, of text sent to another machine and of the scores that it sends back.
_TEXT_BYTES, _SCORE_BYTES = 4, 120
# Large machines are asked too if the first token would otherwise come later than this many times.
_SMALL_FIRST = 1.25
_SMALL = frozenset({"tiny", "small"})


class Scorer(msgspec.Struct, frozen=True):
    """A machine that has the compressor. ``speed``: of that model there; it runs ``share`` of the layers.

    ``link``: to the machine, None for this one. ``load_s``: how long loading the model takes, if it is not
    loaded. ``running``: its other requests. ``context_tokens``: the most it reads at once, 0 if unknown.
    ``measured``: ``speed`` is not from the chip's published figures. ``correction``: the factor by which
    ``speed`` is slower than the machine's own figures, learned from earlier prompts.
    """

    node_id: str
    name: str
    speed: PrefillSpeed
    share: float = EXIT_SHARE
    link: LinkSpeed | None = None
    tier: str = ""
    load_s: float = 0.0
    running: int = 0
    context_tokens: int = 0
    measured: bool = True
    correction: float = 1.0

    @property
    def here(self) -> bool:
        return self.node_id == THIS_NODE

    def seconds(self, tokens: int, passes: int = 1, around: int = AROUND_TOKENS) -> float:
        """Time to score so many tokens in so many passes of the same length, ``around`` more in each."""
        if tokens <= 0:
            return 0.0
        each = math.ceil(tokens / passes) + around
        computed_s = passes * self.speed.total(self.share, range(each), MEASURED_TOKENS)
        there_s = 0.0
        if self.link is not None:
            there_s = self.link.rtt_s + self.link.seconds(tokens * (_TEXT_BYTES + _SCORE_BYTES))
        return self.load_s + computed_s * (1 + SHARING * self.running) + there_s

    def passes(self, tokens: int) -> int:
        """The passes, 1 or more, in which so many tokens are scored soonest; the context may want more."""
        room = max(1, self.context_tokens - AROUND_TOKENS) if self.context_tokens > 0 else tokens
        fewest = max(1, math.ceil(tokens / max(1, room)))
        most = max(fewest, tokens // limits.SMART_PASS_TOKENS)
        # The minimum is broad: steps of a quarter miss it by next to nothing.
        counts = [fewest]
        while counts[-1] < most:
            counts.append(min(most, counts[-1] + max(1, counts[-1] // 4)))
        times_s = [self.seconds(tokens, count) for count in counts]
        # What a pass sees of the text helps it: the fewest that are not clearly slower.
        return next(n for n, s in zip(counts, times_s, strict=True) if s <= _NEARLY * min(times_s))


class SmartPrefillQuestion(msgspec.Struct, frozen=True):
    """A prompt of ``tokens`` tokens, of which the share ``ratio`` is to be kept.

    ``target``: speed of the machine and model that answer, None if unknown. ``dense_s``: seconds of the best
    plan that prefills all that is not cached. ``kept_s``: of the best plan, with helpers, for the part that
    is kept. Both are 0 if unknown. ``form``: in which that part is read.
    """

    tokens: int
    ratio: float
    target: PrefillSpeed | None
    chunk: int = MEASURED_TOKENS
    dense_s: float = 0.0
    kept_s: float = 0.0
    form: FormChoice = FormChoice()


class Segments(msgspec.Struct, frozen=True):
    """A scorer's part of the text: shares of its length, [first, last), computed in so many passes."""

    scorer: Scorer
    first: float
    last: float
    passes: int = 1

    def seconds(self, tokens: int) -> float:
        """Time to score this part of a text of so many tokens."""
        whole = self.passes == 1 and self.first <= 0 and self.last >= 1
        around = 0 if whole else AROUND_TOKENS
        return self.scorer.seconds(self.tokens(tokens), self.passes, around)

    def tokens(self, tokens: int) -> int:
        """How many of a text of so many tokens are in this part."""
        return math.ceil(tokens * (self.last - self.first))


class Parking(msgspec.Struct, frozen=True):
    """Loads of two models on this machine, whose memory holds one at a time: the one that scores is loaded,
    used and gives way to the one that answers.

    ``scorer_s``: to load what scores, 0 if it is loaded. ``target_s``: to load what answers after that;
    ``needed`` if it is not loaded now, so that reading the whole prompt takes that load too.
    """

    scorer_s: float
    target_s: float
    needed: bool = False

    @property
    def added_s(self) -> float:
        """Seconds of the second load that reading the whole prompt would not take."""
        return 0.0 if self.needed else self.target_s


class SmartPlan(msgspec.Struct, frozen=True):
    """``predicted_s`` = ``score_s`` + ``reload_s`` + ``prefill_s``, to compare with ``dense_s``, which is 0
    if unknown. ``score_s`` has the load of what scores in it. ``form``: as it was asked.

    The plan is worth it if ``code`` is ""; otherwise ``code`` says why not, and ``reason`` gives the figures.
    """

    parts: tuple[Segments, ...] = ()
    score_s: float = 0.0
    prefill_s: float = 0.0
    dense_s: float = 0.0
    code: Code = ""
    reason: str = ""
    parking: Parking | None = None
    form: FormChoice = FormChoice()

    @property
    def reload_s(self) -> float:
        """To load the model that answers after the scores, if they take turns."""
        return self.parking.target_s if self.parking is not None else 0.0

    @property
    def predicted_s(self) -> float:
        return self.score_s + self.reload_s + self.prefill_s

    @property
    def worth_it(self) -> bool:
        return not self.code


def exit_share(exit_layer: int, layers: int) -> float:
    """The share of a model's prefill that scores take; ``layers`` is 0 if unknown."""
    return min(1.0, max(_LAST_LAYER, exit_layer - _LAST_LAYER) / layers) if layers else EXIT_SHARE


def whole_share(weights_bytes: int, outside_bytes: int) -> float:
    """What scores without a question take of a model's prefill, which computes no probabilities: those of
    every token besides, by weights that belong to no layer. Where these are not known they are not priced."""
    layers = weights_bytes - outside_bytes
    return weights_bytes / layers if layers > 0 else 1.0


def plan(
    asked: SmartPrefillQuestion, scorers: Iterable[Scorer], parking: Parking | str | None = None
) -> SmartPlan:
    """The best way to score a prompt, and whether it beats a dense prefill.

    The order of ``scorers`` changes nothing.

    Args:
        parking: what scores and what answers do not fit this machine together: the price of taking turns, or
            why they cannot. None if they fit, or if another machine answers.
    """
    if parking is None:
        return _side_by_side(asked, scorers)
    scorers = list(scorers)
    elsewhere = _side_by_side(asked, [scorer for scorer in scorers if not scorer.here])
    own = next((scorer for scorer in scorers if scorer.here), None)
    if own is None:
        return elsewhere
    if isinstance(parking, str):
        return elsewhere if elsewhere.parts else replace(elsewhere, code="out_of_memory", reason=parking)
    own = replace(own, load_s=parking.scorer_s)
    parts = (Segments(own, 0.0, 1.0, own.passes(asked.tokens)),)
    in_turn = _judged(asked, parts, parts[0].seconds(asked.tokens), parking)
    # Only figures that are known justify loads: no plan is worth it that was not compared.
    if asked.target is None:
        reason = "How fast the model that answers is has not been measured yet, so it does not give way."
        in_turn = replace(in_turn, code="out_of_memory", reason=reason)
    if not elsewhere.parts:
        return in_turn
    return min(
        (elsewhere, in_turn), key=lambda each: (not each.worth_it, each.score_s + _added_s(each.parking))
    )


def _added_s(parking: Parking | None) -> float:
    return 0.0 if parking is None else parking.added_s


def _side_by_side(asked: SmartPrefillQuestion, scorers: Iterable[Scorer]) -> SmartPlan:
    """The best plan with machines of which none has to unload anything."""
    able = sorted(scorers, key=lambda s: (s.seconds(asked.tokens, s.passes(asked.tokens)), s.node_id))
    if not able:
        return SmartPlan(dense_s=asked.dense_s, code="no_scorer", reason="No machine has a compressor.")
    score_s, parts = _best(asked.tokens, able)
    small = [scorer for scorer in able if scorer.tier in _SMALL]
    if small and len(small) < len(able):
        small_s, small_parts = _best(asked.tokens, small)
        prefill_s = _prefill_s(asked)
        if small_s + prefill_s <= _SMALL_FIRST * (score_s + prefill_s):
            score_s, parts = small_s, small_parts
    return _judged(asked, parts, score_s)


def _judged(
    asked: SmartPrefillQuestion, parts: tuple[Segments, ...], score_s: float, parking: Parking | None = None
) -> SmartPlan:
    prefill_s = _prefill_s(asked)
    smart_s = score_s + _added_s(parking) + prefill_s
    code: Code = ""
    reason = ""
    # A load to find out is cheap unless another model has to give way for it.
    measured = parking is not None or all(part.scorer.measured for part in parts)
    if measured and asked.target is not None and asked.dense_s > 0 and smart_s > ADVANTAGE * asked.dense_s:
        code = "margin" if smart_s <= asked.dense_s else "slower"
        loads = ""
        if parking is not None:
            loads = (
                f" (with {parking.scorer_s:.2f} s to load what scores, in place of the model that answers)"
            )
        if _added_s(parking):
            loads += f", loading that model again {_added_s(parking):.2f} s"
        reason = (
            f"Scoring would take {score_s:.2f} s{loads} and prefilling {asked.ratio:.0%} of it "
            f"{prefill_s:.2f} s; all of it takes {asked.dense_s:.2f} s."
        )
    return SmartPlan(parts, score_s, prefill_s, asked.dense_s, code, reason, parking, asked.form)


def _prefill_s(asked: SmartPrefillQuestion) -> float:
    """Time to prefill what is kept: its tokens attend to each other only."""
    if asked.target is None:
        return 0.0
    alone_s = asked.target.total(1.0, range(math.ceil(asked.tokens * asked.ratio)), asked.chunk)
    return min(alone_s, asked.kept_s) if asked.kept_s > 0 else alone_s


def _best(tokens: int, able: Sequence[Scorer]) -> tuple[float, tuple[Segments, ...]]:
    """Seconds and parts, with the fewest machines that are not clearly slower than more would be."""
    best_s = math.inf
    best: tuple[Segments, ...] = ()
    for count in range(1, min(len(able), limits.SMART_SCORERS) + 1):
        parts = _divided(tokens, able[:count])
        seconds = max(part.seconds(tokens) for part in parts)
        if seconds < ADVANTAGE * best_s:
            best_s, best = seconds, parts
    return best_s, best


def _divided(tokens: int, scorers: Sequence[Scorer]) -> tuple[Segments, ...]:
    """One part for each machine, by its speed, so that all finish at about the same time."""
    # Two rounds, because a machine's time does not grow in proportion to its part.
    shares = [1 / len(scorers)] * len(scorers)
    for _ in range(2 if len(scorers) > 1 else 0):
        rates = []
        for scorer, share in zip(scorers, shares, strict=True):
            own = max(1, round(tokens * share))
            rates.append(share / max(1e-9, scorer.seconds(own, scorer.passes(own))))
        shares = [rate / sum(rates) for rate in rates]
    parts, first = [], 0.0
    for index, (scorer, share) in enumerate(zip(scorers, shares, strict=True)):
        last = 1.0 if index == len(scorers) - 1 else first + share
        parts.append(Segments(scorer, first, last, scorer.passes(round(tokens * (last - first)))))
        first = last
    return tuple(parts)
