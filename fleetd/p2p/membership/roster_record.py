"""A signed statement of one machine about another, and the form of the names in it."""

from __future__ import annotations

import functools
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.p2p.membership import keys

_DOMAIN = b"fleetd roster record 1\0"
# Out of reach by counting. A forged last number can remove a machine for good, but not make it unremovable.
SEQUENCE_MAX = (1 << 63) - 1


class RosterRecord(msgspec.Struct, frozen=True, array_like=True):
    """A statement of ``signer`` about the machine with this ``certificate``."""

    certificate: Annotated[bytes, Meta(max_length=limits.CERTIFICATE_BYTES)]
    name: Annotated[str, Meta(max_length=limits.MEMBER_NAME_CHARS)]
    signer: Annotated[str, Meta(min_length=keys.ID_CHARS, max_length=keys.ID_CHARS)]
    sequence: Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)]
    removed: bool
    sees_prompts: bool
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]

    @property
    def subject(self) -> str:
        """The node id. Raises IdentityRefused."""
        return subject_of(self.certificate)[0]

    def signed_bytes(self) -> bytes:
        """The bytes that the signature covers: the domain and all other fields."""
        return _DOMAIN + msgspec.msgpack.encode(
            (self.certificate, self.name, self.signer, self.sequence, self.removed, self.sees_prompts)
        )


@functools.lru_cache(maxsize=2 * limits.ROSTER_RECORDS)
def subject_of(certificate: bytes) -> tuple[str, bytes]:
    """Node id and raw public key. Raises IdentityRefused."""
    key = keys.public_key_of(certificate)
    return keys.node_id(key), key


# ---- Names -----------------------------------------------------------------------------------------------


def is_name(text: str) -> bool:
    """True if it can be shown as it is: no control characters, none that changes the writing direction."""
    return 0 < len(text) <= limits.MEMBER_NAME_CHARS and text.isprintable() and text == text.strip()


def clean_name(text: str, otherwise: str) -> str:
    """``text`` reduced to a valid name, or ``otherwise`` if nothing is left."""
    kept = "".join(character for character in text if character.isprintable()).strip()
    return kept[: limits.MEMBER_NAME_CHARS].strip() or otherwise
