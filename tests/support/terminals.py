"""A terminal that a program paints on, without one."""

from __future__ import annotations

import io
import threading


class FakeTerminal(io.StringIO):
    """A terminal that signals its first paint."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.painted = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        done = super().write(text)
        self.painted.set()
        return done
