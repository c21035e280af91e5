"""Gossip between members besides cards: the roster, and addresses at which members were reached. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.p2p.discovery.discovered import is_plausible
from fleetd.p2p.membership.roster import RosterRecord
from fleetd.p2p.message_reader import reader

# Topics.
CARD, ROSTER, ADDRESSES = "card", "roster", "addresses"


class AddressHint(msgspec.Struct, frozen=True, array_like=True):
    """An address at which a member was reached lately, for machines that do not receive its mDNS."""

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
    """Records as message bodies of bounded size, each record after one about its signer.

    A machine that knows these ``signers`` can merge batch after batch and refuses none for its order.
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
    """A message body with as many hints as are allowed."""
    return _encode(hints[: limits.ADDRESSES_TOLD])


def is_shareable(host: str, path: tuple[str, int] | None) -> bool:
    """True if an address can be dialled from both ends of a session that takes ``path``.

    Names of interfaces and hosts differ between machines. A loopback address counts only on a session over
    loopback: a remote machine must not aim this one at its own services.
    """
    local = path is not None and _is_loopback(path[0])
    return "%" not in host and is_plausible(host, loopback=local)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
