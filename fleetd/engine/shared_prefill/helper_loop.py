"""The compute thread's loop in a worker that has some of a model's layers: it only helps others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from fleetd import limits
from fleetd.engine.inbox import Inbox, Stop
from fleetd.engine.memory import KvBudget
from fleetd.engine.protocol import (
    AssistPrefill,
    Cancel,
    DraftFor,
    Failed,
    Heartbeat,
    PrefillAlone,
    PrefillShared,
    Report,
)
from fleetd.engine.shared_prefill.helper_guests import HelperGuests
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.steppable import wait_s
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import ModelUnsupported


@dataclass
class HelperLoop:
    """As ``scheduler.Scheduler``, without answers of its own."""

    sharable: Sharable
    context_tokens: int
    budget: KvBudget
    emit: Callable[[Report], None]
    inbox: Inbox
    streams: HandedOverStreams
    _beat_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._assists = HelperGuests(self.sharable, self.context_tokens, self.budget, self.streams, self.emit)

    def tell(self, command: PrefillShared | PrefillAlone | AssistPrefill | DraftFor | Cancel) -> None:
        self.inbox.put(command)

    def stop(self) -> None:
        self.inbox.put(Stop())

    def run(self) -> None:
        """Until ``stop``. What goes wrong in one assist fails that one."""
        while self._receive():
            self._assists.turn()
            self._beat()
        self._assists.close()
        self.streams.close()

    def _receive(self) -> bool:
        visits = self._assists.visits
        for item in self.inbox.take(0.0 if visits.ready else wait_s(visits.deadlines)):
            match item:
                case Stop():
                    return False
                case AssistPrefill():
                    self._assists.begin(item)
                case Cancel(assist_id):
                    self._assists.cancel(assist_id)
                case DraftFor(follow_id):
                    self.emit(
                        Failed(follow_id, ModelUnsupported.code, "Some layers of a model draft nothing.")
                    )
                case _:
                    pass  # answers, and word about them, are for workers that have the whole model
        return True

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + limits.ENGINE_BEAT_S
        self.streams.sweep()
        self.emit(
            Heartbeat(
                steps=self._assists.steps,
                assisting=len(self._assists),
                blocked=len(self._assists) > 0 and not self._assists.visits.ready,
                kv_bytes=self.budget.used_bytes,
                memory_bytes=mx.get_active_memory(),
            )
        )
