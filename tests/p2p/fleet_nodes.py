"""Real nodes on loopback, in one process: real keys, real TLS, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node, NodeSettings

WITHIN_S = 60.0


def settings(folder: Path, name: str, **more: Any) -> NodeSettings:
    base = {"host": "127.0.0.1", "port": 0, "mdns": False, "software": "test"}
    return NodeSettings(folder=folder / name, name=name, **{**base, **more})


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """Open the nodes that are not open yet, and run all of them."""
    for node in nodes:
        if not node.port:
            await node.open()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.run()) for node in nodes]
        await asyncio.sleep(0)
        try:
            yield
        finally:
            for node in nodes:
                await node.goodbye()
            for task in tasks:
                task.cancel()


async def introduce(*nodes: Node) -> None:
    """Each vouches for each, as pairing does, and knows where the others listen."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.roster.admit(other.identity.certificate, other.name, True)
                await node.roster_changed()
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.reached(other.identity.node_id, ("127.0.0.1", other.port))


async def until(node: Node, condition: Callable[[], Any], within_s: float = WITHIN_S) -> None:
    """Wait for something that changes when the node says that something changed."""
    async with asyncio.timeout(within_s):
        while not condition():
            await node.changed.wait()
            node.validate()


async def together(nodes: Sequence[Node]) -> None:
    """Until each has a session with each other one."""
    for node in nodes:
        await until(node, lambda node=node: all(peer.usable for peer in node.mesh.peers.values()))


def card(node: Node, sequence: int = 1, **fields: Any) -> Card:
    return Card(node.identity.node_id, node.epoch, sequence, name=node.name, **fields)
