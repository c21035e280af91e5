"""The only module that uses parts of zeroconf which its documentation does not name.

zeroconf offers no public way to send a query without the list of known answers, to read records with the time
of their arrival, or to filter packets before they are parsed. A test fails when another release than
``TESTED`` is installed, so that each upgrade is checked here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from zeroconf import ServiceInfo, Zeroconf
from zeroconf._dns import DNSAddress, DNSPointer, DNSQuestion, DNSRecord, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing

__all__ = [
    "DNSAddress",
    "DNSPointer",
    "DNSService",
    "DNSText",
    "filter_packets",
    "is_listening",
    "newest_records",
    "scoped_host",
    "send_query",
    "send_records",
]

#: The releases of zeroconf that this module was tested with.
TESTED = ("0.149", "0.154")

# RFC 1035 and 6762.
_QUERY, _IN = 0, 1
A, PTR, TXT, AAAA, SRV = 1, 12, 16, 28, 33


def send_query(zeroconf: Zeroconf, name: str) -> None:
    """Multicast a PTR question without known answers, so that every machine answers it."""
    query = DNSOutgoing(_QUERY)
    query.add_question(DNSQuestion(name, PTR, _IN))
    zeroconf.async_send(query)


def send_records(zeroconf: Zeroconf, service: ServiceInfo) -> None:
    """Multicast the records of a service now."""
    zeroconf.async_send(zeroconf.generate_service_broadcast(service, None))


def newest_records(zeroconf: Zeroconf, name: str, *kinds: int) -> list[DNSRecord]:
    """The cached records of a name, the newest first.

    The cache gives a record that a packet replaces the time of that packet and one more second to live.
    """
    found = [record for kind in kinds for record in zeroconf.cache.async_all_by_details(name, kind, _IN)]
    return sorted(found, key=lambda record: (record.created, record.ttl), reverse=True)


def scoped_host(record: DNSAddress) -> str:
    """The address of a record as it is dialled: a link-local IPv6 one with its interface."""
    address = ip_address(record.address)
    if address.version == 6 and address.is_link_local and record.scope_id:
        return f"{address}%{socket.if_indextoname(record.scope_id)}"
    return str(address)


def filter_packets(zeroconf: Zeroconf, make: Callable[[Any], asyncio.DatagramProtocol]) -> bool:
    """Put ``make(listener)`` before the listener of each socket. False if no socket can send."""
    if not zeroconf.engine.senders:
        return False
    for reader in zeroconf.engine.readers:
        reader.transport.set_protocol(make(reader.transport.get_protocol()))
    return True


def is_listening(zeroconf: Zeroconf) -> bool:
    """True while every socket is open."""
    readers = zeroconf.engine.readers
    return bool(readers) and not any(reader.transport.is_closing() for reader in readers)
