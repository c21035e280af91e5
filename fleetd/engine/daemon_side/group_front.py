"""The worker that answers with a model over several machines: started once the others have their layers.

start ──► form: every member loads ──► spawn ──► connect ──► loaded ──► ready
            │                                                             └ a member leaves: killed
            └ one cannot: failed
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from fleetd import limits
from fleetd.control.daemon_status import Carried, EngineStatus, HeldLayers
from fleetd.control.model_change import MemberProgress
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.failures import typed
from fleetd.engine.protocol import Event, Finished, LoadFailed, Loading, Report, Unfit
from fleetd.engine.settings import GroupMember, RingPlace, WorkerSettings
from fleetd.errors import EngineDied, FleetError, MemberGone
from fleetd.models.folder import ModelFolder

log = structlog.get_logger(__name__)


class GroupLife(Protocol):
    """``requests.groups.client.FleetGroup`` or ``requests.ranks.client.FleetRanks``: the other machines."""

    @property
    def members(self) -> tuple[GroupMember, ...]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def kinds(self) -> frozenset[str]: ...
    @property
    def ring(self) -> RingPlace | None: ...
    @property
    def carried(self) -> Carried: ...
    async def form(self, told: Callable[[Loading], None]) -> None: ...
    async def connect(self, engine: EngineProcess) -> None: ...
    async def watch(self) -> None: ...
    def close(self) -> None: ...


class NewCut(NamedTuple):
    """Another cut of a model that is loaded, whose group has yet to form.

    ``why``: as a sentence. ``folder``, ``over``: of the model, and the names of the other machines that a
    person has chosen for it (None if nobody has), with which it is loaded again if that fails. ``prepare``:
    has machines that hold nothing of the model yet load their layers, given how they have to compute ("" for
    any), and returns when what it is given has; None if there are none. Raises FleetError: why they do not.
    """

    group: GroupLife
    why: str
    folder: ModelFolder
    over: Sequence[str] | None = None
    prepare: Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]] | None = None


class GroupFront(EngineProcess):
    """An EngineProcess whose ``start`` returns before its process runs. ``options``: as EngineProcess."""

    def __init__(self, settings: WorkerSettings, group: GroupLife, **options: Any) -> None:
        settings = msgspec.structs.replace(
            settings, group=group.members, group_tokens=group.tokens, ring=group.ring
        )
        super().__init__(settings, **options)
        self._group, self._options = group, options
        self._life: asyncio.Task[None] | None = None
        # What plain steps took lately in the layers of each machine, by the last answer.
        self.stages: Sequence[GroupStage] = ()
        # Tokens of all answers since it was loaded.
        self.written_tokens = 0
        # Why it was cut anew, as a sentence; "" for a first cut.
        self.cut_anew = ""

    def over(self, group: GroupLife, held_bytes: int, cut_anew: str) -> GroupFront:
        """The same model over another cut, not started.

        Args:
            held_bytes: that other workers of this machine hold.
            cut_anew: why, as a sentence.
        """
        settings = msgspec.structs.replace(self.settings, held_bytes=held_bytes)
        front = GroupFront(settings, group, **self._options)
        front.cut_anew, front.loading = cut_anew, Loading("cut anew, as measured")
        return front

    @property
    def exact(self) -> bool:
        """True if all machines compute with the same code on devices of one kind, whole layers each."""
        if self.settings.ring is not None:
            return False
        arithmetic = self.facts.arithmetic if self.facts is not None else None
        return arithmetic is not None and self._group.kinds <= {arithmetic.kind}

    @property
    def exact_kind(self) -> str:
        """How another machine has to compute for the group to stay exact; "" if it is not."""
        facts = self.facts
        return facts.arithmetic.kind if self.exact and facts is not None and facts.arithmetic else ""

    @property
    def speed(self) -> MeasuredSpeed:
        """What all machines together measured; zeros before they have."""
        return self.facts.speed if self.facts is not None else MeasuredSpeed()

    @property
    def status(self) -> EngineStatus:
        loading = self.loading.members if self.state == "loading" else []
        progress = {each.name: each for each in loading}
        # Before its process runs, members have not tried to reach each other.
        tried = self.settings.ring is None and self.facts is not None
        members = [
            _held(
                each,
                progress.get(each.name, MemberProgress()),
                relayed=tried and number > 0 and not each.direct,
            )
            for number, each in enumerate(self.settings.group)
        ]
        return msgspec.structs.replace(
            super().status, members=members, cut_anew=self.cut_anew, carried=self._group.carried
        )

    async def start(self) -> None:
        if self.state != "loading":  # unloaded before it began
            raise self._not_running()
        self._life = asyncio.create_task(self._live(), name=f"group-{self.settings.name}")

    async def _live(self) -> None:
        """Form the group, start the worker, and watch the members until one leaves."""
        try:
            await self._group.form(self._tell)
            # The members have told how they compute, and what carries sums.
            self.settings = msgspec.structs.replace(
                self.settings, group=self._group.members, ring=self._group.ring
            )
            await super().start()
            await self._group.connect(self)
            await self._group.watch()
        except Exception as failure:
            error = typed(failure, f"{self.settings.name} could not be held together ({failure}).")
            log.warning("group.lost", model=self.settings.name, code=error.code, reason=error.message)
            await self._lost(error)
        finally:
            self._group.close()

    async def _lost(self, error: FleetError) -> None:
        """End the worker because of what a member failed with."""
        if self.pid is None and self.state == "loading":
            self.error, self.state = error, "failed"
            await self._notify()
            if self.on_exit is not None:
                self.on_exit(self)
        else:
            # Once the worker ends because of one member, the others leave, too. What it ended with stays.
            self.kill(self.error or error)

    async def _take(self, report: Report | Unfit) -> None:
        if isinstance(report, LoadFailed) and report.code == MemberGone.code and self._life is not None:
            # The worker saw a stream end. The member's machine says why, a moment later.
            await asyncio.wait([self._life], timeout=limits.MEMBER_TELLS_S)
            if self.error is not None:
                return
        await super()._take(report)

    def _on_event(self, event: Event, now: float) -> None:
        if isinstance(event, Finished):
            self.written_tokens += event.usage.completion_tokens
            self.stages = event.stages or self.stages
        super()._on_event(event, now)

    async def _gone(self, process: asyncio.subprocess.Process) -> None:
        await super()._gone(process)
        if self._life is not None:
            # The members hold memory for nothing.
            self._life.cancel()

    def _tell(self, progress: Loading) -> None:
        self.loading = progress
        # ``loaded`` wakes by itself only for what the worker says.
        self._telling = asyncio.create_task(self._notify())

    async def stop(self) -> None:
        if self.state == "loading" and self.pid is None:
            self.state = "stopping"
            self.error = self.error or EngineDied(f"{self.settings.name} was unloaded.")
            await self._notify()
        # Its own start ends it if it was told to stop meanwhile: that is part of its life, and does not wait
        # for it.
        if self._life is not None and self._life is not asyncio.current_task():
            self._life.cancel()
            try:
                await asyncio.wait([self._life])
            except asyncio.CancelledError:
                self.kill()
                raise
        # A life that was cancelled before it began has closed nothing.
        self._group.close()
        await super().stop()


def _held(member: GroupMember, loading: MemberProgress, *, relayed: bool) -> HeldLayers:
    return HeldLayers(
        member.name,
        member.first,
        member.last,
        loading.stage,
        loading.done_bytes,
        loading.total_bytes,
        relayed=relayed,
    )
