"""Ways to wait for work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from fleetd.requests.concurrency import with_beats, with_heartbeats


async def test_work_that_goes_on_is_said_to_go_on_until_it_has_a_result() -> None:
    enough, beats = asyncio.Event(), list[int]()

    async def work() -> str:
        await enough.wait()
        return "done"

    def beat() -> None:
        beats.append(len(beats))
        if len(beats) == 3:
            enough.set()

    assert await with_beats(work(), 0.0, beat) == "done"
    assert beats == [0, 1, 2]


@pytest.mark.parametrize("ends", ["beat", "cancelled"])
async def test_work_ends_with_what_waits_for_it(ends: str) -> None:
    begun, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    def beat() -> None:
        if ends == "beat":
            raise ConnectionError("gone")

    waiting = asyncio.create_task(with_beats(work(), 0.01, beat))
    await begun.wait()
    if ends == "cancelled":
        waiting.cancel()
    with pytest.raises((ConnectionError, asyncio.CancelledError)):
        await waiting
    assert ended == ["work"]


async def test_who_is_cancelled_twice_waits_all_the_same_until_the_work_has_ended() -> None:
    """As a request of another machine is that leaves, and is then lost: what the work uses is closed next."""
    begun, ending, may_end, ended = (asyncio.Event() for _ in range(4))

    async def work() -> AsyncGenerator[int, None]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            ending.set()
            await may_end.wait()
            ended.set()

    async def serve() -> None:
        async with aclosing(work()) as told, aclosing(with_heartbeats(told, 60.0)) as beats:
            async for _ in beats:
                pass

    serving = asyncio.create_task(serve())
    await begun.wait()
    serving.cancel()
    await ending.wait()
    serving.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert ended.is_set()
