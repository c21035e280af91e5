"""What the planner needs to know about one prompt: from engines, cards and links; and its options for people.

The planner knows neither cards nor sessions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.engine.protocol import Ready
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.costs import LinkSpeed, PrefillSpeed, modelled
from fleetd.plan.prefill.options import NO_LINK, HelperSpec, PlanChoice, PrefillOption
from fleetd.plan.prefill.schedule import LAST_LAYER, PrefillSize, share_of
from fleetd.plan.refusals import Refusal
from fleetd.plan.route import LOAD_MOST_S
from fleetd.requests.job import THIS_NAME
from fleetd.requests.members.members import Member, Members, eligible

# No model has more bytes of weights, or per token, whatever a card says.
_BYTES_MOST = 1 << 50
# Bound of the factor by which this machine differs from its chip's published figures.
_PACE_MOST = 10.0


def prompt(
    shape: ModelShape,
    tokens: int,
    cached: int,
    chunk: int,
    *,
    kept: int = 0,
    places: Sequence[int] = (),
    states: int = 0,
) -> PrefillSize:
    """Features of a prompt of ``tokens`` tokens. Prefill covers all but the last; decoding computes that one.

    Args:
        kept: how many of them are computed, if tokens are left out; else 0.
        places: after which a chunk ends, and at the last ``states`` of which states may be kept.
    """
    prefilled = max(0, (kept or tokens) - 1)
    if kept and not shape.unshareable:
        shape = replace(
            shape, unshareable="A prompt that sparse prefill has cut is prefilled by one machine."
        )
    return PrefillSize(
        shape,
        tokens=prefilled,
        cached=min(cached, prefilled),
        chunk=max(1, chunk),
        exact_chunks=not shape.any_chunks,
        last_layer=LAST_LAYER,
        places=tuple(places),
        states=states,
    )


def as_held(prompt: PrefillSize) -> PrefillSize:
    """The same prompt, of which helpers send rows as they are held: for an answer that has to be exact."""
    return replace(prompt, shape=replace(prompt.shape, wire_bits=0))


def loaded_here(own: ModelCard, facts: Ready) -> ModelCard:
    """This machine's model as its engine knows it.

    The speed is the card's, which requests correct; until the first card after a load it is the engine's.
    """
    speed = own.speed if own.speed.prefill_tok_s > 0 else facts.speed
    return replace(own, shape=replace(facts.shape, wire_bits=own.shape.wire_bits), speed=speed)


def as_told(model: ModelCard, helping: Iterable[Member]) -> ModelCard:
    """A model that is not loaded here. If its machine does not know yet how the files can be divided, another
    one that has loaded the same files may."""
    others = (member.model_with(model.digest) for member in helping)
    shapes = itertools.chain([model.shape], (card.shape for card in others if card is not None))
    if (shape := next(filter(_divisible, shapes), None)) is not None:
        # Each machine has an arithmetic of its own.
        own = model.shape
        shape = replace(
            shape,
            cpu_arithmetic=own.cpu_arithmetic,
            kv_bits=own.kv_bits,
            kv_held=own.kv_held,
            wire_bits=own.wire_bits,
        )
        return replace(model, shape=shape)
    why = model.shape.unshareable or "No machine has said yet how this model can be divided."
    return replace(model, shape=replace(model.shape, layers=max(1, model.shape.layers), unshareable=why))


def _divisible(shape: ModelShape) -> bool:
    """True if it says how a model can be divided, in figures that a model may have."""
    sizes = shape.sizes
    each = (sizes.row_bytes + sizes.state_bytes, shape.hidden_bytes, shape.weights_bytes)
    most = max(*each, sizes.window, shape.hidden_width, shape.wire_token_bytes)
    return not shape.unshareable and 0 < shape.layers <= min(each) and most <= _BYTES_MOST


def home(here: Member, own: ModelCard) -> HelperSpec:
    """The machine that answers: this one, or another that the planner looks at as if it were this one."""
    speed, is_modelled = _speed(here, own, own.shape)
    first_s = 1 / own.speed.decode_tok_s if own.speed.decode_tok_s > 0 else 0.0
    # More requests than it runs at once are waited for, which routing prices.
    running = min(here.card.running, max(1, here.card.max_streams) - 1)
    return HelperSpec(
        here.node_id,
        here.name,
        speed,
        running=running,
        modelled=is_modelled,
        doubtful=own.speed.doubtful,
        first_token_s=first_s,
    )


def chain_of(answering: Member, helping: Iterable[Member], own: ModelCard) -> list[HelperSpec]:
    """The machine that answers, and all others as it would find them; all by their own figures.

    Args:
        own: the model on the machine that answers.
    """
    at_pace = pace(answering, own)
    helpers = [
        helper(member, own, at_pace, link=between(answering, member))
        for member in helping
        if member.node_id != answering.node_id
    ]
    return [home(answering, own), *helpers]


def corrected(specs: Iterable[HelperSpec], members: Members, digest: str) -> list[HelperSpec]:
    """The same machines by what their parts of earlier prompts took."""
    return [
        replace(spec, speed=spec.speed.times(members.correction(spec.node_id, digest, spec.speed)))
        for spec in specs
    ]


def alike(own: Card, other: Card, model: str) -> bool:
    """True if both have measured that they compute the same bytes from the same files.

    False while one of them has never loaded the model.
    """
    mine, theirs = (next((m for m in card.models if m.name == model), None) for card in (own, other))
    return (
        mine is not None
        and theirs is not None
        and mine.digest == theirs.digest != ""
        and mine.arithmetic == theirs.arithmetic != ""
    )


def between(answering: Member, helping: Member) -> LinkSpeed:
    """The link between two machines; of two others it is not known here, and the worse figures are taken."""
    ours, theirs = answering.link, helping.link
    if ours is None or theirs is None:
        return theirs or ours or NO_LINK
    return ours.and_(theirs)


def pace(here: Member, own: ModelCard) -> float:
    """How many times as long this machine takes as its chip's published figures say; 1 if it is not measured.

    Machines that never measured the model are assumed to take as many times as long as theirs: most of the
    difference comes from the model and the program.
    """
    tok_s = own.speed.prefill_tok_s
    if tok_s <= 0:
        return 1.0
    chip = here.chip(own.shape.cpu_arithmetic)
    return min(_PACE_MOST, max(1 / _PACE_MOST, chip.prefill_tok_s(own.shape.weights_bytes) / tok_s))


def helper(member: Member, own: ModelCard, pace: float = 1.0, link: LinkSpeed | None = None) -> HelperSpec:
    """A machine other than the one that answers, which may be refused.

    Args:
        own: the model on the machine that answers.
        pace: of that machine.
        link: to that machine, if it is not this one.
    """
    card, shape = member.card, own.shape
    known = member.model_with(own.digest) or ModelCard(own.name)
    speed, is_modelled = _speed(member, known, shape)
    part = (known.part_first, known.part_last) if known.part_last > known.part_first else None
    loaded = known.state == "loaded" or part is not None
    refusal = eligible(member, own.digest)
    if refusal is None and _precisions_differ(known.shape, shape):
        refusal = Refusal("dtype", f"{member.name} computes in another precision.")
    return HelperSpec(
        member.node_id,
        member.name,
        speed.times(pace) if is_modelled else speed,
        link=link or member.link or NO_LINK,
        loaded=loaded,
        load_s=0.0 if loaded else min(LOAD_MOST_S, known.load_s or chip_speeds.load_s(shape.weights_bytes)),
        room_bytes=_room_bytes(card, known, loaded=loaded),
        running=card.running,
        exact=bool(known.arithmetic) and known.arithmetic == own.arithmetic,
        narrows=known.shape.wire_token_bytes > 0,
        modelled=is_modelled,
        doubtful=known.speed.doubtful,
        held=part if known.state != "loaded" else None,
        refusal=refusal,
    )


def _precisions_differ(one: ModelShape, other: ModelShape) -> bool:
    """False as long as either is not known."""
    pairs = ((one.dtype, other.dtype), (one.cpu_arithmetic, other.cpu_arithmetic))
    return any("" not in pair and pair[0] != pair[1] for pair in pairs)


def _room_bytes(card: Card, known: ModelCard, *, loaded: bool) -> int:
    """Free memory for keys and values, and for weights if they are not loaded. Nothing is unloaded for it."""
    if loaded:
        return min(card.available_bytes, known.kv_budget_bytes or card.available_bytes)
    return max(0, card.usable_bytes - WORKING_BYTES)


def speed_of(model: ModelCard) -> PrefillSpeed | None:
    """The speed that its machine measured; None before that."""
    return PrefillSpeed.of(model.speed) if model.speed.prefill_tok_s > 0 else None


def with_context(member: Member, known: MeasuredSpeed, shape: ModelShape) -> MeasuredSpeed:
    """The machine's speed, with its chip's published figure for context if that is not measured.

    It is 0 if calibration had no time to measure behind a context, or the context made no difference.
    """
    chip = member.chip(shape.cpu_arithmetic)
    context_s = known.prefill_context_s or chip.prefill_context_s(shape.layers, shape.hidden_width)
    return replace(known, prefill_context_s=context_s)


def _speed(member: Member, known: ModelCard, shape: ModelShape) -> tuple[PrefillSpeed, bool]:
    """The machine's speed, and True if it is not measured but comes from its chip's published figures."""
    if known.speed.prefill_tok_s <= 0:
        return modelled(member.chip(known.shape.cpu_arithmetic), shape), True
    return PrefillSpeed.of(with_context(member, known.speed, shape)), False


class PartOfSplit(msgspec.Struct, frozen=True):
    """One machine's part of a split; both figures are by its own speed."""

    node_id: str
    token_s: float
    expected_s: float


