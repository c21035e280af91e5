"""Which other machines shorten one prompt's prefill, and why the others do not.

    local     all here                     layers   machines take layers, chunk after chunk
    whole     all on others                tokens   machines take tokens, layer after layer

Every plan is priced in seconds to the first token, or refused with a reason. Pure, and quick enough to run
before every prompt. Staying here wins unless another plan is clearly faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.errors import InvalidValue
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.options import HelperSpec, Load, OptionCode, PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import SETUP_ROUND_TRIPS, PrefillSize, Timeline, timeline
from fleetd.plan.prefill.search import Found, Search
from fleetd.plan.prefill.split import Part, Split, SplitKind, checked, cut_bounds
from fleetd.plan.refusals import Refusal
from fleetd.plan.route import ADVANTAGE, CAUTION, DOUBT, SHARING

__all__ = [
    "HelperSpec",
    "LinkSpeed",
    "Load",
    "PlanChoice",
    "PrefillOption",
    "PrefillSize",
    "PrefillSpeed",
    "choose",
    "described",
    "options",
    "percent",
    "plan_prefill",
]

# The plan that the prompt before this one got is priced at this share: two equal plans must not take turns.
HYSTERESIS = 0.9
# Only this many helpers are combined: those that are the best ones alone. Three make seven combinations.
COMBINED = limits.SHARE_MACHINES - 1
# A machine with this many requests of its own is not asked for help.
BUSY_FROM = 3
_UNLIMITED = 1e15
# Errors that made-up figures on a card raise.
_NO_PRICE = (ArithmeticError, ValueError, InvalidValue)


# ---- All plans -------------------------------------------------------------------------------------------


def options(prompt: PrefillSize, home: HelperSpec, helpers: Iterable[HelperSpec]) -> list[PrefillOption]:
    """All plans, local first. Each refused machine appears once, with its reason.

    The order of ``helpers`` changes nothing.
    """
    home, machines = _home_now(home), sorted(map(_now, helpers), key=lambda machine: machine.node_id)
    local_s = home.speed.total(1.0, prompt.new, prompt.chunk)
    found = [
        PrefillOption(
            "local", predicted_s=local_s, steps=((step_names.COMPUTED, local_s),), modelled=home.modelled
        )
    ]
    able = []
    for machine in machines:
        refused = _refusal(prompt, machine)
        if refused is None:
            able.append(machine)
        else:
            found.append(_refused(machine, refused))
    alone: list[tuple[float, HelperSpec]] = []
    for machine in able:
        if machine.held is not None and machine.held[0] > 0:
            found.append(_refused(machine, _part(machine, machine.held)))
            alone.append((math.inf, machine))
            continue
        ways = _ways(prompt, home, [machine])
        if not ways:
            found.append(_refused(machine, _no_room(machine)))
            continue
        alone.append((min(way.predicted_s - way.load_s for way in ways), machine))
        found += _with_link(prompt, home, machine, ways, local_s)
    alone.sort(key=lambda pair: (pair[0], pair[1].node_id))
    best = [machine for _, machine in alone[:COMBINED]]
    for count in range(2, COMBINED + 1):
        for several in itertools.combinations(best, count):
            found += _ways(prompt, home, several)
    return [_to_first_token(option, home.first_token_s) for option in found]


def _to_first_token(option: PrefillOption, first_s: float) -> PrefillOption:
    """Adds the last token's decoding, which takes the same time after every plan."""
    if not option.priced or not first_s:
        return option
    steps = (*option.steps, (step_names.DECODED, first_s))
    return replace(option, predicted_s=option.predicted_s + first_s, steps=steps)


def _refusal(prompt: PrefillSize, machine: HelperSpec) -> Refusal | None:
    """The first reason against a helper, lasting reasons before passing ones. None if it may help."""
    new = len(prompt.new)
    if prompt.shape.unshareable:
        return Refusal("unshareable", prompt.shape.unshareable)
    if machine.refusal is not None:
        return machine.refusal
    if new < limits.SHARE_LEAST_TOKENS:
        least = limits.SHARE_LEAST_TOKENS
        return Refusal("short", f"{new} new tokens are computed sooner than shared; {least} are the least.")
    if machine.running >= BUSY_FROM:
        return Refusal("busy", f"{machine.name} has {machine.running} requests of its own.")
    return None


