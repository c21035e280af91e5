"""What members tell each other besides their cards: the roster, and where a machine was reached. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.p2p.discovery.discovered import is_plausible
from fleetd.p2p.membership.roster import RosterRecord
from fleetd.p2p.messages import reader

# Topics.
CARD, ROSTER, ADDRESSES = "card", "roster", "addresses"


class AddressHint(msgspec.Struct, frozen=True, array_like=True):
    """Where a member was reached lately: a hint for machines that cannot hear its mDNS."""

    node_id: Annotated[str, Meta(max_length=64)]
    host: Annotated[str, Meta(min_length=1, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]


_encode = msgspec.msgpack.Encoder().encode
# Both raise ProtocolError.
read_records: Callable[[bytes], list[RosterRecord]] = reader(
    Annotated[list[RosterRecord], Meta(max_length=limits.ROSTER_RECORDS)], "A peer's roster"
)
read_hints: Callable[[bytes], list[AddressHint]] = reader(
    Annotated[list[AddressHint], Meta(max_length=limits.ADDRESSES_TOLD)], "A peer's list of addresses"
)


# ---- Roster ----------------------------------------------------------------------------------------------


def roster_batches(records: Iterable[RosterRecord], signers: Iterable[str]) -> list[bytes]:
    """Records as message bodies of bounded size, each record after one that vouches for its signer.

    Whoever knows these ``signers`` can then merge batch after batch, and refuses none for its order.
    """
    waiting = list(records)
    known, ordered = set(signers), list[RosterRecord]()
    while ready := [record for record in waiting if record.signer in known]:
        waiting = [record for record in waiting if record.signer not in known]
        ordered += ready
        known |= {record.subject for record in ready}
    found: list[bytes] = []
    batch: list[RosterRecord] = []
    size = 0
    for record in ordered:
        length = len(_encode(record))
        if batch and size + length > limits.ROSTER_BATCH_BYTES:
            found.append(_encode(batch))
            batch, size = [], 0
        batch.append(record)
        size += length
    if batch:
        found.append(_encode(batch))
    return found


# ---- Addresses -------------------------------------------------------------------------------------------


def write_hints(hints: list[AddressHint]) -> bytes:
    """As many as may be told at once."""
    return _encode(hints[: limits.ADDRESSES_TOLD])


def is_shareable(host: str, way: tuple[str, int] | None) -> bool:
    """Whether an address means the same at both ends of a session that goes this way, and can be called.

    Names of interfaces and of hosts are each machine's own; and services of this machine itself are called
    only on the word of somebody who is on this machine as well.
    """
    local = way is not None and _is_loopback(way[0])
    return "%" not in host and is_plausible(host, loopback=local)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
