"""The table of machines discovered on this network. Sans-IO: claims go in, the plausible ones are kept.

Any machine on the network can make any claim, so a claim is only a hint where to dial. Its form is checked,
the addresses in it are restricted, and a flood neither grows the table nor replaces the machines that the
caller wants kept.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fleetd import limits
from fleetd.p2p.token_bucket import TokenBucket

_NODE_ID = re.compile(r"[a-z2-7]{56}")
_VERSIONS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_NAMEPLATE = re.compile(r"[a-z0-9]{0,16}")


class DiscoveredPeer(msgspec.Struct, frozen=True):
    """A claim about a machine, unauthenticated.

    ``versions``: the oldest and newest protocol version of the machine. ``pairing``: the nameplate of its
    open pairing window, or "".
    """

    node_id: str
    name: str
    addresses: tuple[tuple[str, int], ...]
    versions: tuple[int, int]
    pairing: str = ""


def write_text(*, node_id: str, name: str, versions: tuple[int, int], pairing: str) -> dict[str, str]:
    """The TXT record of this machine."""
    room = limits.CLAIM_TEXT_BYTES - len("name=")
    shown = printable(name).encode()[:room].decode("utf-8", "ignore")
    return {"id": node_id, "name": shown, "v": f"{versions[0]}-{versions[1]}", "pair": pairing}


def read_claim(
    text: Mapping[bytes, bytes], hosts: Sequence[str], port: int, *, loopback: bool
) -> DiscoveredPeer | None:
    """A claim reduced to its plausible addresses, or None if it is malformed or has none.

    Args:
        loopback: accept loopback addresses. Only for a daemon that listens on loopback: a claim must not
            aim it at services that trust local callers.
    """

    def value(key: bytes) -> str:
        return text.get(key, b"").decode("utf-8", "replace")

    node_id, pairing = value(b"id"), value(b"pair")
    versions = _VERSIONS.fullmatch(value(b"v"))
    if _NODE_ID.fullmatch(node_id) is None or versions is None or not 1 <= port <= 65535:
        return None
    oldest, newest = int(versions[1]), int(versions[2])
    if not 1 <= oldest <= newest:
        return None
    usable = list(dict.fromkeys(host for host in hosts if is_plausible(host, loopback=loopback)))
    if not usable:
        return None
    return DiscoveredPeer(
        node_id=node_id,
        name=printable(value(b"name")),
        addresses=tuple((host, port) for host in usable[: limits.ADDRESSES_PER_PEER]),
        versions=(oldest, newest),
        pairing=pairing if _NAMEPLATE.fullmatch(pairing) else "",
    )


def is_plausible(host: str, *, loopback: bool) -> bool:
    """True if another machine can be dialled at this address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return False  # another form of an IPv4 address, which would pass the checks below
        if address.is_link_local:
            return bool(address.scope_id)
    if address.is_loopback:
        return loopback
    return not (address.is_multicast or address.is_unspecified or address.is_reserved)


def printable(name: str) -> str:
    """The printable part of a name, cut to the bound: safe to write to a terminal."""
    return "".join(char for char in name if char.isprintable())[: limits.MEMBER_NAME_CHARS].strip()


@dataclass(slots=True)
class _DiscoveryEntry:
    peer: DiscoveredPeer
    instance: str
    heard_s: float


def budget() -> TokenBucket:
    """A bucket of claims that may be accepted."""
    return TokenBucket(limits.CLAIMS_AT_ONCE, limits.CLAIMS_PER_S)


class DiscoveryTable(Mapping[str, DiscoveredPeer]):
    """The last plausible claim about each machine, by node id.

    Args:
        me: this machine's node id; claims about it are refused.
        keep: True for a node id whose entry no other machine may replace.
    """

    def __init__(self, me: str, keep: Callable[[str], bool]) -> None:
        self._me = me
        self._keep = keep
        self._entries: dict[str, _DiscoveryEntry] = {}
        self.budget = budget()

    def __getitem__(self, node_id: str) -> DiscoveredPeer:
        return self._entries[node_id].peer

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def accept(self, peer: DiscoveredPeer, instance: str, now: float) -> bool:
        """Add or renew a claim; False if it is over a bound or about this machine.

        ``instance`` is the service name of the claim, which a later withdrawal repeats.
        """
        if peer.node_id == self._me or not self.budget.take(1, now):
            return False
        if peer.node_id not in self._entries and not self._make_room():
            return False
        # Moved to the end: the first entry is the oldest.
        self._entries.pop(peer.node_id, None)
        self._entries[peer.node_id] = _DiscoveryEntry(peer, instance, now)
        return True

    def gone(self, instance: str) -> None:
        """Remove the entry whose claim had this service name."""
        for node_id in [node_id for node_id, entry in self._entries.items() if entry.instance == instance]:
            del self._entries[node_id]

    def expire(self, now: float) -> None:
        """Remove entries not renewed for ``DISCOVERED_TTL_S``; mDNS itself keeps them over an hour."""
        for node_id in [
            node_id
            for node_id, entry in self._entries.items()
            if now - entry.heard_s >= limits.DISCOVERED_TTL_S
        ]:
            del self._entries[node_id]

    def _make_room(self) -> bool:
        if len(self._entries) < limits.DISCOVERED_PEERS:
            return True
        replaceable = next((node_id for node_id in self._entries if not self._keep(node_id)), None)
        if replaceable is None:
            return False
        del self._entries[replaceable]
        return True
