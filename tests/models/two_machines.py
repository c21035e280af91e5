"""A model on its way between two machines: their real processes, and the wire between them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from fleetd import limits
from fleetd.errors import (
    FleetError,
)
from fleetd.models import install
from fleetd.models.copy import client
from fleetd.models.copy.messages import CopyNeed, CopyOffer, OfferedFile, digest_of, offer_of
from fleetd.models.model_store import ModelStore
from fleetd.models.pull_lines import PullProgress
from fleetd.process.used_socket import shut_down

KEY = bytes(range(32))
CHUNK = limits.SEALED_CHUNK_BYTES
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


class FaultyWire:
    """Carries a stream from its sender to its receiver, counts the bytes, and misbehaves on demand.

    Args:
        hold_at: nothing passes after so many bytes until ``release``.
        cut_at: the connection closes after so many.
        flip_at: this byte arrives changed.
    """

    def __init__(
        self, *, hold_at: int | None = None, cut_at: int | None = None, flip_at: int | None = None
    ) -> None:
        self._marks = (hold_at, cut_at, flip_at)
        self.passed = 0
        self.held = threading.Event()
        self._released = threading.Event()
        self.sender, self._from = tcp_pair()
        self._to, self.receiver = tcp_pair()
        # Little is under way at any time, so that who is held here still has something to send.
        self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        self._from.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        for sock in (self.sender, self.receiver):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def release(self) -> None:
        self._released.set()

    def _carry(self) -> None:
        hold_at, cut_at, flip_at = self._marks
        with self._from, self._to, contextlib.suppress(OSError):
            while data := bytearray(self._from.recv(1 << 16)):
                if flip_at is not None and self.passed <= flip_at < self.passed + len(data):
                    data[flip_at - self.passed] ^= 1
                if cut_at is not None and self.passed + len(data) >= cut_at:
                    self._send(data[: cut_at - self.passed])
                    return
                if hold_at is not None and not self.held.is_set() and self.passed + len(data) >= hold_at:
                    first = hold_at - self.passed
                    self._send(data[:first])
                    del data[:first]
                    self.held.set()
                    self._released.wait(60)
                self._send(data)

    def _send(self, data: bytearray) -> None:
        self._to.sendall(data)
        self.passed += len(data)

    def close(self) -> None:
        self.release()
        for sock in (self.sender, self.receiver, self._from, self._to):
            shut_down(sock)
        # It closes its ends itself: they are its own until then.
        self._thread.join(60)
        self.sender.close()
        self.receiver.close()


@dataclass
class Copy:
    """One attempt: what was asked for, what was reported, how each side ended."""

    needs: list[CopyNeed] = field(default_factory=list)
    steps: list[PullProgress] = field(default_factory=list)
    sent: FleetError | None = None

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(step.stage for step in self.steps))


@contextlib.asynccontextmanager
async def copying(
    there: ModelStore, here: ModelStore, wire: FaultyWire, seen: Copy, **changes: Any
) -> AsyncIterator[Any]:
    """The steps of a copy of "own". ``changes``: another ``offer``, ``digest`` or ``folder`` to send from."""
    folder = changes.get("folder") or (await asyncio.to_thread(there.resolve, "own"))
    offer: CopyOffer = changes.get("offer") or await asyncio.to_thread(offer_of, there, folder)
    sending: list[asyncio.Task[None]] = []

    async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
        seen.needs = needs
        send = client.send(folder.path, needs, wire.sender, KEY)
        sending.append(asyncio.create_task(send))
        return wire.receiver, KEY

    steps = client.receive(
        offer, here.models_dir, connect, name="own", digest=changes.get("digest") or digest_of(offer)
    )
    try:
        async with contextlib.aclosing(steps):
            yield steps
    finally:
        await asyncio.to_thread(wire.close)
        for task in sending:
            try:
                await task
            except FleetError as error:
                seen.sent = error


async def copied(there: ModelStore, here: ModelStore, wire: FaultyWire | None = None, **changes: Any) -> Copy:
    seen = Copy()
    async with copying(there, here, wire or FaultyWire(), seen, **changes) as steps:
        await exhausted(steps, seen)
    return seen


def partials(store: ModelStore) -> dict[str, int]:
    folder = install.partial_folder(store.models_dir, "own")
    return {entry.name: entry.stat().st_size for entry in folder.iterdir()} if folder.exists() else {}


def children(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


def assert_nothing_published(store: ModelStore) -> None:
    assert store.installed() == []
    visible = [entry for entry in store.models_dir.iterdir() if not entry.name.startswith(".")]
    assert visible == []
    assert children("fleetd.models.copy.receive") == children("fleetd.models.copy.send") == []


async def exhausted(steps: AsyncIterator[PullProgress], seen: Copy | None = None) -> None:
    async for step in steps:
        if seen is not None:
            seen.steps.append(step)


def changed(offer: CopyOffer, which: str, /, **fields: Any) -> CopyOffer:
    """The offer with something else said about one file."""
    files = [
        OfferedFile(**({"name": file.name, "size_bytes": file.size_bytes, "blake3": file.blake3} | fields))
        if file.name == which
        else file
        for file in offer.files
    ]
    return CopyOffer(offer.source, offer.revision, files)
