"""The daemon's side of a copy between machines: it starts the processes and hands them their sockets.

    the machine that has the model    send(folder, needs, sock, key)              reads files, seals them
    the machine that gets it          receive(offer, ..., connect) → progress     opens, checks, installs

The caller chooses the other machine and connects to it. No byte of a model passes through the daemon.
"""

from __future__ import annotations

import contextlib
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import DownloadFailed, ProtocolError
from fleetd.models import child
from fleetd.models.copy.messages import CopyLine, CopyNeed, CopyOffer, PartOrder, SendOrder
from fleetd.models.pull_lines import PullProgress
from fleetd.process.joined_threads import joined
from fleetd.process.used_socket import shut_down
from fleetd.sealed import handoff

#: Asks the other machine for files. Returns a socket on which it sends them, and the stream's key.
Connect = Callable[[list[CopyNeed]], Awaitable[tuple[socket.socket, bytes]]]


async def receive(
    offer: CopyOffer, models_dir: Path, connect: Connect, *, name: str, digest: str
) -> AsyncGenerator[PullProgress, None]:
    """Install the offered files as the model ``name``; ``aclose()`` ends it, and the next call resumes.

    Args:
        connect: asks for the files; not called if none is missing.
        digest: the digest that the files must have, even if the offer says another.

    Raises:
        ModelRefused, ModelCorrupt, PeerLost, SealBroken, DiskFull, DownloadFailed
        FleetError: any error of ``connect``.
    """
    arguments = [f"--models-dir={models_dir}", f"--name={name}", f"--digest={digest}"]
    steps = _receiving("receive", arguments, offer, connect, f"The copy of {name}")
    async with aclosing(steps):
        async for step in steps:
            yield step


async def receive_part(
    order: PartOrder, models_dir: Path, connect: Connect
) -> AsyncGenerator[PullProgress, None]:
    """Bring the files of some layers that are not here yet; all else as ``receive``."""
    arguments = [f"--models-dir={models_dir}"]
    steps = _receiving("receive_part", arguments, order, connect, f"The copy of layers of {order.name}")
    async with aclosing(steps):
        async for step in steps:
            yield step


async def _receiving(
    module: str, arguments: list[str], order: CopyOffer | PartOrder, connect: Connect, what: str
) -> AsyncGenerator[PullProgress, None]:
    async with (
        _running(f"fleetd.models.copy.{module}", *arguments) as (process, channel),
        aclosing(child.lines(process, CopyLine, what, "Try again.")) as lines,
    ):
        await _tell(channel, msgspec.msgpack.encode(order))
        async for line in lines:
            if line.needs is not None:
                sock, key = await connect(line.needs)
                with sock:
                    await _tell(channel, key, sock)
            if line.progress is not None:
                yield line.progress


async def send(folder: Path, needs: list[CopyNeed], sock: socket.socket, key: bytes) -> None:
    """Send the files that another machine needs of a model on ``sock``, and close it.

    Raises:
        ProtocolError, ModelRefused, ModelCorrupt: the other machine asks for files that it cannot have.
        PeerLost, DownloadFailed
    """
    with sock:
        if len(needs) > limits.COPY_FILES:
            raise ProtocolError(f"{len(needs)} files were asked for; a copy has at most {limits.COPY_FILES}.")
        order = msgspec.msgpack.encode(SendOrder(folder=str(folder), key=key, needs=needs))
        async with (
            _running("fleetd.models.copy.send") as (process, channel),
            aclosing(child.lines(process, CopyLine, f"Sending {folder.name}", "Try again.")) as lines,
        ):
            await _tell(channel, order, sock)
            # The other side must see the end of the stream when the process ends, not when this returns.
            sock.close()
            async for _ in lines:
                pass


@contextlib.asynccontextmanager
async def _running(module: str, *arguments: str) -> AsyncIterator[tuple[Process, socket.socket]]:
    """A process, and a channel whose other end is its standard input."""
    channel, theirs = socket.socketpair()
    with channel, theirs:
        channel.settimeout(limits.HANDOFF_S)
        async with child.running(module, *arguments, stdin=theirs.fileno()) as process:
            # Only the process has that end now: when the process ends, the channel breaks.
            theirs.close()
            yield process, channel


async def _tell(channel: socket.socket, body: bytes, sock: socket.socket | None = None) -> None:
    try:
        await joined(partial(handoff.send, channel, body, sock), stop=partial(shut_down, channel))
    except TimeoutError:
        raise DownloadFailed(
            f"A copying process took no message for {limits.HANDOFF_S:.0f} s.", hint="Try again."
        ) from None
    except ConnectionError:
        pass  # the process has ended; its last line says why
