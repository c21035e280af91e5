"""Ranks in one process: each has all of every layer, so that a sum over them is that of one alone. What they
are told of each other's passes is real."""

from __future__ import annotations

from dataclasses import dataclass
from pipes import Events, MemoryPipe
from typing import Any

import mlx.core as mx

from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks.mirror import Mirror
from fleetd.engine.ranks.rank_model import RankModel
from fleetd.engine.ranks.remote_rank import RemoteRank
from fleetd.engine.streams.frames import Frame, Place

MOST_BYTES = 1 << 30


@dataclass
class TellingPipe(MemoryPipe):
    """The end of the rank that answers: the other one computes what it is told at once."""

    mirror: Mirror | None = None

    def receive(self) -> Frame | None:
        while self.mirror is not None and self.mirror.ready:
            self.mirror.step()
        return super().receive()


def ranks_of(whole: Any, others: int, most_bytes: int = MOST_BYTES) -> tuple[RankModel, list[Mirror]]:
    """A model of which each of 1 + ``others`` machines computes every pass; what the others keep."""
    ring, events = mx.distributed.init(), Events()
    model = RankModel(Stage.of(whole), ring, PassProgress.alone())
    remote: list[RemoteRank] = []
    mirrors: list[Mirror] = []
    for number in range(1, 1 + others):
        ends: list[TellingPipe] = []

        def telling(_name: str, place: Place, ends: list[TellingPipe] = ends) -> TellingPipe:
            ends.append(TellingPipe(place, events))
            return ends[0]

        def told(_name: str, place: Place, ends: list[TellingPipe] = ends) -> MemoryPipe:
            end = MemoryPipe(place, events)
            end.join(ends[0])
            return end

        remote.append(RemoteRank(telling, model.kept, f"machine {number}"))
        mirrors.append(Mirror(Stage.of(whole), ring, PassProgress.alone(), most_bytes, told))
        ends[0].mirror = mirrors[-1]
    model.join(remote)
    return model, mirrors
