"""Two nodes, of which one falls asleep: the other wakes it, once for all who ask, or gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fleet_nodes import card, introduce, settings, until

from fleetd import limits
from fleetd.errors import PeerUnreachable
from fleetd.fleet.service import Fleet
from fleetd.p2p import links
from fleetd.p2p.node import Node
from fleetd.requests.members.members import eligible

MAC = "3c:22:fb:01:02:03"


class Sleeper:
    """A machine that ends its sessions without a word, and is back once it is sent the packet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = Node(settings(folder, "studio"))
        self.sent: list[list[str]] = []
        self.heard = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        if not self.node.port:
            await self.node.open()
        self._task = asyncio.create_task(self.node.run())

    async def end(self, *, word: bool = False) -> None:
        if self._task is not None:
            if word:
                await self.node.goodbye()
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def send(self, addresses: Iterable[str]) -> None:
        self.sent.append(list(addresses))
        self._loop.call_soon_threadsafe(self.heard.set)

    async def woken(self) -> None:
        """What its network card does at the first packet."""
        await self.heard.wait()
        port = self.node.port
        self.node = Node(settings(self.folder, "studio", port=port))
        await self.begin()
        self.node.publish(card(self.node, wake=[MAC]))


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Fleet, Sleeper]]:
    mini, studio = Node(settings(folder, "mini")), Sleeper(folder)
    await mini.open()
    await studio.begin()
    fleet = Fleet(mini, local_only=False)
    fleet.waker._send = studio.send
    running = asyncio.create_task(mini.run())
    await asyncio.sleep(0)
    await introduce(mini, studio.node)
    studio.node.publish(card(studio.node, wake=[MAC], running=3))
    await until(mini, lambda: len(mini.mesh.cards) == 1)
    try:
        yield fleet, studio
    finally:
        await studio.end()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_machine_that_sleeps_is_woken_and_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On loopback the system refuses at once; that of a machine that sleeps says nothing.
    monkeypatch.setattr(links, "REFUSED", "not said")
    async with pair(tmp_path) as (fleet, studio):
        node_id = studio.node.identity.node_id
        assert [(m.unusable, m.wake_s) for m in fleet.machines()] == [("", 0.0)]
        await studio.end()
        await until(fleet.node, lambda: not len(fleet.node.mesh.cards))
        (asleep,) = fleet.machines()
        assert (asleep.wake_s, asleep.card.running) == (limits.WAKE_S, 0)
        refusal = eligible(asleep)
        assert refusal is not None
        assert refusal.sentence == "studio cannot be used: It is probably asleep."
        assert eligible(asleep, even_asleep=True) is None
        awake = asyncio.create_task(studio.woken())
        await asyncio.gather(fleet.waker.wake(node_id), fleet.waker.wake(node_id))
        await awake
        assert [(m.unusable, m.wake_s) for m in fleet.machines()] == [("", 0.0)]
        assert studio.sent[0] == [MAC]


async def test_the_models_of_a_machine_that_sleeps_are_not_managed_and_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REFUSED", "not said")
    async with pair(tmp_path) as (fleet, studio):
        await studio.end()
        await until(fleet.node, lambda: not len(fleet.node.mesh.cards))
        with pytest.raises(PeerUnreachable, match="studio: It is probably asleep") as error:
            fleet.manage("studio", "load", "m")
        assert error.value.hint == "Wake it, then try again."


async def test_a_machine_that_says_good_bye_is_left_alone(tmp_path: Path) -> None:
    async with pair(tmp_path) as (fleet, studio):
        await studio.end(word=True)
        await until(fleet.node, lambda: not len(fleet.node.mesh.cards))
        assert list(fleet.machines()) == []


async def test_a_machine_whose_daemon_alone_is_gone_is_left_alone(tmp_path: Path) -> None:
    async with pair(tmp_path) as (fleet, studio):
        node_id = studio.node.identity.node_id
        await studio.end()
        await until(fleet.node, lambda: fleet.node.mesh.peers[node_id].paths.refused)
        assert list(fleet.machines()) == []


async def test_a_machine_that_does_not_wake_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REFUSED", "not said")
    monkeypatch.setattr(limits, "WAKE_LATE", 0.0)
    async with pair(tmp_path) as (fleet, studio):
        node_id = studio.node.identity.node_id
        await studio.end()
        await until(fleet.node, lambda: not len(fleet.node.mesh.cards))
        with pytest.raises(PeerUnreachable, match="studio did not wake within 0 s"):
            await fleet.waker.wake(node_id)
        assert fleet.waker.seconds(node_id) is None
        assert list(fleet.machines()) == []
