"""A machine as it is for other work while it holds ranks of divided models. Pure.

A rank that waits for the others polls its sockets without a pause, so each one takes a core for as long as
an answer is written. On a CPU that is a part of all that computes; beside a GPU it is a core that is spare.
"""

from __future__ import annotations

from msgspec.structs import replace

from fleetd.control.model_facts import MeasuredSpeed
from fleetd.p2p.membership.cards import Card


def beside_ranks(card: Card) -> Card:
    """The card without the cores of its ranks, and with the speeds that the others of a CPU have."""
    facts = card.machine
    if not card.rank_cores or not facts.cores:
        return card
    cores = max(1, facts.cores - card.rank_cores)
    slower = facts.cores / cores if facts.accelerator == "cpu" else 1.0
    models = [replace(model, speed=_slower(model.speed, slower)) for model in card.models]
    return replace(card, machine=replace(facts, cores=cores), models=models)


def _slower(speed: MeasuredSpeed, times: float) -> MeasuredSpeed:
    return replace(
        speed,
        prefill_tok_s=speed.prefill_tok_s / times,
        decode_tok_s=speed.decode_tok_s / times,
        prefill_context_s=speed.prefill_context_s * times,
        prefill_fixed_s=speed.prefill_fixed_s * times,
    )
