"""What both ends of a link offer to carry sums with, and what is taken of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing

import pytest

from fleetd import limits
from fleetd.engine.settings import Backend
from fleetd.errors import PeerLost
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.plain_links import PlainLinks
from fleetd.requests.ranks.fabrics import BITS, Fabrics, Offer, agreed, no_offer
from fleetd.requests.ranks.ring_links import RingLinks

LO = Interface("lo", "loopback", ("127.0.0.1",), ("127.0.0.0/8",), 1500, True, True)
KEYS = (bytes(32), bytes([1]) * 32)
RING, JACCL, NCCL = (BITS[name] for name in ("ring", "jaccl", "nccl"))


class FabricClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fabrics(
    *,
    declared: Sequence[str] = ("lo",),
    collectives: Sequence[str] = ("jaccl", "nccl"),
    devices: Sequence[str] = ("rdma_lo",),
    clock: FabricClock | None = None,
) -> Fabrics:
    made = Fabrics(
        PlainLinks(declared, lambda: [LO]), lambda: collectives, lambda: list(devices), clock or FabricClock()
    )
    asyncio.run(made.look())
    return made


def offer(made: Fabrics) -> Offer:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sock:
            return made(sock)


def test_nothing_but_sealed_tunnels_is_offered_on_a_link_that_is_not_declared() -> None:
    assert offer(fabrics(declared=())) == Offer()
    assert offer(fabrics(declared=("en0",))) == Offer()
    assert fabrics(declared=()).possible == []


def test_what_this_machine_has_is_offered_on_a_declared_link() -> None:
    assert offer(fabrics()) == Offer(RING | JACCL | NCCL, "lo")
    assert offer(fabrics(collectives=())) == Offer(RING, "lo")
    assert offer(fabrics(collectives=["nccl"])).bits == RING | NCCL
    assert fabrics().possible == ["jaccl", "nccl"]
    assert fabrics().towards("127.0.0.9") == ["jaccl", "nccl"]
    assert fabrics().towards("10.0.0.9") == []


def test_rdma_is_offered_only_where_its_device_is_linked() -> None:
    assert not offer(fabrics(devices=["rdma_en3"])).bits & JACCL


def test_what_has_just_failed_is_not_offered_for_a_while() -> None:
    clock = FabricClock()
    made = fabrics(clock=clock)
    made.failed("ring")
    made.failed("jaccl")
    assert offer(made).bits == RING | NCCL
    assert made.possible == ["nccl"]
    clock.now = limits.SHARE_LOAD_AGAIN_S + 1
    assert offer(made).bits == RING | JACCL | NCCL


@pytest.mark.parametrize(
    ("size", "both", "expected"),
    [
        (2, [RING | JACCL | NCCL] * 2, "jaccl"),
        (2, [RING | NCCL] * 2, "nccl"),
        (2, [RING | JACCL, RING], "ring"),
        (2, [RING] * 2, "ring"),
        (2, [], "ring"),
        (3, [RING | JACCL] * 2, "ring"),
    ],
)
def test_both_ends_of_all_tunnels_have_to_offer_it(size: int, both: list[int], expected: Backend) -> None:
    assert agreed(size, both) == expected


def streams() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.mark.parametrize(
    ("first", "second", "expected", "carried"),
    [
        (Offer(RING | JACCL, "en3"), Offer(RING | JACCL, "en5"), "jaccl", "RDMA"),
        (Offer(RING | NCCL, "en3"), Offer(RING | JACCL | NCCL, "en5"), "nccl", "NCCL"),
        (Offer(RING, "en3"), Offer(RING | JACCL, "en5"), "ring", "plain"),
        (Offer(RING, "en3"), Offer(), "ring", "sealed"),
    ],
)
async def test_two_machines_come_to_the_same_and_each_knows_its_own_end(
    first: Offer, second: Offer, expected: Backend, carried: str
) -> None:
    with ExitStack() as stack:
        ends = [
            stack.enter_context(closing(RingLinks(rank, 2, lambda sock, told=told: told)))
            for rank, told in enumerate((first, second))
        ]
        (go, come), (back, returned) = streams(), streams()
        ends[0].goes_to(go, KEYS[0])
        ends[1].comes_from(come, KEYS[0])
        ends[1].goes_to(back, KEYS[1])
        ends[0].comes_from(returned, KEYS[1])
        await asyncio.gather(*(end.agree() for end in ends))
        assert [end.place.backend for end in ends] == [expected] * 2
        assert [end.place.interface for end in ends] == [first.interface, second.interface]
        assert [end.carried for end in ends] == [carried] * 2


def test_a_stream_that_broke_before_its_link_was_looked_at_is_closed() -> None:
    def gone(sock: socket.socket) -> Offer:
        raise OSError(107, "Transport endpoint is not connected")

    with closing(RingLinks(0, 2, gone)) as links:
        near, far = streams()
        with far, pytest.raises(PeerLost, match="not connected"):
            links.goes_to(near, KEYS[0])
        assert near.fileno() == -1


def test_without_fabrics_streams_are_sealed() -> None:
    with socket.socket() as sock:
        assert no_offer(sock) == Offer()
