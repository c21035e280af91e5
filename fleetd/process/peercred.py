"""Who is at the other end of a Unix socket, asked of the kernel and not of the peer."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

# Values of <sys/un.h> and <sys/ucred.h> on macOS; Python's socket module does not carry them everywhere.
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_XUCRED = struct.Struct("=IIh2x16I")  # cr_version, cr_uid, cr_ngroups, padding, cr_groups
_UCRED = struct.Struct("=iII")  # pid, uid, gid


def peer_uid(transport: asyncio.BaseTransport | None) -> int | None:
    """The user id of the process at the other end; None if this is not a Unix socket (or it has gone)."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    try:
        if sys.platform == "darwin":
            version, uid, *_ = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
            return int(uid) if version == 0 else None
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return int(uid)
    except OSError:
        return None
