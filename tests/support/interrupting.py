"""Ctrl-C at a program that waits.

Between the last look at signals and the system call that waits, Python misses one: a person, who comes later,
presses the keys again, a test would wait for ever.
"""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import psutil
from live_daemon import until

_LIMIT_S = 60.0


def once_it_waits(pid: int) -> None:
    """Returns when the process's main thread sleeps. Fails at once if the process has ended."""

    def waits() -> bool:
        status = psutil.Process(pid).status()
        assert status != psutil.STATUS_ZOMBIE, "it has ended before it was interrupted"
        return status == psutil.STATUS_SLEEPING

    until(waits, _LIMIT_S)


def interrupt(process: subprocess.Popen[Any]) -> None:
    once_it_waits(process.pid)
    process.send_signal(signal.SIGINT)
