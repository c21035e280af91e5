"""One request from its admission to its last ledger row: the only place that knows how it stands.

Pure: events and clock readings in, figures out. The runner passes every event to ``on_event``; the steps of
the pipeline write here what they decided. At every moment it knows what has been computed so far, which is
what a request that is cancelled or cut off is billed for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd.control.prefill_trace import DrafterView, Outcome, Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.measure.stage_times import StageTimes
from fleetd.engine.protocol import (
    WAITING,
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    Prefill,
    PrefillReport,
    StepTime,
    Timings,
    Tokenized,
    ToolCall,
    ToolCallPiece,
    Usage,
)
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.choice import PlanChoice
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.attempts import Attempts
from fleetd.requests.job import CHARS_PER_TOKEN, THIS_NAME, Exactness, Job, Planned
from fleetd.requests.placement.placement import Placement, PromptPlaces, WantedModel
from fleetd.requests.ports import MetricsPort
from fleetd.requests.remote.remote import RemoteJob
from fleetd.requests.timeline import Phases, Span

_NOWHERE: PromptPlaces = {}
# Stages of a load in which nothing is loaded yet begin so.
WAITS = (WAITING, "waking ")


class LocatedModel(msgspec.Struct, frozen=True):
    """The model that was asked for. ``name`` is canonical; ``folder`` is None if this machine lacks it.

    ``can_pull``: a request may fetch it. ``missing``: why it is not here.
    """

    ref: str
    name: str
    folder: ModelFolder | None
    can_pull: bool = False
    missing: FleetError | None = None

    @property
    def wanted(self) -> WantedModel:
        """The model as the planner is asked for it."""
        return WantedModel(self.name, self.folder is not None, self.can_pull, self.folder)


@dataclass(slots=True)
class Shortening:
    """What the step of smart prefill found out about a prompt that asked for it."""

    # What the client is told.
    result: SmartPrefillResult = field(default_factory=SmartPrefillResult)
    # What scoring and reading the rest were expected to take; None unless they were priced.
    plan: SmartPlan | None = None
    # When they were priced, by the monotonic clock; 0 if they were not.
    planned_s: float = 0.0
    # What was loaded for it and scored, in order.
    steps: list[Span] = field(default_factory=list)
    # Code and message of a scorer that gave up while others went on; else empty.
    lost_scorer: tuple[str, str] = ("", "")


@dataclass(slots=True)
class SharingOutcome:
    """What the step of shared prefill decided in one attempt, and what came of it."""

    # The planner's choice; None until the prompt is tokenized, or if no machine could help.
    choice: PlanChoice | None = None
    # Whether the helpers' bytes are this machine's own; None until all helpers have agreed.
    agreed_exact: bool | None = None
    # The engine's report of how it ended; None until then.
    report: PrefillReport | None = None
    # When all helpers had agreed, and when the engine reported; monotonic seconds, 0 before that.
    agreed_at_s: float = 0.0
    reported_s: float = 0.0
    # What the helpers did by their own accounts, in the order of the chain, then what this machine did.
    spans: Sequence[Span] = ()

    @property
    def went_well(self) -> bool:
        """True if the helpers helped to the end."""
        return self.report is not None and not self.report.code

    @property
    def own_steps(self) -> Sequence[StepTime]:
        """What this machine did of it."""
        return self.report.steps if self.report is not None else ()


@dataclass(slots=True)
class Attempt:
    """One try to have a request answered, by one machine. Times are the monotonic clock's seconds."""

    # What the engine is asked; steps may change it before the attempt.
    generate: Generate
    # When it began, and when it was decided how the prompt is read.
    began_s: float
    decided_s: float
    # What the engine said of the prompt; None until it is tokenized.
    accepted: Accepted | None = None
    # What it failed with; None while it runs and after an answer.
    error: FleetError | None = None
    # Why it did not go as planned: an error's code, and a sentence; else empty.
    code: str = ""
    reason: str = ""
    # What the steps of the pipeline decided and found out.
    sharing: SharingOutcome = field(default_factory=SharingOutcome)
    # The name of the machine that is to answer.
    machine: str = THIS_NAME
    # The keys and values that another machine sent; None if none did.
    fetched: Span | None = None
    # The other worker that drafted; None if none did.
    drafter: DrafterView | None = None
    # What the drafter did, by its own account.
    drafts: Sequence[Span] = ()
    # The job on the machine that answers, and that machine's own trace; None for this machine.
    remote: RemoteJob | None = None
    there: Trace | None = None
    # When the job arrived there, by this machine's monotonic clock.
    there_arrived_s: float = 0.0
    # The tasks of steps that the trace waits for.
    concluding: asyncio.Future[Any] | None = None
    # What it does now, and how far that is: (stage, done, total).
    progress: tuple[str, int, int] = ("", 0, 0)
    # What it waited for before its engine could be asked.
    loading: StageTimes = field(default_factory=StageTimes)
    # Tokens of the prompt that the engine did not have to compute.
    cached_tokens: int = 0
    # Tokens of the prompt that are not prefilled yet; None until the engine has begun.
    left_tokens: int | None = None
    # How much of the prompt was read, from 0 to 1.
    read_share: float = 0.0


