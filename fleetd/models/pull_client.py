"""The daemon's side of a download: start the process, pass on its lines, end it when nobody wants them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import DownloadFailed, from_code
from fleetd.models.progress import PullLine, PullProgress


async def pull(ref: str, models_dir: Path, hub_cache: Path | None) -> AsyncGenerator[PullProgress, None]:
    """Run ``python -m fleetd.models.pull`` and yield its progress.

    Raises:
        FleetError: the one that the process reports, or DownloadFailed if it ends without a word.
    """
    arguments = ["-m", "fleetd.models.pull", "--json", f"--models-dir={models_dir}"]
    if hub_cache is not None:
        arguments.append(f"--hub-cache={hub_cache}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        "--",
        ref,
        # The process ends when this pipe closes: a daemon that was killed leaves no download behind.
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=limits.PULL_LINE_BYTES,
        start_new_session=True,  # so that pip, its child, goes with it
    )
    try:
        finished = False
        seen, moved_at = None, time.monotonic()
        while (line := await _next_line(process)) is not None:
            if line.error is not None:
                raise from_code(line.error.code, line.error.message, hint=line.error.hint)
            if line.progress is not None:
                if line.progress != seen or line.progress.stage == "waiting":
                    seen, moved_at = line.progress, time.monotonic()
                elif time.monotonic() - moved_at > limits.PULL_STALL_S:
                    raise DownloadFailed(
                        f"No byte of {ref} came for {limits.PULL_STALL_S:.0f} s.",
                        hint="Check the network and pull again.",
                    )
                yield line.progress
            finished = finished or line.done is not None
        if not finished:
            raise DownloadFailed(
                f"The download of {ref} ended unexpectedly (exit status {await process.wait()}).",
                hint=f"Try it by hand to see more: {sys.executable} -m fleetd.models.pull {ref}",
            )
    finally:
        await _end(process)


async def _next_line(process: asyncio.subprocess.Process) -> PullLine | None:
    stdout = process.stdout
    if stdout is None:
        raise AssertionError("stdout is a pipe")
    try:
        async with asyncio.timeout(limits.PULL_SILENCE_S):
            raw = await stdout.readline()
        return msgspec.json.decode(raw, type=PullLine) if raw else None
    except TimeoutError:
        raise DownloadFailed(
            f"The download said nothing for {limits.PULL_SILENCE_S:.0f} s and was ended.", hint="Try again."
        ) from None
    except (ValueError, msgspec.DecodeError) as error:
        raise DownloadFailed(f"The download process spoke nonsense ({error}).", hint="Try again.") from None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the whole group, also one whose leader has gone; reap; close the pipes."""
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
