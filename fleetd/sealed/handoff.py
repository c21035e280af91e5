"""Passes a connected socket to another process of this machine, with a message that describes it.

    there   u32 length (big endian) | u8 number | message     the descriptor goes with the first byte
    back    u8 number                                         once a descriptor was taken

A Unix stream socket. The daemon accepts and dials; the other process then reads and writes the bytes itself.
Blocking: an event loop calls it in a thread, with a timeout on the channel.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import struct

from fleetd import limits
from fleetd.errors import ProtocolError

_HEADER = struct.Struct(">IB")
# Tells an acknowledgement from a late one of a message before, whose sender had stopped waiting.
_numbers = itertools.count()
# Linux can set close-on-exec on received descriptors at once; other systems need a second call.
_CLOEXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send(channel: socket.socket, body: bytes, sock: socket.socket | None = None) -> None:
    """Send a message and, with it, a copy of ``sock``; the caller closes its own.

    Returns once the other process has the copy: macOS may lose a socket that its sender closes on the way
    (nodejs/node#7512).

    Raises:
        OSError: the other process did not take it, or has ended.
    """
    if len(body) > limits.HANDOFF_BYTES:
        raise ValueError(f"a message between processes has at most {limits.HANDOFF_BYTES} bytes")
    number = next(_numbers) % 256
    message = _HEADER.pack(len(body), number) + body
    sent = 0
    if sock is not None:
        # With a few bytes only: macOS refuses a descriptor that its small buffers have no room for.
        sent = socket.send_fds(channel, [message[: _HEADER.size]], [sock.fileno()])
    channel.sendall(message[sent:])
    while sock is not None:
        taken = channel.recv(1)
        if not taken:
            raise ConnectionResetError("the other process ended before it took the socket")
        if taken[0] == number:
            return


def receive(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """The next message and the socket that came with it, which is acknowledged.

    Raises:
        EOFError: the other process closed the channel, or ended.
        ProtocolError: the bytes are not a message; descriptors that came with them are closed.
    """
    header, sock = _header(channel)
    try:
        length, number = _HEADER.unpack(header + _exactly(channel, _HEADER.size - len(header)))
        if length > limits.HANDOFF_BYTES:
            raise ProtocolError(f"A message between processes claims {length} bytes.")
        body = _exactly(channel, length)
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    if sock is not None:
        # A sender that is gone has no copy left to close.
        with contextlib.suppress(OSError):
            channel.sendall(bytes([number]))
    return body, sock


def _header(channel: socket.socket) -> tuple[bytes, socket.socket | None]:
    """The first bytes of a message, with its descriptor; not necessarily the whole header."""
    # Room for one descriptor more than is allowed: systems drop those beyond the room in different ways, but
    # one that fits can be refused on each.
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(2 * descriptors.itemsize)
    header, ancillary, flags, _ = channel.recvmsg(_HEADER.size, room, _CLOEXEC)
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
