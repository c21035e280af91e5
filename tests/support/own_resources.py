"""What a process has, and by how much that grew: of this one, and of a worker."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import psutil

#: Of a worker: a pool starts a thread for each processor when it first has so much to do.
POOL_THREADS: Final = MappingProxyType({"threads": os.cpu_count() or 1})


def descriptors() -> int:
    """Descriptors, but those of objects that only wait to be collected.

    An earlier test leaves such objects: a count that has them falls whenever Python collects them.
    """
    gc.collect()
    return psutil.Process().num_fds()


def of_worker(pid: int | None) -> dict[str, int]:
    """Descriptors and threads of a worker."""
    process = psutil.Process(pid)
    return {"descriptors": process.num_fds(), "threads": process.num_threads()}


def grown(
    now: Mapping[str, int], before: Mapping[str, int], spare: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """By how much each count grew, of those that grew by more than ``spare``. What an earlier test left may
    go meanwhile, which is no leak."""
    more = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in more.items() if count > spare.get(name, 0)}


def named() -> Counter[str]:
    """Descriptors by what they are, for a test that fails."""
    process = psutil.Process()
    sockets: Any = process.net_connections("all")
    files = Counter(f"file {file.path}" for file in process.open_files())
    return files + Counter(f"socket {one.laddr} {one.raddr} {one.status}" for one in sockets)
