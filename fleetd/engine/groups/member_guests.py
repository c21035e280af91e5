"""Models of other machines of which this worker has some layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from fleetd import limits
from fleetd.engine.groups.member_disk import PartDisk
from fleetd.engine.groups.member_stage import MemberStage
from fleetd.engine.groups.promised_rows import promised_bytes
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.protocol import HOP_IN, HOP_OUT, STAGE, Accepted, Report, ServeStage
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, ModelUnsupported, Overloaded

# Of a command's layers: the stage, the dtype of hidden states, the bytes that may wait to be written.
PartDisks = Callable[[ServeStage, Stage, mx.Dtype, int], PartDisk | None]

_Task = GuestTask[ServeStage, MemberStage]


@dataclass(kw_only=True)
class MemberGuests(Guests[ServeStage, MemberStage]):
    """``sharable``: the layers of the model that this worker has; None if the model cannot be cut."""

    failure = "These layers could not be run"

    sharable: Sharable | None
    # Where what such a command's layers keep of prompts is written; None: nowhere.
    disk: PartDisks = field(default=lambda command, stage, dtype, most_bytes: None)
    wake: Callable[[], None] = field(default=lambda: None)

    def admit(self, command: ServeStage) -> tuple[_Task, Accepted]:
        stage = self._sharable.stage
        if not stage.first <= command.first < command.last <= stage.last:
            raise InvalidValue(
                f"Layers {command.first} to {command.last} were asked for; "
                f"here are {stage.first} to {stage.last}."
            )
        if command.id in self:
            raise InvalidValue("These layers are run for this group already.")
        if len(self) >= limits.GROUPS:
            raise Overloaded(f"This machine is in {limits.GROUPS} groups already.")
        layers = command.last - command.first
        held = stage.last - stage.first
        n_bytes = promised_bytes(command.tokens, self.budget.sizes)
        self.budget.lend(command.id, n_bytes * layers // held)
        return _Task(command), Accepted(command.id, command.tokens)

    @property
    def _sharable(self) -> Sharable:
        if self.sharable is None:
            raise ModelUnsupported("A model of this kind cannot be cut between machines.")
        return self.sharable

    def stream_names(self, command: ServeStage) -> Iterable[str]:
        return (STAGE,)

    def begin_work(self, task: _Task, streams: HandedOverStreams) -> MemberStage:
        sharable, command = self._sharable, task.command
        stage, dtype = sharable.stage.part(command.first, command.last), sharable.layout.dtype
        most_bytes = self.budget.lent_bytes(task.id)
        disk = self.disk(command, stage, dtype, most_bytes)
        if disk is not None:
            disk.tier.wake = self.wake
        return MemberStage(stage, dtype, most_bytes, streams.connect(task.id), disk, command.tokens)

    def turn(self, chunk_tokens: int) -> None:
        self._open_hops()
        super().turn(chunk_tokens)
        paced = self.ready
        for tier in self.tiers:
            tier.writer.paced = paced

    def _open_hops(self) -> None:
        """Take the streams between members that have come."""
        for task in self._tasks:
            for name in (HOP_IN, HOP_OUT):
                if (
                    task.work is not None
                    and self.streams is not None
                    and self.streams.complete(task.id, (name,))
                ):
                    task.work.hops.open(name, self.streams.connect(task.id))

    @property
    def tiers(self) -> list[DiskTier]:
        """The disks of what runs."""
        disks = [task.work.disk for task in self._tasks if task.work is not None]
        return [disk.tier for disk in disks if disk is not None]

    def advance(self, task: _Task, work: MemberStage, chunk_tokens: int) -> Report | None:
        """``chunk_tokens`` has no effect: the worker that answers says how its prompts are cut."""
        work.step()
        return None
