"""The other ranks of a model whose layers are divided, for the worker that answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetd.engine.load.group_members import GroupMembers
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import dividing, ring
from fleetd.engine.ranks.rank_model import RankModel
from fleetd.engine.ranks.remote_rank import RemoteRank
from fleetd.engine.settings import GroupMember, RingPlace


class RankMembers(GroupMembers):
    def __init__(self, members: Sequence[GroupMember], place: RingPlace, progress: PassProgress) -> None:
        super().__init__(members)
        self._place, self._progress = place, progress

    def divided(self, model: Any) -> RankModel:
        """This rank's part of one of mlx-lm's models, of which nothing is read yet. Raises ModelUnsupported,
        and MemberLost if the other ranks do not come."""
        group = ring.joined(self._place, self._progress)
        return RankModel(dividing.divided(model, group), group, self._progress)

    def join(self, model: RankModel) -> None:
        """Have the others compute with this one, once all have read their weights. Raises MemberLost, and
        GroupLost if one does not connect."""
        model.begin_together()
        self._wait()
        model.join(
            [
                RemoteRank(self._streams.connect(member.stream), model.kept, member.name)
                for member in self._members
            ]
        )
