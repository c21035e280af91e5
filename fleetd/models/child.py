"""The daemon's side of a process that downloads or copies a model: start it, pass on its lines, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import msgspec

from fleetd import limits
from fleetd.errors import DownloadFailed, from_code
from fleetd.models.pull_lines import PullLine
from fleetd.text.decoding import from_json

Line = TypeVar("Line", bound=PullLine)


@contextlib.asynccontextmanager
async def running(module: str, *arguments: str, stdin: int) -> AsyncIterator[Process]:
    """The process ``python -m MODULE ARGUMENTS``. On leaving, one that has not ended is killed and reaped."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=limits.PULL_LINE_BYTES,
        start_new_session=True,  # so that a child of its own (pip) goes with it
    )
    try:
        yield process
    finally:
        await _end(process)


async def lines(process: Process, kind: type[Line], what: str, hint: str) -> AsyncGenerator[Line, None]:
    """The lines that the process writes, until it ends.

    Args:
        what: the name of the process's work, for errors.
        hint: the hint of the error if the process ends without saying why.

    Raises:
        FleetError: the one that it reports, or DownloadFailed if it hangs, or ends without saying why.
    """
    finished = False
    seen, moved_at = None, time.monotonic()
    while (line := await _next_line(process, kind, what)) is not None:
        if line.error is not None:
            raise from_code(line.error.code, line.error.message, hint=line.error.hint)
        if line.progress is not None:
            if line.progress != seen or line.progress.stage == "waiting":
                seen, moved_at = line.progress, time.monotonic()
            elif time.monotonic() - moved_at > limits.PULL_STALL_S:
                raise DownloadFailed(
                    f"{what} made no progress for {limits.PULL_STALL_S:.0f} s.",
                    hint="Check the network and pull again.",
                )
        finished = finished or line.done is not None
        yield line
    if not finished:
        raise DownloadFailed(f"{what} ended unexpectedly (exit status {await process.wait()}).", hint=hint)


async def _next_line(process: Process, kind: type[Line], what: str) -> Line | None:
    stdout = process.stdout
    if stdout is None:
        raise AssertionError("stdout is a pipe")
    try:
        async with asyncio.timeout(limits.PULL_SILENCE_S):
            raw = await stdout.readline()
        return from_json(raw, kind) if raw else None
    except TimeoutError:
        raise DownloadFailed(
            f"{what} said nothing for {limits.PULL_SILENCE_S:.0f} s and was ended.", hint="Try again."
        ) from None
    except (ValueError, msgspec.DecodeError) as error:
        raise DownloadFailed(f"{what} spoke nonsense ({error}).", hint="Try again.") from None


async def _end(process: Process) -> None:
    """Kill the process and its group, even if the process has ended; reap it; close the pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    # Reading to the end lets the transport close; after the kill it is short.
    if process.stdout is not None:
        with contextlib.suppress(ValueError):
            while await process.stdout.read(limits.PULL_LINE_BYTES):
                pass
    await process.wait()
