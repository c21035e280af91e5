"""Facts for the planner about one prompt: from engines, cards, links; and its options for people.

The planner knows neither cards nor sessions, and nobody else knows its words.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetd.engine.protocol import Ready
from fleetd.jobs.placing import Machine as Member
from fleetd.jobs.share_views import OptionView, StepView
from fleetd.p2p.cards import Card, ModelCard
from fleetd.plan import hardware, sharing
from fleetd.plan.costs import Link, Speed, modelled
from fleetd.plan.route import USABLE
from fleetd.plan.sharing import Choice, Machine, Option, Prompt, Refusal, refusal

THIS = "this"


def prompt(tokens: int, cached: int, chunk: int, facts: Ready) -> Prompt:
    """Of a prompt of so many tokens, the last of which is left to decoding."""
    arithmetic = facts.arithmetic
    unshareable = facts.unshareable
    if arithmetic is None:
        unshareable = unshareable or "The engine has not said how it computes."
    prefilled = max(0, tokens - 1)
    return Prompt(
        tokens=prefilled,
        cached=min(cached, prefilled),
        layers=facts.layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        hidden_bytes=facts.hidden_bytes,
        chunk=max(1, chunk),
        exact_chunks=arithmetic is None or arithmetic.chunks == "same",
        unshareable=unshareable,
        weights_bytes=facts.weights_bytes,
    )


def home(card: Card, held: ModelCard, facts: Ready) -> Machine:
    """The machine that answers."""
    # Until the first card after a load has the measurement, the engine itself has it.
    speed, is_modelled = _speed(card, held, facts)
    if is_modelled and facts.prefill_tok_s > 0:
        speed, is_modelled = _measured(facts), False
    return Machine(card.node_id, THIS, speed, running=card.running, modelled=is_modelled)


def helper(member: Member, own: ModelCard, facts: Ready, penalty: str = "") -> Machine:
    """Another machine, which may turn out to be no help.

    Args:
        own: the model on the machine that answers.
        penalty: why it is left out for a while, as a sentence.
    """
    card = member.card
    held = holding(member, own.digest)
    known = held or ModelCard(own.name)
    speed, is_modelled = _speed(card, known, facts)
    return Machine(
        card.node_id,
        member.name,
        speed,
        link=Link(member.bytes_per_s, member.rtt_s),
        loaded=known.state == "loaded",
        load_s=0.0 if known.state == "loaded" else hardware.load_s(facts.weights_bytes),
        room_bytes=card.available_bytes,
        running=card.running,
        exact=bool(known.arithmetic) and known.arithmetic == own.arithmetic,
        modelled=is_modelled,
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


def _speed(card: Card, held: ModelCard, facts: Ready) -> tuple[Speed, bool]:
    """And whether nobody measured it."""
    if held.prefill_tok_s > 0:
        return _measured(held), False
    machine = card.machine
    chip = hardware.hardware_of(machine.chip, machine.accelerator, machine.cores)
    return modelled(chip, facts.weights_bytes, facts.layers, facts.hidden_bytes), True


def _measured(found: ModelCard | Ready) -> Speed:
    return Speed.measured(found.prefill_tok_s, found.prefill_context_s, found.prefill_fixed_s)


def choose(asked: Prompt, here: Machine, helpers: Iterable[Machine], previous: Option | None) -> Choice:
    return sharing.choose(sharing.options(asked, here, helpers), previous)


def views(choice: Choice, most: int | None = None) -> list[OptionView]:
    """The chosen one, then the best of the others."""
    return [view(choice.best, chosen=True), *(view(option) for option in choice.rejected[:most])]


def view(option: Option, *, chosen: bool = False) -> OptionView:
    split = option.split
    return OptionView(
        kind=option.kind,
        # "any" is no way to compute, so nobody answers either.
        nodes=[*option.names, *(() if option.kind == "any" else (THIS,))],
        predicted_s=option.predicted_s if option.priced else None,
        steps=[StepView(name, seconds) for name, seconds in option.steps],
        chosen=chosen,
        code="" if chosen else option.code,
        reason="" if chosen else option.reason,
        cuts=list(split.cuts) if split is not None else [],
        chunk=split.chunk if split is not None else 0,
    )
