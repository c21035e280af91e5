"""How fast the ways to a peer are: measured on loopback, once with bursts, later with echoes only."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_nodes import introduce, running, settings, together

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.p2p import link_prober
from fleetd.p2p.link_prober import LinkProber
from fleetd.p2p.node import Node


async def test_a_way_is_measured_by_echoes_and_bursts(tmp_path: Path) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    ours, _ = LinkProber(a), LinkProber(b)
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        rtt_s, speeds = await ours.measure(b.identity.node_id, ("127.0.0.1", b.port))
        assert rtt_s > 0
        assert speeds
        assert all(count > 0 and seconds > 0 for count, seconds in speeds)
        assert speeds[0][0] == link_prober._BURSTS[0]
        # What is repeated while a session lasts is small.
        _, speeds = await ours.measure(b.identity.node_id, ("127.0.0.1", b.port), ())
        assert speeds == []


async def test_an_address_of_somebody_else_measures_nothing(tmp_path: Path) -> None:
    """The ticket means nothing there, and what answers does not have the key."""
    a, b, c = (Node(settings(tmp_path, name)) for name in "abc")
    ours, _ = LinkProber(a), LinkProber(b)
    async with running(a, b, c):
        await introduce(a, b)
        await together([a, b])
        with pytest.raises(FleetError):
            await ours.measure(b.identity.node_id, ("127.0.0.1", c.port))
        with pytest.raises(FleetError):
            await ours.measure(b.identity.node_id, ("127.0.0.1", 1))


def test_garbage_instead_of_an_invitation_is_refused() -> None:
    for body in (b"", b"\xc1", b"\x92\xc4\x01x\xc4\x01y", b"\xff" * 50):
        with pytest.raises(FleetError):
            link_prober.invitation(body)


async def test_a_peer_that_never_opens_the_stream_costs_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TICKET_S", 0.1)
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    LinkProber(b)
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        stream = a.request(b.identity.node_id, link_prober.METHOD, b"")
        assert await stream.receive()
        with pytest.raises(FleetError, match="No stream was opened"):
            await stream.receive()
