"""The loop of a worker's compute thread: take what has arrived, compute, prove progress.

Everything here runs on one thread, but for ``tell``, ``put_stream`` and ``stop``. Requests and commands
arrive through a queue; reports leave through ``emit``, which may be called from any thread.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from fleetd import limits
from fleetd.engine.groups.member_guests import MemberGuests, PartDisks
from fleetd.engine.guests import Guests
from fleetd.engine.loop.inbox import Inbox, Item, Stop
from fleetd.engine.measure.idle_calibration import IdleCalibration
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.protocol import (
    HOP_IN,
    HOP_OUT,
    STAGE,
    AssistPrefill,
    Cancel,
    DraftFor,
    Failed,
    ForgetOrigins,
    FreeMemory,
    Heartbeat,
    Report,
    ServeStage,
    StreamTag,
    TakenElsewhere,
)
from fleetd.engine.shared_prefill.helper_guests import HelperGuests
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import ModelUnsupported


@dataclass(kw_only=True)
class ComputeLoop(ABC):
    """The loop with guest work only; ``Scheduler`` and ``HelperLoop`` add the rest."""

    context_tokens: int  # the most that a prompt and its answer have together
    budget: KvBudget
    emit: Callable[[Report], None]
    sharable: Sharable | None = None  # what this worker can compute for other machines; None: nothing
    part_disks: PartDisks | None = None  # where layers that run for others keep prompts; None: nowhere
    idle: IdleCalibration | None = None  # what is measured while there is nothing else to do
    inbox: Inbox = field(default_factory=Inbox, init=False)
    streams: HandedOverStreams = field(init=False)
    guests: list[Guests[Any, Any]] = field(init=False)
    # Parts of prompts that other threads have prepared, as images are.
    _prepared: int = field(default=0, init=False)
    _heartbeat_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.streams = HandedOverStreams(self.inbox.wake)
        self._helpers = HelperGuests(
            sharable=self.sharable,
            context_tokens=self.context_tokens,
            budget=self.budget,
            spare_bytes=lambda: self._spare_bytes,
            streams=self.streams,
            emit=self.emit,
        )
        # A step of a model over several machines waits for each of them: short frames go at once.
        self._stage_streams = HandedOverStreams(self.inbox.wake, eager=True, beat_s=limits.GROUP_BEAT_S)
        self._stages = MemberGuests(
            sharable=self.sharable,
            budget=self.budget,
            streams=self._stage_streams,
            emit=self.emit,
            wake=self.inbox.wake,
            **({} if self.part_disks is None else {"disk": self.part_disks}),
        )
        self.guests = [self._helpers, self._stages]

    # ---- from other threads ----------------------------------------------------------------------------

    def tell(self, item: Item) -> None:
        self.inbox.put(item)

    def note_prepared(self) -> None:
        """A part of a prompt is prepared, which may take seconds: that is progress. For one thread."""
        self._prepared += 1

    def put_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        """Take a connected socket that the daemon hands over."""
        (self._stage_streams if tag.name in (STAGE, HOP_IN, HOP_OUT) else self.streams).put(tag, sock)

    def stop(self) -> None:
        self.inbox.put(Stop())

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until ``stop``.

        What goes wrong in a request's own steps fails that request. An exception from here is a bug or a
        failing device, and ends the worker.
        """
        while self.turn():
            self.heartbeat()
        self._close()

    def turn(self) -> bool:
        """Take what has arrived, then a step of each kind of work; where there is none, a step of idle work.

        False once the loop is to stop.
        """
        for item in self.inbox.take_items(0.0 if self._ready or self._idles else _wait_s(self._deadlines())):
            if isinstance(item, Stop):
                return False
            self._take_item(item)
        self._compute()
        if self._idles and self.inbox.empty():
            self._idle_step()
        elif self.idle is not None:
            self.idle.turn(idle=not self._occupied and self.inbox.empty())
        return True

    def heartbeat(self) -> None:
        """Report the figures and close abandoned streams, if it is time for that."""
        now = time.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + limits.ENGINE_BEAT_S
            self._sweep()
            self.emit(self._figures())

    @property
    def _idles(self) -> bool:
        """True if there is nothing to do, and time and work for ``_idle_step``."""
        return False

    def _idle_step(self) -> None:
        """A short step of what may wait for ever. Loops that idle override it."""
        raise NotImplementedError

    @abstractmethod
    def _compute(self) -> None:
        """A step of each kind of work."""

    def _turn_guests(self, chunk_tokens: int) -> None:
        self._helpers.trim()
        for guests in self.guests:
            guests.turn(chunk_tokens)

    def _take_item(self, item: Item) -> None:
        """Act on something that has arrived."""
        match item:
            case AssistPrefill():
                self._helpers.begin(item)
            case ServeStage():
                self._stages.begin(item)
            case Cancel(task_id):
                self._cancel_guest(task_id)
            case FreeMemory(prompts):
                self._free_memory(prompts)
            case TakenElsewhere(n_bytes):
                self._lose(n_bytes)
                self._helpers.trim()
            case ForgetOrigins(labels):
                self._helpers.warm.forget(labels)
            case _:
                pass  # for workers that have the whole model

    def _free_memory(self, prompts: bool) -> None:
        """Give back what is kept for later only; a loop that keeps prompts overrides it."""
        self._helpers.warm.trim(0)
        if prompts:
            for tier in self._stages.tiers:
                tier.free_memory()
        mx.clear_cache()
        self._heartbeat_at = 0.0

    def _lose(self, n_bytes: int) -> None:
        """Other workers hold so much of what this one was given."""
        self.budget.taken_elsewhere_bytes = n_bytes

    @property
    def _spare_bytes(self) -> int:
        """Memory that nothing wants now, for rows of other machines' earlier prompts."""
        return max(0, self.budget.budget_bytes - self.budget.taken_elsewhere_bytes - self.budget.used_bytes)

    def _cancel_guest(self, task_id: str) -> bool:
        """End a guest's task. False if there is none with this id."""
        return any(guests.cancel(task_id) for guests in self.guests)

    @property
    def _ready(self) -> bool:
        """True if something can be computed now."""
        return any(guests.ready for guests in self.guests)

    @property
    def _occupied(self) -> bool:
        """True if there is work, even if all of it waits."""
        return any(len(guests) for guests in self.guests)

    def _deadlines(self) -> list[float | None]:
        """When each wait ends even if nothing arrives, in monotonic seconds."""
        due_s = self.idle.due_s if self.idle is not None else None
        return [due_s, *(due_s for guests in self.guests for due_s in guests.deadlines)]

    def _sweep(self) -> None:
        self.streams.sweep()
        self._stage_streams.sweep()

    def _figures(self) -> Heartbeat:
        return Heartbeat(
            steps=sum(guests.steps for guests in self.guests) + self._prepared,
            assisting=sum(len(guests) for guests in self.guests),
            blocked=self._occupied and not self._ready,
            kv_bytes=self.budget.used_bytes,
            memory_bytes=mx.get_active_memory(),
        )

    def _close(self) -> None:
        for guests in self.guests:
            guests.close()
        self.streams.close()
        self._stage_streams.close()


class HelperLoop(ComputeLoop):
    """The loop of a worker that has some of a model's layers: it only helps other machines."""

    def _take_item(self, item: Item) -> None:
        if isinstance(item, DraftFor):
            self.emit(Failed(item.id, ModelUnsupported.code, "Some layers of a model draft nothing."))
        else:
            super()._take_item(item)

    def _compute(self) -> None:
        # A split says how its prompt is cut: the size has no effect.
        self._turn_guests(chunk_tokens=0)


def _wait_s(deadlines: Iterable[float | None]) -> float:
    """How long a loop with nothing to compute may wait for an arrival: until the next heartbeat or the first
    deadline."""
    first = min((due for due in deadlines if due is not None), default=None)
    longest = limits.ENGINE_BEAT_S
    return longest if first is None else min(longest, max(0.0, first - time.monotonic()))
