"""All ways to answer a prompt: which machine answers, and which others help it with the prefill.

    seconds to the first token = waking + waiting for a turn + loading + what is kept of the prompt + prefill
                                 + the first token + network

One planner for requests and for people. Each machine that has the model is priced with the help that it would
get itself: here that of the other machines, elsewhere that of its own helpers. The machine whose answer would
be complete first gets the request (``route``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.plan.beginnings import Beginning
from fleetd.plan.costs import MEASURED_TOKENS
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.choice import described, percent, plan_prefill
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
    gigabytes,
    like_their_twins,
    prefill_speed,
    route,
)

# The help of others is priced for this machine and for so many others, the soonest alone first: it takes some
# milliseconds for each, and a machine that is far behind stays behind.
HELPED = 3


class Home(msgspec.Struct, frozen=True):
    """A machine that may answer."""

    candidate: Candidate
    # What it would prefill, and its own speed; None if it does not have the model.
    prompt: PrefillSize | None = None
    spec: HelperSpec | None = None
    # The machines that it could ask, with their links to it.
    helpers: tuple[HelperSpec, ...] = ()
    # How its prompt before this one was prefilled.
    previous: PrefillOption | None = None
    # What it could bring into its memory instead of computing it, and the one of them that is priced.
    beginnings: tuple[Beginning, ...] = ()
    begun: Beginning | None = None
    # With its helpers it computes sooner than with any beginning.
    declined: bool = False


class Way(msgspec.Struct, frozen=True):
    """One way to answer. ``prefill`` is None where the machine would fetch the model first.

    ``code`` and ``reason`` say why it was not chosen; both are "" for the chosen way. ``cached_tokens``: of
    the prompt's, those that are probably not computed; ``begun``: where they come from, if not from its
    memory; ``declined``: as of Home.
    """

    node_id: str
    name: str
    price: RoutePrice
    prefill: PrefillOption | None
    code: OptionCode = ""
    reason: str = ""
    cached_tokens: int = 0
    begun: Beginning | None = None
    declined: bool = False

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first token; None for a way that is impossible."""
        if self.prefill is None:
            return self.price.total_s
        price, prefill = self.price, self.prefill
        return price.before_prefill_s + prefill.predicted_s if prefill.priced else None

    @property
    def alone(self) -> bool:
        """True if no other machine helps with the prefill."""
        return self.prefill is None or self.prefill.kind == "local"

    @property
    def brought_by(self) -> str:
        """The name of the step that brings what is kept of the prompt."""
        fetched = self.begun is not None and self.begun.fetched
        return step_names.FETCHED if fetched else step_names.RESTORED

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """What ``first_token_s`` consists of."""
        price, first = self.price, self.prefill
        loaded = step_names.PULLED if first is None else step_names.LOADED
        before = (
            (step_names.WOKEN, price.wake_s),
            (step_names.QUEUED, price.queue_s),
            (loaded, price.load_s),
            (self.brought_by, price.bring_s),
        )
        steps = (*before, *(first.steps if first is not None else ()), (step_names.NETWORK, price.network_s))
        passing = (
            step_names.WOKEN,
            step_names.QUEUED,
            step_names.LOADED,
            step_names.RESTORED,
            step_names.NETWORK,
        )
        return tuple((name, seconds) for name, seconds in steps if seconds or name not in passing)


class Ways(msgspec.Struct, frozen=True):
    """``chosen`` is None where no machine can answer. ``others``: this machine's other ways and the best one
    of each other machine, cheapest first. ``ranked``: the machines that can answer, and why others cannot.
    ``known``: by node id, how many of the prompt's tokens machines probably have, in memory or on the disk.
    """

    chosen: Way | None
    others: tuple[Way, ...]
    ranked: Ranked
    known: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def placements(self) -> tuple[PricedMachine, ...]:
        return self.ranked.placements

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        return self.ranked.rejected

    @property
    def alone_s(self) -> float | None:
        """Seconds to the first token if this machine reads and answers alone; None if it cannot."""
        ways = (self.chosen, *self.others) if self.chosen is not None else self.others
        alone = (way for way in ways if way.node_id == THIS_NODE and way.alone)
        return next((way.first_token_s for way in alone), None)

    @property
    def kept_where(self) -> str:
        """Which machine has read most of the beginning of the prompt before, and if it does not get the
        request, why; "" where none has."""
        most = max(self.known, key=lambda node_id: self.known[node_id], default=None)
        if self.chosen is None or most is None:
            return ""
        best = self.chosen
        if best.begun is not None and best.begun.fetched:
            fetched = f"about {best.begun.fetched} tokens of the prompt from {best.begun.name}"
            return f"{_named(best)} fetches {fetched}, which has read them before."
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
    whole = _like_their_twins(homes)
    homes = [_begun(ask, home) for home in whole]
    alone = route(ask, [home.candidate for home in homes])
    others = [placed.node_id for placed in alone.placements if placed.node_id != THIS_NODE]
    helped = {THIS_NODE, *others[:HELPED]}
    choices: dict[str, PlanChoice] = {}
    for number, home in enumerate(homes):
        if home.candidate.node_id in helped:
            homes[number], choice = _better(home, whole[number])
            if choice is not None:
                choices[home.candidate.node_id] = choice
    ranked = route(ask, [_with_help(home.candidate, choices) for home in homes])
    by_id = {home.candidate.node_id: home for home in homes}
    candidates = {node_id: home.candidate for node_id, home in by_id.items()}
    found = [
        way
        for placed in ranked.placements
        for way in _ways(placed, choices.get(placed.node_id), by_id[placed.node_id])
    ]
    if not found:
        return Ways(None, (), ranked)
    best, *passed = found
    judged = [
        way if way.code else _passed_over(way, best, candidates[way.node_id], candidates[best.node_id])
        for way in passed
    ]
    judged.sort(key=lambda way: (way.first_token_s is None, way.first_token_s or 0.0))
    known = {home.candidate.node_id: tokens for home in whole if (tokens := _kept_tokens(home))}
    return Ways(best, tuple(judged), ranked, known)


