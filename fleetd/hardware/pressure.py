"""How short the whole system is of memory, in its own judgement.

macOS has a level, which it also acts on: it compresses and swaps at "warning" and ends programs at
"critical". Linux has the share of time in which programs wait for memory; alone it also grows while a file is
read that is larger than the page cache, so it counts only if little is free.
"""

from __future__ import annotations

import re

from fleetd import limits
from fleetd.control.daemon_status import Pressure

#: The sysctl of macOS, and its values (NOTE_MEMORYSTATUS_PRESSURE_* of <sys/event.h>).
DARWIN_LEVEL = "kern.memorystatus_vm_pressure_level"
_DARWIN: dict[int | None, Pressure] = {1: "normal", 2: "warning", 4: "critical"}
_STALLED = re.compile(r"^(some|full) avg10=([0-9.]+)", re.MULTILINE)


def of_level(level: int | None) -> Pressure:
    """The pressure by macOS's level; None is a kernel that does not say."""
    return _DARWIN.get(level, "")


def of_stalls(text: str, free_share: float) -> Pressure:
    """The pressure by /proc/pressure/memory and the share of memory that is free."""
    stalled = {kind: float(percent) for kind, percent in _STALLED.findall(text)}
    if not stalled:
        return ""
    if free_share < limits.CRITICAL_FREE_SHARE and stalled.get("full", 0.0) >= limits.STALLED_PERCENT:
        return "critical"
    if free_share < limits.WARNING_FREE_SHARE and stalled.get("some", 0.0) >= limits.STALLED_PERCENT:
        return "warning"
    return "normal"
