"""Links that their owner has declared private: a cable between two machines, or a network of their own.

What the ranks of a divided model send each other goes over such a link unsealed, if the owners of both ends
have declared it so. Everything else is sealed on every link.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network

from fleetd.p2p.discovery.interfaces import Interface


class PlainLinks:
    """Args:
    declared: names of interfaces ("bridge0") and networks ("10.0.5.0/24") as the settings
        have checked them.
    interfaces: those of this machine, now.
    """

    def __init__(
        self, declared: Sequence[str] = (), interfaces: Callable[[], Sequence[Interface]] = tuple
    ) -> None:
        self.declared = tuple(declared)
        self._interfaces = interfaces

    def covers(self, sock: socket.socket) -> bool:
        """True if a connection runs over a link that was declared: both of its ends are on it."""
        if not self.declared or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        own, other = (str(name[0]).partition("%")[0] for name in (sock.getsockname(), sock.getpeername()))
        return any(
            (_within(own, networks) if addresses is None else own in addresses) and _within(other, networks)
            for addresses, networks in self._links()
        )

    def interface(self, sock: socket.socket) -> str:
        """The name of the interface that a connection has its own address of; "" if none has it."""
        own = str(sock.getsockname()[0]).partition("%")[0]
        found = (
            interface.name
            for interface in self._interfaces()
            if own in (address.partition("%")[0] for address in interface.addresses)
        )
        return next(found, "")

    def leads_to(self, host: str) -> bool:
        """True if an address is on a link that was declared."""
        bare = host.partition("%")[0]
        return any(_within(bare, networks) for _, networks in self._links())

    @property
    def missing(self) -> list[str]:
        """Interfaces that were declared and are not there."""
        names = {interface.name for interface in self._interfaces()}
        return [name for name in self.declared if "/" not in name and name not in names]

    def _links(self) -> Iterator[tuple[tuple[str, ...] | None, list[IPv4Network | IPv6Network]]]:
        """This machine's addresses on each declared link (None: any in its networks), and its networks."""
        by_name = {interface.name: interface for interface in self._interfaces()}
        for name in self.declared:
            if "/" in name:
                yield None, [ipaddress.ip_network(name, strict=False)]
            elif (found := by_name.get(name)) is not None:
                own = tuple(address.partition("%")[0] for address in found.addresses)
                yield own, [ipaddress.ip_network(text) for text in found.networks]


def _within(host: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)
