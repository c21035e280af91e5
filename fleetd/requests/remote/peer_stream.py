"""Reading and writing a request's stream between two daemons, whatever the request is about."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable

from fleetd import limits
from fleetd.errors import FleetError, PeerLost, ProtocolError, from_code
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.remote.message_codec import ALIVE

# Silence is counted in so many short waits. If this process itself stood still, one of them is over at once,
# and in the next one it reads what has come meanwhile.
_WAITS = 5


async def next_message(
    stream: PeerStream,
    of: str = "life",
    due_s: Callable[[], float] = lambda: math.inf,
    *,
    silence_s: float | None = None,
) -> bytes | None:
    """The next message that says more than that the other side is alive; None at the end.

    Args:
        due_s: when it must have come at the latest, whatever signs of life there are; the loop's time.
        silence_s: seconds without any sign of life after which the other side is taken for lost; None is
            ``limits.JOB_SILENCE_S``.

    Raises PeerLost for silence, of what: ``of``, and once ``due_s`` has passed.
    """
    loop = asyncio.get_running_loop()
    silence_s = limits.JOB_SILENCE_S if silence_s is None else silence_s
    wait_s, silent = silence_s / _WAITS, 0
    while True:
        # Looked at each time: messages that are there already leave no moment in which a timeout could fire.
        if (left_s := due_s() - loop.time()) <= 0:
            raise PeerLost("It says that it is alive, and gets no further.")
        try:
            async with asyncio.timeout(min(wait_s, left_s)):
                body = await stream.receive()
        except TimeoutError:
            silent += wait_s < left_s
            if silent == _WAITS:
                raise PeerLost(f"No sign of {of} for {silence_s:g} s.") from None
            continue
        silent = 0
        if body != ALIVE:
            return body


async def require_message(stream: PeerStream) -> bytes:
    """The next message that says more than that it is alive. Raises PeerLost for silence."""
    if (body := await next_message(stream)) is None:
        raise ProtocolError("It ended its help without having done it.")
    return body


async def drained(stream: PeerStream) -> None:
    """Wait until what was sent is on its way. Raises PeerLost for a reader that takes nothing."""
    try:
        async with asyncio.timeout(limits.JOB_READ_STALL_S):
            await stream.drained()
    except TimeoutError:
        raise PeerLost(f"Nothing of it was read for {limits.JOB_READ_STALL_S:.0f} s.") from None


def own_id(asked: str) -> str:
    """An id of this machine's: what others call their jobs must not meet what runs here already."""
    return f"{asked[: limits.JOB_ID_CHARS]}.{secrets.token_hex(6)}"


def said_by(name: str, error: FleetError) -> FleetError:
    """The same error, naming the machine it came from."""
    return from_code(error.code, f"{name}: {error.message}", hint=error.hint, param=error.param)
