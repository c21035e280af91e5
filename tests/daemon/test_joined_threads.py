"""Work on threads that a cancelled caller waits for, and what would be lost without that."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from fleetd.models.copy import client
from fleetd.p2p.membership.identity import Identity
from fleetd.p2p.membership.prompt_rules import PromptRules
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_keeper import RosterKeeper
from fleetd.process.joined_threads import joined
from fleetd.sealed import handoff
from fleetd.storage import durable

WITHIN_S = 60.0


class HeldThread:
    """Stands for work that takes its time: the first call of it goes on once it is ``let``."""

    def __init__(self, real: Callable[..., object] = lambda: None) -> None:
        self._real = real
        self.begun, self.let = threading.Event(), threading.Event()

    def __call__(self, *arguments: object) -> object:
        if not self.begun.is_set():
            self.begun.set()
            assert self.let.wait(WITHIN_S)
        return self._real(*arguments)


async def _turns() -> None:
    """As many turns of the loop as a task that was cancelled could need to end."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_returns_and_raises_what_the_work_does_in_the_callers_context() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    with ThreadPoolExecutor(1, "of-its-own") as threads:
        name = await joined(lambda: threading.current_thread().name, threads=threads)
    assert name.startswith("of-its-own")
    assert await joined(variable.get) == 5
    with pytest.raises(ZeroDivisionError):
        await joined(lambda: 1 // 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_however_often_it_is_cancelled_it_is_over_once_the_thread_is(fails: bool) -> None:
    held, stopped = HeldThread(lambda: 1 // 0 if fails else 1), list[str]()
    task = asyncio.create_task(joined(held, stop=partial(stopped.append, "told")))
    try:
        await asyncio.to_thread(held.begun.wait, WITHIN_S)
        for _ in range(3):
            task.cancel()
            await _turns()
            assert not task.done()
    finally:
        held.let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == ["told"] * 3


async def test_a_pairing_that_is_given_up_as_it_is_written_is_not_what_a_restart_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote it went on, and could be the last one to write the file."""
    me, other = (Identity.load_or_create(tmp_path / name) for name in ("me", "other"))
    keeper = RosterKeeper(tmp_path)
    await keeper.load(me)
    held = HeldThread(durable.replace)
    monkeypatch.setattr(durable, "replace", held)

    def change(roster: Roster) -> None:
        roster.admit(other.certificate, "other", True)

    promise = asyncio.create_task(keeper.promise(change))
    await asyncio.to_thread(held.begun.wait, WITHIN_S)
    promise.cancel()
    await _turns()
    gone_on = promise.done()
    saved = asyncio.create_task(keeper.save())
    held.let.set()
    assert not gone_on, "the next save could come first"
    with pytest.raises(asyncio.CancelledError):
        await promise
    await saved
    again = RosterKeeper(tmp_path)
    assert not (await again.load(me)).members


async def test_a_rule_that_a_client_left_as_it_was_written_is_not_written_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_id, file = Identity.load_or_create(tmp_path / "other").node_id, tmp_path / "rules"
    rules = PromptRules(file)
    held = HeldThread(durable.replace)
    monkeypatch.setattr(durable, "replace", held)
    denied = asyncio.create_task(rules.allow(node_id, False))
    await asyncio.to_thread(held.begun.wait, WITHIN_S)
    denied.cancel()
    await _turns()
    gone_on = denied.done()
    allowed = asyncio.create_task(rules.allow(node_id, True))
    held.let.set()
    assert not gone_on, "the next rule could come first"
    with pytest.raises(asyncio.CancelledError):
        await denied
    await allowed
    again = PromptRules(file)
    await again.load()
    assert (rules.allows(node_id), again.allows(node_id)) == (True, True)


async def test_a_socket_that_is_handed_to_a_copying_process_stays_open_until_the_thread_has_done_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number may be another socket's as soon as it is closed, which would be handed over instead."""
    held = HeldThread()
    monkeypatch.setattr(handoff, "send", held)
    near, far = socket.socketpair()
    given, kept = socket.socketpair()

    async def tell() -> None:
        with near, given:
            await client._tell(near, b"key", given)

    with far, kept:
        far.settimeout(WITHIN_S)
        telling = asyncio.create_task(tell())
        await asyncio.to_thread(held.begun.wait, WITHIN_S)
        for _ in range(2):
            telling.cancel()
            await _turns()
        numbers = near.fileno(), given.fileno()
        held.let.set()
        assert min(numbers) >= 0
        assert far.recv(1) == b"", "so that the thread does not wait for an answer"
        with pytest.raises(asyncio.CancelledError):
            await telling
    assert (near.fileno(), given.fileno()) == (-1, -1)