def _no_room(machine: HelperSpec) -> Refusal:
    free = f"{machine.room_bytes / 1e9:.1f} GB"
    return Refusal("no_room", f"{machine.name} has {free} free, too little for a part of this prompt.")


def _part(machine: HelperSpec, held: Part) -> Refusal:
    first, last = held
    return Refusal(
        "part",
        f"{machine.name} has {_layers(first, last)} only: others would have to compute what is before.",
    )


def _refused(machine: HelperSpec, refused: Refusal) -> PrefillOption:
    return PrefillOption(
        "any",
        (machine.node_id,),
        (machine.name,),
        code=refused.code,
        reason=refused.sentence,
        exact=machine.exact,
    )


def _ways(prompt: PrefillSize, home: HelperSpec, machines: Sequence[HelperSpec]) -> list[PrefillOption]:
    """The best split of each kind that these machines have room for; and the same with rows in fewer bits."""
    found = _same_ways(prompt, home, machines)
    if prompt.shape.narrows and all(machine.narrows for machine in machines):
        found += _same_ways(replace(prompt, sent_bits=prompt.shape.wire_bits), home, machines)
    return found


def _same_ways(prompt: PrefillSize, home: HelperSpec, machines: Sequence[HelperSpec]) -> list[PrefillOption]:
    """The best split of each kind, with rows on the wire as the prompt says."""
    chain = _chain(prompt, machines)
    if chain is None:
        return []
    searched = Search(replace(prompt, states=0), chain, home).found()
    return [_option(kind, prompt, home, chain, found) for kind, found in searched]


def _chain(prompt: PrefillSize, machines: Sequence[HelperSpec]) -> Sequence[HelperSpec] | None:
    """The machines in an order in which each has the layers that it computes. None if no order does."""
    # The machine with the slowest link goes first: its last rows travel while the others still compute.
    by_link = sorted(machines, key=lambda m: (m.link.bytes_per_s, m.node_id))
    if all(machine.held is None for machine in machines):
        return by_link
    orders = itertools.permutations(by_link)
    return next((order for order in orders if cut_bounds(prompt.shape.layers, [m.held for m in order])), None)


def _option(
    kind: SplitKind, prompt: PrefillSize, home: HelperSpec, chain: Sequence[HelperSpec], found: Found
) -> PrefillOption:
    split, line = _with_states(
        prompt,
        Split(
            kind=kind,
            cuts=found.cuts,
            layers=prompt.shape.layers,
            cached=prompt.cached,
            tokens=prompt.tokens,
            chunk=found.chunk,
            places=prompt.places,
        ),
        chain,
        home.speed,
        found.timeline,
    )
    checked(split)
    cold = {
        machine: _load(prompt, machine, split.layers_of(rank))
        for rank, machine in enumerate(chain)
        if not machine.loaded
    }
    load_s = max((machine.load_s for machine in cold), default=0.0)
    total_s = load_s + line.total_s
    code: OptionCode = ""
    reason = ""
    # No prompt waits for a load: helpers have to agree soon.
    if load_s > limits.SHARE_COLD_S:
        code, names = "cold", _listed([machine.name for machine in cold])
        parts = {_layers(load.first, load.last) if load.last else "the model" for load in cold.values()}
        reason = (
            f"{names} would have to load {_listed(sorted(parts))} first ({load_s:.1f} s); "
            f"loaded, it would take {line.total_s:.1f} s."
        )
    return PrefillOption(
        kind=kind if split.part_of(split.helpers) else "whole",
        helpers=tuple(machine.node_id for machine in chain),
        names=tuple(machine.name for machine in chain),
        split=split,
        predicted_s=total_s,
        steps=(*(((step_names.LOADED, load_s),) if cold else ()), *_steps(line)),
        code=code,
        reason=reason,
        exact=not prompt.sent_bits and all(machine.exact for machine in chain),
        wire_bits=prompt.sent_bits,
        modelled=home.modelled or any(machine.modelled for machine in chain),
        doubtful=home.doubtful or any(machine.doubtful for machine in chain),
        cold=tuple(cold.values()),
        load_s=load_s,
    )


