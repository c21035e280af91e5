"""Keys and values that other machines sent: under which label they are kept, and throwing them away.

What comes of a machine has a label that workers and blocks carry. All that a machine sent goes, with all that
rests on it, in every worker's memory and on the disk, once it is found to have sent what is wrong, and once
it is no member of the fleet any more; what it sends later has another label.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping

from fleetd import limits
from fleetd.cache.block_store import CacheUnavailable
from fleetd.cache.service import DiskCache
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import BackgroundTasks

log = get_logger("fleetd.origins")

#: The label of a machine.
Labels = Callable[[str], Awaitable[str]]


async def no_label(node_id: str) -> str:
    """An empty one: what comes under it is kept in memory only, and not sent on."""
    return ""


class RowOrigins:
    """``in_memory``: lets every worker forget what it keeps under these labels."""

    def __init__(self, disk: DiskCache, in_memory: Callable[[list[str]], None]) -> None:
        self._disk = disk
        self._in_memory = in_memory
        # By node id, of what comes now.
        self._labels: dict[str, str] = {}
        self._work = BackgroundTasks()

    async def label(self, node_id: str) -> str:
        """The label of what a machine sends now. What the disk cannot note is kept in memory only."""
        if (known := self._labels.get(node_id)) is None:
            known = self._labels[node_id] = secrets.token_hex(limits.CACHE_ORIGIN_CHARS // 2)
            await asyncio.to_thread(self._disk.add_origin, known, node_id)
        return known

    def forget(self, node_id: str) -> asyncio.Task[None]:
        """Throw away what a machine has sent. In memory nothing of it is kept any more when this returns, if
        it came since the daemon started; all of it is gone once the task has ended."""
        if (label := self._labels.pop(node_id, None)) is not None:
            self._in_memory([label])
        return self._work.start(self._forget(node_id))

    async def _forget(self, node_id: str) -> None:
        while True:
            try:
                labels = await asyncio.to_thread(self._disk.forget_machine, node_id)
            except CacheUnavailable as error:
                log.warning("origins.not_forgotten", peer=node_id[:7], reason=str(error))
                await asyncio.sleep(limits.CACHE_AGAIN_S)
                continue
            if labels:
                self._in_memory(labels)
                log.info("origins.forgotten", peer=node_id[:7])
            return

    async def begin(self, members: Mapping[str, int]) -> None:
        """Before a worker runs: throw away what machines sent that have left since this daemon ran last."""
        try:
            known = await asyncio.to_thread(self._disk.machines)
        except CacheUnavailable:
            return  # then no worker finds anything there either
        await asyncio.gather(*(self.forget(node_id) for node_id in known - members.keys()))

    async def watch(self, changed: asyncio.Event, members: Callable[[], Mapping[str, int]]) -> None:
        """Throw away what machines sent that leave the fleet, whoever removes them, until cancelled.

        Args:
            changed: set and cleared at once after each change of the fleet.
            members: the pairing's number by node id: one that leaves and comes back is paired anew.
        """
        before = members()
        while True:
            await changed.wait()
            now = members()
            for node_id, pairing in before.items():
                if now.get(node_id) != pairing:
                    self.forget(node_id)
            before = now

    async def close(self) -> None:
        """End what is under way; what was not thrown away is at the next start, if its machine has left."""
        await self._work.close()
