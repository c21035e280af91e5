"""If the seconds of a load go, from its reports of progress. Pure."""

from __future__ import annotations

from fleetd import limits


class StageTimes:
    """The stages in their order. A stage that comes again later is listed again."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []
        self._stage = ""
        self._since_s = 0.0

    def enter(self, stage: str, now_s: float) -> None:
        """``stage`` goes on or begins; "" if none does."""
        if stage == self._stage:
            return
        if self._stage and len(self.seconds) < limits.LOAD_STAGES:
            self.seconds.append((self._stage, now_s - self._since_s))
        self._stage, self._since_s = stage, now_s

    def end(self, now_s: float) -> None:
        """The load is over."""
        self.enter("", now_s)
