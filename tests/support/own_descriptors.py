"""Descriptors of this process that something still uses."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import psutil


def count() -> int:
    """Without those of objects that only wait to be collected.

    An earlier test leaves such objects: a count that has them falls whenever Python collects them.
    """
    gc.collect()
    return psutil.Process().num_fds()


def named() -> Counter[str]:
    """What they are, for a test that fails."""
    process = psutil.Process()
    sockets: Any = process.net_connections("all")
    files = Counter(f"file {file.path}" for file in process.open_files())
    return files + Counter(f"socket {one.laddr} {one.raddr} {one.status}" for one in sockets)
