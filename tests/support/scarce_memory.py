"""Workers that run out of memory where a request's id says so, in the words of Python and of mlx.

short.<machine>.<verb>.<stream>.<k>.   machine: "home" or a helper's place
                                       open: no room for the stream's buffers and threads
                                       room: none for the prompt's keys and values (home)
                                       take: none for what frame k of the stream brings
                                       make: none to compute what frame k of the stream carries
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any, NamedTuple

_SHORT = re.compile(r"short\.(\w+)\.(open|room|take|make)\.(\w+)\.(\d+)\.")
_MLX = "[malloc] Unable to allocate 1048576 bytes."


class Short(NamedTuple):
    """A request's id begins with ``marker``."""

    machine: str
    verb: str
    stream: str = "none"
    frame: int = 0

    @property
    def marker(self) -> str:
        return f"short.{self.machine}.{self.verb}.{self.stream}.{self.frame}."


class _Shortage:
    """Of the share or assist that is being opened: one at a time in these tests, all on one thread."""

    def __init__(self) -> None:
        self.short: Short | None = None
        self.names: dict[int, str] = {}

    def begin(self, job: str, machine: str) -> None:
        found = _SHORT.match(job)
        mine = found is not None and found[1] == machine
        self.short = Short(machine, found[2], found[3], int(found[4])) if found and mine else None

    def at(self, verb: str, stream: str | None) -> int | None:
        """Which frame of this stream is too much."""
        short = self.short
        return short.frame if short is not None and (short.verb, short.stream) == (verb, stream) else None

    def opening(self, connect: Any) -> Any:
        def opened(name: str, place: Any) -> Any:
            if self.at("open", name) is not None:
                raise RuntimeError("can't start new thread")
            pipe = connect(name, place)
            self.names[id(pipe)] = name
            return pipe

        return opened


def install() -> None:
    """Into a process that is to become a worker."""
    from fleetd.engine.shared_prefill import (
        frame_schedule,
        frame_writer,
        helper_prefill,
        home_prefill,
        home_work,
    )

    now = _Shortage()
    share_init, assist_init = home_prefill.SharedPrefill.__init__, helper_prefill.HelperPrefill.__init__
    incoming_init, outlet_init = frame_schedule.Incoming.__init__, frame_writer.FrameWriter.__init__
    send = frame_writer.FrameWriter._send

    def share(
        self: Any, stage: Any, layout: Any, tokens: Any, prefix: Any, share: Any, connect: Any, **more: Any
    ) -> None:
        now.begin(share.id, "home")
        share_init(self, stage, layout, tokens, prefix, share, now.opening(connect), **more)

    def assist(self: Any, stage: Any, layout: Any, assist: Any, connect: Any, **more: Any) -> None:
        now.begin(assist.id, str(assist.rank))
        assist_init(self, stage, layout, assist, now.opening(connect), **more)

    def incoming(self: Any, stream: str, heads: Any, sizes: Any, buffers: Any) -> None:
        fatal, number = now.at("take", stream), count()

        def scarce(head: Any) -> Any:
            if next(number) == fatal:
                raise MemoryError
            return buffers(head)

        incoming_init(self, stream, heads, sizes, scarce)

    def out(self: Any, pipe: Any, *arguments: Any) -> None:
        outlet_init(self, pipe, *arguments)
        self.fatal, self.number = now.at("make", now.names.get(id(pipe))), count()

    def scarce_send(self: Any, head: Any, payload: Any) -> None:
        if next(self.number) == self.fatal:
            raise RuntimeError(_MLX)
        send(self, head, payload)

    def without_room(allocate: Any) -> Any:
        def scarce(self: Any) -> None:
            if now.at("room", "none") is not None:
                raise RuntimeError(_MLX)
            allocate(self)

        return scarce

    patched: list[tuple[Any, str, Any]] = [
        (home_prefill.SharedPrefill, "__init__", share),
        (helper_prefill.HelperPrefill, "__init__", assist),
        (frame_schedule.Incoming, "__init__", incoming),
        (frame_writer.FrameWriter, "__init__", out),
        (frame_writer.FrameWriter, "_send", scarce_send),
        *(
            (kind, "allocate", without_room(kind.allocate))
            for kind in (home_work.LayersAtHome, home_work.TokensAtHome)
        ),
    ]
    for kind, name, function in patched:
        setattr(kind, name, function)
