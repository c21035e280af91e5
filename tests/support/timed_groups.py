"""A group of machines whose time is counted and not measured: each block takes a machine what its curve says,
and a message its way. What waits is done in the order in which it comes, so that a block that is undone
before its machine is free is never computed, as among real machines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pipes import Clock
from types import SimpleNamespace
from typing import Any

import pytest
from group_machines import AnsweringPipe, Group, group_of

from fleetd.engine.groups import flight, group_model, member_stage, remote_stage
from fleetd.engine.loop import decoding
from fleetd.engine.streams.frames import Frame

# Seconds of a machine for a block of so many tokens.
Takes = Callable[[int], float]


@dataclass
class TimedMember:
    """One machine behind the first. ``way_s``: of a message to it, or from it."""

    clock: Clock
    pipe: AnsweringPipe
    takes: Takes
    way_s: float
    # What it takes the time from.
    there: Clock
    # Until when it computes what it began.
    free_s: float = 0.0
    # What is on its way there and back, by the time at which it comes.
    coming: deque[tuple[float, Any]] = field(default_factory=deque)
    answers: deque[tuple[float, Any]] = field(default_factory=deque)
    # Frames that came and were not looked at.
    waiting: int = 0

    def __post_init__(self) -> None:
        near, member = self.pipe, self.pipe.member
        far: Any = near.other
        assert member is not None
        run = member._run
        received = super(AnsweringPipe, near).receive

        def timed(command: Any, *given: Any) -> Any:
            self.free_s += self.takes(command.tokens)
            self.there.now = self.free_s
            return run(command, *given)

        def receive() -> Frame | None:
            self.go_on()
            while self.answers and self.answers[0][0] <= self.clock.now:
                near.queue.append(self.answers.popleft()[1])
            return received()

        member._run = timed  # type: ignore[method-assign]
        near.receive = receive  # type: ignore[method-assign]
        near._deliver = lambda *frame: self.coming.append((self.clock.now + self.way_s, frame))  # type: ignore[method-assign]
        far._deliver = lambda *frame: self.answers.append((self.free_s + self.way_s, frame))

    @property
    def begins_s(self) -> float:
        """When it looks at the next frame."""
        if self.waiting:
            return self.free_s
        return max(self.free_s, self.coming[0][0]) if self.coming else math.inf

    @property
    def next_s(self) -> float:
        """When anything happens that the machine that answers may wait for."""
        return min(self.begins_s, self.answers[0][0] if self.answers else math.inf)

    def go_on(self) -> None:
        """Do what it did until now."""
        other: Any = self.pipe.other
        assert self.pipe.member is not None
        while (begins_s := self.begins_s) <= self.clock.now:
            self.free_s = self.there.now = begins_s
            while self.coming and self.coming[0][0] <= begins_s:
                other.queue.append(self.coming.popleft()[1])
                self.waiting += 1
            self.pipe.member.step()
            self.waiting -= 1


class _TimedFront:
    """The layers of the machine that answers."""

    def __init__(self, stage: Any, clock: Clock, takes: Takes) -> None:
        self._stage, self._clock, self._takes = stage, clock, takes

    def run(self, hidden: Any, *given: Any) -> Any:
        self._clock.now += self._takes(hidden.shape[1])
        return self._stage.run(hidden, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class _Moved:
    """In the place of what the machine that answers waits on."""

    def __init__(self, clock: Clock, members: Sequence[TimedMember]) -> None:
        self._clock, self._members = clock, members

    def clear(self) -> None:
        """Nothing is missed: no time passes until ``wait``."""

    def wait(self, _timeout_s: float) -> None:
        for member in self._members:
            member.go_on()
        next_s = min(member.next_s for member in self._members)
        assert next_s < math.inf, "nothing comes any more"
        self._clock.now = max(self._clock.now, next_s)


@dataclass
class TimedGroup:
    """``clock``: the time of all machines."""

    group: Group
    clock: Clock
    members: list[TimedMember]


def timed_group(
    patch: pytest.MonkeyPatch, whole: Any, cuts: Sequence[int], takes: Sequence[Takes], way_s: float
) -> TimedGroup:
    """``whole`` over machines that take for a block what ``takes`` says of each. Hidden states pass through
    the first one."""
    clock, there = Clock(), Clock()
    for module in (decoding, flight, group_model, remote_stage):
        patch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    patch.setattr(member_stage, "time", SimpleNamespace(monotonic=there))
    group = group_of(whole, *cuts, direct=False)
    members = [
        TimedMember(clock, pipe, each, way_s, there)
        for pipe, each in zip(group.pipes, takes[1:], strict=True)
    ]
    group.model._front = _TimedFront(group.model.front, clock, takes[0])  # type: ignore[assignment]
    moved: Any = _Moved(clock, members)
    for stage in group.model.members.stages:
        stage.moved = moved
    return TimedGroup(group, clock, members)
