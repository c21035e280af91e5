"""What the planner needs to know about one prompt: from engines, cards and links; and its options for people.

The planner knows neither cards nor sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.engine.protocol import Arithmetic, Ready
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
    tokens: int,
    cached: int,
    chunk: int,
    facts: Ready,
    kept: int = 0,
    places: Sequence[int] = (),
    states: int = 0,
) -> PrefillSize:
    """Features of a prompt of ``tokens`` tokens. Prefill covers all but the last; decoding computes that one.

    Args:
        kept: how many of them are computed, if tokens are left out; else 0.
        places: after which a chunk ends, and at the last ``states`` of which states may be kept.
    """
    arithmetic = facts.arithmetic
    unshareable = facts.unshareable
    if arithmetic is None:
        unshareable = unshareable or "The engine has not said how it computes."
    elif kept:
        unshareable = unshareable or arithmetic.sparse
    prefilled = max(0, (kept or tokens) - 1)
    # As if all layers were like the largest: a helper must have room for whichever it gets.
    weights_bytes = facts.outside_bytes + facts.layers * facts.layer_bytes
    return PrefillSize(
        tokens=prefilled,
        cached=min(cached, prefilled),
        layers=facts.layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        hidden_bytes=facts.hidden_bytes,
        chunk=max(1, chunk),
        exact_chunks=arithmetic is None or arithmetic.chunks == "same",
        prompt_span=tokens - 1 if kept else 0,
        unshareable=unshareable,
        weights_bytes=max(weights_bytes, facts.weights_bytes),
        outside_bytes=facts.outside_bytes,
        last_layer=LAST_LAYER,
        state_bytes=facts.state_bytes,
        window_bytes=facts.window_bytes_per_token,
        window=facts.window_tokens,
        places=() if kept else tuple(places),
        states=states,
    )


def divisible(model: ModelCard) -> bool:
    """True if a card says how a model can be divided, in figures that a model may have."""
    kept = model.kv_bytes_per_token + model.window_bytes_per_token + model.state_bytes
    each = (kept, model.hidden_bytes, model.weights_bytes)
    return (
        0 < model.layers <= min(each) and max(*each, model.window_tokens, model.hidden_width) <= _BYTES_MOST
    )


def told_facts(model: ModelCard) -> Ready:
    """What an engine says of a model, as far as a card has it: of a model that is not loaded here."""
    chunks: Literal["any", "same"] = "any" if model.any_chunks else "same"
    return Ready(
        architecture=model.architecture,
        device="cpu",  # as no machine has told it, nothing here depends on it
        dtype=model.dtype,
        layers=max(1, model.layers),
        vocab_size=0,
        context_tokens=model.context_tokens,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        state_bytes=model.state_bytes,
        window_bytes_per_token=model.window_bytes_per_token,
        window_tokens=model.window_tokens,
        kv_budget_bytes=model.kv_budget_bytes,
        has_chat_template=False,
        tool_calls=False,
        reasoning=False,
        load_s=model.load_s,
        versions={},
        hidden_bytes=model.hidden_bytes,
        hidden_width=model.hidden_width,
        outside_bytes=model.outside_bytes,
        unshareable="" if divisible(model) else "No machine has said yet how this model can be divided.",
        arithmetic=Arithmetic("", model.dtype, {}, chunks=chunks, sparse=""),
    )


def home(here: Member, own: ModelCard, facts: Ready) -> HelperSpec:
    """The machine that answers: this one, or another that the planner looks at as if it were this one."""
    known = _known(own, facts)
    speed, is_modelled = _speed(here, known, facts)
    first_s = 1 / known.decode_tok_s if known.decode_tok_s > 0 else 0.0
    # More requests than it runs at once are waited for, which routing prices.
    running = min(here.card.running, max(1, here.card.max_streams) - 1)
    return HelperSpec(
        here.node_id,
        here.name,
        speed,
        running=running,
        modelled=is_modelled,
        doubtful=_doubtful(known),
        first_token_s=first_s,
    )


def chain_of(answering: Member, helping: Iterable[Member], own: ModelCard, facts: Ready) -> list[HelperSpec]:
    """The machine that answers, and all others as it would find them; all by their own figures.

    Args:
        own: the model on the machine that answers; ``facts``: what its engine says of it.
    """
    at_pace = pace(answering, own, facts)
    helpers = [
        helper(member, own, facts, at_pace, link=between(answering, member))
        for member in helping
        if member.node_id != answering.node_id
    ]
    return [home(answering, own, facts), *helpers]


def corrected(specs: Iterable[HelperSpec], members: Members, digest: str) -> list[HelperSpec]:
    """The same machines by what their parts of earlier prompts took."""
    return [
        replace(spec, speed=spec.speed.times(members.correction(spec.node_id, digest, spec.speed)))
        for spec in specs
    ]


def between(answering: Member, helping: Member) -> LinkSpeed:
    """The link between two machines; of two others it is not known here, and the worse figures are taken."""
    ours, theirs = answering.link, helping.link
    if ours is None or theirs is None:
        return theirs or ours or NO_LINK
    return ours.and_(theirs)


def pace(here: Member, own: ModelCard, facts: Ready) -> float:
    """How many times as long this machine takes as its chip's published figures say; 1 if it is not measured.

    Machines that never measured the model are assumed to take as many times as long as theirs: most of the
    difference comes from the model and the program.
    """
    tok_s = _known(own, facts).prefill_tok_s
    if tok_s <= 0:
        return 1.0
    return min(_PACE_MOST, max(1 / _PACE_MOST, here.chip.prefill_tok_s(facts.weights_bytes) / tok_s))


def helper(
    member: Member, own: ModelCard, facts: Ready, pace: float = 1.0, link: LinkSpeed | None = None
) -> HelperSpec:
    """A machine other than the one that answers, which may be refused.

    Args:
        own: the model on the machine that answers.
        pace: of that machine.
        link: to that machine, if it is not this one.
    """
    card = member.card
    found = member.model_with(own.digest)
    known = found or ModelCard(own.name)
    speed, is_modelled = _speed(member, known, facts)
    part = (known.part_first, known.part_last) if known.part_last > known.part_first else None
    loaded = known.state == "loaded" or part is not None
    refusal = eligible(member, own.digest)
    if refusal is None and "" not in (known.dtype, facts.dtype) and known.dtype != facts.dtype:
        refusal = Refusal("dtype", f"{member.name} computes in another precision.")
    return HelperSpec(
        member.node_id,
        member.name,
        speed.times(pace) if is_modelled else speed,
        link=link or member.link or NO_LINK,
        loaded=loaded,
        load_s=0.0 if loaded else min(LOAD_MOST_S, known.load_s or chip_speeds.load_s(facts.weights_bytes)),
        room_bytes=_room_bytes(card, known, loaded=loaded),
        running=card.running,
        exact=bool(known.arithmetic) and known.arithmetic == own.arithmetic,
        modelled=is_modelled,
        doubtful=_doubtful(known),
        held=part if known.state != "loaded" else None,
        # A machine that has not loaded the model cannot know yet.
        sparse=known.sparse or not loaded,
        refusal=refusal,
    )


def _room_bytes(card: Card, known: ModelCard, *, loaded: bool) -> int:
    """Free memory for keys and values, and for weights if they are not loaded. Nothing is unloaded for it."""
    if loaded:
        return min(card.available_bytes, known.kv_budget_bytes or card.available_bytes)
    return max(0, card.usable_bytes - WORKING_BYTES)


def _known(own: ModelCard, facts: Ready) -> ModelCard | Ready:
    """The source of this machine's speeds: the engine, until the first card after a load has them."""
    return own if own.prefill_tok_s > 0 else facts


def speed_of(model: ModelCard) -> PrefillSpeed | None:
    """The speed that its machine measured; None before that."""
    if model.prefill_tok_s <= 0:
        return None
    return PrefillSpeed.measured(model.prefill_tok_s, model.prefill_context_s, model.prefill_fixed_s)


def _doubtful(known: ModelCard | Ready) -> bool:
    return known.doubtful if isinstance(known, ModelCard) else bool(known.doubt)


def _speed(member: Member, known: ModelCard | Ready, facts: Ready) -> tuple[PrefillSpeed, bool]:
    """The machine's speed, and True if it is not measured but comes from its chip's published figures."""
    chip = member.chip
    if known.prefill_tok_s <= 0:
        return modelled(chip, facts.weights_bytes, facts.layers, facts.hidden_width), True
    # 0: calibration had no time to measure behind a context, or the context made no difference.
    context_s = known.prefill_context_s or chip.prefill_context_s(facts.layers, facts.hidden_width)
    return PrefillSpeed.measured(known.prefill_tok_s, context_s, known.prefill_fixed_s), False


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
    )
