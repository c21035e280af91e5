"""Machines that keep blocks on their disks and have no engine: real nodes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import kv_blocks

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

import fleet_nodes
from fakes import FakeModels
from sharing_fakes import own_card

from fleetd.cache.block_store import BlockStore
from fleetd.cache.service import DiskCache
from fleetd.p2p.node import Node
from fleetd.requests.admission import ServingContext
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.fetch_counts import FetchCounts
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.kv_fetching.server import BlockServer
from fleetd.requests.remote.bulk_dialer import BulkDialer

SIZE = 500


class Keeper:
    """A machine whose disk has blocks, and no engine."""

    def __init__(self, node: Node, folder: Path, *, may_see: bool = True) -> None:
        self.node = node
        self.card = own_card(node.name)
        self.outcomes: list[str] = []
        self._done = asyncio.Event()
        settings = kv_blocks.settings(folder)
        self.cache = DiskCache(settings, on=True, note=lambda: "")
        self.cache.start()
        self.store = BlockStore(settings)
        context = ServingContext(
            FakeModels(),
            lambda: self.card,
            draining=lambda: False,
            finished=self._ended,
        )
        self.prompts = KeptPrompts(self.cache, lambda name: self.card.models[0])
        self.counts = FetchCounts()
        server = BlockServer(
            BulkDialer(node),
            self.cache,
            self.prompts,
            context,
            lambda peer: may_see,
            self.counts,
            lambda peer: "home",
        )
        node.handle(messages.FIND, server.find)
        node.handle(messages.LOOK, server.look)
        node.handle(messages.FETCH, server.fetch)

    def _ended(self, kind: str, outcome: str) -> None:
        self.outcomes.append(outcome)
        self._done.set()

    async def served(self) -> None:
        """Once a fetch has ended."""
        await self._done.wait()

    @property
    def node_id(self) -> str:
        return self.node.identity.node_id

    def keep(
        self,
        names: list[bytes],
        *,
        local_only: bool = False,
        states: Sequence[int] = (),
        origins: tuple[str, ...] = (),
    ) -> None:
        for label in origins:
            self.store.add_origin(label, "another machine")
        kv_blocks.keep(self.store, names, SIZE, local_only=local_only, states=states, origins=origins)


@contextlib.asynccontextmanager
async def fleet(folder: Path, *may_see: bool) -> AsyncIterator[tuple[Node, list[Keeper]]]:
    home = Node(fleet_nodes.settings(folder, "home"))
    keepers = [
        Keeper(Node(fleet_nodes.settings(folder, f"keeper{n}")), folder / f"disk{n}", may_see=sees)
        for n, sees in enumerate(may_see)
    ]
    nodes = [home, *(keeper.node for keeper in keepers)]
    try:
        async with fleet_nodes.running(*nodes):
            await fleet_nodes.introduce(*nodes)
            await fleet_nodes.together(nodes)
            yield home, keepers
    finally:
        for keeper in keepers:
            keeper.store.close()
            keeper.cache.close()
