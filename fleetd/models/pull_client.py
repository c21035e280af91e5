"""The daemon's side of a download: start the process, pass on its progress, end it if no request waits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from fleetd.models import child
from fleetd.models.pull_lines import PullLine, PullProgress


async def pull(ref: str, models_dir: Path, hub_cache: Path | None) -> AsyncGenerator[PullProgress, None]:
    """Run ``python -m fleetd.models.pull.process`` and yield its progress.

    Raises:
        FleetError: the one that the process reports, or DownloadFailed if it ends without saying why.
    """
    arguments = ["--json", f"--models-dir={models_dir}"]
    if hub_cache is not None:
        arguments.append(f"--hub-cache={hub_cache}")
    what = f"The download of {ref}"
    by_hand = f"Try it by hand to see more: {sys.executable} -m fleetd.models.pull.process {ref}"
    # The process ends when this pipe closes: a daemon that was killed leaves no download behind.
    stdin = asyncio.subprocess.PIPE
    async with (
        child.running("fleetd.models.pull.process", *arguments, "--", ref, stdin=stdin) as process,
        aclosing(child.lines(process, PullLine, what, by_hand)) as lines,
    ):
        async for line in lines:
            if line.progress is not None:
                yield line.progress