class Request:
    """One job on its way.

    A request may take several attempts: on another machine, or with its whole prompt after a shortened one
    failed. What belongs to one attempt is in ``attempt``, of which each has a new one; usage and times go on.

    ``job``: as it runs now, its prompt perhaps shortened; ``asked``: as it came. ``running`` once an engine
    works on it, waiting before.
    """

    def __init__(
        self,
        job: Job,
        model: LocatedModel,
        placement: Placement,
        metrics: MetricsPort,
        *,
        arrived_s: float,
        at_s: float,
        places: PromptPlaces = _NOWHERE,
        here: str = THIS_NAME,
    ) -> None:
        self.asked = self.job = job
        self.model = model
        # The machine that is to answer now, and the one that was chosen first.
        self.placement = self.first_placement = placement
        self._places = places
        self.arrived_s = arrived_s
        self.at_s = at_s
        # This machine's name.
        self.here = here
        self.phases = Phases(here, arrived_s)
        self.running = False
        self.finished: Finished | None = None
        self.first_token_s: float | None = None
        # Seconds of the time before it in which the client read (``RemoteJob.client_s``).
        self.first_client_s = 0.0
        # How it runs, as it was announced last; and whether other machines ever had a part in its prefill.
        self.planned: Planned | None = None
        # Where it runs is known once the load of its model has begun.
        self.undecided = False
        # The last plan that was told is what was expected, and not yet decided.
        self.expecting = False
        self.shared = False
        # None unless smart prefill was asked for.
        self.smart: Shortening | None = None
        # The traces of the attempts before this one, and of this one if it has failed.
        self.earlier: list[Trace] = []
        self.tried: list[Attempt] = []
        self.failed_trace: Trace | None = None
        self.ended_s: float | None = None
        # Which machines failed at it.
        self.attempts = Attempts()
        self._metrics = metrics
        self._announced: list[Planned] = []
        self._running_s: float | None = None
        self._last_token_s = arrived_s
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self.attempt = self._new_attempt()
        metrics.waiting(model.name, +1)

    def begin(self, now_s: float) -> None:
        """A new attempt, on the machine that ``placement`` names."""
        if self.failed_trace is not None:
            self.earlier.append(self.failed_trace)
            self.failed_trace = None
            self.tried.append(self.attempt)
        self.attempt = self._new_attempt()
        self.attempt.began_s = now_s
        self.phases.enter(step_names.WAITING, self.here, now_s)

    def _new_attempt(self) -> Attempt:
        machine = self.answered_by or self.here
        return Attempt(self.job.request, began_s=self.arrived_s, decided_s=self.arrived_s, machine=machine)

    # ---- what is known -----------------------------------------------------------------------------------

    @property
    def places(self) -> PromptPlaces:
        """What machines keep of its prompt, as it is asked now."""
        return self._places if self.job is self.asked else _NOWHERE

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until the engine has counted them."""
        return self._prompt_tokens

    @property
    def unread_tokens(self) -> int:
        """Tokens of its prompt that are to be prefilled yet: by the plan until the engine has begun."""
        if self.answering:
            return 0
        if self.attempt.left_tokens is not None:
            return self.attempt.left_tokens
        estimated = len(self.job.prompt_text) // CHARS_PER_TOKEN
        return max(0, (self._prompt_tokens or estimated) - self.placement.cached_tokens)

    @property
    def id(self) -> str:
        return self.job.request.id

    @property
    def folder_here(self) -> ModelFolder | None:
        """The model's files, if this machine answers and had them from the start. Steps need them."""
        return self.model.folder if self.placement.node_id == THIS_NODE else None

    @property
    def answered_by(self) -> str:
        """The name of the machine that answers; "" for this one."""
        return "" if self.placement.node_id == THIS_NODE else self.placement.planned.nodes[0]

    @property
    def answering(self) -> bool:
        """True once something of the answer has been passed on: from then on it cannot begin anew."""
        return self.first_token_s is not None

    @property
    def smart_planned(self) -> bool:
        """True if it was priced to score the prompt first."""
        return self.smart is not None and self.smart.plan is not None

    @property
    def shortened(self) -> bool:
        """True if smart prefill left out something of the prompt."""
        return self.smart is not None and self.smart.result.used

    @property
    def exactness(self) -> Exactness:
        """How exact the answer is, by what was cached, what helpers had a part in and what is left
        out."""
        attempt = self.attempt
        accepted, sharing = attempt.accepted, attempt.sharing
        if self.shortened:
            return "lossy"
        if self.answered_by:
            # As the client was told: that machine knows its helpers, and this one how alike the two are.
            return (self.planned or self.placement.planned).exactness
        if accepted is None:
            return "exact"
        if accepted.kept:
            return "lossy"
        if not accepted.exact:
            return "equivalent"
        if sharing.agreed_exact is None or sharing.agreed_exact:
            return "exact"
        report = sharing.report
        theirs = report is None or not report.code or report.verified > accepted.cached
        return "equivalent" if theirs else "exact"

    @property
    def prefill_outcome(self) -> Outcome:
        """What came of its prefill, with or without helpers."""
        if self.first_token_s is None and self.finished is None:
            return self._unfinished
        if self.attempt.sharing.agreed_exact is None:
            return "local"
        return "shared" if self.attempt.sharing.went_well else "fallback"

    @property
    def outcome(self) -> Outcome:
        if self.finished is None:
            return self._unfinished
        if self.shortened:
            return "smart"
        return "remote" if self.answered_by else self.prefill_outcome

    @property
    def _unfinished(self) -> Outcome:
        return "failed" if self.attempt.error is not None else "cancelled"

    @property
    def kept_tokens(self) -> int:
        """Tokens of the prompt that are prefilled, if some are left out; else 0."""
        return self.attempt.accepted.kept if self.attempt.accepted is not None else 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held in this attempt."""
        if self.attempt.sharing.choice is not None and self.attempt.accepted is not None:
            return self.attempt.accepted.cached
        return self.attempt.cached_tokens

    # ---- what happens ------------------------------------------------------------------------------------

    def announce(self, planned: Planned | None = None) -> None:
        """How it runs from now on, for the client; without ``planned`` as before, with a new smart result."""
        planned = planned or self.planned
        if planned is None:
            return
        # Other machines compute for this one as it holds rows; over several, nothing is quantised.
        kv_bits = 0 if planned.kind == "group" else self.placement.planned.kv_bits
        planned = msgspec.structs.replace(planned, kv_bits=kv_bits)
        self.planned, self.expecting = planned, False
        self.shared = self.shared or planned.shared
        if self.smart is not None:
            exactness = "lossy" if self.shortened else planned.exactness
            planned = msgspec.structs.replace(planned, exactness=exactness, smart=self.smart.result)
        self._announced.append(planned)

    def expected(self) -> Planned:
        """Where it will run, as far as that is known before its prompt is tokenized, for headers that leave
        with the first progress. "exact" is promised only if nothing else is taken: parts may yet be left out,
        or others may help."""
        self.planned, self.expecting = self.placement.planned, True
        result = self.smart.result if self.smart is not None else None
        decided = result if result is not None and (result.used or result.code) else None
        whole = self.asked.smart is None or (decided is not None and not decided.used)
        exactness: Exactness = "lossy"
        if whole:
            exactness = "exact" if self.attempt.generate.exact else "equivalent"
        return msgspec.structs.replace(self.planned, exactness=exactness, smart=decided)

    def take_announced(self) -> list[Planned]:
        """What has been announced since the last call."""
        found, self._announced = self._announced, []
        return found

    def decided(self, choice: PlanChoice, accepted: Accepted, now_s: float) -> None:
        """It was decided how others help with the prompt."""
        self.attempt.sharing.choice = choice
        self.attempt.accepted, self.attempt.decided_s = accepted, now_s
        if choice.best.split is not None:
            self._phase(step_names.READING, now_s)

    def failed(self, error: FleetError) -> None:
        """This attempt ended with an error."""
        attempt = self.attempt
        attempt.error = error
        attempt.code, attempt.reason = attempt.code or error.code, attempt.reason or error.message

    def ended_badly(self, error: FleetError) -> None:
        """The request ended with an error, whether or not an attempt did."""
        if self.attempt.error is None:
            self.failed(error)

    def on_event(self, event: Loading | Event, now_s: float) -> None:
        """Note an event as it is passed on."""
        attempt = self.attempt
        attempt.loading.enter(event.stage if isinstance(event, Loading) else "", now_s)
        match event:
            case Loading():
                attempt.progress = (event.stage, event.done, event.total)
                waits = event.stage.startswith(WAITS)
                self._phase(step_names.WAITING if waits else step_names.LOADING, now_s)
            case Tokenized() | Accepted():
                attempt.progress = ("waiting", 0, 0)
                if self.phases.name == step_names.LOADING:
                    self._phase(step_names.WAITING, now_s)
                self._prompt_tokens = event.prompt_tokens
                if isinstance(event, Accepted) and attempt.accepted is None:
                    attempt.accepted, attempt.decided_s = event, now_s
            case Prefill():
                self._phase(step_names.READING, now_s)
                attempt.progress = ("reading the prompt", event.done, event.total)
                attempt.cached_tokens = event.cached
                attempt.read_share = event.done / max(1, event.total)
                attempt.left_tokens = max(0, event.total - event.done)
                self._cached_tokens = max(self._cached_tokens, event.cached)
                self._run(now_s)
            case Delta():
                self._run(now_s)
                self._completion_tokens += event.tokens
                if event.channel == "reasoning":
                    self._reasoning_tokens += event.tokens
                self._token(event.tokens, now_s)
                # Also of an answer that goes on after a load in its middle.
                if self.first_token_s is not None:
                    attempt.progress = ("answering", 0, 0)
            case ToolCallPiece():
                self._run(now_s)
                self._completion_tokens += event.tokens
                self._token(event.tokens, now_s)
            case ToolCall():
                self._run(now_s)
                self._token(0, now_s)
            case Finished():
                self.finished = event
            case _:
                pass

    def leave(self) -> None:
        """Take the request out of the gauges; once, at its end of any kind."""
        (self._metrics.running if self.running else self._metrics.waiting)(self.model.name, -1)

    def so_far(self, now_s: float) -> tuple[Usage, Timings]:
        """What was computed: the engine's own figures if it gave them, else what was seen from here."""
        if self.finished is not None:
            return self.finished.usage, self.finished.timings
        usage = Usage(
            prompt_tokens=self._prompt_tokens if self.running else 0,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            reasoning_tokens=self._reasoning_tokens,
        )
        started_s = now_s if self._running_s is None else self._running_s
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return usage, Timings(
            queue_s=started_s - self.arrived_s,
            prefill_s=first_s - started_s,
            decode_s=now_s - first_s,
        )

    def _phase(self, name: str, now_s: float) -> None:
        if self.answering and name != step_names.WRITING:
            return  # what an engine does for it now delays the answer
        waits = name == step_names.WAITING
        self.phases.enter(name, self.here if waits else self.attempt.machine, now_s)

    def _run(self, now_s: float) -> None:
        if not self.running:
            self.running = True
            self._running_s = now_s
            self._metrics.waiting(self.model.name, -1)
            self._metrics.running(self.model.name, +1)

    def _token(self, count: int, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._phase(step_names.WRITING, now_s)
            remote = self.attempt.remote
            self.first_client_s = remote.client_s if remote is not None else 0.0
            self._metrics.first_token(self.model.name, now_s - self.arrived_s)
        elif count:
            self._metrics.tokens(self.model.name, count, now_s - self._last_token_s)
        else:
            return
        self._last_token_s = now_s
