"""A rank looked at from outside: a pass that is late ends it, and with it the group.

A rank that waits for another one says nothing, uses a whole core, and takes no order: nothing that it would
have to do itself shows that it stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from fleetd import limits
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.errors import GroupLost


class RankWatch:
    """``name``: of the model, for people."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd = PassProgress.create()
        self._progress = PassProgress(self._fd)

    @property
    def arguments(self) -> tuple[str, ...]:
        """That the worker is started with."""
        return ("--progress-fd", str(self._fd))

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the worker inherits."""
        return (self._fd,)

    def started(self) -> None:
        """The worker has its descriptors."""
        os.close(self._fd)

    async def late(
        self, process: asyncio.subprocess.Process, silent_s: Callable[[], float]
    ) -> GroupLost | None:
        """Why the rank has to end, once it has; None if its process has ended.

        ``silent_s``: seconds since it said anything, 0 while it need not.
        """
        clock = asyncio.get_running_loop().time
        done, passed_s = 0, clock()
        while process.returncode is None:
            await asyncio.sleep(limits.RANK_LOOK_S)
            if self._progress.under_way or self._progress.done != done:
                # Several passes may be made before it says anything.
                done, passed_s = self._progress.done, clock()
            if late_s := self._progress.late_s:
                if not done:
                    return self._lost(f"The ranks of {self._name} did not all come in time")
                return self._lost(f"A pass of {self._name} is {late_s:.1f} s late")
            if min(silent_s(), clock() - passed_s) > limits.RANK_SILENT_S:
                return self._lost(f"A rank of {self._name} is silent")
        return None

    def close(self) -> None:
        """Let go of the memory, which has a descriptor. Once the worker has ended, or did not start."""
        self._progress.close()

    def _lost(self, why: str) -> GroupLost:
        return GroupLost(
            f"{why}, after {self._progress.done} passes: its ranks are ended.",
            hint="Send the request again: it goes another way. If the machines are linked by RDMA, memory of "
            "a rank that was ended by force may stay in use until its machine starts anew.",
        )

    @staticmethod
    async def end(process: asyncio.subprocess.Process) -> None:
        """End a rank, which may not be able to take an order: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    os.kill(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.RANK_END_S):
                    await process.wait()
                return
