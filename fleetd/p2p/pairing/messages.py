"""The messages of pairing and their encoding. ``roles`` defines which side sends each, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from fleetd import limits
from fleetd.errors import PairingFailed
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.pairing.key_agreement import MAC_BYTES, SPAKE_BYTES, TAG_BYTES
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import msgpack_decoder

# The oldest and the newest version of this exchange that this program supports.
VERSIONS = (1, 1)
NONCE_BYTES = 16
_LENGTH_BYTES = 2
# Array and struct headers around the records of one message.
_HEADROOM_BYTES = 64

_Version = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Refusal = Literal["wrong_code", "closed", "declined", "version", "itself", "broken"]


class PairingHello(Struct, frozen=True, array_like=True, tag=1):
    """The first frame of each side; read before the version is agreed on, so its fields never change."""

    versions: tuple[_Version, _Version]
    certificate: Annotated[bytes, Meta(max_length=limits.CERTIFICATE_BYTES)]
    name: Annotated[str, Meta(max_length=limits.MEMBER_NAME_CHARS)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class PakeShare(Struct, frozen=True, array_like=True, tag=2):
    """One half of SPAKE2."""

    message: Annotated[bytes, Meta(min_length=SPAKE_BYTES, max_length=SPAKE_BYTES)]


class Confirm(Struct, frozen=True, array_like=True, tag=3):
    mac: Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Proof(Struct, frozen=True, array_like=True, tag=4):
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Records(Struct, frozen=True, array_like=True, tag=5):
    """Part of a roster; ``more`` in all parts but the last."""

    records: list[RosterRecord]
    more: bool


class PairingFinished(Struct, frozen=True, array_like=True, tag=6):
    """The inviter has everything on its disk."""


class Refuse(Struct, frozen=True, array_like=True, tag=7):
    """A reason as a code: each machine writes its own sentences for people."""

    reason: Refusal


Message = PairingHello | PakeShare | Confirm | Proof | Records | PairingFinished | Refuse
_decode = msgpack_decoder(Message).decode
encode = msgspec.msgpack.encode


def decode(body: bytes) -> Message:
    """Raises PairingFailed."""
    try:
        message: Message = _decode(body)
    except UNREADABLE:
        raise PairingFailed("The other side does not speak the pairing protocol.") from None
    return message


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES) + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Take the next whole body out of the buffer. Raises PairingFailed for one that is too long."""
    if len(buffer) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(buffer[:_LENGTH_BYTES])
    if length > limits.PAIRING_FRAME_BYTES:
        raise PairingFailed(
            f"A pairing message of {length} bytes is over the limit of {limits.PAIRING_FRAME_BYTES}."
        )
    end = _LENGTH_BYTES + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[_LENGTH_BYTES:end])
    del buffer[:end]
    return body


def parts(records: Iterable[RosterRecord]) -> Iterator[Records]:
    """A roster as messages that fit into sealed frames."""
    room = limits.PAIRING_FRAME_BYTES - TAG_BYTES - _HEADROOM_BYTES
    part: list[RosterRecord] = []
    size = 0
    for record in records:
        length = len(encode(record))
        if part and size + length > room:
            yield Records(part, more=True)
            part, size = [], 0
        part.append(record)
        size += length
    yield Records(part, more=False)
