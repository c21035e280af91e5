"""Bounds the memory of this process while code runs over a publisher's files: a template, a config.

The kernel refuses what goes beyond, and Python raises MemoryError. The whole process is bounded, so what its
other threads may need meanwhile has to be allowed, too. On Linux only: macOS takes the limit and ignores it.
For the CPU only: the driver of a GPU reserves more addresses than there is memory. Elsewhere the daemon looks
at the worker's memory (``memory_watch``).
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAGES = Path("/proc/self/statm")
_lock = threading.Lock()
_bounds: list[int] = []
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def is_bounded(device: str) -> bool:
    """True if ``at_most`` bounds a process that computes on this device: cpu, or a GPU by any name."""
    return sys.platform.startswith("linux") and device == "cpu"


@contextmanager
def at_most(more_bytes: int, device: str = "cpu") -> Iterator[None]:
    """Allow the process so much more than it has now. Of several bounds at a time the widest counts."""
    if not is_bounded(device):
        yield
        return
    bound = _mapped_bytes() + more_bytes
    with _lock:
        if not _bounds:
            _remember()
        _bounds.append(bound)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _bounds.remove(bound)
            _apply()


def _mapped_bytes() -> int:
    return int(_PAGES.read_text().split()[0]) * resource.getpagesize()


def _remember() -> None:
    global _before
    _before = resource.getrlimit(resource.RLIMIT_AS)


def _apply() -> None:
    soft, hard = _before
    if _bounds:
        own = max(_bounds)
        soft = own if soft == resource.RLIM_INFINITY else min(own, soft)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
