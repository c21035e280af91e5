"""Whether a worker's load goes on, by what it says and by what its process does. Pure.

A worker says when it begins to read weights and when it has read them. In between its process reads bytes,
takes memory and computes; one that does none of these for long is given up.
"""

from __future__ import annotations

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_change import READING
from fleetd.engine.protocol import Loading
from fleetd.errors import EngineStalled
from fleetd.hardware.process_work import ProcessWork


class LoadWatch:
    """Args:
    name: of the model.
    within_s: a load that does nothing for so long is over.
    progress: where it begins.
    """

    def __init__(self, name: str, within_s: float, progress: Loading, now_s: float) -> None:
        self._name, self._within_s = name, within_s
        self._progress = progress
        self._told_s = self._moved_s = now_s
        # What the process has done: when it was looked at last, and when its stage began.
        self._work = self._before = ProcessWork()

    def told(self, progress: Loading, now_s: float) -> None:
        """The worker says how far it is."""
        if progress.stage != self._progress.stage:
            self._before = self._work
        self._progress, self._told_s, self._moved_s = progress, now_s, now_s

    def looked(self, work: ProcessWork, now_s: float) -> Loading:
        """Note what the process has done so far; returns how far the load is by that."""
        if work != self._work:
            self._work, self._moved_s = work, now_s
        progress, before = self._progress, self._before
        if progress.stage == READING:
            gained = max(work.read_bytes - before.read_bytes, work.resident_bytes - before.resident_bytes, 0)
            if (done := min(progress.total, gained)) > progress.done:
                self._progress, self._told_s = replace(progress, done=done), now_s
        return self._progress

    def over(self, now_s: float) -> EngineStalled | None:
        """Why the load is to be ended; None if it goes on."""
        if now_s - self._moved_s > self._within_s:
            return EngineStalled(
                f"{self._name} did not load: its worker has read and computed nothing for "
                f"{self._within_s:.0f} s.",
                hint="Look whether the disk that it lies on answers.",
            )
        if now_s - self._told_s > limits.ENGINE_LOAD_S:
            return EngineStalled(f"{self._name} did not load within {limits.ENGINE_LOAD_S:.0f} s.")
        return None
