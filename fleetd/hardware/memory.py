"""The memory of this machine, and how much of it models may take.

    kernel, control groups ──system_memory──► total, free ──budget──► MemoryBudget

Admission in the engine, FITS HERE, routing and the card that other machines see use this one budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from fleetd.control.daemon_status import MemoryBudget
from fleetd.hardware.facts import text
from fleetd.limits import GIB

# Above this a cgroup v1 "limit" is the kernel's way to say that there is none.
_UNLIMITED_BYTES = 1 << 60
# Metal lets the GPU hold two thirds of a small Mac's memory and three quarters of a large one's.
_LARGE_MAC_BYTES = 36 * GIB


def system_memory(groups: Iterable[Path]) -> tuple[int, int]:
    """Bytes in all and bytes free, as far as these control groups let this process have them."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _cgroup_memory(groups):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def metal_limit(total_bytes: int, wired_limit_bytes: int) -> int:
    """Bytes that the GPU of a Mac may hold; the owner's ``iogpu.wired_limit_mb`` comes first.

    A worker asks Metal itself; this is for the daemon, which leaves the GPU alone.
    """
    if wired_limit_bytes:
        return wired_limit_bytes
    return total_bytes * 2 // 3 if total_bytes < _LARGE_MAC_BYTES else total_bytes * 3 // 4


def budget(
    total_bytes: int,
    available_bytes: int,
    *,
    device_limit_bytes: int = 0,
    fraction: float = 1.0,
    max_bytes: int = 0,
    overcommit: bool = False,
) -> MemoryBudget:
    """What models may take; the arguments are the fields of the result, where 0 is no limit."""

    def share(free_bytes: int) -> int:
        held = min(free_bytes, device_limit_bytes) if device_limit_bytes else free_bytes
        return min(int(held * fraction), max_bytes) if max_bytes else int(held * fraction)

    largest = share(total_bytes)
    return MemoryBudget(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        device_limit_bytes=device_limit_bytes,
        fraction=fraction,
        max_bytes=max_bytes,
        overcommit=overcommit,
        usable_bytes=largest if overcommit else share(available_bytes),
        largest_bytes=largest,
    )


def cgroup_folders(root: Path) -> Iterable[Path]:
    """This process's control group and its ancestors: the tightest limit among them is the one that kills."""
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = base / path.lstrip("/")
        # Inside a container the path may not exist under our mount; the mount's top is then our own group.
        while folder != base:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        if base.is_dir():
            yield base


def _cgroup_memory(folders: Iterable[Path]) -> Iterable[tuple[int, int]]:
    """(limit, used) of each group that has a limit."""
    for folder in folders:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = text(folder / limit_name).strip()
            if limit.isdecimal() and int(limit) < _UNLIMITED_BYTES:
                used = text(folder / used_name).strip()
                yield int(limit), int(used) - _reclaimable(folder) if used.isdecimal() else 0


def _reclaimable(folder: Path) -> int:
    """Page cache counts as used in a cgroup but gives way at once: a model file read once is no pressure."""
    for line in text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0
