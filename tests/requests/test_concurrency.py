"""Ways to wait for work."""

from __future__ import annotations

import asyncio

import pytest

from fleetd.requests.concurrency import with_beats


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
