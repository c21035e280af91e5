"""Keeps this machine from sleeping for lack of use, exactly while it computes for somebody.

caffeinate on macOS and systemd-inhibit on Linux hold the system's own assertion for it, as a child process
that ends with the daemon, however that ends: caffeinate waits for the daemon's process, and what
systemd-inhibit runs reads a pipe of the daemon until it breaks. A closed lid still puts the machine to sleep,
and so does a person who insists.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

import psutil

from fleetd import limits
from fleetd.control.daemon_status import PowerView
from fleetd.power.slept import SleepClock
from fleetd.process.observe import get_logger
from fleetd.text.terminal_text import printable

log = get_logger("fleetd.power")

_LOOK_S = 1.0


def commands(platform: str, pid: int, *, portable: bool) -> list[list[str]]:
    """The commands that hold an assertion for the process ``pid``, the best first; none if none is known."""
    if platform == "darwin":
        # A Mac that was woken over the network sleeps again soon, and -s holds that off too. A laptop would
        # go on with its lid closed while it is charged.
        return [["caffeinate", "-i", *([] if portable else ["-s"]), "-w", str(pid)]]
    if platform.startswith("linux"):
        said = ["--who=fleetd", "--why=It computes for a person or a paired machine.", "--mode=block", "cat"]
        # GNOME's timer respects locks on sleep alone, which a service without a session may not take. Locks
        # on idleness, which systemd's own timer respects, are allowed to all.
        return [["systemd-inhibit", f"--what={what}", *said] for what in ("sleep:idle", "idle")]
    return []


def own_commands() -> list[list[str]]:
    """Those of this process; a machine whose battery cannot be read may be a laptop."""
    try:
        portable = psutil.sensors_battery() is not None
    except Exception:  # whatever a platform's probe raises, the machine computes
        portable = True
    return commands(sys.platform, os.getpid(), portable=portable)


def battery_share() -> float | None:
    """The charge of the battery that the machine runs on, from 0 to 1; None on mains and where unknown."""
    try:
        found = psutil.sensors_battery()
    except Exception:
        return None
    return None if found is None or found.power_plugged is not False else found.percent / 100


class KeepAwake:
    """Args:
    working: whether this machine computes for anybody now.
    least_battery: on battery below this share the machine may sleep.
    candidates: as ``commands`` has them.
    """

    def __init__(
        self,
        working: Callable[[], bool],
        *,
        enabled: bool = True,
        least_battery: float = 0.0,
        candidates: Sequence[Sequence[str]] | None = None,
        battery: Callable[[], float | None] = battery_share,
        clock: SleepClock | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._working = working
        self._enabled = enabled
        self._least_battery = least_battery
        self._candidates = own_commands() if candidates is None else candidates
        self._battery = battery
        self._clock = clock or SleepClock()
        self._monotonic = monotonic
        # Not of the event loop: the daemon only looks at it, and it may outlast the loop by a moment.
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._next = 0
        self._again_s = float("-inf")
        self._refused = ""

    @property
    def view(self) -> PowerView:
        return PowerView(self._process is not None and self._process.poll() is None, self._refused)

    async def run(self) -> None:
        """Look every second until cancelled."""
        try:
            while True:
                if slept_s := self._clock.slept_s():
                    # Peers that it worked for have long gone on without it; their sessions end now.
                    log.warning("machine.slept", slept_s=round(slept_s), working=self._working())
                await self.look()
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._release()

    async def look(self) -> None:
        """Take the assertion, keep it or let it go."""
        if not (self._enabled and self._working()):
            await self._release()
            return
        share = self._battery()
        if share is not None and share < self._least_battery:
            await self._release()
            self._refuse(f"the battery is at {share:.0%}, less than power.least_battery")
            return
        if self._process is None and self._monotonic() >= self._again_s:
            self._take()
        elif self._process is not None and self._process.poll() is not None:
            await self._try_next(self._process.returncode)

    def _take(self) -> None:
        if self._next >= len(self._candidates):
            self._give_up("this system has no command for it")
            return
        command = self._candidates[self._next]
        # A file: what systemd-inhibit runs may hold a pipe open after it has ended itself.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                # A group of its own: a Ctrl-C in the daemon's terminal must not end it before the answers
                # that are drained.
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            self._give_up(f"{command[0]}: {(error.strerror or str(error)).lower()}")
        else:
            self._refused = ""

    async def _try_next(self, code: int) -> None:
        """It has ended by itself: it was refused, or somebody ended it."""
        said = b""
        if self._said is not None:
            self._said.seek(0)
            said = self._said.read(limits.POWER_WORDS_BYTES)
        await self._release()
        self._next += 1
        if self._next < len(self._candidates):
            self._take()
        else:
            words = printable(said.decode(errors="replace").strip()) or f"it ended with {code}"
            self._give_up(f"{self._candidates[-1][0]}: {words}")

    def _give_up(self, reason: str) -> None:
        self._next, self._again_s = 0, self._monotonic() + limits.POWER_AGAIN_S
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            log.info("power.not_held", reason=reason, note="the machine may sleep while it computes")
        self._refused = reason

    async def _release(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._said is not None:
            self._said.close()
        if process.stdin is not None:
            process.stdin.close()
        # The group: systemd-inhibit does not end what it runs.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, limits.POWER_COMMAND_S)
                return
