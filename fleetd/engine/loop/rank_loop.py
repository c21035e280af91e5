"""The loop of a rank that answers nothing: it serves one group, and computes nothing else, ever.

A pass that other ranks do not make at the same time would be summed with another one of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetd.engine.layers.stage import Stage
from fleetd.engine.loop.compute_loop import HelperLoop
from fleetd.engine.loop.inbox import Item
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.protocol import ServeStage
from fleetd.engine.ranks.mirror_guests import MirrorGuests


@dataclass(kw_only=True)
class RankLoop(HelperLoop):
    """``stage``: all layers, divided. ``ring``: the group of all ranks."""

    stage: Stage
    ring: Any
    progress: PassProgress

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mirrors = MirrorGuests(
            stage=self.stage,
            ring=self.ring,
            progress=self.progress,
            budget=self.budget,
            streams=self._stage_streams,
            emit=self.emit,
        )
        self.guests = [self._mirrors]

    def _take_item(self, item: Item) -> None:
        if isinstance(item, ServeStage):
            self._mirrors.begin(item)
        else:
            super()._take_item(item)
