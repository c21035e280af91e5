"""Whether the system lists the assertion that keeps a machine awake, and no more once it is released."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Awaitable, Callable

# The commands that list assertions, and the word in the lines of ours.
_LISTS = {"darwin": (["pmset", "-g", "assertions"], "caffeinate")}
_LINUX = (["systemd-inhibit", "--list", "--no-pager"], "fleetd")
_WITHIN_S, _STEP_S = 5.0, 0.1


def measure() -> dict[str, bool | None]:
    """``awake_held`` and ``awake_released``; None each where the system lists nothing.

    Raises ModuleNotFoundError if this version of fleetd takes no assertion.
    """
    keep_awake = importlib.import_module("fleetd.power.keep_awake")
    working = [True]
    assertion = keep_awake.KeepAwake(lambda: working[0])
    return asyncio.run(taken_and_released(assertion.look, lambda: working.__setitem__(0, False), listed))


def listed() -> int | None:
    """Assertions of ours that the system knows of; None if it cannot be asked."""
    command, word = _LISTS.get(sys.platform, _LINUX)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else sum(word in line for line in done.stdout.splitlines())


async def taken_and_released(
    look: Callable[[], Awaitable[None]], end_work: Callable[[], None], count: Callable[[], int | None]
) -> dict[str, bool | None]:
    """Take the assertion, see it listed, release it, and see it gone; each within five seconds."""
    if (before := count()) is None:
        return {"awake_held": None, "awake_released": None}
    await look()
    held = await _until(lambda: (count() or 0) > before)
    end_work()
    await look()
    return {"awake_held": held, "awake_released": await _until(lambda: count() == before)}


async def _until(check: Callable[[], bool]) -> bool:
    for _ in range(int(_WITHIN_S / _STEP_S)):
        if check():
            return True
        await asyncio.sleep(_STEP_S)
    return False
