"""One mDNS responder and browser for ``_fleetd._tcp``, on zeroconf. Imported late: nobody waits for it.

Between the sockets and zeroconf stands a gate. What does not speak of fleetd is dropped unparsed, so other
people's printers cost nothing; of what does, only so many bytes per second are parsed, so a flood costs a
bounded share of a core. Names contain the node id, so nobody has to be asked whether they are free: the
second that probing takes is saved.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroconf import RecordUpdate, RecordUpdateListener, ServiceInfo, Zeroconf
from zeroconf._dns import DNSAddress, DNSPointer, DNSQuestion, DNSRecord, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.asyncio import AsyncZeroconf

from fleetd import limits
from fleetd.observe import get_logger
from fleetd.p2p.token_bucket import TokenBucket

log = get_logger("fleetd.discovery")

SERVICE = "_fleetd._tcp.local."
# Part of our service's name and of our host names, so every packet about either contains it.
_MARK = b"fleetd"
# RFC 1035 and 6762.
_QUERY, _IN, _A, _PTR, _TXT, _AAAA, _SRV = 0, 1, 1, 12, 16, 28, 33
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")
_LABEL_CHARS = 40
# RFC 6762 wants a second between two multicasts of one record.
_INTRODUCE_S = 1.0
_SAY_AGAIN_S = 1.5
# A look at an empty packet costs as much as this many bytes of a full one.
_PACKET_COST_BYTES = 256

# What goes wrong here is told by Discovery.state, once and in words.
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a service instance says of itself, unchecked."""

    instance: str
    text: Mapping[bytes, bytes]
    hosts: tuple[str, ...]
    port: int


