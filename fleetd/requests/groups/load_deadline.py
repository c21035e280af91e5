"""Until when a member of a group has to be further with its layers. Pure.

A member watches its own load, and a process that stands still is ended there. This holds for one that does
not: whose daemon says that it is alive, and no more.
"""

from __future__ import annotations

import math
from typing import Literal

from fleetd import limits
from fleetd.control.model_change import FETCHING
from fleetd.engine.protocol import WAITING
from fleetd.requests.groups.messages import StageTold

_Kind = Literal["loads", "waits", "fetches"]


class LoadDeadline:
    """Args:
    load_s: about how many seconds a load of the layers takes there.
    now_s: the loop's time, as of each call.
    """

    def __init__(self, load_s: float, now_s: float) -> None:
        late_s = limits.LOAD_LATE * load_s
        self._still_s = max(limits.GROUP_LOAD_S, late_s)
        # Seconds that are left of each kind of step, all together. What is fetched may take hours, as long as
        # bytes come.
        self._left_s: dict[_Kind, float] = {
            "loads": max(limits.ENGINE_LOAD_S, late_s),
            "waits": limits.ENGINE_LOAD_S,
            "fetches": math.inf,
        }
        self._kind: _Kind = "loads"
        self._told = StageTold()
        self._told_s = self._moved_s = now_s

    @property
    def due_s(self) -> float:
        """The loop's time."""
        still_s = math.inf if self._kind == "waits" else self._still_s
        return min(self._moved_s + still_s, self._told_s + self._left_s[self._kind])

    def told(self, told: StageTold, now_s: float) -> None:
        """The member says how far it is."""
        self._left_s[self._kind] -= now_s - self._told_s
        self._kind, self._told_s = _kind(told.stage), now_s
        if told.stage != self._told.stage or told.done > self._told.done:
            self._told, self._moved_s = told, now_s


def _kind(stage: str) -> _Kind:
    if stage.startswith(WAITING):
        return "waits"
    return "fetches" if stage in FETCHING else "loads"
