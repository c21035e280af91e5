"""A process of this machine that has nothing to do with the test: its parent has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import TracebackType

# It waits until its parent has ended, before which it is no stranger. It comes in as soon as somebody
# listens, says numbers, and counts what it hears until it is sent away.
_STRANGER = """
import os, socket, sys, time
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.005)
while True:
    try:
        sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.005)
print("in", flush=True)
heard = 0
try:
    sock.sendall(bytes(range(256)))
    while data := sock.recv(4096):
        heard += len(data)
except OSError:
    pass
print("out", heard, flush=True)
"""
_PARENT = (
    "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:], str(os.getpid())])"
)


class Stranger:
    """Connects to a port of the loopback interface before anybody else does."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PARENT, _STRANGER, str(port)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._process.wait()

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Its group has the id of the parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdout is not None
        self._process.stdout.close()
