"""Workers whose parts of groups run out of memory when a test says so, in the words of mlx.

A worker is short of memory from its next step on once ``path`` of its process id exists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FOLDER = "FLEETD_TEST_SHORT"
_MLX = "[malloc] Unable to allocate 1048576 bytes."


def path(pid: int) -> Path:
    return Path(os.environ[FOLDER]) / str(pid)


def scarce(function: Any) -> Any:
    """The function of a worker, until that is short of memory."""

    def called(*given: Any, **named: Any) -> Any:
        if path(os.getpid()).exists():
            raise RuntimeError(_MLX)
        return function(*given, **named)

    return called


def install() -> None:
    """Into a process that is to become a worker."""
    from fleetd.engine.groups.group_model import GroupModel
    from fleetd.engine.groups.member_stage import MemberStage

    for kind, name in ((MemberStage, "_run"), (GroupModel, "begin")):
        setattr(kind, name, scarce(getattr(kind, name)))
