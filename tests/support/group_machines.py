"""A group of machines in one process: a member computes whenever the worker that answers asks for what comes
back, or only now and then."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pipes import Events, MemoryPipe
from typing import Any

import mlx.core as mx

from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.member_disk import PartDisk
from fleetd.engine.groups.member_stage import MemberStage
from fleetd.engine.groups.remote_rows import KeptThere
from fleetd.engine.groups.remote_stage import RemoteStage
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import HOP_IN, HOP_OUT
from fleetd.engine.streams.frames import Connect, Frame, Place

MOST_BYTES = 1 << 30
LAZY = 0.7


@dataclass
class AnsweringPipe(MemoryPipe):
    """The end of the worker that answers."""

    member: MemberStage | None = None
    # Decides whether the member computes when it is asked; None: always. Blocks pile up meanwhile.
    dice: random.Random | None = None
    moved: threading.Event = field(default_factory=threading.Event)

    def receive(self) -> Frame | None:
        while (frame := super().receive()) is None:
            assert self.member is not None
            if self.dice is not None and self.dice.random() < LAZY:
                # It is asked again at once.
                self.moved.set()
                return None
            if not self.member.ready and self.member.rows.disk.due_s is not None:
                # Its disk is looked through, by another thread.
                return None
            if not self.member.ready and self.member.hops.waits:
                # The member before it is asked first.
                self.moved.set()
                return None
            assert self.member.ready, "both ends wait"
            self.member.step()
        return frame


@dataclass
class Group:
    """``model`` is what the worker that answers computes with."""

    model: GroupModel
    members: list[MemberStage]
    pipes: list[AnsweringPipe]
    events: Events
    # Between two members, the end of the one that sends.
    hops: list[MemoryPipe] = field(default_factory=list)


def group_of(
    whole: Any,
    *cuts: int,
    most_bytes: int = MOST_BYTES,
    disk: Callable[[int, Stage, mx.Dtype], PartDisk | None] = lambda number, stage, dtype: None,
    direct: bool = True,
) -> Group:
    """A model over len(cuts) + 1 machines, cut before these layers. ``disk``: of a member, by its number.
    ``direct``: hidden states go from member to member, not through the worker that answers."""
    stage = Stage.of(whole)
    events, moved = Events(), threading.Event()
    ends = [*cuts, stage.total]
    members: list[MemberStage] = []
    pipes: list[AnsweringPipe] = []
    remote = []
    for first, last in zip(cuts, ends[1:], strict=True):
        own = stage.part(first, last)
        dtype = stage.embed(mx.array([[0]])).dtype
        remote.append(
            RemoteStage(
                _answering(events, pipes, moved),
                moved,
                first=first,
                last=last,
                width=own.width,
                dtype=dtype,
                kept=KeptThere.of(own.empty),
                ids=own.takes_tokens,
                name=f"machine {len(members) + 1}",
                from_before=direct and len(members) > 0,
                to_next=direct and last < stage.total,
            )
        )

        def connect(name: str, place: Place, pipe: AnsweringPipe = pipes[-1]) -> MemoryPipe:
            assert name == "stage"
            end = MemoryPipe(place, events)
            end.join(pipe)
            return end

        members.append(MemberStage(own, dtype, most_bytes, connect, disk(len(members), own, dtype)))
        pipes[-1].member = members[-1]
    hops = [_linked(before, behind, events) for before, behind in pairwise(members)] if direct else []
    model = GroupModel(stage, cuts[0], stage.embed(mx.array([[0]])).dtype)
    model.join(remote)
    return Group(model, members, pipes, events, hops)


def _linked(before: MemberStage, behind: MemberStage, events: Events) -> MemoryPipe:
    ends: list[MemoryPipe] = []

    def connect(_name: str, place: Place) -> MemoryPipe:
        ends.append(MemoryPipe(place, events))
        return ends[-1]

    before.hops.open(HOP_OUT, connect)
    behind.hops.open(HOP_IN, connect)
    ends[0].join(ends[1])
    return ends[0]


def lazy(group: Group, seed: int) -> Group:
    """The same, whose members compute now and then."""
    for number, pipe in enumerate(group.pipes):
        pipe.dice = random.Random(seed + number)
    return group


def _answering(events: Events, pipes: list[AnsweringPipe], moved: threading.Event) -> Connect:
    def connect(name: str, place: Place) -> AnsweringPipe:
        assert name == "stage"
        pipes.append(AnsweringPipe(place, events, moved=moved))
        return pipes[-1]

    return connect


def rows_held(group: Group) -> Sequence[int]:
    """How many sequences and batches each member keeps something of."""
    return [len(member.rows) for member in group.members]
