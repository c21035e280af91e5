"""The daemon's side of a download: start the process, pass on its progress, end it if no request waits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec

from fleetd.models import child
from fleetd.models.hub_parts import HubPartOrder
from fleetd.models.pull_lines import PullLine, PullProgress


async def pull(ref: str, models_dir: Path, hub_cache: Path | None) -> AsyncGenerator[PullProgress, None]:
    """Run ``python -m fleetd.models.pull.process`` and yield its progress.

    Raises:
        FleetError: the one that the process reports, or DownloadFailed if it ends without saying why.
    """
    arguments = ["--json", f"--models-dir={models_dir}"]
    if hub_cache is not None:
        arguments.append(f"--hub-cache={hub_cache}")
    by_hand = f"Try it by hand to see more: {sys.executable} -m fleetd.models.pull.process {ref}"
    steps = _pulling("process", [*arguments, "--", ref], f"The download of {ref}", by_hand)
    async with aclosing(steps):
        async for step in steps:
            yield step


async def pull_part(order: HubPartOrder, models_dir: Path) -> AsyncGenerator[PullProgress, None]:
    """Bring layers of a model of the hub, which is asked for what is not here. Raises as ``pull``."""
    raw = msgspec.json.encode(order).decode()
    what = f"The download of layers of {order.hub_id}"
    steps = _pulling("part_process", [f"--models-dir={models_dir}", "--", raw], what, "Try again.")
    async with aclosing(steps):
        async for step in steps:
            yield step


async def _pulling(
    module: str, arguments: list[str], what: str, hint: str
) -> AsyncGenerator[PullProgress, None]:
    # The process ends when this pipe closes: a daemon that was killed leaves no download behind.
    stdin = asyncio.subprocess.PIPE
    async with (
        child.running(f"fleetd.models.pull.{module}", *arguments, stdin=stdin) as process,
        aclosing(child.lines(process, PullLine, what, hint)) as lines,
    ):
        async for line in lines:
            if line.progress is not None:
                yield line.progress