def _like_their_twins(homes: Sequence[Home]) -> list[Home]:
    """The homes, each with the speed of a machine of its kind if it never measured its own."""
    ordered = sorted(homes, key=lambda home: home.candidate.node_id)
    candidates = like_their_twins([home.candidate for home in ordered])
    return [replace(home, candidate=c) for home, c in zip(ordered, candidates, strict=True)]


def _kept_tokens(home: Home) -> int:
    """Tokens of the prompt that the machine has itself."""
    on_disk = (each.tokens for each in home.beginnings if not each.fetched)
    return max(home.candidate.cached_tokens, *on_disk, 0)


def _begun(ask: RouteQuestion, home: Home) -> Home:
    """The home with the beginning that saves most against computing; unchanged if none saves time."""
    c = home.candidate
    if c.absent or not home.beginnings:
        return home
    speed = prefill_speed(c)

    def seconds(tokens: int) -> float:
        # The last token is computed whatever is kept: it gives the first token of the answer.
        kept = min(tokens, max(0, ask.prompt_tokens - 1))
        return speed.total(1.0, range(kept, ask.prompt_tokens), MEASURED_TOKENS)

    # To wait for what is being read takes at most as long as to read it.
    without_s = seconds(c.cached_tokens - c.awaited_tokens)
    best, best_s = None, without_s
    for each in home.beginnings:
        saved_s = without_s - seconds(each.tokens)
        least_s = saved_s * limits.FETCH_LEAST_GAIN if each.fetched else 0.0
        if saved_s - each.seconds > least_s and each.seconds + seconds(each.tokens) < best_s:
            best, best_s = each, each.seconds + seconds(each.tokens)
    return home if best is None else _with_beginning(home, best)


def _with_beginning(home: Home, begun: Beginning) -> Home:
    prompt = home.prompt
    if prompt is not None:
        prompt = replace(prompt, cached=min(begun.tokens, prompt.tokens))
    candidate = replace(home.candidate, cached_tokens=begun.tokens, awaited_tokens=0, bring_s=begun.seconds)
    return replace(home, candidate=candidate, prompt=prompt, begun=begun)


def _better(home: Home, whole: Home) -> tuple[Home, PlanChoice | None]:
    """The machine with its beginning or, if its helpers compute that sooner, as ``whole``; and its prefill.

    ``whole``: the same machine where no beginning is brought.
    """
    choice = _choice(home)
    if home.begun is None or choice is None or not home.helpers:
        return home, choice
    computed = _choice(whole)
    if computed is None or computed.best.predicted_s >= home.begun.seconds + choice.best.predicted_s:
        return home, choice
    return replace(whole, declined=True), computed


def _choice(home: Home) -> PlanChoice | None:
    if home.prompt is None or home.spec is None:
        return None
    spec = home.spec
    if spec.modelled:
        spec = replace(spec, speed=prefill_speed(home.candidate))
    return plan_prefill(home.prompt, spec, home.helpers, home.previous)


def _with_help(c: Candidate, choices: Mapping[str, PlanChoice]) -> Candidate:
    choice = choices.get(c.node_id)
    if choice is None:
        return c
    decoded_s = sum(seconds for name, seconds in choice.best.steps if name == step_names.DECODED)
    return replace(c, helped_s=choice.best.predicted_s - decoded_s)


def _ways(placed: PricedMachine, choice: PlanChoice | None, home: Home) -> list[Way]:
    """The best way on a machine and, on this one, the others."""
    c, price, begun = home.candidate, placed.price, home.begun
    cached = c.cached_tokens
    if choice is None:
        prefill = None if c.absent else _alone(placed)
        return [Way(c.node_id, c.name, price, prefill, cached_tokens=cached, begun=begun)]
    options = [choice.best, *(choice.rejected if c.here else ())]
    return [
        Way(c.node_id, c.name, price, option, option.code, option.reason, cached, begun, home.declined)
        for option in options
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
    elif c.cramped:
        room, need = gigabytes(c.kv_room_bytes or 0), gigabytes(c.kv_bytes)
        code = "no_room"
        beside = f"{room} for keys and values beside the model"
        reason = f"{way.name} would have {beside}; the prompt needs {need}."
    elif share >= 1:
        code = "slower"
        reason = f"The answer would take {percent(share - 1)} longer than {where(best)}."
    else:
        code = "margin"
        least = percent(1 - ADVANTAGE)
        home = best.name if best.node_id != THIS_NODE else "this machine"
        to = f"leave {home}, which has the session" if chosen.session else "ask another machine"
        reason = f"The answer would take {percent(1 - share)} less, too little to {to}: {least} would do."
    return replace(way, code=code, reason=reason)


def _named(way: Way) -> str:
    return way.name if way.node_id != THIS_NODE else "This machine"


def where(way: Way) -> str:
    """The way as a part of a sentence: which machine answers or, on this one, how the prompt is prefilled."""
    if way.node_id != THIS_NODE:
        return f"on {way.name}"
    return described(way.prefill) if way.prefill is not None else "staying here"
