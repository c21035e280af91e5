"""Sockets to other machines that the daemon handed over, until the tasks that they are for take them.

A socket may come before the command that it belongs to, or after it, or for a task that has just ended.
A socket that is not taken in time is closed. The channel's thread puts them in, the compute thread makes
pipes of them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable

from fleetd import limits
from fleetd.engine.protocol import StreamTag
from fleetd.engine.streams.frames import Connect, Place
from fleetd.engine.streams.pipe import SocketPipe


class HandedOverStreams:
    """``wake`` is called, on any thread, when a stream came, and whenever one that was taken moved.

    ``eager``, ``beat_s``: as ``SocketPipe`` has them.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        eager: bool = False,
        beat_s: float = 0.0,
    ) -> None:
        self._wake = wake
        self._eager, self._beat_s = eager, beat_s
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], tuple[StreamTag, socket.socket, float]] = {}

    def put(self, tag: StreamTag, sock: socket.socket) -> None:
        """A second one of the same name replaces the first; of too many the oldest goes."""
        key = tag.job, tag.name
        with self._lock:
            unwanted = [self._held.pop(key)] if key in self._held else []
            self._held[key] = tag, sock, self._clock()
            while len(self._held) > limits.TICKETS:
                unwanted.append(self._held.pop(next(iter(self._held))))
        _close(unwanted)
        self._wake()

    def jobs(self, name: str) -> list[str]:
        """The jobs that have a stream of this name which is not taken yet."""
        with self._lock:
            return [job for job, held in self._held if held == name]

    def complete(self, job: str, names: Iterable[str]) -> bool:
        with self._lock:
            return all((job, name) in self._held for name in names)

    def connect(self, job: str) -> Connect:
        """The function with which a job that is ``complete`` opens its streams, once each."""

        def connect(name: str, place: Place) -> SocketPipe:
            with self._lock:
                tag, sock, _ = self._held.pop((job, name))
            return SocketPipe(
                sock,
                tag.key,
                tag.role,
                place=place,
                wake=self._wake,
                eager=self._eager,
                beat_s=self._beat_s,
            )

        return connect

    def take_stream(self, job: str, name: str) -> tuple[StreamTag, socket.socket] | None:
        """The socket itself, for a thread that reads from it; None if it has not come."""
        with self._lock:
            found = self._held.pop((job, name), None)
        return None if found is None else found[:2]

    def drop(self, job: str) -> None:
        """Close the streams of a job that has ended."""
        self._drop(lambda key, _: key[0] == job)

    def sweep(self) -> None:
        """Close the streams that were not taken for ``limits.TICKET_S``."""
        oldest = self._clock() - limits.TICKET_S
        self._drop(lambda _, since: since < oldest)

    def close(self) -> None:
        self._drop(lambda _key, _since: True)

    def __len__(self) -> int:
        return len(self._held)

    def _drop(self, unwanted: Callable[[tuple[str, str], float], bool]) -> None:
        with self._lock:
            keys = [key for key, (_, _, since) in self._held.items() if unwanted(key, since)]
            found = [self._held.pop(key) for key in keys]
        _close(found)


def _close(streams: Iterable[tuple[StreamTag, socket.socket, float]]) -> None:
    for _, sock, _ in streams:
        sock.close()
