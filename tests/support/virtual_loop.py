"""An event loop whose clock moves only when nothing is left to do: hours of waiting take no time.

What is ready on a socket comes before any timer, and within one process what was written is ready at once, so
a server and its client on one such loop see the times that they would see if they took no time themselves.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _PatientSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Waits for sockets only where no timer is set."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found:
            self.now_s += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """``asyncio.Runner(loop_factory=VirtualLoop)``. ``time()`` begins at 0.

    Work in threads is not waited for: a timer that is set meanwhile comes first.
    """

    def __init__(self) -> None:
        self._patient = _PatientSelector()
        super().__init__(self._patient)

    def time(self) -> float:
        return self._patient.now_s
