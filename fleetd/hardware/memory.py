"""The memory of this machine, and how much of it models may take.

    psutil, else the kernel    ──system_memory──► total, free, pressure ─┐
    control groups             ──┘                                        ├──budget──► MemoryBudget
    Metal, or a card's own memory ──────────────────────────────────────┘

Admission in the engine, FITS HERE, routing and the card that other machines see use this one budget.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import HardwareReading, MemoryBudget, Pressure
from fleetd.hardware import darwin
from fleetd.hardware.facts import text
from fleetd.hardware.pressure import DARWIN_LEVEL, of_level, of_stalls
from fleetd.limits import GIB
from fleetd.process.observe import get_logger

log = get_logger("fleetd.hardware")

# Above this a cgroup v1 "limit" is the kernel's way to say that there is none.
_UNLIMITED_BYTES = 1 << 60
# What Metal lets the GPU hold where nothing was asked yet: two thirds of a small Mac's memory, and three
# quarters of a large one's. Newer versions of macOS give more.
_LARGE_MAC_BYTES = 36 * GIB


class MemoryReading(msgspec.Struct, frozen=True):
    """``free_unknown``: nothing says what is free, and ``available_bytes`` is all that there is."""

    total_bytes: int
    available_bytes: int
    free_unknown: bool = False
    pressure: Pressure = ""


def system_memory(groups: Iterable[Path], root: Path = Path("/")) -> MemoryReading:
    """The system's memory, as far as these control groups let this process have it. Never raises."""
    total, free = _whole_system()
    # A daemon that believes it has no memory would load no model.
    total = total or limits.ASSUMED_MEMORY_BYTES
    available = total if free is None else min(free, total)
    for limit, used in _cgroup_memory(groups):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MemoryReading(total, available, free is None, _pressure(root, available / total if total else 0.0))


def _whole_system() -> tuple[int, int | None]:
    """Bytes in all, 0 if nothing says that, and bytes free, None if nothing says that."""
    try:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    except Exception as error:
        _say_unread(f"{type(error).__name__}: {error}")
    kernel = darwin.kernel()
    if kernel is not None:
        return kernel.integer("hw.memsize") or _pages("SC_PHYS_PAGES"), kernel.free_bytes()
    return _pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES") or None


@cache
def _say_unread(error: str) -> None:
    """Once for each error: memory is read several times a second."""
    log.warning("memory.unread", error=error, note="the kernel is asked without psutil")


def _pages(name: str) -> int:
    """A count of pages that ``sysconf`` knows, in bytes; 0 if it does not."""
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _pressure(root: Path, free_share: float) -> Pressure:
    kernel = darwin.kernel()
    if kernel is not None:
        return of_level(kernel.integer(DARWIN_LEVEL))
    return of_stalls(text(root / "proc/pressure/memory"), free_share)


def resident_bytes(pid: int) -> int:
    """What a process holds of the memory now; 0 if it is gone, or if the system does not tell."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return 0


def metal_limit(total_bytes: int, wired_limit_bytes: int, told_bytes: int = 0) -> int:
    """Bytes that the GPU of a Mac may hold: the owner's ``iogpu.wired_limit_mb``, else what Metal told, else
    a guess.
    """
    if wired_limit_bytes:
        return min(wired_limit_bytes, total_bytes)
    return told_bytes or (total_bytes * 2 // 3 if total_bytes < _LARGE_MAC_BYTES else total_bytes * 3 // 4)


def of_card(memory: MemoryReading, card_bytes: int, card_free_bytes: int) -> MemoryReading:
    """The same reading for models that live in a card's own memory; 0 bytes of it is a machine without."""
    if not card_bytes:
        return memory
    return replace(memory, total_bytes=card_bytes, available_bytes=min(card_free_bytes, card_bytes))


def budget(
    memory: MemoryReading,
    *,
    device_limit_bytes: int = 0,
    held_bytes: int = 0,
    fraction: float = 1.0,
    max_bytes: int = 0,
    overcommit: bool = False,
) -> MemoryBudget:
    """What models may take; the arguments are the fields of the result, of which 0 is no limit.

    ``fraction`` and ``max_bytes`` bound the sum of all models: what they hold is taken off.

    Args:
        held_bytes: what loaded models hold already.
    """

    def share(free_bytes: int, held_bytes: int) -> int:
        # What models would find if none held anything.
        reach = min(free_bytes + held_bytes, memory.total_bytes, device_limit_bytes or memory.total_bytes)
        left = min(int(reach * fraction), max_bytes or reach) - held_bytes
        return max(0, min(free_bytes, left))

    largest = share(memory.total_bytes, 0)
    now = 0 if memory.pressure == "critical" else share(memory.available_bytes, held_bytes)
    if overcommit:
        now = max(0, min(largest, max_bytes - held_bytes)) if max_bytes else largest
    return MemoryBudget(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        free_unknown=memory.free_unknown,
        pressure=memory.pressure,
        device_limit_bytes=device_limit_bytes,
        held_bytes=held_bytes,
        fraction=fraction,
        max_bytes=max_bytes,
        overcommit=overcommit,
        usable_bytes=now,
        largest_bytes=largest,
    )


def machine_budget(
    machine: HardwareReading,
    available_bytes: int,
    held_bytes: int,
    *,
    fraction: float,
    max_bytes: int,
    overcommit: bool,
) -> MemoryBudget:
    """``budget`` of a machine's last reading, with so many bytes free of the memory that models live in."""
    return budget(
        MemoryReading(machine.model_memory_bytes, available_bytes, machine.free_unknown, machine.pressure),
        device_limit_bytes=machine.device_limit_bytes,
        held_bytes=held_bytes,
        fraction=fraction,
        max_bytes=max_bytes,
        overcommit=overcommit,
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
