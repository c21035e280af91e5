"""Announces this machine by mDNS and finds the others on the local network. Its results are hints only.

It runs beside the daemon, and its failures never stop the daemon: if the network does not permit
multicast, ``state`` says so and discovery tries again.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fleetd import limits
from fleetd.p2p.discovery import interfaces
from fleetd.p2p.discovery.discovered import DiscoveredPeer, DiscoveryTable, read_claim, write_text
from fleetd.p2p.discovery.interfaces import Interface
from fleetd.p2p.discovery.unreachable import explain_multicast
from fleetd.process.observe import get_logger

if TYPE_CHECKING:
    from fleetd.p2p.discovery.mdns import Claim, Responder

__all__ = ["DiscoveredPeer", "Discovery"]

log = get_logger("fleetd.discovery")

RUNNING = "running"
_STARTING, _STOPPED = "starting", "stopped"
# Two more queries soon after the first: Wi-Fi often loses multicast packets.
_EARLY_S = (1.0, 3.0)


class Discovery:
    """``run`` until cancelled; ``stop`` says goodbye first.

    Args:
        host: the address on which this daemon listens; selects interfaces and announced addresses.
        on_seen: called with each plausible claim, new or repeated, at a bounded rate.
        keep: True for a node id whose entry no other machine may replace.
    """

    def __init__(
        self,
        *,
        node_id: str,
        name: str,
        port: int,
        versions: tuple[int, int],
        host: str,
        on_seen: Callable[[DiscoveredPeer], None],
        keep: Callable[[str], bool] = lambda node_id: False,
    ) -> None:
        self._node_id = node_id
        self._name = name
        self._port = port
        self._versions = versions
        self._host = host
        self._on_seen = on_seen
        self._pairing = ""
        self._state = _STARTING
        self.table = DiscoveryTable(node_id, keep)
        self.responder: Responder | None = None
        self._stopped = False
        self._wake = asyncio.Event()
        self._loopback = False

    @property
    def state(self) -> str:
        """The state to show: "running", or why this machine can neither find others nor be found."""
        if self.responder is not None and self.responder.trouble is not None:
            return explain_multicast(self.responder.trouble, sys.platform)
        return self._state

    @property
    def seen(self) -> Mapping[str, DiscoveredPeer]:
        """The other machines that were discovered lately, by node id."""
        self.table.expire(self._now())
        return self.table

    async def run(self) -> None:
        """Announce and listen on every usable interface until cancelled; never raises."""
        wait_s = limits.DISCOVERY_AGAIN_S
        try:
            while not self._stopped:
                began = self._now()
                try:
                    await self._serve()
                except Exception as error:  # no error of the network or of zeroconf may end the daemon
                    if not self._stopped:
                        self._say(_why(error))
                finally:
                    await self._close()
                if self._now() - began > limits.DISCOVERY_AGAIN_MOST_S:
                    wait_s = limits.DISCOVERY_AGAIN_S
                await self._pause(wait_s)
                wait_s = min(wait_s * 2, limits.DISCOVERY_AGAIN_MOST_S)
        finally:
            self._state = _STOPPED

    async def announce_pairing(self, nameplate: str) -> None:
        """Announce an open pairing window by its nameplate; "" withdraws it."""
        self._pairing = nameplate
        if self.responder is not None:
            await self.responder.update(self._text())

    async def stop(self) -> None:
        """Say goodbye and end ``run``."""
        self._stopped = True
        if self.responder is not None:
            self.responder.say_goodbye()
        self._wake.set()
        await self._close()

    # ---- one life of a responder -------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Run one responder until the interfaces change, a socket closes or ``stop`` is called."""
        mdns = await asyncio.to_thread(importlib.import_module, "fleetd.p2p.discovery.mdns")
        while True:
            chosen = await asyncio.to_thread(self._choose)
            if self._stopped:
                return  # announced now, it would be found for an hour after its goodbye
            if not any(chosen):
                self._say("no network interface of this machine can be used for it")
                await self._pause(limits.DISCOVERY_REFRESH_S)
                continue
            addresses, scopes = chosen
            self._loopback = all(ipaddress.ip_address(host).is_loopback for host in addresses)
            self.responder = mdns.Responder(
                node_id=self._node_id,
                name=self._name,
                port=self._port,
                text=self._text(),
                addresses=addresses,
                scopes=scopes,
                on_claim=self._claimed,
                on_gone=self.table.gone,
            )
            await self.responder.open()
            self._say(RUNNING)
            await self._watch(self.responder, chosen)
            await self._close()

    async def _watch(self, responder: Responder, chosen: tuple[list[str], list[int]]) -> None:
        for delay_s in _EARLY_S:
            await self._pause(delay_s)
            if not self._stopped:
                responder.ask()
        asked = self._now()
        while not self._stopped and responder.alive:
            await self._pause(limits.DISCOVERY_REFRESH_S)
            self.table.expire(self._now())
            if self._stopped or await asyncio.to_thread(self._choose) != chosen:
                return
            if self._now() - asked >= limits.DISCOVERY_ASK_S:
                asked = self._now()
                responder.ask()

    def _choose(self) -> tuple[list[str], list[int]]:
        *_, (host, *_) = socket.getaddrinfo(self._host, None)[0]  # it may be "localhost"
        return choose(str(host), interfaces.read())

    async def _close(self) -> None:
        responder, self.responder = self.responder, None
        if responder is not None:
            try:
                await responder.close()
            except Exception as error:  # as in run
                log.debug("discovery.not_closed", reason=_why(error))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _claimed(self, claim: Claim) -> None:
        found = read_claim(claim.text, claim.hosts, claim.port, loopback=self._loopback)
        if found is None:
            return
        is_new = found.node_id not in self.table
        if self.table.accept(found, claim.instance, self._now()):
            if is_new and self.responder is not None:
                self.responder.introduce()
            self._on_seen(found)

    def _text(self) -> dict[str, str]:
        return write_text(
            node_id=self._node_id, name=self._name, versions=self._versions, pairing=self._pairing
        )

    def _say(self, state: str) -> None:
        if state != self._state:
            self._state = state
            if state == RUNNING:
                log.info("discovery.running")
            else:
                log.warning("discovery.not_running", reason=state)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def choose(host: str, found: Sequence[Interface]) -> tuple[list[str], list[int]]:
    """The addresses that a daemon listening on ``host`` announces, and the indexes of the interfaces where it
    uses IPv6 multicast: those without IPv4, since both at once would only double the traffic."""
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        if not address.is_loopback and not any(host in item.addresses for item in found):
            return [], []  # an address that is gone, or not there yet
        scopes = [_index(item) for item in found if host in item.addresses and address.version == 6]
        return [host], scopes
    shared = [item for item in found if item.is_shared]
    addresses = [text for item in shared for text in item.addresses if ":" not in text]
    addresses += [text for item in shared for text in item.addresses if ":" in text and "%" not in text]
    only_v6 = [item for item in shared if item.addresses and all(":" in text for text in item.addresses)]
    addresses += [text for item in only_v6 for text in item.addresses if "%" in text]
    return addresses[: limits.ADDRESSES_PER_PEER], [_index(item) for item in only_v6]


def _index(interface: Interface) -> int:
    return socket.if_nametoindex(interface.name)


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return explain_multicast(error, sys.platform)
    return f"mDNS failed ({type(error).__name__}: {error})"
