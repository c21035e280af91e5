"""Whether other machines shorten one prompt's prefill, which of them, and why not otherwise.

    local     all here                     layers   machines take layers, chunk after chunk
    whole     all on others                tokens   machines take tokens, layer after layer

Every way is priced in seconds to the first token, or refused with a reason. Pure, and quick enough to
be asked before every prompt. Staying here wins unless another way is clearly faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fleetd import limits
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.options import (
    Code,
    HelperSpec,
    Kind,
    Load,
    PlanChoice,
    PrefillOption,
    Refusal,
    refusal,
)
from fleetd.plan.prefill.schedule import SETUP_ROUND_TRIPS, Place, PrefillSize, Timeline, timeline
from fleetd.plan.prefill.search import Found, Part, Search, SearchHelper, cut_bounds
from fleetd.plan.prefill.split import Split, checked
from fleetd.plan.route import ADVANTAGE, CAUTION

__all__ = [
    "HelperSpec",
    "LinkSpeed",
    "Load",
    "PlanChoice",
    "PrefillOption",
    "PrefillSize",
    "PrefillSpeed",
    "Refusal",
    "choose",
    "options",
    "refusal",
]

# What was chosen for the prompt before counts for so much less: two ways that are alike must not take turns.
HYSTERESIS = 0.9
# Machines that may be combined: the best ones alone. Three make seven combinations.
COMBINED = limits.SHARE_MACHINES - 1
# How long a machine should compute at a time, unless it is as long alone: others wait for their turns, and
# answers for their tokens.
STEP_S, BUSY_STEP_S = 1.0, 0.25
# With more of its own work than this a machine is left alone.
BUSY_FROM = 3
_UNLIMITED = 1e15
_NOWHERE = LinkSpeed(0.0)
# The step that is no longer prefill.
AFTER_PREFILL = "first token"


# ---- What there is ---------------------------------------------------------------------------------------


def options(prompt: PrefillSize, home: HelperSpec, helpers: Iterable[HelperSpec]) -> list[PrefillOption]:
    """All ways, local first; whoever is refused appears once. The order of ``helpers`` changes nothing."""
    machines = sorted(helpers, key=lambda machine: machine.node_id)
    local_s = _speed(home).total(1.0, prompt.new, prompt.chunk)
    found = [
        PrefillOption("local", predicted_s=local_s, steps=(("computed", local_s),), modelled=home.modelled)
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
    """Which comes after all of them alike, but makes what they save a smaller part of the whole."""
    if not option.priced or not first_s:
        return option
    steps = (*option.steps, (AFTER_PREFILL, first_s))
    return replace(option, predicted_s=option.predicted_s + first_s, steps=steps)


def _refusal(prompt: PrefillSize, machine: HelperSpec) -> Refusal | None:
    """From what nothing can change to what passes."""
    new = len(prompt.new)
    if prompt.unshareable:
        return Refusal("unshareable", prompt.unshareable)
    if machine.refusal is not None:
        return machine.refusal
    if machine.link is None:
        return refusal("unusable", machine.name)
    if prompt.span and not machine.sparse:
        return refusal("sparse", machine.name)
    if new < limits.SHARE_LEAST_TOKENS:
        least = limits.SHARE_LEAST_TOKENS
        return Refusal("short", f"{new} new tokens are computed sooner than shared; {least} are the least.")
    if machine.running >= BUSY_FROM:
        return Refusal("busy", f"{machine.name} has {machine.running} requests of its own.")
    return None


def _no_room(machine: HelperSpec) -> Refusal:
    free = f"{machine.room_bytes / limits.GIB:.1f} GiB"
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
    """The best split of each kind over these machines, those that they have room for."""
    chain = _chain(prompt, machines)
    if chain is None:
        return []
    start = max(prompt.cached, prompt.tokens - prompt.chunk)
    alone_s = _speed(home).seconds(1.0, start, prompt.chunk)
    bounded = [_helper(prompt, machine, alone_s) for machine in chain]
    search = Search(prompt, bounded, _speed(home), _step_s(home, alone_s))
    ways: list[PrefillOption] = []
    for kind, found in (
        ("tokens", search.tokens()),
        ("layers", search.layers()),
        ("whole", search.layers(whole=True)),
    ):
        if found is not None:
            ways.append(_option(kind, prompt, home, chain, found))  # type: ignore[arg-type]  # the kinds above
    return ways


def _chain(prompt: PrefillSize, machines: Sequence[HelperSpec]) -> Sequence[HelperSpec] | None:
    """In an order in which those that have certain layers only can compute them; None where there is none."""
    # Who has the slowest link goes first: its last rows then travel while the others still compute.
    by_link = sorted(machines, key=lambda m: (m.link.bytes_per_s if m.link else 0.0, m.node_id))
    if all(machine.held is None for machine in machines):
        return by_link
    orders = itertools.permutations(by_link)
    return next((order for order in orders if cut_bounds(prompt.layers, [m.held for m in order])), None)


def _option(
    kind: Kind, prompt: PrefillSize, home: HelperSpec, chain: Sequence[HelperSpec], found: Found
) -> PrefillOption:
    split = checked(
        Split(
            kind="tokens" if kind == "tokens" else "layers",
            cuts=found.cuts,
            layers=prompt.layers,
            cached=prompt.cached,
            tokens=prompt.tokens,
            chunk=found.chunk,
            span=prompt.span,
        )
    )
    cold = {
        machine: _load(prompt, machine, split.layers_of(place))
        for place, machine in enumerate(chain)
        if not machine.loaded
    }
    load_s = max((machine.load_s for machine in cold), default=0.0)
    total_s = load_s + found.total_s
    code: Code = ""
    reason = ""
    # The agreement does not wait for a load.
    if load_s > limits.SHARE_SETUP_S:
        code, names = "cold", _listed([machine.name for machine in cold])
        parts = {_layers(load.first, load.last) if load.last else "the model" for load in cold.values()}
        reason = (
            f"{names} would have to load {_listed(sorted(parts))} first ({load_s:.1f} s); "
            f"loaded, it would take {found.total_s:.1f} s."
        )
    return PrefillOption(
        kind=kind,
        helpers=tuple(machine.node_id for machine in chain),
        names=tuple(machine.name for machine in chain),
        split=split,
        predicted_s=total_s,
        steps=(*((("loaded", load_s),) if cold else ()), *_steps(found.timeline)),
        code=code,
        reason=reason,
        exact=all(machine.exact for machine in chain),
        modelled=home.modelled or any(machine.modelled for machine in chain),
        cold=tuple(cold.values()),
        load_s=load_s,
    )


def _load(prompt: PrefillSize, machine: HelperSpec, layers: range) -> Load:
    """All of the model, where such a prompt would fit beside it: then it can answer too. Else these."""
    whole_bytes = prompt.weights_bytes + prompt.kv_bytes_per_token * prompt.tokens
    if whole_bytes <= machine.room_bytes or len(layers) == prompt.layers:
        return Load(machine.node_id)
    return Load(machine.node_id, layers.start, layers.stop)


def _steps(line: Timeline) -> tuple[tuple[str, float], ...]:
    return (
        ("agreed", line.agreed_s),
        ("prefix sent", line.prefix_s),
        ("waited", line.waited_s),
        ("computed", line.computed_s),
        ("exposed hand-off", line.exposed_s),
    )


def _helper(prompt: PrefillSize, machine: HelperSpec, alone_s: float) -> SearchHelper:
    return SearchHelper(
        Place(_speed(machine), machine.link or _NOWHERE),
        machine.room_bytes,
        machine.loaded,
        _step_s(machine, alone_s),
        machine.held,
    )


def _speed(machine: HelperSpec) -> PrefillSpeed:
    """Those who compute at once take turns."""
    return machine.speed.times(1.0 + max(0, machine.running))


def _step_s(machine: HelperSpec, alone_s: float) -> float:
    return BUSY_STEP_S if machine.running > 0 else max(STEP_S, alone_s)


def _with_link(
    prompt: PrefillSize, home: HelperSpec, machine: HelperSpec, ways: Sequence[PrefillOption], local_s: float
) -> list[PrefillOption]:
    """The same; where none of them pays, but would over a better link, that is the reason."""
    link, target_s = machine.link or _NOWHERE, ADVANTAGE * local_s
    if min(way.predicted_s - way.load_s for way in ways) <= target_s:
        return list(ways)
    wider = replace(machine, link=LinkSpeed(_UNLIMITED, link.rtt_s))
    over_wider = min(_ways(prompt, home, [wider]), key=lambda way: way.predicted_s)
    if over_wider.split is not None and over_wider.predicted_s - over_wider.load_s <= target_s:
        speed = _speed(machine)
        least = _rate(_least_rate(prompt, over_wider.split, Place(speed, link), _speed(home), target_s))
        sentence = f"The link to {machine.name} carries {_rate(link.bytes_per_s)}; {least} would do."
    elif link.rtt_s * SETUP_ROUND_TRIPS > (1 - ADVANTAGE) * local_s:
        sentence = f"The link to {machine.name} takes {1000 * link.rtt_s:.0f} ms there and back."
    else:
        return list(ways)
    return [way if way.code else replace(way, code="slow_link", reason=sentence) for way in ways]


def _least_rate(
    prompt: PrefillSize, split: Split, helper: Place, home: PrefillSpeed, target_s: float
) -> float:
    """Bytes per second from which on a split takes no longer than ``target_s``."""
    low, high = max(1.0, helper.link.bytes_per_s), _UNLIMITED
    # Up to a hundredth: it is a figure for people.
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        link = replace(helper.link, bytes_per_s=middle)
        if timeline(prompt, split, [replace(helper, link=link)], home).total_s <= target_s:
            high = middle
        else:
            low = middle
    return high


# ---- Which one -------------------------------------------------------------------------------------------


def choose(found: Sequence[PrefillOption], previous: PrefillOption | None = None) -> PlanChoice:
    """The cheapest, if it is clearly cheaper than local; ``previous``: what such a prompt got last time."""
    local = next(option for option in found if option.kind == "local")
    able = [option for option in found if option.priced and not option.code and option is not local]

    def weighed_s(option: PrefillOption) -> float:
        return (
            option.predicted_s * (CAUTION if option.modelled else 1.0) * (HYSTERESIS if kept(option) else 1.0)
        )

    def kept(option: PrefillOption) -> bool:
        return previous is not None and (option.kind, option.helpers) == (previous.kind, previous.helpers)

    best = min(able, key=lambda option: (weighed_s(option), len(option.helpers)), default=local)
    if weighed_s(best) > ADVANTAGE * local.predicted_s or best.predicted_s > local.predicted_s:
        best = local
    rejected = [
        option if option.code else _rejected(option, best, local) for option in found if option is not best
    ]
    rejected.sort(key=lambda option: (not option.priced, option.predicted_s))
    return PlanChoice(best, tuple(rejected), _warm(found, best))


def _warm(found: Sequence[PrefillOption], best: PrefillOption) -> tuple[Load, ...]:
    cold = [option for option in found if option.code == "cold"]
    loaded = min(cold, key=lambda option: option.predicted_s - option.load_s, default=None)
    if loaded is None or loaded.predicted_s - loaded.load_s > ADVANTAGE * best.predicted_s:
        return ()
    return loaded.cold


def _rejected(option: PrefillOption, best: PrefillOption, local: PrefillOption) -> PrefillOption:
    code: Code = "slower"
    faster = _percent(1 - option.predicted_s / best.predicted_s)
    if option.predicted_s > best.predicted_s:
        slower = _percent(option.predicted_s / best.predicted_s - 1)
        sentence = f"{slower} slower than {_way(best)}."
    elif option.modelled:
        code, sentence = "unmeasured", f"{faster} faster, but by its makers' figures only."
    elif best is not local:
        code, sentence = "kept", f"{faster} faster than {_way(best)}, too little to change."
    else:
        code = "margin"
        asked = _percent(1 - ADVANTAGE)
        sentence = f"{faster} faster than staying here; {asked} are asked of another machine."
    return replace(option, code=code, reason=sentence)


def _way(option: PrefillOption) -> str:
    match option.kind:
        case "local":
            return "staying here"
        case "whole":
            return f"all of it on {_listed(option.names)}"
        case kind:
            return f"{kind} with {_listed(option.names)}"


def _layers(first: int, last: int) -> str:
    return f"layers {first}-{last - 1}" if last - first > 1 else f"layer {first}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
