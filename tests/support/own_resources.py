"""What this process has, and what of it an earlier test left."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil


def descriptors() -> int:
    """Descriptors, but those of objects that only wait to be collected.

    An earlier test leaves such objects: a count that has them falls whenever Python collects them.
    """
    gc.collect()
    return psutil.Process().num_fds()


def grown(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """By how much each count grew. What an earlier test left may go meanwhile, which is no leak."""
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def named() -> Counter[str]:
    """Descriptors by what they are, for a test that fails."""
    process = psutil.Process()
    sockets: Any = process.net_connections("all")
    files = Counter(f"file {file.path}" for file in process.open_files())
    return files + Counter(f"socket {one.laddr} {one.raddr} {one.status}" for one in sockets)
