"""All ways to answer a prompt: which machine answers, and which others help it with the prefill.

    seconds to the first token = waking + waiting for a turn + loading + prefill + the first token + network

One planner for requests and for people. Each machine that has the model is priced with the help that it would
get itself: here that of the other machines, elsewhere that of its own helpers. The machine whose answer would
be complete first gets the request (``route``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleetd.errors import InvalidValue
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.choice import choose, described, options, percent
from fleetd.plan.prefill.options import HelperSpec, OptionCode, PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import (
    ADVANTAGE,
    Candidate,
    PricedMachine,
    Ranked,
    Rejection,
    RoutePrice,
    RouteQuestion,
    like_their_twins,
    prefill_speed,
    route,
)

# The help of others is priced for this machine and for so many others, the soonest alone first: it takes some
# milliseconds for each, and a machine that is far behind stays behind.
HELPED = 3


@dataclass(frozen=True, slots=True)
class Home:
    """A machine that may answer. ``prompt`` and ``spec`` are None where it does not have the model.

    ``prompt``: what it would prefill. ``spec``: its own speed. ``helpers``: the machines that it could ask,
    with their links to it. ``previous``: how its prompt before this one was prefilled.
    """

    candidate: Candidate
    prompt: PrefillSize | None = None
    spec: HelperSpec | None = None
    helpers: tuple[HelperSpec, ...] = ()
    previous: PrefillOption | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer. ``prefill`` is None where the machine would fetch the model first.

    ``code`` and ``reason`` say why it was not chosen; both are "" for the chosen way. ``cached_tokens``: of
    the prompt's, those that the machine has probably read before.
    """

    node_id: str
    name: str
    price: RoutePrice
    prefill: PrefillOption | None
    code: OptionCode = ""
    reason: str = ""
    cached_tokens: int = 0

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None for a way that is impossible."""
        if self.prefill is None:
            return self.price.total_s
        return self._around_s + self.prefill.predicted_s if self.prefill.priced else None

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """What ``first_token_s`` consists of."""
        price, first = self.price, self.prefill
        loaded = step_names.FETCHED if first is None else step_names.LOADED
        before = (
            (step_names.WOKEN, price.wake_s),
            (step_names.QUEUED, price.queue_s),
            (loaded, price.load_s),
        )
        steps = (*before, *(first.steps if first is not None else ()), (step_names.NETWORK, price.network_s))
        passing = (step_names.WOKEN, step_names.QUEUED, step_names.LOADED, step_names.NETWORK)
        return tuple((name, seconds) for name, seconds in steps if seconds or name not in passing)

    @property
    def _around_s(self) -> float:
        return self.price.wake_s + self.price.queue_s + self.price.load_s + self.price.network_s


@dataclass(frozen=True, slots=True)
class Ways:
    """``chosen`` is None where no machine can answer. ``others``: this machine's other ways and the best one
    of each other machine, cheapest first. ``ranked``: the machines that can answer, and why others cannot.
    ``known``: by node id, how many of the prompt's tokens machines have probably read before.
    """

    chosen: Way | None
    others: tuple[Way, ...]
    ranked: Ranked
    known: Mapping[str, int] = field(default_factory=dict)

    @property
    def placements(self) -> tuple[PricedMachine, ...]:
        return self.ranked.placements

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        return self.ranked.rejected

    @property
    def kept_where(self) -> str:
        """Which machine has read most of the beginning of the prompt before, and if it does not get the
        request, why; "" where none has."""
        most = max(self.known, key=lambda node_id: self.known[node_id], default=None)
        if self.chosen is None or most is None:
            return ""
        best = self.chosen
        if self.known.get(best.node_id, 0) == self.known[most]:
            return f"{_named(best)} has read about {self.known[most]} tokens of the prompt before."
        passed = next((way for way in self.others if way.node_id == most), None)
        refused = next((each for each in self.rejected if each.node_id == most), None)
        if passed is not None:
            name, reason = _named(passed), passed.reason
        else:
            name, reason = (refused.name, refused.refusal.sentence) if refused is not None else ("", "")
        return f"{name} has read about {self.known[most]} tokens of the prompt before. {reason}"


def plan(ask: RouteQuestion, homes: Sequence[Home]) -> Ways:
    """Price every way, and choose. The order of ``homes`` changes nothing."""
    homes = _like_their_twins(homes)
    alone = route(ask, [home.candidate for home in homes])
    others = [placed.node_id for placed in alone.placements if placed.node_id != THIS_NODE]
    helped = {THIS_NODE, *others[:HELPED]}
    choices = {
        home.candidate.node_id: choice
        for home in homes
        if home.candidate.node_id in helped and (choice := _choice(home)) is not None
    }
    ranked = route(ask, [_with_help(home.candidate, choices) for home in homes])
    candidates = {home.candidate.node_id: home.candidate for home in homes}
    found = [
        way
        for placed in ranked.placements
        for way in _ways(placed, choices.get(placed.node_id), candidates[placed.node_id])
    ]
    if not found:
        return Ways(None, (), ranked)
    best, *passed = found
    judged = [
        way if way.code else _passed_over(way, best, candidates[way.node_id], candidates[best.node_id])
        for way in passed
    ]
    judged.sort(key=lambda way: (way.first_token_s is None, way.first_token_s or 0.0))
    known = {c.node_id: c.cached_tokens for c in candidates.values() if c.cached_tokens}
    return Ways(best, tuple(judged), ranked, known)


def _like_their_twins(homes: Sequence[Home]) -> list[Home]:
    """With the speeds of machines of the same kind where a machine never measured its own."""
    ordered = sorted(homes, key=lambda home: home.candidate.node_id)
    candidates = like_their_twins([home.candidate for home in ordered])
    return [replace(home, candidate=c) for home, c in zip(ordered, candidates, strict=True)]


def _choice(home: Home) -> PlanChoice | None:
    if home.prompt is None or home.spec is None:
        return None
    spec = home.spec
    if spec.modelled:
        spec = replace(spec, speed=prefill_speed(home.candidate))
    try:
        return choose(options(home.prompt, spec, home.helpers), home.previous)
    except (ArithmeticError, ValueError, InvalidValue):
        # Figures on a card may be made up, so that sums of them leave the range of numbers. That must cost
        # this machine's requests no more than the help of others.
        return choose(options(home.prompt, spec, ()))


def _with_help(c: Candidate, choices: Mapping[str, PlanChoice]) -> Candidate:
    choice = choices.get(c.node_id)
    if choice is None:
        return c
    decoded_s = sum(seconds for name, seconds in choice.best.steps if name == step_names.DECODED)
    return replace(c, helped_s=choice.best.predicted_s - decoded_s)


def _ways(placed: PricedMachine, choice: PlanChoice | None, c: Candidate) -> list[Way]:
    """The best way on a machine and, on this one, the others."""
    cached = c.cached_tokens
    if choice is None:
        prefill = None if c.absent else _alone(placed)
        return [Way(placed.node_id, placed.name, placed.price, prefill, cached_tokens=cached)]
    options = [choice.best, *(choice.rejected if c.here else ())]
    return [
        Way(c.node_id, c.name, placed.price, option, option.code, option.reason, cached) for option in options
    ]


def _alone(placed: PricedMachine) -> PrefillOption:
    """The prefill of a machine whose helpers were not priced."""
    seconds = placed.price.prefill_s
    return PrefillOption("local", predicted_s=seconds, steps=((step_names.COMPUTED, seconds),))


def _passed_over(way: Way, best: Way, c: Candidate, chosen: Candidate) -> Way:
    """The way with the reason why another machine gets the request."""
    code: OptionCode
    share = way.price.total_s / max(1e-9, best.price.total_s)
    if c.absent:
        code, reason = "absent", f"{way.name} would have to fetch the model first."
    elif c.left_out:
        code, reason = "failed", f"{way.name} failed a short while ago, so others are asked first."
    elif share >= 1:
        code = "slower"
        reason = f"The answer would take {percent(share - 1)} longer than {_where(best)}."
    else:
        code = "margin"
        least = percent(1 - ADVANTAGE)
        of = f"any but {_named(best)}, where the session is" if chosen.session else "another machine"
        reason = f"The answer would take {percent(1 - share)} less; {least} are asked of {of}."
    return replace(way, code=code, reason=reason)


def _named(way: Way) -> str:
    return way.name if way.node_id != THIS_NODE else "This machine"


def _where(way: Way) -> str:
    if way.node_id != THIS_NODE:
        return f"on {way.name}"
    return described(way.prefill) if way.prefill is not None else "staying here"
