"""What a machine in the middle can do to a sealed stream: it sees where each chunk begins, as anybody can."""

from __future__ import annotations

import struct
from collections.abc import Callable

from fleetd.sealed.chunks import HEADER_BYTES, KEY_BYTES, TAG_BYTES, Role, Sealer

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(range(1, KEY_BYTES + 1))
#: The highest bit of a chunk's number: nothing follows it.
LAST = 0x80
# Changes the list of the chunks that were sent; the first argument says at which one.
Change = Callable[[int, list[bytes]], list[bytes]]


def chunks_of(wire: bytes) -> list[bytes]:
    """The chunks, the last of which may be incomplete."""
    found = []
    while len(wire) >= HEADER_BYTES:
        (size,) = struct.unpack_from(">I", wire)
        found.append(wire[: HEADER_BYTES + size])
        wire = wire[HEADER_BYTES + size :]
    return found


def ended(chunks: list[bytes]) -> bool:
    """True if the last chunk is marked as the last one, and there whole."""
    return bool(chunks) and bool(chunks[-1][4] & LAST) and len(chunks[-1]) == HEADER_BYTES + TAG_BYTES


def sealed(key: bytes, role: Role, at: int, size: int) -> bytes:
    """The chunk of another stream that has this number and length there."""
    sealer, out = Sealer(key, role), memoryview(bytearray(size + HEADER_BYTES + TAG_BYTES))
    for _ in range(at):
        sealer.seal_into(memoryview(b"x"), out)
    return bytes(out[: sealer.seal_into(memoryview(bytes(size)), out)])


def flip(offset: int) -> Change:
    def change(at: int, chunks: list[bytes]) -> list[bytes]:
        bad = bytearray(chunks[at])
        bad[offset] ^= 1
        return [*chunks[:at], bytes(bad), *chunks[at + 1 :]]

    return change


def spliced(key: bytes, role: Role) -> Change:
    def change(at: int, chunks: list[bytes]) -> list[bytes]:
        size = max(1, len(chunks[at]) - HEADER_BYTES - TAG_BYTES)
        return [*chunks[:at], sealed(key, role, at, size), *chunks[at + 1 :]]

    return change


def numbered(chunk: bytes, at: int) -> bytes:
    """The chunk, with another number."""
    return chunk[:4] + struct.pack(">Q", at) + chunk[HEADER_BYTES:]


def renumbered(at: int, chunks: list[bytes]) -> list[bytes]:
    """The chunk before, with the number that is due."""
    return [*chunks[:at], numbered(chunks[at - 1], at), *chunks[at + 1 :]]


def called_last(at: int, chunks: list[bytes]) -> list[bytes]:
    bad = bytearray(chunks[at])
    bad[4] |= LAST
    return [*chunks[:at], bytes(bad)]


def changes(role: Role, other: Role) -> dict[str, Change]:
    """By what is done, to a stream that ``role`` sends and that is sealed with ``KEY``."""
    return {
        "a length is flipped": flip(3),
        "a number is flipped": flip(HEADER_BYTES - 1),
        "a bit of the text is flipped": flip(HEADER_BYTES + 1),
        "a bit of the tag is flipped": flip(-1),
        "a chunk is dropped": lambda at, chunks: [*chunks[:at], *chunks[at + 1 :]],
        "a chunk is repeated": lambda at, chunks: [*chunks[: at + 1], *chunks[at:]],
        "two chunks are swapped": lambda at, chunks: [
            *chunks[:at],
            chunks[at + 1],
            chunks[at],
            *chunks[at + 2 :],
        ],
        "an older chunk takes its number": renumbered,
        "a chunk of another session": spliced(OTHER, role),
        "a chunk of the other direction": spliced(KEY, other),
        "a chunk is cut": lambda at, chunks: [*chunks[:at], chunks[at][:-9]],
        "a header is cut": lambda at, chunks: [*chunks[:at], chunks[at][:5]],
        "it ends between two chunks": lambda at, chunks: chunks[:at],
        "it is said to end": called_last,
        "chunks are joined": lambda at, chunks: [*chunks[:at], chunks[at] + chunks[at], *chunks[at + 1 :]],
        "bytes of nobody": lambda at, chunks: [*chunks[:at], bytes(1000), *chunks[at:]],
    }
