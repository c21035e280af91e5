"""Carries out the dials that the mesh decides on: one task for each, ended when it is no longer needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fleetd.errors import FleetError, PeerUnreachable
from fleetd.p2p.actions import Dial
from fleetd.process.observe import get_logger

log = get_logger("fleetd.p2p")


class Dialer:
    """Dials under way. At most one of them has the same address and expected machine.

    Args:
        connect: makes the connection, or raises FleetError.
        failed: called with a dial and the reason why it failed.
        cancelled: called with a dial that was given up, or ended without a word.
    """

    def __init__(
        self,
        connect: Callable[[Dial], Awaitable[Any]],
        failed: Callable[[Dial, FleetError], None],
        cancelled: Callable[[Dial], None],
    ) -> None:
        self._connect = connect
        self._failed = failed
        self._cancelled = cancelled
        self._tasks: dict[Dial, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> Mapping[Dial, asyncio.Task[None]]:
        return self._tasks

    def begin(self, dial: Dial, group: asyncio.TaskGroup) -> None:
        """Start a dial in ``group``, unless the same one is under way."""
        if dial not in self._tasks:
            task = self._tasks[dial] = group.create_task(self._run(dial), name=f"dial {dial.address[0]}")
            task.add_done_callback(lambda done: self._ended(dial, done))

    def over(self, dial: Dial) -> None:
        """It is known what came of a dial: the same one may begin again before its task has ended."""
        self._tasks.pop(dial, None)

    def reached(self, connected: Dial, node_id: str) -> None:
        """A dial has opened a session: it is over. Those to the machine's other addresses are cancelled."""
        self.over(connected)
        for dial, task in list(self._tasks.items()):
            if dial.expected == node_id:
                task.cancel()

    async def _run(self, dial: Dial) -> None:
        try:
            await self._connect(dial)
        except FleetError as error:
            log.debug("peer.dial_failed", address=dial.address[0], error=str(error))
            self.over(dial)
            self._failed(dial, error)
        except Exception as error:  # a dial's boundary: no error may end the node
            log.exception("peer.dial_broken", address=dial.address[0])
            self.over(dial)
            self._failed(dial, PeerUnreachable(f"It could not be dialled: {type(error).__name__}."))

    def _ended(self, dial: Dial, task: asyncio.Task[None]) -> None:
        if self._tasks.get(dial) is task:  # cancelled, possibly before its first step
            self.over(dial)
            self._cancelled(dial)
