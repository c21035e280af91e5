"""Calls of a node that come to nothing in unusual ways: none may end the node, or keep its place for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fleet_nodes import introduce, running, settings

from fleetd.errors import PeerUnreachable
from fleetd.p2p.node import Node
from fleetd.p2p.session import transport


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "."])
async def test_a_host_name_that_no_resolver_takes_is_an_unreachable_machine(host: str) -> None:
    with pytest.raises(PeerUnreachable, match="not a name"):
        await transport.open_socket((host, 8115))


async def test_a_call_that_is_given_up_before_it_began_can_be_made_again(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        await introduce(a, b)
        a.reached(b.identity.node_id, ("127.0.0.1", 1))
        peer = a.mesh.peers[b.identity.node_id]
        begun = set(a.dialer.under_way.values())
        assert peer.dialling
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)
        await asyncio.sleep(0)
        assert begun.isdisjoint(a.dialer.under_way.values())
        assert len(peer.dialling) == len(a.dialer.under_way)
