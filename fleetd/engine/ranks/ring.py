"""This process as one rank of an MLX group, to which it belongs until it ends: there is no way out of one.

Most often that is MLX's ring. Each rank is told of two ports of its own machine alone: the one that it
listens at, and the one behind which the daemon carries its bytes to the next rank.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers import distributed

from fleetd import limits
from fleetd.engine.cpu import products
from fleetd.engine.failures import MemberLost
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks.side_channel import SideChannel
from fleetd.engine.settings import RingPlace
from fleetd.errors import GroupLost, MemberGone
from fleetd.process import local_peers

_HERE = "127.0.0.1"
# Numbers of which a canary's sum is formed, and what its step counts up to: sums are exact in f32.
_CANARY, _CANARY_STEPS = 16, 1 << 12
# While a side channel is open, so are the tunnels: they end when this process does.
_OPEN: list[SideChannel] = []
# What errors of a backend begin with.
_OF_BACKENDS = ("[ring]", "[jaccl]", "[nccl]", "NCCL")


def joined(place: RingPlace, progress: PassProgress) -> Any:
    """The ``mx.distributed.Group`` of this process, once all ranks have come. Raises MemberLost.

    MLX waits for the others without a limit, and no thread of this process runs meanwhile: the daemon, which
    looks at ``progress``, ends it after ``limits.RING_FORM_S`` and says why. Without one the kernel ends it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fleetd-ring-") as folder,
        _no_longer_than(limits.RING_FORM_S + limits.RANK_END_S),
        progress.within(limits.RING_FORM_S),
    ):
        try:
            return _joined(place, Path(folder))
        except (OSError, RuntimeError, ValueError) as error:
            name = f"ring ({place.backend})" if place.backend != "ring" else "ring"
            raise MemberLost(GroupLost(f"The {name} could not be formed: {error}")) from error


def _joined(place: RingPlace, folder: Path) -> Any:
    """The group, by the backend that was agreed on. Raises OSError, RuntimeError, ValueError."""
    if not mx.distributed.is_available(place.backend):
        raise RuntimeError(f"this build of MLX has no {place.backend}")
    file = folder / "ranks.json"
    match place.backend:
        case "jaccl":
            return _by_rdma(place, file)
        case "nccl":
            return _by_nccl(place)
        case "ring":
            file.write_text(json.dumps(rows(place)))
            os.environ.update(MLX_RANK=str(place.rank), MLX_HOSTFILE=str(file))
            group = mx.distributed.init(strict=True, backend="ring")
            _check_neighbour(place)
            return group


def _check_neighbour(place: RingPlace) -> None:
    """Raises RuntimeError if what came in at this rank's port is no process of fleetd. MLX takes the first
    one that comes, whose numbers would be in every sum."""
    came = local_peers.accepted(place.port)
    if not came or not all(local_peers.is_of(place.daemon or os.getppid(), far, near) for far, near in came):
        raise RuntimeError("a process that is not fleetd's came in at the port of this rank")


def _by_rdma(place: RingPlace, file: Path) -> Any:
    """Two ranks over RDMA. What each has to know of the other's device goes through the tunnels of the ring,
    so that there is no coordinator with an open port."""
    file.write_text(json.dumps(devices(place)))
    os.environ.update(MLX_RANK=str(place.rank), MLX_IBV_DEVICES=str(file))
    channel = SideChannel.open(place)
    _OPEN.append(channel)
    return mx.distributed.init(
        strict=True, backend="jaccl", all_gather_factory=lambda rank, size: channel.gather
    )


def _by_nccl(place: RingPlace) -> Any:
    """Two ranks by NCCL. The second one asks for the group's identifier at the mouth of its tunnel to the
    first; MLX has the first one listen for that. NCCL's own connections are over the interface."""
    port = place.port if place.rank == 0 else place.next_port
    os.environ.update(
        MLX_RANK=str(place.rank),
        MLX_WORLD_SIZE=str(place.size),
        NCCL_HOST_IP=_HERE,
        NCCL_PORT=str(port),
        NCCL_SOCKET_IFNAME=f"={place.interface}",
    )
    return mx.distributed.init(strict=True, backend="nccl")


def devices(place: RingPlace) -> list[list[str | None]]:
    """The RDMA device of each rank to each other one. Nothing is used of rows but this rank's own; the others
    have its names, as none may be empty."""
    device = f"rdma_{place.interface}"
    ranks = range(place.size)
    return [[None if rank == other else device for other in ranks] for rank in ranks]


def rows(place: RingPlace) -> list[list[str]]:
    """The ring as this rank is told of it: nothing is used of rows but its own and the next one's."""
    found = [[f"{_HERE}:{place.port}"]] * place.size
    found[(place.rank + 1) % place.size] = [f"{_HERE}:{place.next_port}"]
    found[place.rank] = [f"{_HERE}:{place.port}"]
    return found


def check(
    group: Any, progress: PassProgress, step: int = 0, *, within_s: float = limits.RANKS_LOAD_S
) -> None:
    """Wait until every rank has come here, and see that sums of this ring are sums. Raises MemberLost.

    ``step``: the same number on every rank. The sum is wrong too if a rank has come with another one.
    """
    size, step = group.size(), step % _CANARY_STEPS
    # Each place and each rank has a number of its own: sums of other places or of fewer ranks are others.
    places = mx.arange(1, _CANARY + 1, dtype=mx.float32)
    with progress.within(within_s), lost_ranks():
        found = mx.distributed.all_sum(places * (group.rank() + 1) + step, group=group)
        mx.eval(found)
    if not bool(mx.all(found == places * (size * (size + 1) // 2) + size * step)):
        raise MemberLost(
            GroupLost(
                f"A sum over the ranks was wrong after {progress.done} passes: a machine or a link computes "
                "wrongly, or its rank is not where the others are. All ranks are ended.",
                hint="Send the request again: it goes another way. If this comes again with the same "
                "machine, leave it out.",
            )
        )


@contextmanager
def lost_ranks() -> Iterator[None]:
    """What MLX raises meanwhile because a rank is gone comes out as MemberLost."""
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in _OF_BACKENDS):
            raise
        raise MemberLost(MemberGone(f"Another rank is gone: {error}")) from error


def keep_rows_stable() -> None:
    """Have divided layers compute as ``mlx_functions`` has others: with as many rows as make the bits of one
    row the same in every batch. For a CPU, once."""
    for kind in (distributed.AllToShardedLinear, distributed.ShardedToAllLinear):
        kind.__call__ = _stable(kind.__call__)


def _stable(stock: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
    def linear(self: Any, x: mx.array) -> mx.array:
        return products.row_stable(partial(stock, self), x)

    return linear


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