def _with_states(
    prompt: PrefillSize, split: Split, chain: Sequence[HelperSpec], home: PrefillSpeed, without: Timeline
) -> tuple[Split, Timeline]:
    """The split, with states sent at as many of its last places as possible, and its timeline.

    Sending them may take little longer than ``without``, the timeline of the split that sends none.
    """
    most_s = (1 + limits.SHARE_STATES_SHARE) * without.total_s
    for sent in range(min(prompt.states, len(prompt.places)), 0, -1):
        line = timeline(replace(prompt, states=sent), split, chain, home)
        if line.total_s <= most_s:
            return msgspec.structs.replace(split, sent=sent), line
    return split, without


def _load(prompt: PrefillSize, machine: HelperSpec, layers: range) -> Load:
    """What a cold helper should load: the whole model if such a prompt fits beside it, else ``layers``.

    A machine with the whole model can answer, too.
    """
    beside = (machine.room_bytes - prompt.shape.most_weights_bytes) * (1 - limits.PREFIX_SHARE)
    if prompt.shape.sizes.of(prompt.tokens) <= beside or len(layers) == prompt.shape.layers:
        return Load(machine.node_id)
    return Load(machine.node_id, layers.start, layers.stop)


def _steps(line: Timeline) -> tuple[tuple[str, float], ...]:
    return (
        (step_names.AGREED, line.agreed_s),
        (step_names.PREFIX_SENT, line.prefix_s),
        (step_names.WAITED, line.waited_s),
        (step_names.COMPUTED, line.computed_s),
        (step_names.EXPOSED, line.exposed_s),
    )


def _now(machine: HelperSpec) -> HelperSpec:
    """The helper at its speed for this prompt, which takes turns with the helper's own requests."""
    return replace(machine, speed=machine.speed.times(1.0 + max(0, machine.running)))


def _home_now(home: HelperSpec) -> HelperSpec:
    """The machine that answers, at its speed for this prompt. Routing counts its requests in the same way."""
    # Too high a price for staying here would send prompts away that are sooner read here.
    return replace(home, speed=home.speed.times(1.0 + SHARING * max(0, home.running)))


def _with_link(
    prompt: PrefillSize, home: HelperSpec, machine: HelperSpec, ways: Sequence[PrefillOption], local_s: float
) -> list[PrefillOption]:
    """The plans ``ways`` with one helper. Its link is the reason against them if a better one would pay."""
    link, target_s = machine.link, ADVANTAGE * local_s
    if min(way.predicted_s - way.load_s for way in ways) <= target_s:
        return list(ways)
    wider = replace(machine, link=LinkSpeed(_UNLIMITED, link.rtt_s))
    over_wider = min(_same_ways(prompt, home, [wider]), key=lambda way: way.predicted_s)
    if over_wider.split is not None and over_wider.predicted_s - over_wider.load_s <= target_s:
        least = _rate(_least_rate(prompt, over_wider.split, machine, home.speed, target_s))
        sentence = f"The link to {machine.name} carries {_rate(link.bytes_per_s)}; {least} would do."
    elif link.rtt_s * SETUP_ROUND_TRIPS > (1 - ADVANTAGE) * local_s:
        sentence = f"The link to {machine.name} takes {1000 * link.rtt_s:.0f} ms there and back."
    else:
        return list(ways)
    return [way if way.code else replace(way, code="slow_link", reason=sentence) for way in ways]


def _least_rate(
    prompt: PrefillSize, split: Split, helper: HelperSpec, home: PrefillSpeed, target_s: float
) -> float:
    """The least bytes per second with which a split takes at most ``target_s``."""
    low, high = max(1.0, helper.link.bytes_per_s), _UNLIMITED
    prompt = replace(prompt, states=0)
    # The figure is for people, who need no more than one percent.
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        link = replace(helper.link, bytes_per_s=middle)
        if timeline(prompt, split, [replace(helper, link=link)], home).total_s <= target_s:
            high = middle
        else:
            low = middle
    return high


# ---- The best --------------------------------------------------------------------------------------------


def plan_prefill(
    prompt: PrefillSize,
    home: HelperSpec,
    helpers: Iterable[HelperSpec],
    previous: PrefillOption | None = None,
) -> PlanChoice:
    """The choice among all plans; ``previous`` as in ``choose``.

    A card may have made-up figures, whose sums leave the range of numbers. The planner then goes on without
    that machine.
    """
    machines = list(helpers)
    try:
        return choose(options(prompt, home, machines), previous)
    except _NO_PRICE:
        machines = [_believed(prompt, home, machine) for machine in machines]
    try:
        return choose(options(prompt, home, machines), previous)
    except _NO_PRICE:
        return choose(options(prompt, home, ()))


