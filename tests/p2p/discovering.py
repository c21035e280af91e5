"""A machine that only discovers: ``discovering.py NODE_ID NAME PORT``; ends, with a goodbye, with its stdin.

Prints JSON objects, one per line: ``{"seen": id, "hosts": [...]}``, ``{"gone": id}``, ``{"state": text}``.
"""

from __future__ import annotations

import asyncio
import json
import sys

from fleetd.p2p.discovery.discovery import DiscoveredPeer, Discovery

LOOK_S = 0.02


def say(**news: object) -> None:
    print(json.dumps(news), flush=True)  # noqa: T201


async def watch(discovery: Discovery, known: set[str]) -> None:
    """``known``: whoever was seen, also between two looks, and is not said to be gone."""
    state = ""
    while True:
        if discovery.state != state:
            state = discovery.state
            say(state=state)
        for node_id in known - set(discovery.seen):
            known.discard(node_id)
            say(gone=node_id)
        await asyncio.sleep(LOOK_S)


async def main(node_id: str, name: str, port: str) -> None:
    known: set[str] = set()

    def seen(found: DiscoveredPeer) -> None:
        known.add(found.node_id)
        say(seen=found.node_id, hosts=[host for host, _ in found.addresses])

    everywhere = "0.0.0.0"  # noqa: S104
    discovery = Discovery(
        node_id=node_id, name=name, port=int(port), versions=(1, 1), host=everywhere, on_seen=seen
    )
    tasks = [asyncio.create_task(discovery.run()), asyncio.create_task(watch(discovery, known))]
    await asyncio.to_thread(sys.stdin.read)
    await discovery.stop()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
