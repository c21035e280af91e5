"""Dials that are over may begin again at once, however late the loop comes to the end of their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fleetd.errors import FleetError, PeerUnreachable
from fleetd.p2p.actions import Dial
from fleetd.p2p.dialer import Dialer

DIAL = Dial(("127.0.0.1", 1), "a" * 56)


class DialledMachine:
    """``outcomes``: of each connection in turn; None does not end by itself."""

    def __init__(self, *outcomes: Exception | str | None) -> None:
        self.outcomes = iter(outcomes)
        self.told: list[str] = []
        self.again: Callable[[], None] = lambda: None
        self.dialer = Dialer(self._connect, self._failed, lambda dial: self.told.append("cancelled"))
        self.second = asyncio.Event()

    async def _connect(self, dial: Dial) -> None:
        match next(self.outcomes):
            case None:
                self.second.set()
                await asyncio.Event().wait()
            case "opened":
                self.dialer.over(dial)
                self.again()
            case "silent":
                pass
            case error:
                assert isinstance(error, Exception)
                raise error

    def _failed(self, dial: Dial, error: FleetError) -> None:
        self.told.append(error.code)
        self.again()


@pytest.mark.parametrize("soon", [False, True], ids=["at once", "before the task has ended"])
@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (PeerUnreachable("nobody"), ["peer_unreachable"]),
        (ZeroDivisionError(), ["peer_unreachable"]),
        ("opened", []),
    ],
    ids=["failed", "broken", "opened"],
)
async def test_a_dial_that_is_over_begins_again(
    outcome: Exception | str, told: list[str], *, soon: bool
) -> None:
    """The mesh decided so while the first task had not ended: nothing was dialled, and it waited for ever."""
    machine, loop = DialledMachine(outcome, None), asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:

        def begin() -> None:
            machine.dialer.begin(DIAL, group)

        machine.again = (lambda: (loop.call_soon(begin), None)[1]) if soon else begin
        machine.dialer.begin(DIAL, group)
        [first] = machine.dialer.under_way.values()
        await machine.second.wait()
        await asyncio.wait({first})
        await asyncio.sleep(0)  # what is called at its end
        [second] = machine.dialer.under_way.values()
        assert second is not first
        assert machine.told == told
        second.cancel()
    assert machine.told == [*told, "cancelled"]
    assert not machine.dialer.under_way


@pytest.mark.parametrize("outcome", [None, "silent"])
async def test_a_dial_that_ends_without_a_word_is_given_up(outcome: str | None) -> None:
    """``None``: it is cancelled before its first step."""
    machine = DialledMachine(outcome)
    async with asyncio.TaskGroup() as group:
        machine.dialer.begin(DIAL, group)
        machine.dialer.begin(DIAL, group)
        [task] = machine.dialer.under_way.values()
        if outcome is None:
            task.cancel()
    assert machine.told == ["cancelled"]
    assert not machine.dialer.under_way
