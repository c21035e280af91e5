"""Reports to systemd: the daemon is ready, is stopping, is alive.

The protocol is one datagram per message to the socket named by NOTIFY_SOCKET. Without that variable every
call does nothing, so callers need no condition. The watchdog ping is sent by the event loop itself: a loop
that is stuck stops pinging, and the service manager restarts the daemon.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

# systemd kills after WATCHDOG_USEC without a ping; its manual recommends half of that as the interval.
_PINGS_PER_TIMEOUT = 2


class Notifier:
    """Sends sd_notify messages. Never raises: the daemon serves whether or not they arrive."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environ)

    @property
    def enabled(self) -> bool:
        return self._address.startswith(("/", "@"))

    @property
    def ping_every_s(self) -> float | None:
        """Seconds between watchdog pings; None if no watchdog watches this process."""
        return self._watchdog_s / _PINGS_PER_TIMEOUT if self.enabled and self._watchdog_s else None

    def send(self, *assignments: str) -> None:
        """Send ``NAME=value`` lines in one datagram, if a service manager listens."""
        if not self.enabled:
            return
        # A leading @ stands for the NUL byte of Linux's abstract namespace.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)
            ) as sock:
                # A full queue must not stall the event loop.
                sock.setblocking(False)
                sock.sendto("\n".join(assignments).encode(), address)
        except OSError:
            pass

    def ready(self, status: str) -> None:
        self.send("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        self.send("STOPPING=1", f"STATUS={status}")

    async def watchdog(self) -> None:
        """Ping for as long as the loop turns; returns at once if no watchdog was asked for."""
        every_s = self.ping_every_s
        if every_s is None:
            return
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(every_s)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    # WATCHDOG_PID names the process meant: the variables are inherited by children that must not ping.
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdecimal() else 0.0
