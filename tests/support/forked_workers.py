"""Real engine workers that start in a fraction of the time: forked from a process that has done the imports.

    test ── fds, arguments ──► nursery ── fork ──► worker, as ``python -m fleetd.engine.worker`` is one
         ◄── process id ─────

For tests that kill workers by the hundred. Run as a program this is the nursery, to which ``Nursery``
is the other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 1 << 16
_FDS = 4
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Forked:
    """What ``EngineProcess`` uses of an ``asyncio.subprocess.Process``."""

    stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._exited)

    @property
    def returncode(self) -> int | None:
        return -signal.SIGKILL if self._ended.is_set() else None

    async def wait(self) -> int:
        await self._ended.wait()
        return -signal.SIGKILL

    def _exited(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._ended.set()


class Nursery:
    """``limits``: figures of ``fleetd.limits`` that its workers have instead. ``log``: their stderr."""

    def __init__(self, log: Path, **limits: float) -> None:
        self._ours, theirs = socket.socketpair()
        self._one_at_a_time = threading.Lock()
        with theirs, log.open("ab") as stderr:
            arguments = [sys.executable, __file__, str(theirs.fileno()), json.dumps(limits)]
            self._process = subprocess.Popen(
                arguments,
                pass_fds=[theirs.fileno()],
                # Read when the libraries are loaded, which is long before a worker sets them.
                env=os.environ | dict.fromkeys(_THREADS, "1"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    async def exec(self, *command: str, pass_fds: Sequence[int], **_: Any) -> Forked:
        """In the place of ``asyncio.create_subprocess_exec``, for a worker's command."""
        return Forked(await asyncio.to_thread(self._fork, list(command), list(pass_fds)))

    def _fork(self, command: list[str], fds: list[int]) -> int:
        where = {str(fd): number for number, fd in enumerate(fds)}
        # The child has its own numbers for them.
        arguments: list[str | int] = [where.get(word, word) for word in command]
        with self._one_at_a_time:
            socket.send_fds(self._ours, [json.dumps(arguments).encode()], fds)
            return int.from_bytes(self._ours.recv(4), "big")

    def close(self) -> None:
        self._ours.close()
        self._process.wait(20)


# ---- the nursery -----------------------------------------------------------------------------------------


def main(channel: socket.socket, changes: dict[str, float]) -> None:
    from fleetd import limits
    from fleetd.engine import cpu

    for name, value in changes.items():
        setattr(limits, name, value)
    cpu.preload_blas()
    cpu.preload_blas = lambda: None  # it insists on being first, and has been
    from fleetd.engine import loading

    loading.quiet_libraries()
    import scarce_memory
    import transformers  # noqa: F401

    import fleetd.engine.helper_loop
    import fleetd.engine.scheduler
    import fleetd.engine.stage_loading
    import fleetd.engine.worker  # noqa: F401

    scarce_memory.install()
    # Nobody here asks how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _FDS)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become_worker(json.loads(message), fds)
        for fd in fds:
            os.close(fd)
        channel.sendall(pid.to_bytes(4, "big"))


def _become_worker(arguments: list[str | int], fds: list[int]) -> None:
    from fleetd.engine import worker

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        words = [str(fds[word]) if isinstance(word, int) else word for word in arguments]
        sys.argv = words[words.index("fleetd.engine.worker") :]
        code = worker.main()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
