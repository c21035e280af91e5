"""The chunks of a sealed stream: AES-256-GCM, numbered, each direction under a key of its own. Sans-IO.

    u32 length | u64 counter | ciphertext | tag         big endian; ``length`` is that of ciphertext and tag

The counter is the nonce. The tag covers the text, the counter and the length: a chunk that is changed,
repeated, left out, moved or sent back to its sender does not open. The highest bit of the counter marks the
last chunk, so a stream that was cut short is detected. Both keys are derived from the stream's key, which is
new and random for every connection: a nonce is never used twice.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

from fleetd import limits
from fleetd.errors import SealBroken

# Imported by the first stream: a daemon without peers seals nothing, and the library stays in its memory.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Role = Literal["connector", "acceptor"]

KEY_BYTES = 32
HEADER_BYTES = 12
TAG_BYTES = 16
_HEADER = struct.Struct(">IQ")
_LAST = 1 << 63
_INFO: dict[Role, bytes] = {
    "connector": b"fleetd sealed 1 connector->acceptor",
    "acceptor": b"fleetd sealed 1 acceptor->connector",
}


class Sealer:
    """One direction's sending end, for the side that has ``role``."""

    def __init__(self, key: bytes, role: Role) -> None:
        self._cipher = _cipher(key, role)
        self._count = 0
        self._finished = False

    def seal_into(self, plain: memoryview, out: memoryview, *, last: bool = False) -> int:
        """Write the next chunk to the start of ``out``; returns its length.

        ``plain`` holds at most ``limits.SEALED_CHUNK_BYTES``; ``out`` has room for it, a header and a tag.
        """
        if self._finished or len(plain) > limits.SEALED_CHUNK_BYTES:
            raise ValueError("nothing follows the last chunk, and no chunk is longer than the bound")
        counter = self._count | (_LAST if last else 0)
        size = len(plain) + TAG_BYTES
        _HEADER.pack_into(out, 0, size, counter)
        header, body = out[:HEADER_BYTES], out[HEADER_BYTES : HEADER_BYTES + size]
        self._cipher.encrypt_into(_nonce(counter), plain, header, body)
        self._count += 1
        self._finished = last
        return HEADER_BYTES + size


class Opener:
    """One direction's receiving end, for the side that has ``role``."""

    def __init__(self, key: bytes, role: Role) -> None:
        self._cipher = _cipher(key, "acceptor" if role == "connector" else "connector")
        self._count = 0
        self.finished = False

    def body_bytes(self, header: memoryview) -> int:
        """The number of bytes after this header. Raises SealBroken for an invalid header."""
        size, counter = _HEADER.unpack(header)
        if self.finished:
            raise SealBroken("A sealed stream went on after its last chunk.")
        if counter & ~_LAST != self._count:
            raise SealBroken(f"Sealed chunk {self._count} was due and {counter & ~_LAST} came.")
        # Only the last chunk may be empty: empty ones would look like progress.
        least = TAG_BYTES if counter & _LAST else TAG_BYTES + 1
        if not least <= size <= limits.SEALED_CHUNK_BYTES + TAG_BYTES:
            raise SealBroken(f"Sealed chunk {self._count} claims {size} bytes.")
        return int(size)

    def open_into(self, header: memoryview, body: memoryview, out: memoryview) -> None:
        """Decrypt a chunk whose header was checked; ``out`` is ``TAG_BYTES`` shorter than ``body``.

        Raises:
            SealBroken: the tag is wrong; the content of ``out`` must not be used.
        """
        from cryptography.exceptions import InvalidTag

        counter = _HEADER.unpack(header)[1]
        try:
            self._cipher.decrypt_into(_nonce(counter), body, header, out)
        except InvalidTag:
            raise SealBroken(
                f"Sealed chunk {self._count} was changed on its way, or sealed with another key."
            ) from None
        self._count += 1
        self.finished = bool(counter & _LAST)


def _cipher(key: bytes, sender: Role) -> AESGCM:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a stream's key has {KEY_BYTES} bytes")
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), KEY_BYTES, salt=None, info=_INFO[sender]).derive(key))


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")
