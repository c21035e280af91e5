"""Streams between workers without sockets, threads or time: two ends of a pipe, and a fleet of them.

A frame travels when its receiver asks for it: until then its bytes are the sender's backlog, read from the
sender's own buffers, so that a buffer that was changed too early shows. Everything that happens is counted,
so that a test can break any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from fleetd.engine.streams.frames import Connect, Frame, FrameHeader, Place
from fleetd.errors import FleetError, PeerLost


@dataclass
class Events:
    """Sends and receipts, numbered from 0; the one with the number ``fatal`` breaks its pipe."""

    fatal: int = -1
    count: int = 0

    def next(self) -> bool:
        """Whether this one is fatal."""
        self.count += 1
        return self.count - 1 == self.fatal


@dataclass
class MemoryPipe:
    """``tamper`` sees each frame that this end sends and says which frames are sent instead."""

    place: Place
    events: Events
    other: MemoryPipe | None = None
    tamper: Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]] | None = None
    # Frames on their way to this end.
    queue: deque[tuple[FrameHeader, list[memoryview]]] = field(default_factory=deque)
    backlog: int = 0
    broken: FleetError | None = None
    ended: bool = False
    closed: bool = False
    heard_s: float = 0.0
    sent: list[FrameHeader] = field(default_factory=list)
    # Frames sent before the other end was opened.
    early: list[tuple[FrameHeader, list[memoryview]]] = field(default_factory=list)

    def join(self, other: MemoryPipe) -> None:
        self.other, other.other = other, self
        for one in (self, other):
            for head, payload in one.early:
                one._deliver(head, payload)
            one.early.clear()

    def send(self, head: FrameHeader, *payload: memoryview) -> None:
        assert not self.ended
        assert not self.closed
        assert sum(part.nbytes for part in payload) == head.nbytes
        self.sent.append(head)
        if self.broken is not None:
            return
        if self.events.next():
            self.fail()
            return
        frames = [(head, list(payload))]
        if self.tamper is not None:
            changed = self.tamper(head, b"".join(payload))
            frames = [(new, [memoryview(data)]) for new, data in changed]
        for new, parts in frames:
            self.backlog += new.nbytes
            if self.other is None:
                self.early.append((new, parts))
            else:
                self._deliver(new, parts)

    def _deliver(self, head: FrameHeader, payload: list[memoryview]) -> None:
        assert self.other is not None
        self.other.queue.append((head, payload))

    def receive(self) -> Frame | None:
        assert not self.closed
        if not self.queue:
            if self.broken is not None:
                raise self.broken
            return None
        if self.events.next():
            self.fail()
            return self.receive()
        head, payload = self.queue.popleft()
        try:
            buffers = self.place(FrameHeader.unpack(head.pack()))
        except FleetError as error:
            self.broken = error
            self.queue.clear()
            raise
        data = memoryview(b"".join(payload))
        assert sum(buffer.nbytes for buffer in buffers) == len(data)
        at = 0
        for buffer in buffers:
            buffer[:] = data[at : at + buffer.nbytes]
            at += buffer.nbytes
        if self.other is not None:
            self.other.backlog -= head.nbytes
        return Frame(head, buffers)

    def fail(self) -> None:
        """As when a cable is cut: what is on its way is lost on both sides."""
        for one in (self, self.other):
            if one is not None:
                one.broken = one.broken or PeerLost("The stream broke (cut).")
                one.queue.clear()

    def finish(self) -> None:
        self.ended = True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.queue.clear()
        if self.other is not None and not self.ended and self.other.broken is None:
            self.other.broken = PeerLost("The stream was closed before its end.")


@dataclass
class Streams:
    """All streams of one share, opened by name from each machine."""

    helpers: int
    events: Events = field(default_factory=Events)
    # By (machine, name); machine -1 is home.
    ends: dict[tuple[int, str], MemoryPipe] = field(default_factory=dict)
    tampers: dict[tuple[int, str], Any] = field(default_factory=dict)

    def of(self, machine: int) -> Connect:
        """``connect`` for helper ``machine``, or for home (-1)."""

        def connect(name: str, place: Place) -> MemoryPipe:
            end = (machine, name)
            assert end not in self.ends, f"{end} is opened twice"
            pipe = MemoryPipe(place, self.events, tamper=self.tampers.get(end))
            self.ends[end] = pipe
            other = self.ends.get(self._other(machine, name))
            if other is not None:
                pipe.join(other)
            return pipe

        return connect

    def _other(self, machine: int, name: str) -> tuple[int, str]:
        if name.startswith("helper"):
            return int(name.removeprefix("helper")), "home"
        match name:
            case "home":
                return -1, f"helper{machine}"
            case "in":
                return (self.helpers if machine < 0 else machine) - 1, "out"
            case "out":
                return (-1 if machine == self.helpers - 1 else machine + 1), "in"
        raise AssertionError(name)


@dataclass
class Clock:
    """Time that passes only when a test says so, and a little whenever it is looked at."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def changed(**fields: Any) -> Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]]:
    """A tamper that changes fields of every head."""
    return lambda head, data: [(replace(head, **fields), data)]
