"""How many connections may be open: as many as this process has file descriptors for.

A terminal on a Mac gives a process 256 of them. What must always open (the database, a worker's channel, a
model's file, the accepting and refusing of a connection) keeps a reserve; connections share what is left.
"""

from __future__ import annotations

import contextlib
import resource

import msgspec

from fleetd import limits


class ConnectionCaps(msgspec.Struct, frozen=True):
    """Most connections at once: of each HTTP site, those of them that have not shown a token, and at the peer
    port those that have not shown what they are."""

    http: int
    http_unknown: int
    peers_unknown: int


def open_limit() -> int:
    """File descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits.DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise this process's soft limit as far as its hard limit and ``limits.DESCRIPTORS`` allow."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, limits.DESCRIPTORS)
    if open_limit() < wanted:
        # macOS may name no hard limit and have one all the same.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


UNSCALED = ConnectionCaps(
    limits.HTTP_CONNECTIONS, limits.HTTP_CONNECTIONS_UNAUTHENTICATED, limits.PEER_SOCKETS_UNKNOWN
)


def connection_caps(descriptors: int, http_sites: int) -> ConnectionCaps:
    """The caps beside the reserve: half is shared by the HTTP sites, a quarter is for sockets at the
    peer port that have not said what they are; the last quarter is for members and for streams."""
    free = max(0, descriptors - limits.DESCRIPTORS_RESERVED)
    each = free // 2 // http_sites
    return ConnectionCaps(
        http=max(4, min(limits.HTTP_CONNECTIONS, each)),
        http_unknown=max(2, min(limits.HTTP_CONNECTIONS_UNAUTHENTICATED, each // 2)),
        peers_unknown=max(2, min(limits.PEER_SOCKETS_UNKNOWN, free // 4)),
    )
