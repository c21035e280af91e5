"""Which model scores a prompt, and which machines have it, as the planner wants them. Pure.

A named compressor is the one; otherwise it is the smallest model whose role that is, and where no machine has
one, the smallest chat model that is clearly smaller than the model that answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetd.p2p.membership.cards import MachineFacts, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.costs import LinkSpeed, PrefillSpeed, modelled
from fleetd.plan.route import USABLE
from fleetd.plan.scoring import Scorer
from fleetd.requests.placement import THIS_NODE, Member, canonical
from fleetd.requests.smart_prefill.segment_scoring import CompressorModel

# A chat model that has no other role scores for models at least so many times its size.
_CLEARLY_LARGER = 4
# Shape of the models that compressors are, for machines that never measured one.
_LAYERS, _HIDDEN_BYTES = 30, 2048


@dataclass(frozen=True, slots=True)
class ModelHolder:
    """A model on a machine. ``folder``: on this one."""

    node_id: str
    name: str
    model: ModelCard
    tier: str = ""
    chip: chip_speeds.Hardware | None = None
    link: LinkSpeed | None = None
    running: int = 0
    folder: Any = None

    @property
    def key(self) -> str:
        """As ``CompressorModel.key``."""
        return self.model.digest or self.model.name


def holders(machines: Iterable[Member]) -> list[ModelHolder]:
    """Models of other machines that may see prompts and can be reached."""
    found: list[ModelHolder] = []
    for machine in machines:
        card = machine.card
        if not machine.sees_prompts or machine.reach != USABLE or card.draining:
            continue
        chip = chip_of(card.machine)
        link = LinkSpeed(machine.bytes_per_s, machine.rtt_s)
        found += [
            ModelHolder(card.node_id, machine.name, model, card.machine.tier, chip, link, card.running)
            for model in card.models
        ]
    return found


def chip_of(facts: MachineFacts) -> chip_speeds.Hardware:
    return chip_speeds.hardware_of(facts.chip, facts.accelerator, facts.cores)


def choose(named: str, found: Sequence[ModelHolder], target_bytes: int) -> list[ModelHolder]:
    """All that hold the one model that is to score; nobody where there is none.

    Args:
        named: the compressor that was asked for; "" leaves the choice open.
        target_bytes: weights of the model that answers.
    """
    # Other machines hold a model only under its digest, which stands for its very files.
    able = [holder for holder in found if holder.node_id == THIS_NODE or holder.model.digest]
    if named:
        wanted = canonical(named)
        able = [holder for holder in able if holder.model.name in (named, wanted)]
    else:
        compressors = [holder for holder in able if "compressor" in holder.model.roles]
        smaller = [
            holder
            for holder in able
            if "chat" in holder.model.roles
            and 0 < holder.model.weights_bytes * _CLEARLY_LARGER <= target_bytes
        ]
        able = compressors or smaller
    if not able:
        return []
    # This machine's files decide where several have the same name.
    best = min(
        able, key=lambda h: (h.model.weights_bytes, h.model.name, h.node_id != THIS_NODE, h.model.digest)
    )
    return [
        holder
        for holder in able
        if holder is best or (holder.model.digest == best.model.digest and best.model.digest)
    ]


def compressor(holding: Sequence[ModelHolder]) -> CompressorModel:
    here = next((holder for holder in holding if holder.node_id == THIS_NODE), None)
    model = (here or holding[0]).model
    return CompressorModel(model.name, model.digest, here.folder if here is not None else None)


def scorer(holder: ModelHolder, factor: float = 1.0) -> Scorer:
    """``factor``: how many times as long as by its figures it takes."""
    model = holder.model
    measured = model.prefill_tok_s > 0
    speed = speed_of(model)
    if speed is None:
        chip = holder.chip or chip_speeds.hardware_of("", "", 1)
        speed = modelled(chip, max(1, model.weights_bytes), _LAYERS, _HIDDEN_BYTES)
    return Scorer(
        holder.node_id,
        holder.name,
        speed.times(factor),
        link=holder.link,
        tier=holder.tier,
        load_s=0.0 if model.state == "loaded" else chip_speeds.load_s(model.weights_bytes),
        running=holder.running,
        context_tokens=model.context_tokens,
        measured=measured,
    )


def speed_of(model: ModelCard) -> PrefillSpeed | None:
    """As its machine measured it; None before that."""
    if model.prefill_tok_s <= 0:
        return None
    return PrefillSpeed.measured(model.prefill_tok_s, model.prefill_context_s, model.prefill_fixed_s)
