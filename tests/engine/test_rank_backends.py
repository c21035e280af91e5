"""What carries the sums of ranks: that each backend is set up as MLX wants it. RDMA and NCCL themselves run
only on machines that have them, and a test that cannot run says what is missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from rank_workers import free_ports, places
from strangers import Stranger

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import ring
from fleetd.engine.ranks.side_channel import SideChannel
from fleetd.engine.settings import Backend, RingPlace

VARIABLES = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a rank sets for MLX, and leaves open, is undone."""
    for name in (*VARIABLES, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    opened: list[SideChannel] = []
    monkeypatch.setattr(ring, "_OPEN", opened)
    yield
    for channel in opened:
        channel.close()


def place(backend: Backend, rank: int = 0, **fields: Any) -> RingPlace:
    ports = free_ports(2)
    return RingPlace(rank, 2, ports[0], ports[1], backend=backend, interface="en3", **fields)


# ---- the side channel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 48, 100_000])
def test_every_rank_hears_what_every_rank_says(size: int, count: int) -> None:
    said = [bytes([65 + rank]) * count for rank in range(size)]

    def talk(own: RingPlace) -> list[bytes]:
        channel = SideChannel.open(own)
        try:
            # More than once, as a library that connects in steps does.
            return [channel.gather(said[own.rank], count) for _ in range(3)]
        finally:
            channel.close()

    with ThreadPoolExecutor(size) as threads:
        assert list(threads.map(talk, places(size))) == [[b"".join(said)] * 3] * size


@pytest.fixture
def channels() -> Iterator[list[SideChannel]]:
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(SideChannel.open, places(2)))
    yield made
    for each in made:
        each.close()


def test_a_rank_that_goes_ends_the_talk(channels: list[SideChannel]) -> None:
    channels[1].close()
    with pytest.raises(OSError, match=r"gone|reset|pipe"):
        channels[0].gather(b"x", 1)


def test_what_is_too_much_or_has_another_length_is_refused(channels: list[SideChannel]) -> None:
    for source, count in ((b"xy", 1), (bytes(limits.SIDE_CHANNEL_BYTES + 1), limits.SIDE_CHANNEL_BYTES + 1)):
        with pytest.raises(ValueError, match="too many"):
            channels[0].gather(source, count)


def test_a_neighbour_that_does_not_come_is_not_waited_for_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RING_FORM_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        (own,) = free_ports(1)
        with pytest.raises(TimeoutError):
            SideChannel.open(RingPlace(0, 2, own, other.getsockname()[1]))


# ---- what MLX is told ------------------------------------------------------------------------------------


class FakeMlx:
    """mx.distributed with a backend that it notes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.devices: Any = None
        patch.setattr(mx.distributed, "is_available", lambda backend: True)
        patch.setattr(mx.distributed, "init", self.init)

    def init(self, **asked: Any) -> str:
        self.asked, self.environment = asked, {name: os.environ.get(name, "") for name in VARIABLES}
        if file := os.environ.get("MLX_IBV_DEVICES"):
            self.devices = json.loads(Path(file).read_text())
        if factory := asked.get("all_gather_factory"):
            self.gathered = factory(int(os.environ["MLX_RANK"]), 2)(b"me", 2)
        return "group"


def test_rdma_gets_its_device_matrix_and_speaks_through_the_tunnels(monkeypatch: pytest.MonkeyPatch) -> None:
    mlx, own = FakeMlx(monkeypatch), place("jaccl", 1)
    before = RingPlace(0, 2, own.next_port, own.port)

    def other() -> bytes:
        channel = SideChannel.open(before)
        try:
            return channel.gather(b"he", 2)
        finally:
            channel.close()

    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(other)
        assert ring.joined(own, PassProgress.alone()) == "group"
        assert told.result(60) == mlx.gathered == b"heme"
    assert mlx.asked["backend"] == "jaccl"
    assert mlx.asked["strict"] is True
    assert mlx.environment["MLX_RANK"] == "1"
    # A row for each rank, and an entry for each that it is linked to.
    assert mlx.devices == [[None, "rdma_en3"], ["rdma_en3", None]]
    # It needs no coordinator, which would have an open port.
    assert "MLX_JACCL_COORDINATOR" not in os.environ


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_finds_its_identifier_at_the_end_of_the_tunnel(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    mlx, own = FakeMlx(monkeypatch), place("nccl", rank)
    assert ring.joined(own, PassProgress.alone()) == "group"
    assert mlx.asked == {"strict": True, "backend": "nccl"}
    assert mlx.environment["MLX_WORLD_SIZE"] == "2"
    assert mlx.environment["NCCL_HOST_IP"] == "127.0.0.1"
    assert mlx.environment["NCCL_PORT"] == str(own.next_port if rank else own.port)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=en3"


@pytest.mark.parametrize("backend", ["jaccl", "nccl"])
def test_a_backend_that_this_build_does_not_have_ends_the_group_with_its_name(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(mx.distributed, "is_available", lambda name: name == "ring")
    with pytest.raises(MemberLost) as caught:
        ring.joined(place(backend), PassProgress.alone())
    assert f"no {backend}" in caught.value.error.message


def test_what_a_backend_fails_with_is_a_rank_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMlx(monkeypatch)

    def fails(**_: Any) -> None:
        raise RuntimeError("[nccl] accept() failed: 9")

    monkeypatch.setattr(mx.distributed, "init", fails)
    with pytest.raises(MemberLost, match="could not be formed"):
        ring.joined(place("nccl"), PassProgress.alone())


_JOINS = """
import sys
import msgspec
from fleetd.engine.failures import MemberLost
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import ring
from fleetd.engine.settings import RingPlace

