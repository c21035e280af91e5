"""How fast the machines of a group are, compared with each other.

A figure that a machine measured is never compared with another one's published figure: a machine without
measurements is as much slower than its chip's figures as those with measurements usually are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetd.p2p.membership.cards import ModelCard
from fleetd.requests.members.members import Member


def decode_tok_s(machines: Sequence[tuple[Member, ModelCard]]) -> Mapping[str, float]:
    """Tokens of an answer per second that each machine would write with a whole model, by node id.

    Args:
        machines: each with the model as it has it, or would have it.
    """
    # Imported late: few daemons hold models together.
    from statistics import median

    shares = {member.node_id: _share(member, model) for member, model in machines}
    known = [share for share in shares.values() if share]
    usual = median(known) if known else 1.0
    return {
        member.node_id: _published(member, model) * (shares[member.node_id] or usual)
        for member, model in machines
    }


def _share(member: Member, model: ModelCard) -> float:
    """The measured speed over the published one, by the largest model of a kind; 0 if none was measured.

    Of larger models less of a step's time belongs to what does not grow with the weights.
    """
    measured = [
        each
        for each in member.card.models
        if each.speed.decode_tok_s
        and not each.speed.doubtful
        and each.shape.weights_bytes
        and each.shape.cpu_arithmetic == model.shape.cpu_arithmetic
    ]
    if not measured:
        return 0.0
    largest = max(measured, key=lambda each: (each.shape.weights_bytes, each.name))
    return largest.speed.decode_tok_s / _published(member, largest)


def _published(member: Member, model: ModelCard) -> float:
    return member.chip(model.shape.cpu_arithmetic).decode_tok_s(model.shape.weights_bytes)
