"""One mDNS responder and browser for ``_fleetd._tcp``, on zeroconf. Imported late: the import is slow.

A flood filter stands between the sockets and zeroconf. It drops packets that do not contain ``fleetd``
unparsed, so printers on the network cost nothing, and passes a bounded number of bytes per second, so a flood
costs a bounded share of a core. Service names contain the node id and are unique without probing, which saves
a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from zeroconf import RecordUpdate, RecordUpdateListener, ServiceInfo, Zeroconf
from zeroconf.asyncio import AsyncZeroconf

from fleetd import limits
from fleetd.p2p.discovery import zeroconf_adapter as adapter
from fleetd.p2p.discovery.zeroconf_adapter import DNSAddress, DNSPointer, DNSService, DNSText
from fleetd.p2p.token_bucket import TokenBucket
from fleetd.process.observe import get_logger

log = get_logger("fleetd.discovery")

SERVICE = "_fleetd._tcp.local."
# Part of our service's name and of our host names, so every packet about either contains it.
_MARK = b"fleetd"
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")
_LABEL_CHARS = 40
# RFC 6762 requires a second between two multicasts of one record.
_INTRODUCE_S = 1.0
_SAY_AGAIN_S = 1.5
# Handling an empty packet costs as much as this many bytes of a full one.
_PACKET_COST_BYTES = 256

# Discovery.state reports errors, once and as a sentence.
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)


class Claim(msgspec.Struct, frozen=True):
    """The description of a service instance by itself, unchecked."""

    instance: str
    text: Mapping[bytes, bytes]
    hosts: tuple[str, ...]
    port: int


class Responder(RecordUpdateListener):
    """Announces one machine and listens for others. Made in the event loop; raises OSError.

    Args:
        addresses: addresses to announce; multicast uses the interfaces that have them.
        scopes: indexes of the interfaces for multicast over IPv6.
        on_claim: called with each claim, new or repeated.
        on_gone: called with the instance name of a claim that was withdrawn.
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
        #: The last error in sending, until the next query.
        self.trouble: OSError | None = None
        #: One for each socket.
        self.filters: list[FloodFilter] = []
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
        self.zeroconf = Zeroconf(interfaces=interfaces + list(scopes), use_asyncio=True)

    async def open(self) -> None:
        """Announce this machine and ask the others to announce themselves."""
        await self.zeroconf.async_wait_for_start()
        bucket = budget()

        def filtered(listener: Any) -> FloodFilter:
            self.filters.append(FloodFilter(listener, bucket, self._clock, self._failed))
            return self.filters[-1]

        if not adapter.filter_packets(self.zeroconf, filtered):
            raise OSError(errno.EADDRNOTAVAIL, "no interface has such an address")
        self.zeroconf.async_add_listener(self, None)
        self._announcing = asyncio.ensure_future(
            await self.zeroconf.async_register_service(self._info, cooperating_responders=True)
        )
        self.ask()

    def ask(self) -> None:
        """Ask all machines to describe themselves.

        The query has no list of known answers, which would silence known machines: their answers show that
        they are still there.
        """
        self.trouble = None
        adapter.send_query(self.zeroconf, SERVICE)

    def introduce(self) -> None:
        """Announce this machine to a new one now: zeroconf may delay its answer by a second."""
        now = self._clock()
        if now - self._introduced_s >= _INTRODUCE_S:
            self._introduced_s = now
            adapter.send_records(self.zeroconf, self._info)

    async def update(self, text: Mapping[str, str]) -> None:
        """Announce this machine with another TXT record."""
        self._info = self._describe(text)
        if self._announcing is not None:
            self._announcing.cancel()
        self._announcing = asyncio.ensure_future(self._announce())

    async def _announce(self) -> None:
        await (await self.zeroconf.async_update_service(self._info))
        # zeroconf may delay an answer with the old text by a second, and a machine that received the same
        # packet just before drops this one as an echo. So the text is sent again after both delays.
        await asyncio.sleep(_SAY_AGAIN_S)
        adapter.send_records(self.zeroconf, self._info)

    @property
    def alive(self) -> bool:
        """True while every socket is open."""
        return adapter.is_listening(self.zeroconf)

    def say_goodbye(self) -> None:
        if (goodbye := self.zeroconf.generate_unregister_all_services()) is not None:
            self.zeroconf.async_send(goodbye)

    async def close(self) -> None:
        """Close the sockets without a goodbye, which is for a machine that stops."""
        if self._announcing is not None:
            self._announcing.cancel()
        self.zeroconf.registry.async_remove(self._info)
        await AsyncZeroconf(zc=self.zeroconf).async_close()

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
        """Called with the records of one packet, before they are in the cache."""
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
        """Called when they are in the cache."""
        touched, self._touched = self._touched, set()
        for instance in touched:
            if (claim := self._claim(instance)) is not None:
                self._on_claim(claim)

    def _touch(self, instance: str) -> None:
        if (
            len(self._touched) < limits.DISCOVERED_PEERS
            and instance.endswith(SERVICE)
            and instance != self._info.name
        ):
            self._touched.add(instance)

    def _claim(self, instance: str) -> Claim | None:
        """The claim of an instance from the cache; None while a record is missing."""
        service = next(iter(adapter.newest_records(self.zeroconf, instance, adapter.SRV)), None)
        text = next(iter(adapter.newest_records(self.zeroconf, instance, adapter.TXT)), None)
        if not isinstance(service, DNSService) or not isinstance(text, DNSText):
            return None
        # Newest first: after a change of network the old addresses stay in the cache for a while.
        found = adapter.newest_records(self.zeroconf, service.server, adapter.A, adapter.AAAA)
        return Claim(
            instance=instance,
            text=read_strings(text.text),
            hosts=tuple(adapter.scoped_host(record) for record in found if isinstance(record, DNSAddress)),
            port=service.port,
        )


def read_strings(text: bytes) -> dict[bytes, bytes]:
    """The ``key=value`` strings of a TXT record. The first of each key counts (RFC 6763)."""
    found: dict[bytes, bytes] = {}
    while text:
        end = 1 + text[0]
        key, _, value = text[1:end].partition(b"=")
        found.setdefault(key, value)
        text = text[end:]
    return found


def budget() -> TokenBucket:
    """A bucket of bytes that may be parsed."""
    return TokenBucket(limits.MDNS_BURST_BYTES, limits.MDNS_BYTES_PER_S)


class FloodFilter(asyncio.DatagramProtocol):
    """Passes packets of fleetd from one socket to zeroconf, as far as the bucket allows."""

    def __init__(
        self,
        inner: Any,  # zeroconf's listener is compiled and has no base class
        bucket: TokenBucket,
        clock: Callable[[], float],
        on_error: Callable[[OSError], None],
    ) -> None:
        self.inner = inner
        self.bucket = bucket
        self._clock = clock
        self._on_error = on_error
        self._logged_s = -limits.REPEAT_LOG_S

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        now = self._clock()
        if _MARK not in data or not self.bucket.take(len(data) + _PACKET_COST_BYTES, now):
            return
        try:
            self.inner.datagram_received(data, addr)
        except Exception as error:  # the parser's boundary: no packet may end the loop
            if now - self._logged_s >= limits.REPEAT_LOG_S:
                self._logged_s = now
                log.warning("mdns.packet_dropped", type=type(error).__name__, error=str(error))

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, OSError):
            self._on_error(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)
