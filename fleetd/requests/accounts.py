"""What is counted and written down of requests: ledger rows, metrics, learned speeds.

opened ─▶ reserved ─▶ settled: finished or cancelled
     └──────────────▶ refunded: an error, no tokens billed
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.process.observe import LineBudget, get_logger
from fleetd.requests.job import THIS_NAME, Job, Planned
from fleetd.requests.ledger import Gain, Ledger, Reservation
from fleetd.requests.ports import MetricsPort
from fleetd.requests.request import Request
from fleetd.requests.request_views import trace_of

log = get_logger("fleetd.requests")

# Weight of the newest request in the moving average of request times.
_EWMA = 0.2


class Accounts:
    """The accounts of all requests of one daemon.

    Args:
        speeds: learns from each answer that was computed here.
    """

    def __init__(
        self,
        ledger: Ledger,
        metrics: MetricsPort,
        speeds: ModelSpeeds | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self.metrics = metrics
        self.speeds = speeds or ModelSpeeds()
        self.monotonic = monotonic
        self.failure_lines = LineBudget(limits.FAILURES_LOGGED, monotonic)
        self.completed = 0
        self.failed = 0
        # Seconds that a request takes, as a moving average; None before the first one has ended.
        self.request_s: float | None = None

    def open(self, job: Job) -> Account:
        """The account of a request that has just arrived."""
        return Account(self, job)

    def took(self, seconds: float) -> None:
        """A request was answered."""
        self.completed += 1
        known_s = seconds if self.request_s is None else self.request_s
        self.request_s = known_s + _EWMA * (seconds - known_s)


class Account:
    """One request, from its arrival to its end."""

    def __init__(self, accounts: Accounts, job: Job) -> None:
        self._all = accounts
        self._job = job
        self._row: Reservation | None = None
        self._counted: Planned | None = None

    async def reserve(self, request: Request) -> None:
        """Write its row; waits no longer than ``Ledger.reserve``."""
        node = _node_of(request.placement.planned)
        self._row = Reservation(request.id, request.model.name, node, self._job.route, request.at_s)
        await self._all.ledger.reserve(self._row)

    def refused(self, model: str, at_s: float) -> None:
        """No model or no machine was found for it; its row is written by ``refund``."""
        self._row = Reservation(self._job.request.id, model, THIS_NAME, self._job.route, at_s)

    def planned(self, planned: Planned, *, expecting: bool) -> None:
        """How it runs from now on; ``expecting``: it is not decided yet."""
        if self._row is not None:
            self._row = replace(self._row, node=_node_of(planned))
        if expecting:
            return
        before, self._counted = self._counted, planned
        if before is None or (before.kind, before.reason) != (planned.kind, planned.reason):
            self._all.metrics.plan(planned.kind, "fallback" if planned.reason else "only")

    def settle(self, request: Request, reason: str) -> None:
        """It has ended, with a finish reason or "cancelled"."""
        now_s = self._all.monotonic()
        took_s = now_s - request.arrived_s
        usage, timings = request.so_far(now_s)
        if self._row is not None:
            trace = trace_of(request)
            self._all.ledger.settle(
                self._row, usage, timings, reason, first_s=trace.ttft_s, gain=gain_of(trace)
            )
        self._all.metrics.finished(request.model.name, reason, usage, timings, took_s)
        if reason == "cancelled":
            return
        if self._row is not None and self._row.node == THIS_NAME:
            self._computed_here(request, now_s)
        self._all.took(took_s)

    def _computed_here(self, request: Request, now_s: float) -> None:
        usage, timings = request.so_far(now_s)
        if request.finished is not None and request.finished.speculation is not None:
            self._all.metrics.speculated(request.finished.speculation)
        if request.planned is not None and request.planned.kind == "group":
            # Several machines took these times together.
            return
        self._all.speeds.ran(
            request.model.name,
            prompt_tokens=request.kept_tokens or usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            prefill_s=timings.prefill_s,
            decode_s=0.0 if timings.decode_interleaved else timings.decode_s,
            now_s=now_s,
            # An image takes time that says nothing of how fast tokens are read.
            shared=request.shared or timings.prefill_interleaved or request.job.images > 0,
        )

    def refund(self, code: str) -> None:
        """It has failed with this error's code."""
        self._all.failed += 1
        self._all.metrics.failed(code)
        if self._row is not None:
            self._all.ledger.refund(self._row, code)
        if (left_out := self._all.failure_lines.spend()) is not None:
            more = {"left_out": left_out} if left_out else {}
            job = self._job
            log.info("request.failed", request=job.request.id, code=code, route=job.route, **more)


def _node_of(planned: Planned) -> str:
    """The machine that answers, as the ledger has it."""
    return THIS_NAME if planned.answered_here else planned.nodes[0]


def gain_of(trace: Trace) -> Gain:
    """What the ledger keeps of a trace's gain."""
    there = trace.there.speculation if trace.there is not None else None
    drafts = trace.speculation or there
    saved_s, drafts_s = trace.saved_s or 0.0, drafts.saved_s if drafts is not None else 0.0
    smart_s = saved_s - drafts_s if trace.chosen.kind == "smart" else 0.0
    return Gain(saved_s, drafts_s, smart_s, trace.outcome == "shared")
