"""What may carry the sums of ranks besides a ring of tunnels: RDMA between Macs (JACCL), and NCCL between
machines with NVIDIA's GPUs.

Neither seals anything. So each end offers them only on a link that its owner has declared private, and both
ends have to offer the same. MLX on this machine has to have it, and RDMA needs a device that is linked.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection

import msgspec

from fleetd import limits
from fleetd.engine.settings import Backend
from fleetd.hardware import rdma
from fleetd.p2p.plain_links import PlainLinks

# What an end of a tunnel says of its link, a bit each; the first is the tunnel's own.
BITS: dict[Backend, int] = {"ring": 1, "jaccl": 2, "nccl": 4}
# Those that are taken if both ends offer them, the first one that is.
PREFERRED: tuple[Backend, ...] = ("jaccl", "nccl")


class Offer(msgspec.Struct, frozen=True):
    """What this end offers on one link. ``bits``: of ``BITS``. ``interface``: that the link is at here."""

    bits: int = 0
    interface: str = ""


def no_offer(sock: socket.socket) -> Offer:
    """Sealed tunnels on any link."""
    return Offer()


class Fabrics:
    """Args:
    links: those that are declared private.
    collectives: what MLX has here besides its ring.
    devices: RDMA devices that are linked. Blocks.
    """

    def __init__(
        self,
        links: PlainLinks,
        collectives: Callable[[], Collection[str]],
        devices: Callable[[], list[str]] = rdma.active,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._collectives, self._devices = links, collectives, devices
        self._monotonic = monotonic
        # Until when a backend is not offered, because a group that was to use it has not formed.
        self._not_before_s: dict[Backend, float] = {}
        self._linked: list[str] = []

    @property
    def possible(self) -> list[str]:
        """Backends that are offered on some link, as far as MLX goes."""
        return [name for name in PREFERRED if self._links.declared and self._may(name)]

    def towards(self, host: str) -> list[str]:
        """The same on the link that leads to an address."""
        return self.possible if self._links.leads_to(host) else []

    def failed(self, backend: Backend) -> None:
        """A group that was to use it has not formed: it is not offered for a while, and a ring is tried."""
        if backend != "ring":
            self._not_before_s[backend] = self._monotonic() + limits.SHARE_LOAD_AGAIN_S

    async def look(self) -> None:
        """Read again which RDMA devices are linked, before offers are made."""
        if "jaccl" in self._collectives() and self._links.declared:
            self._linked = await asyncio.to_thread(self._devices)

    def __call__(self, sock: socket.socket) -> Offer:
        """What this end offers on the link of a connection."""
        if not self._links.covers(sock):
            return Offer()
        interface = self._links.interface(sock)
        bits = BITS["ring"]
        if f"rdma_{interface}" in self._linked and self._may("jaccl"):
            bits |= BITS["jaccl"]
        if interface and self._may("nccl"):
            bits |= BITS["nccl"]
        return Offer(bits, interface)

    def _may(self, backend: Backend) -> bool:
        return backend in self._collectives() and self._not_before_s.get(backend, 0.0) <= self._monotonic()


def agreed(size: int, both: Collection[int]) -> Backend:
    """What carries the sums of ``size`` ranks, by what both ends of each of this machine's tunnels offer.

    More than two need a device for each pair or know only their neighbours: they use the ring.
    """
    if size == 2 and both:
        for name in PREFERRED:
            if all(bits & BITS[name] for bits in both):
                return name
    return "ring"
