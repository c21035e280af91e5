"""One job for vectors or scores as it goes: what the page shows of it, and its trace at the end.

    waiting ── (loading) ── reading ─┬─ computed, on each machine
                                     └─ left to chats

All by the clock of the machine that was asked; a trace never holds a word of a text. The requests of one long
job of a client have one record, and so one row in the list of requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import RunningRequest
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import MachineTexts, TextsWork, Trace
from fleetd.errors import FleetError
from fleetd.plan.prefill import step_names
from fleetd.requests.job import THIS_NAME
from fleetd.requests.summary import summary
from fleetd.requests.timeline import Phases, Span, steps_of
from fleetd.requests.vectors.job import MachineRun, VectorJob
from fleetd.requests.vectors.messages import texts_of


@dataclass(slots=True)
class VectorRecord:
    """``here``: this machine's name. ``at_s``: Unix time of the arrival, ``arrived_s`` the monotonic one; of
    a long job, those of its first request. ``job`` is its present one."""

    job: VectorJob
    here: str
    at_s: float
    arrived_s: float
    phases: Phases = field(init=False)
    # Of the requests before: by node id what was computed, and how many texts they had.
    _ran: dict[str, MachineRun] = field(default_factory=dict, init=False)
    _asked: int = field(default=0, init=False)
    # The time in which no machine was given a part, as all of them answered chats: begin, end, and seconds.
    _left: Span | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.phases = Phases(self.here, self.arrived_s)

    def goes_on(self, job: VectorJob) -> None:
        """The next request of the same long job has come."""
        self._ran, self._asked = _together(self._ran, self.job.ran), self.texts
        self.job = job

    @property
    def texts(self) -> int:
        """How many were asked for by now."""
        return self._asked + len(texts_of(self.job.request))

    @property
    def whole(self) -> VectorJob:
        """The job with what was computed for its requests before."""
        job = self.job
        if job.part_of is None:
            return job
        shown_id = f"{job.id.partition('-')[0]}-{job.part_of.id}"
        return dataclasses.replace(job, id=shown_id, ran=_together(self._ran, job.ran))

    def loads(self, machine: str, now_s: float) -> None:
        """A machine loads the model; others may be reading already."""
        if self.phases.name != step_names.READING:
            self.phases.enter(step_names.LOADING, self._named(machine), now_s)

    def reads(self, machine: str, now_s: float) -> None:
        """A machine computes; the first one names the phase."""
        if self.phases.name != step_names.READING:
            self.phases.enter(step_names.READING, self._named(machine), now_s)

    def left_to_chats(self, began_s: float, ended_s: float) -> None:
        left = self._left or Span(step_names.LEFT_TO_CHATS, self.here, began_s, ended_s, 0.0)
        seconds = (left.seconds or 0.0) + ended_s - began_s
        self._left = dataclasses.replace(left, ended_s=ended_s, seconds=seconds)

    def _named(self, machine: str) -> str:
        return self.here if machine == THIS_NAME else machine

    def running(self, now_s: float) -> RunningRequest:
        """What the page shows while the job goes on."""
        job, loading = self.whole, self.job.loading
        stage, done, total = "", job.done, max(self.texts, job.part_of.total if job.part_of else 0)
        if loading is not None:
            stage, done, total = loading.stage, loading.done, loading.total
        elif self.phases.name == step_names.READING:
            stage = "making vectors" if job.route == "embeddings" else "scoring documents"
        return RunningRequest(
            id=job.id,
            model=job.name or job.model,
            route=job.route,
            client=job.client,
            at_s=self.at_s,
            # Whole seconds: a finer age would be a change at every look.
            age_s=float(int(now_s - self.arrived_s)),
            stage=stage,
            done=done,
            total=total,
            prompt_tokens=job.tokens,
            exactness=job.exactness if job.done else "",
            plan=OptionView(job.kind, job.nodes, None, chosen=True),
        )

    def trace(self, ended_s: float, error: FleetError | None, *, cancelled: bool = False) -> Trace:
        """What is written down of the job at its end."""
        job = self.whole
        why = error or next((run.lost for run in job.lost), None)
        found = Trace(
            id=job.id,
            at_s=self.at_s,
            model=(job.name or job.model)[: limits.CARD_TEXT_CHARS],
            prompt_tokens=job.tokens,
            chosen=OptionView(job.kind, job.nodes, None, chosen=True),
            steps=steps_of(self._steps(job, ended_s))[: limits.TRACE_STEPS],
            outcome="cancelled" if cancelled else "failed" if error is not None else job.kind,
            exactness=job.exactness if job.done else "",
            code=why.code if why is not None else "",
            reason=why.message if why is not None else "",
            took_s=ended_s - self.arrived_s,
            client=job.client,
            answered_by=job.nodes[0] if job.kind == "remote" else "",
            machine=self.here,
            clock_s=self.arrived_s,
            texts=TextsWork(job.route, self.texts, list(_machines(job))),
        )
        return replace(found, summary=summary(found))

    def _steps(self, job: VectorJob, ended_s: float) -> Span:
        spans = self.phases.spans(ended_s)
        if self._left is not None:
            spans.append(self._left)
        for run in job.ran.values():
            name = self._named(run.machine.name)
            loaded_s = run.began_s + run.loaded_s
            if run.loaded_s:
                spans.append(Span(step_names.LOADED, name, run.began_s, loaded_s))
            if run.parts:
                spans.append(Span(step_names.COMPUTED, name, loaded_s, run.ended_s, run.computed_s))
        return Span(step_names.REQUEST, self.here, self.arrived_s, ended_s, parts=tuple(spans))


def _machines(job: VectorJob) -> Iterator[MachineTexts]:
    for run in job.ran.values():
        lost = run.lost
        yield MachineTexts(
            run.machine.name,
            run.parts,
            run.texts,
            run.tokens,
            run.computed_s,
            run.loaded_s,
            lost.code if lost is not None else "",
            lost.message if lost is not None else "",
        )


def _together(before: Mapping[str, MachineRun], now: Mapping[str, MachineRun]) -> dict[str, MachineRun]:
    """What machines have computed in both, by node id."""
    found = dict(before)
    for node_id, run in now.items():
        known = found.get(node_id)
        found[node_id] = (
            run
            if known is None
            else dataclasses.replace(
                run,
                began_s=known.began_s,
                ended_s=max(known.ended_s, run.ended_s),
                parts=known.parts + run.parts,
                texts=known.texts + run.texts,
                tokens=known.tokens + run.tokens,
                computed_s=known.computed_s + run.computed_s,
                loaded_s=known.loaded_s + run.loaded_s,
            )
        )
    return found
