"""Who is said to be on this network. Sans-IO: unauthenticated claims in, a small table of plausible ones out.

Anybody on the network can claim anything here. So a claim is a hint where to dial and never more; it is
checked for form, what it can point at is restricted, and a flood neither grows the table nor pushes out the
machines that the caller wants kept.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetd import limits
from fleetd.p2p.token_bucket import TokenBucket

_NODE_ID = re.compile(r"[a-z2-7]{56}")
_VERSIONS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_NAMEPLATE = re.compile(r"[a-z0-9]{0,16}")


@dataclass(frozen=True, slots=True)
class DiscoveredPeer:
    """A machine as it, or somebody in its name, describes itself.

    ``versions``: the oldest and newest protocol that it speaks. ``pairing``: the nameplate of its open
    pairing window, or "".
    """

    node_id: str
    name: str
    addresses: tuple[tuple[str, int], ...]
    versions: tuple[int, int]
    pairing: str = ""


def write_text(*, node_id: str, name: str, versions: tuple[int, int], pairing: str) -> dict[str, str]:
    """The TXT record of a machine."""
    room = limits.SIGHTING_TEXT_BYTES - len("name=")
    shown = printable(name).encode()[:room].decode("utf-8", "ignore")
    return {"id": node_id, "name": shown, "v": f"{versions[0]}-{versions[1]}", "pair": pairing}


def read_sighting(
    text: Mapping[bytes, bytes], hosts: Sequence[str], port: int, *, loopback: bool
) -> DiscoveredPeer | None:
    """A claim in its plausible form, or None where it has none.

    Args:
        loopback: whether addresses of this machine itself are believed; only a daemon that listens on
            loopback may be led there, or a stranger could aim it at services that trust local callers.
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
    """Whether a machine can be called at this address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return False  # a second spelling of an address, which would pass the checks of the first
        if address.is_link_local:
            return bool(address.scope_id)
    if address.is_loopback:
        return loopback
    return not (address.is_multicast or address.is_unspecified or address.is_reserved)


def printable(name: str) -> str:
    """A name for people that cannot move their cursor or fill their screen."""
    return "".join(char for char in name if char.isprintable())[: limits.MEMBER_NAME_CHARS].strip()


@dataclass(slots=True)
class _DiscoveryEntry:
    sighting: DiscoveredPeer
    instance: str
    heard_s: float


def budget() -> TokenBucket:
    """How many sightings may still be taken in."""
    return TokenBucket(limits.SIGHTINGS_AT_ONCE, limits.SIGHTINGS_PER_S)


class DiscoveryTable(Mapping[str, DiscoveredPeer]):
    """The last plausible claim of each machine, by node id.

    Args:
        me: this machine's own id, which is nobody else's.
        keep: whether a machine must not be forgotten in favour of a stranger.
    """

    def __init__(self, me: str, keep: Callable[[str], bool]) -> None:
        self._me = me
        self._keep = keep
        self._entries: dict[str, _DiscoveryEntry] = {}
        self._budget = budget()

    def __getitem__(self, node_id: str) -> DiscoveredPeer:
        return self._entries[node_id].sighting

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def heard(self, sighting: DiscoveredPeer, instance: str, now: float) -> bool:
        """Take in a claim; whether it is worth acting on.

        ``instance`` is the name under which it was made, and under which it will be taken back.
        """
        if sighting.node_id == self._me or not self._budget.take(1, now):
            return False
        if sighting.node_id not in self._entries and not self._make_room():
            return False
        # Moved to the end: the first entry is the one that was silent for longest.
        self._entries.pop(sighting.node_id, None)
        self._entries[sighting.node_id] = _DiscoveryEntry(sighting, instance, now)
        return True

    def gone(self, instance: str) -> None:
        """The claim made under this name was taken back."""
        for node_id in [node_id for node_id, entry in self._entries.items() if entry.instance == instance]:
            del self._entries[node_id]

    def expire(self, now: float) -> None:
        """Forget who has not been heard of for long: mDNS itself would list the dead for over an hour."""
        for node_id in [
            node_id
            for node_id, entry in self._entries.items()
            if now - entry.heard_s >= limits.SIGHTING_TTL_S
        ]:
            del self._entries[node_id]

    def _make_room(self) -> bool:
        if len(self._entries) < limits.SIGHTINGS:
            return True
        stranger = next((node_id for node_id in self._entries if not self._keep(node_id)), None)
        if stranger is None:
            return False
        del self._entries[stranger]
        return True
