"""Giving a connected socket to another process of this machine, with a message that says what it is for.

    u32 length (big endian) | message     on a Unix stream socket; the descriptor goes with the first byte

The daemon accepts and dials; the process that the bytes are for then reads and writes them itself. Blocking:
an event loop calls it in a thread, with a timeout on the channel.
"""

from __future__ import annotations

import array
import os
import socket
import struct

from fleetd import limits
from fleetd.errors import ProtocolError

_LENGTH = struct.Struct(">I")
# Linux can mark what arrives as close-on-exec in one step; elsewhere it takes a second one.
_CLOEXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send(channel: socket.socket, body: bytes, sock: socket.socket | None = None) -> None:
    """Send a message and, with it, a copy of ``sock``; the caller closes its own."""
    if len(body) > limits.HANDOFF_BYTES:
        raise ValueError(f"a message between processes has at most {limits.HANDOFF_BYTES} bytes")
    message = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(channel, [message], [sock.fileno()]) if sock is not None else 0
    channel.sendall(message[sent:])


def receive(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """The next message and the socket that came with it.

    Raises:
        EOFError: the other process closed the channel, or ended.
        ProtocolError: what came is not a message; whatever descriptors came with it are closed.
    """
    header, sock = _header(channel)
    try:
        (length,) = _LENGTH.unpack(header + _exactly(channel, _LENGTH.size - len(header)))
        if length > limits.HANDOFF_BYTES:
            raise ProtocolError(f"A message between processes claims {length} bytes.")
        return _exactly(channel, length), sock
    except BaseException:
        if sock is not None:
            sock.close()
        raise


def _header(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """The first bytes of a message, which the descriptor comes with; not necessarily the whole header."""
    # Room for one descriptor more than may come: what exceeds the room is dropped in different ways on
    # different systems, what fits can be refused everywhere.
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(2 * descriptors.itemsize)
    header, ancillary, flags, _ = channel.recvmsg(_LENGTH.size, room, _CLOEXEC)
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) > 1 or flags & socket.MSG_CTRUNC:
            raise ProtocolError("A message between processes came with more than one descriptor.")
        if not header:
            raise EOFError
        return header, socket.socket(fileno=descriptors[0]) if descriptors else None
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise ProtocolError(f"What was handed over is no socket ({error.strerror}).") from None
        raise


def _exactly(channel: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    left = memoryview(found)
    while left:
        received = channel.recv_into(left)
        if received == 0:
            raise EOFError
        left = left[received:]
    return bytes(found)