try:
    ring.joined(msgspec.json.decode(sys.argv[1], type=RingPlace), PassProgress.alone())
    print("It is in the ring.")
except MemberLost as lost:
    print(lost.error.message)
"""


def test_a_stranger_that_comes_in_at_the_port_of_a_rank_ends_it() -> None:
    """MLX takes the first process that connects; its numbers would be in every sum."""
    own = place("ring", 0, daemon=os.getpid())
    with socket.create_server(("127.0.0.1", own.next_port), reuse_port=True), Stranger(own.port) as stranger:
        rank = [sys.executable, "-c", _JOINS, msgspec.json.encode(own).decode()]
        said = subprocess.run(rank, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert stranger.says() == "in"
    assert "a process that is not fleetd's came in" in said


def test_rdma_does_not_speak_with_a_stranger() -> None:
    own = place("jaccl", 1)
    before = RingPlace(0, 2, own.next_port, own.port)
    with Stranger(own.port) as stranger, ThreadPoolExecutor(2) as threads:
        opening = threads.submit(SideChannel.open, own)
        assert stranger.says() == "in"
        other = threads.submit(SideChannel.open, before)
        channels = [opening.result(60), other.result(60)]
        assert stranger.says() == "out 0"
        for channel in channels:
            channel.close()


@pytest.mark.parametrize("said", ["[ring] Receiving failed", "[jaccl] No IPv4-mapped GID", "NCCL error 2"])
def test_an_error_of_any_backend_in_a_pass_is_a_rank_that_is_lost(said: str) -> None:
    with pytest.raises(MemberLost), ring.lost_ranks():
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="of the model"), ring.lost_ranks():
        raise RuntimeError("of the model")


# ---- the real ones, where they are -----------------------------------------------------------------------

ONE_RANK = """
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="nccl")
found = mx.distributed.all_sum(mx.full(16, 3.0), group=group)
mx.eval(found)
print(group.size(), bool(mx.all(found == 3.0)))
"""


def test_nccl_adds_up_on_one_rank() -> None:
    if not mx.distributed.is_available("nccl"):
        pytest.skip("NOT TRIED: NCCL. This build of MLX has none (mlx-cuda has it, on a machine with a GPU)")
    (port,) = free_ports(1)
    rank = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK],
        env={**os.environ, **rank, "NCCL_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split()[-2:] == ["1", "True"], done.stderr


def test_rdma_says_what_it_lacks() -> None:
    if not mx.distributed.is_available("jaccl"):
        pytest.skip("NOT TRIED: RDMA (JACCL). This build of MLX has none (it needs a Mac with macOS 26.2)")
    # Two ranks need two Macs and a cable: here it has to name what is missing instead of waiting.
    with pytest.raises((RuntimeError, ValueError)):
        mx.distributed.init(strict=True, backend="jaccl")
