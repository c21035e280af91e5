"""The parts that both processes of a copy share: messages from their daemon, and how they end.

Standard input is a Unix socket that brings messages and sockets (``sealed.handoff``). A process ends at once
when the daemon closes it, or dies.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

from fleetd.errors import DownloadFailed, FleetError, ProtocolError
from fleetd.models.reporter import Reporter
from fleetd.process import priority
from fleetd.sealed import handoff

# Copying is not urgent: it must not take cores from an engine.
_NICE = 5

Message = tuple[bytes, socket.socket | None]


class DaemonLines:
    """The messages that come on standard input, read by a thread."""

    def __init__(self) -> None:
        self._channel = socket.fromfd(0, socket.AF_UNIX, socket.SOCK_STREAM)
        self._messages: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def message(self) -> Message:
        """The bytes of the next message, and the socket that came with it, if one did. Blocks."""
        return self._messages.get()

    def stream(self) -> tuple[bytes, socket.socket]:
        """The next message and its socket. Blocks. Raises ProtocolError if it has none."""
        body, sock = self.message()
        if sock is None:
            raise ProtocolError("The daemon handed over no socket.")
        return body, sock

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(handoff.receive(self._channel))
        except (EOFError, OSError, ProtocolError):
            # The daemon has gone, and the main thread may be waiting for a disk or a lock.
            os._exit(1)


def run(work: Callable[[DaemonLines, Reporter], str]) -> int:
    """The process's main function: do ``work`` and report its result or error. Returns the exit status."""
    priority.yield_cores(_NICE)
    reporter = Reporter(as_json=True)
    try:
        name = work(DaemonLines(), reporter)
    except FleetError as error:
        reporter.close(None, error)
        return 1
    except Exception as error:  # the boundary of the process: the daemon gets a sentence, not a traceback
        reporter.close(
            None, DownloadFailed(f"The copy failed: {error!r}.", hint="Try again; then report this.")
        )
        return 1
    reporter.close(name, None)
    return 0
