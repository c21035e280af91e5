"""Prompts whose clients have left while other machines help to read them.

A client that leaves may only have had too short a time-out, and asks again. What helpers compute of a prompt
that is cut by tokens is of use at its end only. So it is read on, without a client, as long as that costs no
other prompt anything: the one that asks again follows it, as one prompt follows another that begins alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetd import limits
from fleetd.engine.loop.awaited_prefixes import AwaitedPrefixes
from fleetd.engine.loop.phases import Phase
from fleetd.engine.loop.sequence import ScheduledSequence


class LeftPrompts:
    """``prefilling``: the scheduler's own list. ``busy``: true if a prompt waits or an answer is written."""

    def __init__(
        self, prefilling: list[ScheduledSequence], awaited: AwaitedPrefixes, busy: Callable[[], bool]
    ) -> None:
        self._prefilling, self._awaited, self._busy = prefilling, awaited, busy

    def keep(self, sequence: ScheduledSequence) -> bool:
        """Its client leaves. True if it is read on; then it has ``left_s``."""
        if sequence.shared is None or self._others(sequence):
            return False
        sequence.left_s = time.monotonic()
        return True

    @property
    def all(self) -> list[ScheduledSequence]:
        return [each for each in self._prefilling if each.left_s]

    @property
    def ending(self) -> list[ScheduledSequence]:
        """Those that are to end now: another prompt could use the time, no helper takes part any more, or no
        client has asked again."""
        latest_s = time.monotonic() - limits.SHARE_LEFT_S
        return [
            each
            for each in self.all
            if each.shared is None
            or self._others(each)
            or (each.left_s < latest_s and not self._awaited.leads(each))
        ]

    def _others(self, sequence: ScheduledSequence) -> bool:
        others = (each.phase for each in self._prefilling if each is not sequence)
        return self._busy() or any(phase is not Phase.FOLLOWING for phase in others)
