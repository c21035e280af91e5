"""What is believed of another machine's card: no speed that its hardware cannot have. Pure.

A card is written by the machine that it describes. Without a bound, one that claims any speed would be sent
every request of the fleet. What its work really takes is measured here and corrects the rest
(``Members.correction``).
"""

from __future__ import annotations

from msgspec.structs import replace

from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan import chip_speeds

# How much faster than ``chip_speeds`` estimates an honest machine may be: estimates are of 0.6 of the peak,
# of 4-bit weights and of the narrower memory of a chip; drafts make decoding faster.
_ROOM = 4.0
# A mixture of experts computes with a small part of its weights. The smallest parts there are have a 32nd.
_SPARSEST = 32.0
# A model is read from the disk, and no disk is faster.
_DISK_BYTES_PER_S = 20e9
# No model is smaller, whatever a card says.
_WEIGHTS_BYTES = 1 << 20


def believed(card: Card, own: Card | None = None) -> Card:
    """The card with the speeds that its hardware may have; the same object if nothing is bounded.

    Args:
        own: this machine's card. It knows the size of the models that are here too, and their measured
            speeds tell how much of its weights a model computes with.
    """
    known = {model.digest: model for model in own.models if model.digest} if own is not None else {}
    models = [_believed(card, model, own, known.get(model.digest)) for model in card.models]
    if all(model is claimed for model, claimed in zip(models, card.models, strict=True)):
        return card
    return replace(card, models=models)


def _believed(card: Card, model: ModelCard, own: Card | None, same: ModelCard | None) -> ModelCard:
    facts, claimed = card.machine, same if same is not None else model
    arithmetic = model.shape.cpu_arithmetic
    weights_bytes = max(_WEIGHTS_BYTES, claimed.shape.weights_bytes)
    most = chip_speeds.most_of(facts.chip, facts.accelerator, facts.cores, arithmetic)
    prefill_gain = decode_gain = _SPARSEST
    if own is not None and same is not None:
        here = own.machine
        mine = chip_speeds.hardware_of(here.chip, here.accelerator, here.cores, same.shape.cpu_arithmetic)
        prefill_gain = _gain(same.speed.prefill_tok_s, mine.prefill_tok_s(weights_bytes))
        decode_gain = _gain(same.speed.decode_tok_s, mine.decode_tok_s(weights_bytes))
    told = model.speed
    speed = replace(
        told,
        prefill_tok_s=min(told.prefill_tok_s, _ROOM * prefill_gain * most.prefill_tok_s(weights_bytes)),
        decode_tok_s=min(told.decode_tok_s, _ROOM * decode_gain * most.decode_tok_s(weights_bytes)),
    )
    # 0: it does not know, and the planner estimates it.
    load_s = max(model.load_s, weights_bytes / _DISK_BYTES_PER_S) if model.load_s else 0.0
    if (speed, load_s) == (told, model.load_s):
        return model
    return replace(model, speed=speed, load_s=load_s)


def _gain(measured: float, estimated: float) -> float:
    """How many times as fast as its chip's figures say a model runs; as much as possible if not measured."""
    return min(_SPARSEST, max(1.0, measured / estimated)) if measured > 0 else _SPARSEST


def capped(claim: Card, card: Card) -> dict[str, str]:
    """What a machine claims and what is believed instead, as a clause, for each model that is capped.

    ``card``: what ``believed`` made of the ``claim``.
    """
    found = {}
    for claimed, model in zip(claim.models, card.models, strict=True):
        parts = [
            f"{of} of {_rate(said)} tok/s, of which {_rate(believes)} are believed"
            for of, said, believes in (
                ("prefill", claimed.speed.prefill_tok_s, model.speed.prefill_tok_s),
                ("decoding", claimed.speed.decode_tok_s, model.speed.decode_tok_s),
            )
            if believes < said
        ]
        if claimed.load_s < model.load_s:
            parts.append(f"a load in {claimed.load_s:.2g} s, and {model.load_s:.2g} s are expected")
        if parts:
            found[model.name] = ", ".join(parts)
    return found


def _rate(tok_s: float) -> str:
    return f"{tok_s:.3g}" if tok_s >= 1e6 else f"{tok_s:,.0f}"
