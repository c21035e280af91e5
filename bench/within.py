"""``python -m bench.within SECONDS COMMAND...``: run a command, and leave nothing of it behind.

After so many seconds, or when this process is asked to end, the command is asked to end as well, and what it
has started with it. What has not ended ``GRACE_S`` later is killed: also processes in sessions of their own,
and on Linux those that have lost their parents. Exits as the command did, with 124 if its time was up, and
with 137 if it had to be killed.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

# A measurement keeps what it has, and ends its daemons, which end their workers.
GRACE_S = 30.0
LATE, KILLED = 124, 137
_POLL_S = 0.1
# prctl(2).
_SET_CHILD_SUBREAPER = 36


def main(seconds: float, command: Sequence[str], grace_s: float = GRACE_S) -> int:
    _adopt_orphans()
    # Unwinds, so that nothing is left behind either if this process is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process, late, ended = subprocess.Popen(command, stdin=subprocess.DEVNULL), False, False
    try:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            ended = _ended(process, grace_s)
    finally:
        _kill(process)
    code = process.returncode
    return KILLED if not ended else LATE if late else code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    """What this process has started stays below it. Only Linux has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ended(process: subprocess.Popen[bytes], grace_s: float) -> bool:
    """Ask the command to end; True once it has, and all that it has started, within ``grace_s``."""
    until_s = time.monotonic() + grace_s
    if process.poll() is None:
        # It ends the others itself: they are asked only if it is gone.
        process.terminate()
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    for left in _below():
        _tell(left, signal.SIGTERM)
    while _below() and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return process.poll() is not None and not _below()


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Each may have started another one since the list was made.
    while left := _below():
        for each in left:
            _tell(each, signal.SIGKILL)
        time.sleep(_POLL_S)
    process.wait()


def _below() -> list[psutil.Process]:
    """All processes that live below this one."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.is_running() and not _is_dead(each)]


def _is_dead(process: psutil.Process) -> bool:
    """True for one that has ended and for which nobody has asked yet; adopted ones are asked for here."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        process.wait(0)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired, ChildProcessError):
        pass
    return True


def _tell(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
