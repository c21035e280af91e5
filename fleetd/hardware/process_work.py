"""What a process has done so far, as the system counts it: one that stands still does nothing more."""

from __future__ import annotations

import msgspec
import psutil


class ProcessWork(msgspec.Struct, frozen=True):
    """0 for what the system does not tell. ``read_bytes``: of files, from the disk or from memory."""

    read_bytes: int = 0
    resident_bytes: int = 0
    cpu_s: float = 0.0


def work_of(pid: int) -> ProcessWork:
    """What a process has done by now; nothing if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessWork(
                _read_bytes(process), int(process.memory_info().rss), times.user + times.system
            )
    except (psutil.Error, OSError):
        return ProcessWork()


def _read_bytes(process: psutil.Process) -> int:
    """macOS does not tell."""
    counters = getattr(process, "io_counters", None)
    if counters is None:
        return 0
    try:
        counted = counters()
    except (psutil.Error, OSError, NotImplementedError):
        return 0
    # What is mapped into memory is in the second figure only.
    return int(getattr(counted, "read_chars", 0)) + int(counted.read_bytes)
