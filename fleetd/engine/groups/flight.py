"""Blocks of tokens on their way through the members of a group, several at a time.

    own layers ─► member 1 ─► member 2 ─► …        each member computes another block
        block 3     block 2     block 1

Hidden states go from member to member. If members have no streams to each other, this machine passes them on,
whenever it waits or begins a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups.remote_stage import RemoteStage, StagePass
from fleetd.errors import GroupLost, MembersApart

# What a member sent before it went may come so much later than word of its streams to others, which broke.
_LATER_S = limits.GROUP_BEAT_S / 2


@dataclass(slots=True, eq=False)
class Flight:
    """One block. ``passes``: its way through each member's layers. ``finish``: hidden states behind the last
    layer to logits, (B, T, D) -> (B, T, V). ``own``: hidden states that were asked for of layers of this
    machine, (B, rows, D) each. ``last``: the last layer, if its hidden states were asked for and come anyway;
    -1 if not."""

    members: GroupStages
    passes: Sequence[StagePass]
    finish: Callable[[mx.array], mx.array]
    own: dict[int, mx.array] = field(default_factory=dict)
    last: int = -1

    def logits(self) -> mx.array:  # (B, T, V)
        """Wait for what comes out. Raises MemberLost."""
        last = self.passes[-1]
        self.members.wait(lambda: last.done)
        if last.out is None:
            raise RuntimeError("a block that was dropped has no logits")
        return self.finish(last.out)

    def states(self) -> dict[int, mx.array]:
        """Wait for the hidden states that were asked for: by layer, (B, rows, D). None of a block that was
        skipped. Raises MemberLost."""
        self.members.wait(lambda: all(entered.done for entered in self.passes))
        found = dict(self.own)
        for entered in self.passes:
            found |= entered.taps
        if self.last >= 0 and (out := self.passes[-1].out) is not None:
            found[self.last] = out
        return found

    def drop(self) -> None:
        """Nothing more is wanted of it."""
        for member, entered in zip(self.members.stages, self.passes, strict=True):
            member.drop(entered)


@dataclass(slots=True)
class GroupStages:
    """The other machines of a group, in the order of their layers."""

    stages: Sequence[RemoteStage] = field(default=())

    def pass_on(self) -> bool:
        """Take what has come, and send on what goes on. False if nothing has come. Raises MemberLost."""
        came = [member.collect() for member in self.stages]
        return any(came)

    def tell(self) -> None:
        """Send the changes that there are now at once."""
        for member in self.stages:
            member.tell()

    def wait(self, until: Callable[[], bool]) -> None:
        """Pass on what comes until ``until``. Raises MemberLost."""
        since_s = time.monotonic()
        while not until():
            self.stages[0].moved.clear()
            if self.pass_on():
                since_s = time.monotonic()
                continue
            begun_s = time.monotonic()
            self.stages[0].moved.wait(limits.GROUP_BEAT_S)
            now_s = time.monotonic()
            if now_s - begun_s > limits.GROUP_SILENT_S:
                # This process itself stood still: what came meanwhile is read first.
                continue
            for member in self.stages:
                member.check(since_s, now_s)
            self._check_hops(now_s)

    def _check_hops(self, now_s: float) -> None:
        """Raises MemberLost if the stream between two members broke: for the one before it if nothing is
        heard of that one any more, for the one behind it if something is.

        A member that is gone leaves its streams to others broken, too, and its own may show that later.
        """
        for before, behind in pairwise(self.stages):
            told = [*_told(before, to_next=True), *_told(behind, to_next=False)]
            if not told:
                continue
            silent_s = before.silent_s(now_s)
            if silent_s > limits.GROUP_SILENT_S:
                raise MemberLost(GroupLost(f"{before.name} was silent for {silent_s:.1f} s."))
            if now_s - silent_s > min(told) + _LATER_S:
                raise MemberLost(
                    MembersApart(
                        f"{behind.name} is not reached any more by {before.name}, which sends to it."
                    )
                )


def _told(member: RemoteStage, *, to_next: bool) -> list[float]:
    """When the member told that this stream of it is lost."""
    return [at_s for lost, at_s in member.hops_lost if lost.to_next is to_next]
