"""When a rank has to end, by what it shares with the daemon and by its silence."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from fleetd import limits
from fleetd.engine.daemon_side.rank_watch import RankWatch
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.errors import GroupLost

pytestmark = pytest.mark.one_loop


@asynccontextmanager
async def rank(code: str = "import time; time.sleep(60)") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> RankWatch:
    monkeypatch.setattr(limits, "RANK_LOOK_S", 0.01)
    monkeypatch.setattr(limits, "RANK_SILENT_S", 0.2)
    # Passes are late only if a test says so.
    monkeypatch.setattr(limits, "RANK_STALL_S", 60.0)
    return RankWatch("tiny")


def shared(watch: RankWatch) -> PassProgress:
    """The rank's end."""
    (fd,) = watch.inherited
    return PassProgress(fd)


async def test_a_pass_that_is_late_ends_the_rank(watch: RankWatch) -> None:
    progress = shared(watch)
    async with rank() as process:
        with progress.within(0.05):
            lost = await watch.late(process, lambda: 0.0)
    assert isinstance(lost, GroupLost)
    assert "tiny" in lost.message
    assert "RDMA" in (lost.hint or "")


async def test_a_silent_rank_that_makes_no_pass_is_lost(watch: RankWatch) -> None:
    async with rank() as process:
        lost = await watch.late(process, lambda: 3600.0)
    assert isinstance(lost, GroupLost)
    assert "silent" in lost.message


async def test_a_silent_rank_that_makes_passes_is_not_lost(watch: RankWatch) -> None:
    progress = shared(watch)
    async with rank() as process:
        waiting = asyncio.create_task(watch.late(process, lambda: 3600.0))
        for _ in range(20):
            with progress.passing(1):
                await asyncio.sleep(0.02)
        assert not waiting.done()
        with progress.passing(1):
            process.kill()
            assert await waiting is None


async def test_a_rank_that_does_not_heed_sigterm_is_killed(
    watch: RankWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RANK_END_S", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn = f"{deaf}; print(1, flush=True); time.sleep(60)"
    async with rank(stubborn) as process:
        assert process.stdout is not None
        await process.stdout.readline()
        await watch.end(process)
        # It was sent the signal; the system takes its time.
        assert await process.wait() == -9


def test_a_watch_that_is_over_leaves_no_descriptor() -> None:
    process = psutil.Process()
    # What is left of other tests would be closed in between.
    gc.collect()
    before = process.num_fds()
    watch = RankWatch("tiny")
    watch.started()
    watch.close()
    assert process.num_fds() <= before
