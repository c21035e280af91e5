"""When each stage of a load began and ended, from its reports of progress. Pure."""

from __future__ import annotations

from fleetd import limits


class StageTimes:
    """The stages in their order. A stage that comes again later is listed again."""

    def __init__(self) -> None:
        # Each with its begin and its end, in the caller's seconds.
        self.stages: list[tuple[str, float, float]] = []
        self._stage = ""
        self._since_s = 0.0

    @property
    def seconds(self) -> list[tuple[str, float]]:
        """What each stage took."""
        return [(stage, ended_s - began_s) for stage, began_s, ended_s in self.stages]

    def enter(self, stage: str, now_s: float) -> None:
        """``stage`` goes on or begins; "" if none does."""
        if stage == self._stage:
            return
        if self._stage and len(self.stages) < limits.LOAD_STAGES:
            self.stages.append((self._stage, self._since_s, now_s))
        self._stage, self._since_s = stage, now_s

    def end(self, now_s: float) -> None:
        """The load is over."""
        self.enter("", now_s)
