"""What models may take of a machine's memory, and how that figure comes about. Pure."""

from __future__ import annotations

from fleetctl.render.text import size
from fleetd.control.daemon_status import MemoryBudget

_PRESSURE = {
    "warning": "The system is short of memory: models that are idle for a minute are unloaded.",
    "critical": "The system is critically short of memory: idle models are unloaded, and none is loaded.",
}


def memory_lines(memory: MemoryBudget, evictable_bytes: int = 0) -> list[str]:
    """The figure with its parts and, where the settings override what is free, a warning."""
    if not memory.total_bytes:
        return []
    free, total = size(memory.available_bytes), size(memory.total_bytes)
    known = not (memory.overcommit or memory.free_unknown)
    parts = [f"{free} free of {total}" if known else f"{total} of memory"]
    if memory.device_limit_bytes:
        parts.append(f"of which the GPU may hold {size(memory.device_limit_bytes)}")
    parts.append(f"times {memory.fraction:g} (engine.memory_fraction)")
    if memory.max_bytes:
        parts.append(f"at most {size(memory.max_bytes)} (engine.max_memory_bytes)")
    if memory.held_bytes:
        parts.append(f"with the {size(memory.held_bytes)} that models hold")
    lines = [f"Models may take {size(memory.usable_bytes)} now: {', '.join(parts)}."]
    if evictable_bytes:
        lines.append(f"Idle models give back {size(evictable_bytes)} where another needs it.")
    if memory.pressure in ("warning", "critical"):
        lines.append(_PRESSURE[memory.pressure])
    if memory.free_unknown:
        lines.append("This system does not say what is free: models load as if all memory were.")
    if memory.overcommit:
        lines.append("engine.overcommit is on: what is free is not looked at, and the machine may swap.")
    return lines
