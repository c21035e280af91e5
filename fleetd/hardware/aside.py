"""Questions to drivers and programs that may take seconds or never answer, asked beside everything else."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from fleetd import limits
from fleetd.process.observe import get_logger

log = get_logger("fleetd.hardware")
T = TypeVar("T")


class Aside(Generic[T]):
    """Asks in a thread of its own, one question at a time; ``read`` never waits.

    Args:
        name: for the log.
        again_s: for how long an answer is good. A failure stands for ``limits.DEVICE_RETRY_S``.
    """

    def __init__(self, name: str, ask: Callable[[], T], again_s: float = math.inf) -> None:
        self._name = name
        self._ask = ask
        self._again_s = again_s
        self._answer: T | None = None
        # When the answer becomes old; True if it is, whenever it was given.
        self._due_s, self._old = -math.inf, False
        self._failed = False
        self._asking: threading.Thread | None = None

    def read(self) -> T | None:
        """The last answer; None if there is none, or asking failed. Asks again if it has become old."""
        if (self._old or time.monotonic() >= self._due_s) and not self._busy:
            self._old, self._due_s = False, math.inf
            # A driver that hangs must not keep the process.
            self._asking = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._asking.start()
        return self._answer

    def forget(self) -> None:
        """Ask again at the next ``read``, and give the old answer till then."""
        self._old = True

    @property
    def _busy(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait for the question that is being asked."""
        if self._asking is not None:
            self._asking.join(timeout_s)

    def _run(self) -> None:
        try:
            self._answer, again_s = self._ask(), self._again_s
        except Exception as error:
            if not self._failed:
                log.warning("hardware.unread", asked=self._name, error=f"{type(error).__name__}: {error}")
            self._answer, again_s = None, limits.DEVICE_RETRY_S
        self._failed = self._answer is None
        self._due_s = time.monotonic() + again_s
