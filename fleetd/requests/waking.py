"""Wakes a paired machine that sleeps, when an answer from it is worth the wait.

The planner adds what waking took before to the price of that machine, so it is woken only if its answer
would still be complete first. A machine that does not wake is left asleep for a while, longer each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleetd import limits
from fleetd.errors import PeerUnreachable
from fleetd.p2p import wake_on_lan
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node
from fleetd.process.observe import get_logger

log = get_logger("fleetd.requests")

# Weight of the newest time in a moving average.
_WEIGHT = 0.5


@dataclass(slots=True)
class _Learned:
    seconds: float = limits.WAKE_S
    failures: int = 0
    not_before_s: float = float("-inf")


class WakeTimes:
    """What waking each machine takes, and when it may be tried again. ``now_s`` is monotonic seconds."""

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = {}

    def seconds(self, node_id: str, now_s: float) -> float | None:
        """Seconds that waking it probably takes; None while the machine is not to be woken."""
        known = self._learned.get(node_id, _Learned())
        return known.seconds if now_s >= known.not_before_s else None

    def patience_s(self, node_id: str) -> float:
        return self._learned.get(node_id, _Learned()).seconds * limits.WAKE_LATE

    def woke(self, node_id: str, took_s: float, now_s: float) -> None:
        took_s = min(took_s, limits.WAKE_MOST_S)
        known = self._learned.setdefault(node_id, _Learned(took_s))
        known.seconds += _WEIGHT * (took_s - known.seconds)
        known.failures, known.not_before_s = 0, now_s + limits.WAKE_AGAIN_S

    def failed(self, node_id: str, now_s: float) -> None:
        known = self._learned.setdefault(node_id, _Learned())
        wait_s = min(limits.WAKE_FAILED_S * 2.0 ** min(known.failures, 32), limits.WAKE_FAILED_MOST_S)
        known.failures, known.not_before_s = known.failures + 1, now_s + wait_s


class Waker:
    """Args:
    send: broadcasts the packets for these hardware addresses.
    """

    def __init__(
        self, node: Node, *, enabled: bool, send: Callable[[Iterable[str]], None] = wake_on_lan.send
    ) -> None:
        self._node = node
        self._enabled = enabled
        self._send = send
        self._times = WakeTimes()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def seconds(self, node_id: str) -> float | None:
        """Seconds that waking a machine would take; None if it is not to be woken, or is probably awake."""
        card = self._node.mesh.asleep(node_id)
        if not self._enabled or card is None or not card.wake:
            return None
        return self._times.seconds(node_id, asyncio.get_running_loop().time())

    async def wake(self, node_id: str) -> None:
        """Return once the machine is connected and has said what it has; one attempt serves all who ask.

        Raises PeerUnreachable: it did not wake in time.
        """
        task, card = self._under_way.get(node_id), self._node.mesh.asleep(node_id)
        if task is None:
            if card is None:
                return
            task = asyncio.create_task(self._wake(node_id, card), name=f"wake {node_id}")
            self._under_way[node_id] = task
            task.add_done_callback(lambda _: self._under_way.pop(node_id, None))
        await asyncio.shield(task)

    async def _wake(self, node_id: str, card: Card) -> None:
        mesh, loop = self._node.mesh, asyncio.get_running_loop()
        name, patience_s, began_s = self._node.name_of(node_id), self._times.patience_s(node_id), loop.time()
        while mesh.cards.get(node_id) is None:
            if loop.time() - began_s > patience_s:
                self._times.failed(node_id, loop.time())
                log.info("machine.not_woken", peer=name, waited_s=round(patience_s, 1))
                raise PeerUnreachable(f"{name} did not wake within {patience_s:.0f} s.")
            await asyncio.to_thread(self._send, card.wake)
            self._node.call_again(node_id)
            await self._changed(limits.WAKE_REPEAT_S, lambda: mesh.cards.get(node_id) is not None)
        took_s = loop.time() - began_s
        # Less than a second: it was not asleep, only away.
        if took_s >= 1:
            self._times.woke(node_id, took_s, loop.time())
            log.info("machine.woken", peer=name, took_s=round(took_s, 1))

    async def _changed(self, within_s: float, condition: Callable[[], bool]) -> None:
        """Wait for the condition, but not for longer."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    await self._node.changed.wait()
        except TimeoutError:
            pass
