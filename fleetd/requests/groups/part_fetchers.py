"""Machines that have no file of a model, and can fetch the layers that they are to hold.

They come from the machine that asks or, of a model that it has in part itself, from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.p2p.membership.cards import ModelCard
from fleetd.requests.members.members import Member, eligible


def fetchers(
    others: Sequence[Member], own: ModelCard, *, even_left_out: bool = False
) -> list[tuple[Member, ModelCard]]:
    """Those of them, each with the model as this machine has it: a load there has not been tried."""
    return [
        (member, own)
        for member in others
        if member.card.part_bytes
        and whole_model(member, own) is None
        and eligible(member, even_left_out=even_left_out) is None
        and (even_left_out or not member.why_left_out(own.digest))
    ]


def whole_model(member: Member, own: ModelCard) -> ModelCard | None:
    """The model as a machine has all of its files; None if it has them not."""
    if own.source != "part":
        return member.model_with(own.digest)
    found = member.model(own.name)
    same = found is not None and found.source == "hub" and found.revision == own.revision
    return found if same else None


def most_layers(member: Member, layer_bytes: int, *, from_hub: bool = False, besides: int = 0) -> int:
    """How many layers its disk has room for, and its link brings within ``limits.PART_FETCH_S``.

    Args:
        layer_bytes: of the largest layer's file.
        from_hub: the link does not count.
        besides: bytes of the disk that other files of the model take.
    """
    room = float(max(0, member.card.part_bytes - besides))
    if member.bytes_per_s and not from_hub:
        room = min(room, member.bytes_per_s * limits.PART_FETCH_S)
    return int(room // max(1, layer_bytes))
