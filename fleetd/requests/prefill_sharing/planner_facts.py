"""Facts for the planner about one prompt: from engines, cards, links; and its options for people.

The planner knows neither cards nor sessions, and nobody else knows its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.engine.memory import WORKING_BYTES
from fleetd.engine.protocol import Ready
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.costs import LinkSpeed, PrefillSpeed, modelled
from fleetd.plan.prefill import choice as sharing
from fleetd.plan.prefill.choice import HelperSpec, PlanChoice, PrefillOption, PrefillSize, Refusal, refusal
from fleetd.plan.route import USABLE
from fleetd.requests.job import THIS_NAME
from fleetd.requests.placement import Member

# Workers' own word for the step in which they compute.
COMPUTED = "computed"
# Beyond this, what one machine takes says nothing about others.
_PACE_MOST = 10.0


def prompt(tokens: int, cached: int, chunk: int, facts: Ready, kept: int = 0) -> PrefillSize:
    """Of a prompt of so many tokens, the last of which is left to decoding.

    Args:
        kept: of these, those that are computed, where not all are.
    """
    arithmetic = facts.arithmetic
    unshareable = facts.unshareable
    if arithmetic is None:
        unshareable = unshareable or "The engine has not said how it computes."
    elif kept:
        unshareable = unshareable or arithmetic.sparse
    prefilled = max(0, (kept or tokens) - 1)
    return PrefillSize(
        tokens=prefilled,
        cached=min(cached, prefilled),
        layers=facts.layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        hidden_bytes=facts.hidden_bytes,
        chunk=max(1, chunk),
        exact_chunks=arithmetic is None or arithmetic.chunks == "same",
        span=tokens - 1 if kept else 0,
        unshareable=unshareable,
        weights_bytes=facts.weights_bytes,
        outside_bytes=facts.outside_bytes,
    )


def home(card: Card, held: ModelCard, facts: Ready) -> HelperSpec:
    """The machine that answers."""
    known = _known(held, facts)
    speed, is_modelled = _speed(card, known, facts)
    first_s = 1 / known.decode_tok_s if known.decode_tok_s > 0 else 0.0
    return HelperSpec(
        card.node_id, THIS_NAME, speed, running=card.running, modelled=is_modelled, first_token_s=first_s
    )


def pace(card: Card, held: ModelCard, facts: Ready) -> float:
    """How many times as long the machine that answers takes as by its makers' figures; 1 if nobody knows.

    Other machines will take as many times theirs: most of it is the model's doing, and the program's.
    """
    tok_s = _known(held, facts).prefill_tok_s
    if tok_s <= 0:
        return 1.0
    return min(_PACE_MOST, max(1 / _PACE_MOST, _chip(card).prefill_tok_s(facts.weights_bytes) / tok_s))


def helper(member: Member, own: ModelCard, facts: Ready, pace: float = 1.0, penalty: str = "") -> HelperSpec:
    """Another machine, which may turn out to be no help.

    Args:
        own: the model on the machine that answers.
        pace: that machine's.
        penalty: why it is left out for a while, as a sentence.
    """
    card = member.card
    held = holding(member, own.digest)
    known = held or ModelCard(own.name)
    speed, is_modelled = _speed(card, known, facts)
    part = (known.part_first, known.part_last) if known.part_last > known.part_first else None
    loaded = known.state == "loaded" or part is not None
    return HelperSpec(
        card.node_id,
        member.name,
        speed.times(pace) if is_modelled else speed,
        link=LinkSpeed(member.bytes_per_s, member.rtt_s),
        loaded=loaded,
        load_s=0.0 if loaded else chip_speeds.load_s(facts.weights_bytes),
        room_bytes=_room_bytes(card, known, loaded=loaded),
        running=card.running,
        exact=bool(known.arithmetic) and known.arithmetic == own.arithmetic,
        modelled=is_modelled,
        held=part if known.state != "loaded" else None,
        # What is not loaded has not said.
        sparse=known.sparse or not loaded,
        refusal=_refusal(member, held, facts, penalty),
    )


def holding(member: Member, digest: str) -> ModelCard | None:
    """The model with these very files on that machine."""
    return next((m for m in member.card.models if digest and m.digest == digest), None)


def may_help(member: Member, digest: str) -> bool:
    """Whether it is worth asking the planner about it at all."""
    return (
        member.sees_prompts
        and member.reach == USABLE
        and not member.card.draining
        and holding(member, digest) is not None
    )


def _refusal(member: Member, held: ModelCard | None, facts: Ready, penalty: str) -> Refusal | None:
    if not member.sees_prompts:
        return refusal("private", member.name)
    if member.reach != USABLE:
        return refusal("unusable", member.name)
    if member.card.draining:
        return refusal("draining", member.name)
    if held is None:
        return refusal("other_files", member.name)
    if held.dtype and held.dtype != facts.dtype:
        return refusal("dtype", member.name)
    if penalty:
        return Refusal("failed", f"{member.name}: {penalty}")
    return None


def _room_bytes(card: Card, held: ModelCard, *, loaded: bool) -> int:
    """For keys and values, and for weights where they are not loaded: of what is free, nothing gives way."""
    if loaded:
        return min(card.available_bytes, held.kv_budget_bytes or card.available_bytes)
    return max(0, (card.usable_bytes or card.available_bytes) - WORKING_BYTES)


def _known(held: ModelCard, facts: Ready) -> ModelCard | Ready:
    """Until the first card after a load has the measurement, the engine itself has it."""
    return held if held.prefill_tok_s > 0 else facts


def _speed(card: Card, found: ModelCard | Ready, facts: Ready) -> tuple[PrefillSpeed, bool]:
    """And whether nobody measured it."""
    chip = _chip(card)
    if found.prefill_tok_s <= 0:
        return modelled(chip, facts.weights_bytes, facts.layers, facts.hidden_bytes), True
    # There was no time to measure behind a context, or it did not show.
    context_s = found.prefill_context_s or chip.prefill_context_s(facts.layers, facts.hidden_bytes)
    return PrefillSpeed.measured(found.prefill_tok_s, context_s, found.prefill_fixed_s), False


def _chip(card: Card) -> chip_speeds.Hardware:
    machine = card.machine
    return chip_speeds.hardware_of(machine.chip, machine.accelerator, machine.cores)


def choose(
    asked: PrefillSize, here: HelperSpec, helpers: Iterable[HelperSpec], previous: PrefillOption | None
) -> PlanChoice:
    return sharing.choose(sharing.options(asked, here, helpers), previous)


@dataclass(frozen=True, slots=True)
class PartOfSplit:
    """What one machine of a chain computes, by its own figures."""

    node_id: str
    token_s: float
    expected_s: float


def parts(option: PrefillOption, machines: Iterable[HelperSpec]) -> list[PartOfSplit]:
    """In the order of the chain, the machine that answers last; ``machines`` has that one first."""
    split = option.split
    if split is None:
        return []
    here, *others = machines
    by_id = {machine.node_id: machine for machine in others}
    chain = [*(by_id[node_id] for node_id in option.helpers if node_id in by_id), here]
    if len(chain) != split.machines:
        return []  # somebody has just left
    found = []
    for place, machine in enumerate(chain):
        share = len(split.layers_of(place)) / split.layers
        expected_s = machine.speed.total(share, split.tokens_of(place), split.chunk)
        found.append(PartOfSplit(machine.node_id, machine.speed.token_s, expected_s))
    return found


def views(choice: PlanChoice, most: int | None = None) -> list[OptionView]:
    """The chosen one, then the best of the others."""
    return [view(choice.best, chosen=True), *(view(option) for option in choice.rejected[:most])]


def view(option: PrefillOption, *, chosen: bool = False) -> OptionView:
    split = option.split
    return OptionView(
        kind=option.kind,
        # "any" is no way to compute, so nobody answers either.
        nodes=[*option.names, *(() if option.kind == "any" else (THIS_NAME,))],
        predicted_s=option.predicted_s if option.priced else None,
        steps=[StepView(name, seconds) for name, seconds in option.steps],
        chosen=chosen,
        code="" if chosen else option.code,
        reason="" if chosen else option.reason,
        cuts=list(split.cuts) if split is not None else [],
        chunk=split.chunk if split is not None else 0,
    )