def parts(option: PrefillOption, machines: Iterable[HelperSpec]) -> list[PartOfSplit]:
    """The parts in the order of the chain, the machine that answers last. ``machines`` has that one first."""
    split = option.split
    if split is None:
        return []
    here, *others = machines
    by_id = {machine.node_id: machine for machine in others}
    chain = [*(by_id[node_id] for node_id in option.helpers if node_id in by_id), here]
    if len(chain) != split.machines:
        return []  # a helper has just left the fleet
    found = []
    for rank, machine in enumerate(chain):
        expected_s = machine.speed.total(
            share_of(split.layers_of(rank), split.layers), split.tokens_of(rank), split.chunk
        )
        found.append(PartOfSplit(machine.node_id, machine.speed.token_s, expected_s))
    return found


def views(choice: PlanChoice, most: int | None = None) -> list[OptionView]:
    """The chosen option, then the best of the others."""
    return [view(choice.best, chosen=True), *(view(option) for option in choice.rejected[:most])]


def view(option: PrefillOption, *, chosen: bool = False) -> OptionView:
    split = option.split
    return OptionView(
        kind=option.kind,
        # "any" is not a plan, so no machine answers.
        nodes=[*option.names, *(() if option.kind == "any" else (THIS_NAME,))],
        predicted_s=option.predicted_s if option.priced else None,
        steps=[StepView(name, seconds) for name, seconds in option.steps],
        chosen=chosen,
        code="" if chosen else option.code,
        reason="" if chosen else option.reason,
        cuts=list(split.cuts) if split is not None else [],
        chunk=split.chunk if split is not None else 0,
        wire_bits=option.wire_bits,
    )
