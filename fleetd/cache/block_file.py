"""A block as the bytes of a file: sealed chunks (``sealed.chunks``) under a key of its own. No I/O.

    "fleetd kv" | u8 version | salt (32) | sealed chunks of:  u32 length | BlockHeader | payload

The key follows from the machine's key, the salt and the block's name. So a file that was changed, cut short,
made longer, renamed, or written by another machine or version does not open.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.cache.machine_key import MachineKey
from fleetd.errors import SealBroken
from fleetd.sealed.chunks import HEADER_BYTES, TAG_BYTES, Opener, Sealer
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import from_msgpack

VERSION = 1
_MAGIC = b"fleetd kv"
_SALT_BYTES = 32
PREFACE_BYTES = len(_MAGIC) + 1 + _SALT_BYTES
_LENGTH = struct.Struct("<I")
_CHUNK = limits.SEALED_CHUNK_BYTES


class BlockHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the payload is: buffers of ``sizes`` bytes, one after the other.

    ``layout``: says what each buffer holds; a reader takes only what it expects. ``tokens``: from the
    prompt's first to the block's last. ``origins``: labels of the machines that it came from, as the index
    has them; what the index says of a file may be older than the file.
    """

    layout: Annotated[str, Meta(max_length=limits.CACHE_LAYOUT_CHARS)]
    tokens: Annotated[int, Meta(ge=0, le=limits.CACHE_TOKENS)]
    sizes: Annotated[
        list[Annotated[int, Meta(ge=0, le=limits.CACHE_BLOCK_BYTES)]],
        Meta(max_length=limits.CACHE_BLOCK_PARTS),
    ]
    origins: Annotated[
        tuple[Annotated[str, Meta(max_length=limits.CACHE_ORIGIN_CHARS)], ...],
        Meta(max_length=limits.CACHE_ORIGINS),
    ] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class BlockDamaged(Exception):
    """These bytes are not the block that was asked for; use nothing of it."""


def _framed(header: BlockHeader) -> bytes:
    text = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(text)) + text


def sealed_bytes(header: BlockHeader) -> int:
    """The length of the file."""
    plain = len(_framed(header)) + header.nbytes
    return PREFACE_BYTES + plain + -(-plain // _CHUNK) * (HEADER_BYTES + TAG_BYTES)


def seal(
    key: MachineKey, name: bytes, header: BlockHeader, buffers: Iterable[memoryview]
) -> Iterator[memoryview]:
    """The file in pieces, each valid until the next is asked for. ``buffers``: of the header's sizes."""
    preface = _MAGIC + bytes([VERSION]) + secrets.token_bytes(_SALT_BYTES)
    yield memoryview(preface)
    sealer = Sealer(key.block_key(preface, name), "connector")
    out = memoryview(bytearray(HEADER_BYTES + _CHUNK + TAG_BYTES))
    head = _framed(header)
    left = len(head) + header.nbytes
    for chunk in _chunked([memoryview(head), *buffers]):
        left -= len(chunk)
        yield out[: sealer.seal_into(chunk, out, last=not left)]
    if left:
        raise ValueError(f"the buffers are {left} bytes shorter than the header says")


def _chunked(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes in chunks, all but the last of the full size."""
    chunk, used = memoryview(bytearray(_CHUNK)), 0
    for buffer in buffers:
        while len(buffer):
            n = min(len(buffer), _CHUNK - used)
            chunk[used : used + n] = buffer[:n]
            buffer, used = buffer[n:], used + n
            if used == _CHUNK:
                yield chunk
                used = 0
    if used:
        yield chunk[:used]


def unseal(
    key: MachineKey,
    name: bytes,
    read_into: Callable[[memoryview], int],
    targets: Callable[[BlockHeader], Sequence[memoryview]],
) -> BlockHeader:
    """Open a file and put its payload where ``targets`` says, which looks at the header first.

    Args:
        read_into: fills the buffer, or less of it at the file's end; returns how many bytes.
        targets: one writable buffer per size of the header; raises BlockDamaged for a header that it did not
            expect.

    Raises:
        BlockDamaged: what the targets hold then must not be used.
    """
    preface = memoryview(bytearray(PREFACE_BYTES))
    if read_into(preface) != PREFACE_BYTES or bytes(preface[:-_SALT_BYTES]) != _MAGIC + bytes([VERSION]):
        raise BlockDamaged("not a block of this version")
    plain = _PlainChunks(Opener(key.block_key(bytes(preface), name), "acceptor"), read_into)
    try:
        length = memoryview(bytearray(_LENGTH.size))
        plain.fill(length)
        (size,) = _LENGTH.unpack(length)
        if size > limits.CACHE_HEADER_BYTES:
            raise BlockDamaged(f"a header of {size} bytes")
        text = memoryview(bytearray(size))
        plain.fill(text)
        header = from_msgpack(text, BlockHeader)
        for target in targets(header):
            plain.fill(target)
        plain.end()
    except (*UNREADABLE, SealBroken, struct.error) as error:
        raise BlockDamaged(str(error)) from error
    return header


class _PlainChunks:
    """Plain bytes in any pieces, from chunks that are opened as they are needed."""

    def __init__(self, opener: Opener, read_into: Callable[[memoryview], int]) -> None:
        self._opener = opener
        self._read_into = read_into
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(_CHUNK + TAG_BYTES))
        self._plain = memoryview(bytearray(_CHUNK))
        self._left = self._plain[:0]

    def fill(self, target: memoryview) -> None:
        while len(target):
            if not len(self._left):
                self._next()
            n = min(len(target), len(self._left))
            target[:n] = self._left[:n]
            target, self._left = target[n:], self._left[n:]

    def end(self) -> None:
        """Raises BlockDamaged unless this was all."""
        if len(self._left) or not self._opener.finished or self._read_into(self._header[:1]):
            raise BlockDamaged("the file goes on after its end")

    def _next(self) -> None:
        if self._read_into(self._header) != HEADER_BYTES:
            raise BlockDamaged("the file is cut short")
        size = self._opener.body_bytes(self._header)
        body = self._body[:size]
        if self._read_into(body) != size:
            raise BlockDamaged("the file is cut short")
        self._left = self._plain[: size - TAG_BYTES]
        self._opener.open_into(self._header, body, self._left)
