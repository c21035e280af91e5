"""Finds the machine that shows a pairing code: calls each address where it is said to be, some at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable

from fleetd import limits
from fleetd.errors import PeerUnreachable
from fleetd.p2p.discovery.discovered import DiscoveredPeer
from fleetd.p2p.links import Address
from fleetd.p2p.session import transport

_STEP_S = 0.1


async def find(nameplate: str, seen: Callable[[], Iterable[DiscoveredPeer]]) -> tuple[Address, socket.socket]:
    """A connection to a machine that announces this nameplate, within ``limits.PAIRING_SEARCH_S``.

    Any machine of the network can announce it at any address, also at ones that swallow calls: they must keep
    the search neither from the right one nor from its end. Raises PeerUnreachable.
    """
    error: PeerUnreachable | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.PAIRING_SEARCH_S):
            while True:
                shown = [
                    address for each in seen() if each.pairing == nameplate for address in each.addresses
                ]
                try:
                    return await first_to_answer(dict.fromkeys(shown))
                except PeerUnreachable as failed:
                    error = failed if shown else error
                await asyncio.sleep(_STEP_S)
    raise error or PeerUnreachable(
        f"No machine that shows a code with {nameplate} was found on this network.",
        hint="Is `fleetctl pair` still open there? Where multicast is blocked: --host ADDRESS.",
    )


async def first_to_answer(addresses: Iterable[Address]) -> tuple[Address, socket.socket]:
    """The first connection that opens, of ``limits.DIALS_AT_ONCE`` at a time. Raises PeerUnreachable."""
    waiting = deque(addresses)
    calls: dict[asyncio.Task[socket.socket], Address] = {}
    error = PeerUnreachable("No address is known.")
    try:
        while waiting or calls:
            while waiting and len(calls) < limits.DIALS_AT_ONCE:
                address = waiting.popleft()
                calls[asyncio.create_task(transport.open_socket(address))] = address
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                address = calls.pop(call)
                try:
                    return address, call.result()
                except PeerUnreachable as failed:
                    error = failed
    finally:
        for call in calls:
            call.add_done_callback(_close)
            call.cancel()
    raise error


def _close(call: asyncio.Task[socket.socket]) -> None:
    """Close the socket of a call that was answered too late."""
    if not call.cancelled() and call.exception() is None:
        call.result().close()
