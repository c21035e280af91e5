"""Machines that have no file of a model, and can fetch the layers that they are to hold."""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.p2p.membership.cards import ModelCard
from fleetd.requests.members.members import Member, eligible


def fetchers(others: Sequence[Member], own: ModelCard) -> list[tuple[Member, ModelCard]]:
    """Those of them, each with the model as this machine has it: a load there has not been tried."""
    return [
        (member, own)
        for member in others
        if member.card.part_bytes
        and member.model_with(own.digest) is None
        and eligible(member) is None
        and not member.why_left_out(own.digest)
    ]


def most_layers(member: Member, layer_bytes: int) -> int:
    """How many layers its disk has room for, and its link brings within ``limits.PART_FETCH_S``.

    Args:
        layer_bytes: of the largest layer's file.
    """
    room = float(member.card.part_bytes)
    if member.bytes_per_s:
        room = min(room, member.bytes_per_s * limits.PART_FETCH_S)
    return int(room // max(1, layer_bytes))
