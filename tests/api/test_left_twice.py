"""Answers that are cancelled again while they end: they are over once what they use is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest

from fleetd.api.generation.choices import Choices
from fleetd.api.http import relay


class SlowToEnd:
    """A source of events that takes until it is ``let`` to end."""

    def __init__(self) -> None:
        self.begun, self.let, self.ended = asyncio.Event(), asyncio.Event(), False

    async def events(self) -> AsyncGenerator[Any, None]:
        try:
            self.begun.set()
            await asyncio.Event().wait()
            yield None
        finally:
            await self.let.wait()
            self.ended = True


async def _relayed(source: SlowToEnd) -> None:
    async with aclosing(source.events()) as events:
        await relay._send_all(events, cast("Any", None))


async def _chosen(source: SlowToEnd) -> None:
    async with Choices([source.events]) as choices:
        await choices.next(None)


@pytest.mark.parametrize("answering", [_relayed, _chosen])
async def test_an_answer_that_is_left_twice_has_closed_its_source(answering: Any) -> None:
    """By its client, and by a server that stops."""
    source = SlowToEnd()
    task = asyncio.create_task(answering(source))
    async with asyncio.timeout(60):
        await source.begun.wait()
        for _ in range(2):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        gone_on = task.done()
        source.let.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert source.ended
    assert not gone_on
