"""The frames of a control session between two paired daemons, and their encoding.

Sans-IO. Inside TLS a frame is ``u32 length (big endian) | MessagePack``: an array whose first item is the
number of its kind and whose others are the fields below, in order.

Compatibility of versions: a new field goes to the end and has a default, so an older side skips it and a
newer one accepts its absence; a new kind of frame is sent only in a version that has it. Hello keeps its
first fields for ever, because it is read before the version is agreed on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import msgpack_decoder

# The oldest and the newest version that this program supports.
PROTOCOL_VERSIONS = (1, 1)

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_StreamId = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Name = Annotated[str, Meta(max_length=limits.METHOD_CHARS)]
_Version = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """The first frame of each side, sent without waiting for the other's."""

    versions: tuple[_Version, _Version]  # oldest and newest that it supports
    node_id: Annotated[str, Meta(min_length=56, max_length=56)]
    name: Annotated[str, Meta(max_length=limits.PEER_NAME_CHARS)]
    epoch: _Count  # grows at each start
    software: str
    roster: Annotated[bytes, Meta(min_length=16, max_length=16)]  # digest of the roster it holds
    port: Annotated[int, Meta(ge=0, le=65535)]  # where it listens
    features: list[str] = []


class Ping(Struct, frozen=True, array_like=True, tag=2):
    """Answered by a Pong at once, before all other frames. Nonces count from 1."""

    nonce: _Count


class Pong(Struct, frozen=True, array_like=True, tag=3):
    """The answer to the Ping of the same nonce."""

    nonce: _Count
    # When it was answered, by the monotonic clock of this side, in seconds; 0 if not told.
    at_s: _Seconds = 0.0


class Open(Struct, frozen=True, array_like=True, tag=4):
    """A request: a new stream, whose number is odd from the side that dialled and even from the other.

    Numbers only grow. ``body`` is the request's body, and ``more`` says that the rest of it follows in Data
    frames.
    """

    stream: _StreamId
    method: _Name
    body: Annotated[bytes, Meta(max_length=limits.OPEN_BODY_BYTES)] = b""
    more: bool = False


class DataFrame(Struct, frozen=True, array_like=True, tag=5):
    """A message of a stream, or a fragment of one; ``more`` in all fragments but the last."""

    stream: _StreamId
    body: bytes
    more: bool = False


class End(Struct, frozen=True, array_like=True, tag=6):
    """No more messages in this direction. A stream is over when both directions have ended."""

    stream: _StreamId


class CancelFrame(Struct, frozen=True, array_like=True, tag=7):
    """The stream is over at once, in both directions; fields as in ``errors.FleetError``."""

    stream: _StreamId
    code: str
    message: str = ""
    hint: str = ""
    param: str | None = None


class WindowFrame(Struct, frozen=True, array_like=True, tag=8):
    """Returns credit: ``credit`` more bytes may be sent on the stream."""

    stream: _StreamId
    credit: _Count


class NotifyFrame(Struct, frozen=True, array_like=True, tag=9):
    """A notification without an answer."""

    topic: _Name
    body: Annotated[bytes, Meta(max_length=limits.NOTIFY_BYTES)] = b""


class Bye(Struct, frozen=True, array_like=True, tag=10):
    """The last frame: ``goodbye`` from a daemon that stops, else the error that ends the session."""

    code: str
    message: str = ""


Frame = Hello | Ping | Pong | Open | DataFrame | End | CancelFrame | WindowFrame | NotifyFrame | Bye

_LENGTH = struct.Struct(">I")
_encode = msgpack.Encoder().encode
_decode: Callable[[memoryview], Frame] = msgpack_decoder(Frame).decode


def encode(frame: Frame) -> bytes:
    """One frame, ready to send. Bodies within their bounds keep frames within theirs."""
    payload = _encode(frame)
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Turns bytes in any pieces into frames. Holds at most one unfinished frame between calls."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that ``data`` completes.

        Raises:
            ProtocolError: too long (seen from its length alone), or no frame of the protocol. The buffer is
                unusable afterwards.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, at)
                if length > limits.FRAME_BYTES:
                    raise ProtocolError(
                        f"A frame of {length} bytes was announced; the limit is {limits.FRAME_BYTES}."
                    )
                end = at + _LENGTH.size + length
                if end > len(self._buffer):
                    return
                with memoryview(self._buffer) as whole, whole[at + _LENGTH.size : end] as payload:
                    frame = _read(payload)
                at = end
                yield frame
        finally:
            del self._buffer[:at]


def _read(payload: memoryview) -> Frame:
    try:
        return _decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"A frame of {len(payload)} bytes cannot be read: {error}.") from error
