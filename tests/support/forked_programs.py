"""Real workers, daemons and clients that start quickly: forked from a process that has done their imports.

    test ── descriptors, arguments ──► server ── fork ──► ``python -m fleetd.engine.worker …``
         ◄── process id, then exit status ──                ``python -m fleetd run …`` ── forks a server
                                                            of its own for its workers

In its own tests fleetctl is forked by a server that has imported fleetctl alone.

Run as a program this is the server; ``Programs`` is its client. Every other program starts as usual.
Only for Linux, where MLX on a CPU allows a fork after its import.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import psutil

AVAILABLE = sys.platform == "linux"
WORKER = "fleetd.engine.worker"
# Modules that the server runs for ``python -m NAME``, and where their ``main`` is.
ENTRIES = {WORKER: WORKER, "fleetd": "fleetd.cli", "fleetctl": "fleetctl.cli"}
_MESSAGE_BYTES = 1 << 17
_DESCRIPTORS = 16
# Received descriptors are moved above this number, then to the numbers the program expects.
_ABOVE = 600
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NUMBER_BYTES = 4
_BE_SUBREAPER = 36
#: A forked daemon writes where its threads are to its log, and goes on.
SAY_WHERE = signal.SIGUSR2
# What the libraries found in the server's environment, and what a worker says of its arithmetic comes from.
_LIBRARIES = ("MKL_CBWR", "KMP_BLOCKTIME", *_THREADS)

# Of the libraries: what the load of nearly every model of the tests imports, and a new home's identity.
_READ_BY_LOADING = (
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "cryptography.x509",
    "transformers.models.llama.configuration_llama",
    "mlx_lm.models.llama",
    "mlx_lm.models.switch_layers",
    "mlx_lm.tool_parsers.json_tools",
)

exec_as_usual = asyncio.create_subprocess_exec
# In a server: the values of _LIBRARIES.
_found: dict[str, str] = {}


def module_of(command: Sequence[str]) -> str:
    """The module that a server can run for this command, or ""."""
    is_module = len(command) > 2 and command[0] == sys.executable and command[1] == "-m"
    return command[2] if is_module and command[2] in ENTRIES else ""


class Programs:
    """A server's client.

    Args:
        log: where the server's own stderr goes.
        limits: figures of ``fleetd.limits`` that its programs have instead.
        install: modules beside this one whose ``install()`` changes its programs before they begin.
        imports: what the server imports instead of all that workers and daemons need.
        enter: a command that runs the server, and with it all its programs, somewhere else.
    """

    def __init__(
        self,
        log: Path,
        *,
        limits: Mapping[str, float] | None = None,
        install: Sequence[str] = (),
        imports: Sequence[str] = (),
        enter: Sequence[str] = (),
    ) -> None:
        self._log = log
        #: A folder for what its programs find out for each other (found_once.py).
        self.found = log.parent / "found"
        self._enter = enter
        options = {"limits": limits or {}, "install": list(install), "imports": list(imports)}
        self._options = json.dumps(options)
        self._server: subprocess.Popen[bytes] | None = None

    @cached_property
    def channel(self) -> socket.socket:
        """The way to the server, which starts when this is first asked for."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("ab") as stderr:
            self._server = subprocess.Popen(
                [*self._enter, sys.executable, __file__, str(theirs.fileno()), self._options],
                pass_fds=[theirs.fileno()],
                # Read when the libraries are loaded, which is long before a worker sets them.
                env=os.environ | dict.fromkeys(_THREADS, "1"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        return ours

    def close(self) -> None:
        """End the server, which kills what still runs."""
        if self._server is not None:
            self.channel.close()
            self._server.wait(60)

    async def exec(self, *command: str, **options: Any) -> Any:
        """In the place of ``asyncio.create_subprocess_exec``: forks workers, starts all else as usual."""
        if module_of(command) != WORKER:
            return await exec_as_usual(*command, **options)
        return await exec_forked(self.channel, *command, **options)

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, log: int
    ) -> ForkedProgram:
        """A program without input; its output goes to ``log``."""
        with open(os.devnull, "rb") as nothing:
            return ForkedProgram(self.channel, command, [nothing.fileno(), log, log], env=env, cwd=cwd)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], given: bytes | None, timeout_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        """A program to its end; ``given`` is its input, None is none. Raises subprocess.TimeoutExpired."""
        with (
            open(os.devnull, "rb") if given is None else tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            if given is not None:
                stdin.write(given)
                stdin.seek(0)
            standard = [file.fileno() for file in (stdin, stdout, stderr)]
            program = ForkedProgram(self.channel, command, standard, env=env, cwd=None)
            try:
                code = program.wait(timeout_s)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


class ForkedProgram:
    """The part of ``subprocess.Popen`` that the tests use. ``standard``: its stdin, stdout and stderr."""

    def __init__(
        self,
        channel: socket.socket,
        command: Sequence[str],
        standard: Sequence[int],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> None:
        self._status = _ask(channel, command, standard, env=env, cwd=cwd)
        self.pid = _number(self._status.recv(_NUMBER_BYTES, socket.MSG_WAITALL))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as of Popen. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            readable, _, _ = select.select([self._status], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired("fleetd", timeout or 0)
            with self._status:
                self.returncode = _number(self._status.recv(_NUMBER_BYTES, socket.MSG_WAITALL))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ToTheEnd(asyncio.StreamReaderProtocol):
    """Reads a socket to its end."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.closed = asyncio.Event()
        super().__init__(self.reader)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # nothing is ever written: the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed.set()


async def _reading(sock: socket.socket) -> tuple[asyncio.Transport, _ToTheEnd]:
    """The socket is the transport's from now on, also if this is cancelled: if anybody else closed it, its
    number would stay in asyncio's tables, and the next socket that has it would never be read."""
    sock.setblocking(False)
    return await asyncio.get_running_loop().create_connection(_ToTheEnd, sock=sock)


class ForkedWorker:
    """The part of ``asyncio.subprocess.Process`` that ``EngineProcess`` uses."""

    def __init__(self, pid: int, status: _ToTheEnd, stderr: _ToTheEnd) -> None:
        self.pid, self.stderr = pid, stderr.reader
        self.returncode: int | None = None
        self._ended = asyncio.create_task(self._wait(status, stderr))

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def _wait(self, status: _ToTheEnd, stderr: _ToTheEnd) -> int:
        self.returncode = _number(await status.reader.read(_NUMBER_BYTES))
        await status.closed.wait()
        await stderr.closed.wait()
        return self.returncode


async def exec_forked(channel: socket.socket, *command: str, **options: Any) -> Any:
    """A worker by its command; takes the options of ``asyncio.create_subprocess_exec`` that it is given."""
    # A socket for its stderr: a stream of it is closed with its last reader.
    ours, theirs = socket.socketpair()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        asked = _ask(
            channel,
            command,
            [nothing, nothing, theirs.fileno()],
            pass_fds=options["pass_fds"],
            new_session=True,
        )
    finally:
        theirs.close()
        os.close(nothing)
    try:
        pid = await _started(asked)
    except asyncio.CancelledError:
        ours.close()
        raise
    # What of both nothing else closes if this is cancelled.
    left: socket.socket | asyncio.Transport = ours
    try:
        left, status = await _reading(asked)
        _, stderr = await _reading(ours)
    except asyncio.CancelledError:
        _kill(pid)
        left.close()
        raise
    return ForkedWorker(pid, status, stderr)


async def _started(asked: socket.socket) -> int:
    """The id of the process that was asked for. If this is cancelled, that process is killed, as asyncio's
    own start does it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(asked, readable.set)
    try:
        await readable.wait()
    except asyncio.CancelledError:
        loop.remove_reader(asked)
        with asked:
            _kill(_pid(asked))
        raise
    loop.remove_reader(asked)
    return _pid(asked)


def _pid(asked: socket.socket) -> int:
    # The loop has made it a socket that does not wait.
    asked.setblocking(True)
    return _number(asked.recv(_NUMBER_BYTES, socket.MSG_WAITALL))


def _kill(pid: int) -> None:
    if pid < 0:  # no process, but how one ended: its server has
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ask(
    channel: socket.socket,
    command: Sequence[str],
    standard: Sequence[int],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
) -> socket.socket:
    """Have a program started; on the socket come its process id and, once it has ended, its exit status."""
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = [0, 1, 2, *pass_fds]
        message = {
            "command": list(command),
            "env": None if env is None else dict(env),
            "cwd": None if cwd is None else str(cwd),
            "numbers": numbers,
            "new_session": new_session,
        }
        socket.send_fds(channel, [json.dumps(message).encode()], [theirs.fileno(), *standard, *pass_fds])
    return ours


def _number(data: bytes) -> int:
    """A process id or exit status; that of a program killed with its server is SIGKILL's."""
    return int.from_bytes(data, "big", signed=True) if data else -signal.SIGKILL


# ---- The server ------------------------------------------------------------------------------------------


class _Start(NamedTuple):
    """A program that this process, just forked, is to become."""

    message: dict[str, Any]
    descriptors: list[int]


def serve(channel: socket.socket, *, kills: bool) -> _Start | None:
    """Fork until the client is gone, then None. Returns in each fork what that is to become.

    ``kills``: what still runs when the client goes is killed; otherwise it ends by itself.
    """
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    if kills:
        # What its programs leave behind is its own child then.
        ctypes.CDLL(None).prctl(_BE_SUBREAPER, 1, 0, 0, 0)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 1 << 12)
                _reap(running)
                continue
            data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _DESCRIPTORS)
            if not data:
                while kills and (left := psutil.Process().children(recursive=True)):
                    for process in left:
                        process.kill()
                    psutil.wait_procs(left)
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(before)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(descriptors[0])
                channel.detach()
                for status in running.values():
                    status.detach()
                return _Start(json.loads(data), descriptors[1:])
            running[pid] = socket.socket(fileno=descriptors[0])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                running[pid].sendall(pid.to_bytes(_NUMBER_BYTES, "big", signed=True))


def _reap(running: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in running:
                continue  # left behind by one that was started here
            with running.pop(pid) as told, contextlib.suppress(OSError):
                code = os.waitstatus_to_exitcode(status)
                told.sendall(code.to_bytes(_NUMBER_BYTES, "big", signed=True))


def become(start: _Start) -> int:
    """Run the program in this process, with its descriptors and no other; returns its exit code."""
    message = start.message
    if message["new_session"]:
        os.setsid()
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in start.descriptors]
    os.closerange(3, _ABOVE)
    for number, descriptor in zip(message["numbers"], above, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    if message["cwd"] is not None:
        os.chdir(message["cwd"])
    if message["env"] is not None:
        os.environ.clear()
        os.environ.update(message["env"])
    command = message["command"]
    module = module_of(command)
    sys.argv = [module, *command[3:]]
    if module == "fleetd":
        _fork_server()
        # Into its log: a daemon that dies of a signal, or hangs before its log begins, is heard of too.
        faulthandler.enable(2)
        faulthandler.register(SAY_WHERE, 2)
    elif module == WORKER:
        os.environ.update(_found)
    code: int | None = importlib.import_module(ENTRIES[module]).main()
    return code or 0


def _fork_server() -> None:
    """Before this process becomes a daemon and has threads: the server of its workers, its child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        # A Ctrl-C is for the daemon.
        os.setsid()
        start = serve(theirs, kills=False)
        if start is None:
            os._exit(0)
        sys.exit(become(start))
    theirs.close()

    async def forked(*command: str, **options: Any) -> Any:
        if module_of(command) != WORKER:
            return await exec_as_usual(*command, **options)
        return await exec_forked(ours, *command, **options)

    asyncio.create_subprocess_exec = forked


def _import_for_programs() -> None:
    from fleetd.engine.cpu import products

    products.preload_blas()
    products.preload_blas = lambda: products.exact()  # it insists on being first, and has been
    from fleetd.engine import worker
    from fleetd.startup import import_index, lean_imports

    worker.quiet_libraries()

    # The index that the tests' own process stores (conftest.py).
    with import_index.stored(Path(__file__).parents[2] / ".cache"):
        for module in _READ_BY_LOADING:
            importlib.import_module(module)
    # As ``fleetd run`` does. A daemon's imports took as long as all else that it does until it is ready.
    lean_imports.load()
    importlib.import_module("fleetd.app")
    from fleetctl.cli import VERBS

    for verb in VERBS:
        importlib.import_module(f"fleetctl.verbs.{verb}")

    _found.update((name, os.environ[name]) for name in _LIBRARIES if name in os.environ)


def main(channel: socket.socket, options: dict[str, Any]) -> int:
    from fleetd import limits

    for name, value in options["limits"].items():
        setattr(limits, name, value)
    if options["imports"]:
        for module in options["imports"]:
            importlib.import_module(module)
    else:
        _import_for_programs()
    for module in options["install"]:
        importlib.import_module(module).install()
    # It lives through all tests: what is there now need not be looked at again by a collector in each fork.
    import gc

    gc.collect()
    gc.freeze()
    start = serve(channel, kills=True)
    return 0 if start is None else become(start)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])))