def _believed(prompt: PrefillSize, home: HelperSpec, machine: HelperSpec) -> HelperSpec:
    """The machine, with a refusal if it cannot be priced alone."""
    try:
        options(prompt, home, (machine,))
    except _NO_PRICE:
        sentence = f"{machine.name} tells figures by which nothing can be planned."
        return replace(machine, refusal=Refusal("unusable", sentence))
    return machine


def choose(found: Sequence[PrefillOption], previous: PrefillOption | None = None) -> PlanChoice:
    """The cheapest plan if it is clearly cheaper than local, otherwise local.

    Args:
        previous: the plan of the prompt before this one.
    """
    local = next(option for option in found if option.kind == "local")
    able = [option for option in found if option.priced and not option.code and option is not local]

    def weighed_s(option: PrefillOption) -> float:
        caution = CAUTION if option.modelled else DOUBT if option.doubtful else 1.0
        return option.predicted_s * caution * (HYSTERESIS if kept(option) else 1.0)

    def kept(option: PrefillOption) -> bool:
        return previous is not None and _way(option) == _way(previous)

    def clearly_sooner(options: Iterable[PrefillOption], than: PrefillOption) -> PrefillOption:
        best = min(options, key=lambda option: (weighed_s(option), len(option.helpers)), default=than)
        least_s = than.predicted_s if than is local else weighed_s(than)
        return than if weighed_s(best) > ADVANTAGE * least_s or best.predicted_s > than.predicted_s else best

    best = clearly_sooner((option for option in able if not option.wire_bits), local)
    # To round has to be worth something, too.
    best = clearly_sooner((option for option in able if option.wire_bits), best)
    rejected = [
        option if option.code else _rejected(option, best, local) for option in found if option is not best
    ]
    rejected.sort(key=lambda option: (not option.priced, option.predicted_s))
    return PlanChoice(best, tuple(rejected), _warm(found, best))


def _way(option: PrefillOption) -> tuple[object, ...]:
    return option.kind, option.helpers, option.wire_bits


def _warm(found: Sequence[PrefillOption], best: PrefillOption) -> tuple[Load, ...]:
    cold = [option for option in found if option.code == "cold"]
    loaded = min(cold, key=lambda option: option.predicted_s - option.load_s, default=None)
    if loaded is None or loaded.predicted_s - loaded.load_s > ADVANTAGE * best.predicted_s:
        return ()
    return loaded.cold


def _rejected(option: PrefillOption, best: PrefillOption, local: PrefillOption) -> PrefillOption:
    code: OptionCode = "slower"
    faster = percent(1 - option.predicted_s / best.predicted_s)
    if option.predicted_s > best.predicted_s:
        slower = percent(option.predicted_s / best.predicted_s - 1)
        sentence = f"{slower} slower than {described(best)}."
    elif option.modelled:
        code, sentence = "unmeasured", f"{faster} faster, but by its makers' figures only."
    elif option.doubtful:
        code = "doubtful"
        sentence = f"{faster} faster, by speeds that are in doubt."
    elif option.wire_bits > best.wire_bits:
        code, least = "margin", percent(1 - ADVANTAGE)
        sentence = f"{faster} faster than {described(best)}, too little to round for: {least} would do."
    elif best is not local:
        code, sentence = "kept", f"{faster} faster than {described(best)}, too little to change."
    else:
        code = "margin"
        least = percent(1 - ADVANTAGE)
        sentence = f"{faster} faster than staying here, too little to ask another machine: {least} would do."
    return replace(option, code=code, reason=sentence)


def described(option: PrefillOption) -> str:
    """The way to prefill, as a part of a sentence."""
    match option.kind:
        case "local":
            return "staying here"
        case "whole":
            way = f"all of it on {_listed(option.names)}"
        case kind:
            way = f"{kind} with {_listed(option.names)}"
    return f"{way}, rows in {option.wire_bits} bits" if option.wire_bits else way


def _layers(first: int, last: int) -> str:
    return f"layers {first}-{last - 1}" if last - first > 1 else f"layer {first}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def percent(share: float) -> str:
    """0.1 → "10 %"."""
    return f"{100 * share:.0f} %"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
