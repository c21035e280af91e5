"""Bounds the memory of this process while code runs over a publisher's files: a template, a config.

The kernel refuses what goes beyond, and Python raises MemoryError. The whole process is bounded, so what its
other threads need meanwhile has to be allowed, too. On Linux only: macOS takes the limit and ignores it.
For the CPU only: the driver of a GPU reserves more addresses than there is memory. Elsewhere the daemon looks
at the worker's memory (``memory_watch``).
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

_PAGES = Path("/proc/self/statm")


@dataclass(eq=False)
class _Bound:
    n_bytes: int
    thread: int


_lock = threading.Lock()
_bounds: list[_Bound] = []
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_promised = 0


def is_bounded(device: str) -> bool:
    """True if ``at_most`` bounds a process that computes on this device: cpu, or a GPU by any name."""
    return sys.platform.startswith("linux") and device == "cpu"


@contextmanager
def at_most(more_bytes: int, device: str = "cpu") -> Iterator[None]:
    """Allow the process so much more than it has now, beside what other threads are ``promised``, before and
    meanwhile.

    Of several bounds of one thread the innermost counts, of several threads' the widest.
    """
    if not is_bounded(device):
        yield
        return
    with _lock:
        if not _bounds:
            _remember()
        bound = _Bound(_mapped_bytes() + more_bytes + _promised, threading.get_ident())
        _bounds.append(bound)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _bounds.remove(bound)
            _apply()


@contextmanager
def narrowed(more_bytes: int) -> Iterator[None]:
    """``at_most`` for a part of what is bounded already; where nothing is, this bounds nothing either."""
    with at_most(more_bytes) if _bounds else nullcontext():
        yield


def promised(n_bytes: int) -> None:
    """Other threads may take so much memory in all from now on."""
    global _promised
    with _lock:
        more, _promised = n_bytes - _promised, n_bytes
        # What is given back may stay mapped, to be used again.
        if more > 0 and _bounds:
            for bound in _bounds:
                bound.n_bytes += more
            _apply()


def _mapped_bytes() -> int:
    return int(_PAGES.read_text().split()[0]) * resource.getpagesize()


def _remember() -> None:
    global _before
    _before = resource.getrlimit(resource.RLIMIT_AS)


def _apply() -> None:
    soft, hard = _before
    if _bounds:
        own = max({bound.thread: bound.n_bytes for bound in _bounds}.values())
        soft = own if soft == resource.RLIM_INFINITY else min(own, soft)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
