"""Work that must not hold up the answers that run beside it: it is done in turns of a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from fleetd import limits


def in_turns(
    steps: Iterable[None], seconds: Callable[[], float] = lambda: limits.FETCH_TURN_S
) -> Iterator[None]:
    """Take the steps; yields whenever those since the last time have taken so long."""
    begun_s = time.monotonic()
    for _ in steps:
        if time.monotonic() - begun_s >= seconds():
            yield
            begun_s = time.monotonic()
