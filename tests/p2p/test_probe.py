"""How fast the ways to a peer are: measured on loopback, once with bursts, later with echoes only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_nodes import card, introduce, running, settings, together, until

from fleetd import limits
from fleetd.errors import FleetError, ModelNotFound, ProtocolError
from fleetd.limits import MIB
from fleetd.models.copy import client
from fleetd.models.copy.messages import CopyOffer, OfferedFile
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p import link_prober
from fleetd.p2p.link_prober import LinkProber
from fleetd.p2p.membership.cards import ModelCard
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.model_copies import MODEL_OFFER, ModelCopies
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.sealed.stream import SealedSender


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
        # The largest that was sent was sent again: one measurement that agrees with no other is not believed.
        assert [count for count, _ in speeds].count(speeds[-1][0]) > 1
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


@pytest.mark.parametrize("size", [bytes(1), bytes(8), b"\xff" * 8, b"\1", b"\xff" * 3000])
def test_attack_a_burst_of_a_size_that_is_none_is_a_protocol_error(size: bytes) -> None:
    """The last is a number that Python does not even write down."""
    near, far = socket.socketpair()
    with near, far:
        sender = SealedSender(near, bytes(32), "connector")
        for _ in range(4):
            sender.send(bytes(16))
        sender.send(size)
        with pytest.raises(ProtocolError, match="no size of a burst"):
            link_prober.serve_burst(far, bytes(32))


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


async def test_what_work_carried_over_a_path_raises_its_figure_and_a_late_hand_off_casts_doubt(
    tmp_path: Path,
) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        dialer = BulkDialer(a)
        path = dialer.best(b.identity.node_id)
        assert path is not None
        now = asyncio.get_running_loop().time()
        path.transferred(8 * MIB, 0.4, now)  # 21 MB/s, beside something else
        dialer.carried(b.identity.node_id, 100 * MIB, 1.0)
        assert path.bytes_per_s == 100 * MIB
        dialer.carried(b.identity.node_id, 100 * MIB, 10.0)  # it may have waited for the other's computing
        assert path.bytes_per_s == 100 * MIB
        assert not path.speeds.doubtful(now)
        dialer.carried(b.identity.node_id, 100 * MIB, 10.0, late=True)
        assert path.speeds.doubtful(now)
        dialer.carried("a machine that is gone", 100 * MIB, 1.0)


async def test_a_copy_of_a_model_tells_what_its_path_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Node(settings(tmp_path, "a")), Node(settings(tmp_path, "b"))
    offer = CopyOffer("folder", None, [OfferedFile("model.safetensors", 1, "0" * 64)])

    class Empty:
        models_dir = Path("nowhere")

        def resolve(self, ref: str) -> None:
            raise ModelNotFound(f"There is no {ref}.")

        def drop_parts(self) -> None:
            """There are none."""

    async def offering(_peer: str, _body: bytes, stream: PeerStream) -> None:
        stream.send(msgspec.msgpack.encode(offer))

    async def receive(*_told: Any, **_: Any) -> AsyncIterator[PullProgress]:
        yield PullProgress("", 0, 200 * MIB, "connecting")
        # The first half was there already, from an earlier attempt.
        for done in (100, 150, 200):
            yield PullProgress("a file", done * MIB, 200 * MIB, "copying")
        yield PullProgress("a file", 200 * MIB, 200 * MIB, "verifying")

    monkeypatch.setattr(client, "receive", receive)
    b.handle(MODEL_OFFER, offering)
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(
        BulkDialer, "carried", lambda _self, node_id, count, _seconds: seen.append((node_id, count))
    )
    async with running(a, b):
        await introduce(a, b)
        await together([a, b])
        b.publish(card(b, models=[ModelCard("big", digest="d")]))
        await until(a, lambda: len(a.mesh.cards))
        copies = ModelCopies(a, Empty(), lambda: card(a))  # type: ignore[arg-type]
        async with contextlib.aclosing(copies.pull("big")) as steps:
            assert [step.stage async for step in steps][-1] == "verifying"
        assert seen == [(b.identity.node_id, 100 * MIB)]