class Responder(RecordUpdateListener):
    """Announces one machine and listens for others. Made in the event loop; raises OSError.

    Args:
        addresses: where this machine says it is; its multicast goes through the interfaces that have them.
        scopes: indexes of interfaces to be used with IPv6.
    """

    def __init__(
        self,
        *,
        node_id: str,
        name: str,
        port: int,
        text: Mapping[str, str],
        addresses: Sequence[str],
        scopes: Sequence[int],
        on_claim: Callable[[Claim], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.trouble: OSError | None = None
        self._clock = asyncio.get_running_loop().time
        self._introduced_s = -_INTRODUCE_S
        self._label = f"{node_id[:7]}-{_UNSAFE.sub('-', name)[:_LABEL_CHARS]}".rstrip("-")
        self._host = f"fleetd-{node_id[:16]}.local."
        self._port = port
        self._addresses = list(addresses)
        self._on_claim = on_claim
        self._on_gone = on_gone
        self._touched: set[str] = set()
        self._info = self._describe(text)
        self._announcing: asyncio.Future[None] | None = None
        interfaces: list[str | int] = [host for host in addresses if ":" not in host]
        self._zeroconf = Zeroconf(interfaces=interfaces + list(scopes), use_asyncio=True)

    async def open(self) -> None:
        """Announce this machine and ask who else is there."""
        await self._zeroconf.async_wait_for_start()
        if not self._zeroconf.engine.senders:
            raise OSError(errno.EADDRNOTAVAIL, "no interface has such an address")
        bucket = budget()
        for reader in self._zeroconf.engine.readers:
            inner = reader.transport.get_protocol()
            reader.transport.set_protocol(FloodFilter(inner, bucket, self._clock, self._failed))
        self._zeroconf.async_add_listener(self, None)
        self._announcing = asyncio.ensure_future(
            await self._zeroconf.async_register_service(self._info, cooperating_responders=True)
        )
        self.ask()

    def ask(self) -> None:
        """Ask everybody to describe themselves.

        Without the list of known answers that would silence those who are known: that they answer is what
        tells that they are still there.
        """
        self.trouble = None
        query = DNSOutgoing(_QUERY)
        query.add_question(DNSQuestion(SERVICE, _PTR, _IN))
        self._zeroconf.async_send(query)

    def introduce(self) -> None:
        """Describe this machine to a newcomer now: answers to its question may be held back for a second."""
        now = self._clock()
        if now - self._introduced_s >= _INTRODUCE_S:
            self._introduced_s = now
            self._zeroconf.async_send(self._zeroconf.generate_service_broadcast(self._info, None))

    async def update(self, text: Mapping[str, str]) -> None:
        """Announce this machine with another TXT record."""
        self._info = self._describe(text)
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = asyncio.ensure_future(self._announce())

    async def _announce(self) -> None:
        await (await self._zeroconf.async_update_service(self._info))
        # Answers with what was true before may be held back for a second, and whoever heard the very same
        # a moment before that takes this for an echo. So it is said once more when both are over.
        await asyncio.sleep(_SAY_AGAIN_S)
        self._zeroconf.async_send(self._zeroconf.generate_service_broadcast(self._info, None))

    @property
    def alive(self) -> bool:
        readers = self._zeroconf.engine.readers
        return bool(readers) and not any(reader.transport.is_closing() for reader in readers)

    def say_goodbye(self) -> None:
        if (goodbye := self._zeroconf.generate_unregister_all_services()) is not None:
            self._zeroconf.async_send(goodbye)

    async def close(self) -> None:
        """Without a goodbye: that is for a machine that stops, not for a socket that is replaced."""
        if self._announcing is not None:
            self._announcing.cancel()
        self._zeroconf.registry.async_remove(self._info)
        await AsyncZeroconf(zc=self._zeroconf).async_close()

    def _describe(self, text: Mapping[str, str]) -> ServiceInfo:
        return ServiceInfo(
            SERVICE,
            f"{self._label}.{SERVICE}",
            self._port,
            properties=dict(text),
            server=self._host,
            parsed_addresses=[host.partition("%")[0] for host in self._addresses],
        )

    def _failed(self, error: OSError) -> None:
        self.trouble = error

    # ---- zeroconf's RecordUpdateListener -----------------------------------------------------------------

    def async_update_records(self, zc: Zeroconf, now: float, records: list[RecordUpdate]) -> None:
        """Called with the records of one packet, before the cache has them."""
        for update in records:
            record = update.new
            if isinstance(record, DNSPointer) and record.name.lower() == SERVICE:
                if record.is_expired(now):
                    self._touched.discard(record.alias)
                    self._on_gone(record.alias)
                else:
                    self._touch(record.alias)
            elif isinstance(record, DNSService | DNSText) and not record.is_expired(now):
                self._touch(record.name)

    def async_update_records_complete(self) -> None:
        """Called when the cache has them."""
        touched, self._touched = self._touched, set()
        for instance in touched:
            if (claim := self._claim(instance)) is not None:
                self._on_claim(claim)

    def _touch(self, instance: str) -> None:
        if (
            len(self._touched) < limits.SIGHTINGS
            and instance.endswith(SERVICE)
            and instance != self._info.name
        ):
            self._touched.add(instance)

    def _claim(self, instance: str) -> Claim | None:
        """Put together what the cache has; None while a part is missing."""
        cache = self._zeroconf.cache
        services = cache.async_all_by_details(instance, _SRV, _IN)
        texts = cache.async_all_by_details(instance, _TXT, _IN)
        if not services or not texts:
            return None
        service, text = max(services, key=_freshness), max(texts, key=_freshness)
        if not isinstance(service, DNSService) or not isinstance(text, DNSText):
            return None
        found = cache.async_all_by_details(service.server, _A, _IN)
        found += cache.async_all_by_details(service.server, _AAAA, _IN)
        # The newest first: a machine that has moved still has its old addresses in the cache for a while.
        found.sort(key=_freshness, reverse=True)
        return Claim(
            instance=instance,
            text=read_strings(text.text),
            hosts=tuple(_host(record) for record in found if isinstance(record, DNSAddress)),
            port=service.port,
        )


def _freshness(record: DNSRecord) -> tuple[float, float]:
    """The cache marks what a packet has replaced with that packet's time, and one more second to live."""
    return record.created, record.ttl


def read_strings(text: bytes) -> dict[bytes, bytes]:
    """The ``key=value`` strings of a TXT record; as RFC 6763 has it, the first of a key counts."""
    found: dict[bytes, bytes] = {}
    while text:
        end = 1 + text[0]
        key, _, value = text[1:end].partition(b"=")
        found.setdefault(key, value)
        text = text[end:]
    return found


def _host(record: DNSAddress) -> str:
    address = ipaddress.ip_address(record.address)
    if address.version == 6 and address.is_link_local and record.scope_id:
        return f"{address}%{socket.if_indextoname(record.scope_id)}"
    return str(address)


def budget() -> TokenBucket:
    """How many bytes may still be parsed."""
    return TokenBucket(limits.MDNS_BURST_BYTES, limits.MDNS_BYTES_PER_S)


class FloodFilter(asyncio.DatagramProtocol):
    """Stands in front of one of zeroconf's sockets."""

    def __init__(
        self,
        inner: Any,  # zeroconf's listener is compiled and has no base class
        bucket: TokenBucket,
        clock: Callable[[], float],
        on_error: Callable[[OSError], None],
    ) -> None:
        self._inner = inner
        self._bucket = bucket
        self._clock = clock
        self._on_error = on_error
        self._told_s = -limits.REPEAT_LOG_S

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        now = self._clock()
        if _MARK not in data or not self._bucket.take(len(data) + _PACKET_COST_BYTES, now):
            return
        try:
            self._inner.datagram_received(data, addr)
        except Exception as error:  # the parser's boundary: a packet that breaks it must not break the loop
            if now - self._told_s >= limits.REPEAT_LOG_S:
                self._told_s = now
                log.warning("mdns.packet_dropped", type=type(error).__name__, error=str(error))

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, OSError):
            self._on_error(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
