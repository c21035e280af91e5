"""Work that now and then waits for other machines, and what the loop that does it in turns has to know."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from fleetd import limits


class Steppable(Protocol):
    """``sharing.SharedPrefill`` or ``helper_prefill.HelperPrefill``."""

    @property
    def ready(self) -> bool: ...
    @property
    def due_s(self) -> float | None: ...


def can_step(work: Steppable) -> bool:
    """Whether its step does something now: computes, or gives up what is overdue."""
    if work.ready:
        return True
    due_s = work.due_s
    return due_s is not None and time.monotonic() >= due_s


def wait_s(deadlines: Iterable[float | None]) -> float:
    """How long a loop with nothing to compute may wait for something to arrive: until the next beat, or
    until something is due."""
    first = min((due for due in deadlines if due is not None), default=None)
    beat = limits.ENGINE_BEAT_S
    return beat if first is None else min(beat, max(0.0, first - time.monotonic()))
