"""Passes a connected socket to another process of this machine, with a message that describes it.

    u32 length (big endian) | message     on a Unix stream socket; the descriptor goes with the first byte

The daemon accepts and dials; the other process then reads and writes the bytes itself. Blocking: an event
loop calls it in a thread, with a timeout on the channel.
"""

from __future__ import annotations

import array
import os
import socket
import struct

from fleetd import limits
from fleetd.errors import ProtocolError

_LENGTH = struct.Struct(">I")
# Linux can set close-on-exec on received descriptors at once; other systems need a second call.
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
        ProtocolError: the bytes are not a message; descriptors that came with them are closed.
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
    """The first bytes of a message, with its descriptor; not necessarily the whole header."""
    # Room for one descriptor more than is allowed: systems drop those beyond the room in different ways, but
    # one that fits can be refused on each.
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
