"""One request from its admission to its last ledger row: the only place that knows how it stands.

Pure: events and clock readings in, figures out. The runner passes every event to ``on_event``; the steps of
the pipeline write here what they decided. At every moment it knows what has been computed so far, which is
what a request that is cancelled or cut off is billed for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from fleetd.control.prefill_plan import StepView
from fleetd.control.prefill_trace import DrafterView, Outcome, Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.measure.stage_times import StageTimes
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
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
from fleetd.plan.prefill.choice import PlanChoice
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import CHARS_PER_TOKEN, Exactness, Job, Planned
from fleetd.requests.placement.placement import Placement, PromptPlaces, WantedModel
from fleetd.requests.ports import MetricsPort
from fleetd.requests.remote.remote import RemoteJob

_NOWHERE: PromptPlaces = {}
# A helper's name, and what it did by its own account.
Account = tuple[str, Sequence[StepTime]]


class LocatedModel(msgspec.Struct, frozen=True):
    """The model that was asked for. ``name`` is canonical; ``folder`` is None where this machine lacks it.

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


class Request:
    """One job on its way.

    A request may take several attempts: on another machine, or with its whole prompt after a shortened one
    failed. What belongs to one attempt is forgotten by ``begin``; usage and times go on.

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
    ) -> None:
        self.asked = self.job = job
        self.model = model
        self.placement = placement
        self._places = places
        self.arrived_s = arrived_s
        self.at_s = at_s
        self.running = False
        self.finished: Finished | None = None
        self.first_token_s: float | None = None
        # Of the time before it, what passed while the client read (``RemoteJob.client_s``).
        self.first_client_s = 0.0
        # How it runs, as it was announced last; and whether other machines ever had a part in its prefill.
        self.planned: Planned | None = None
        # The last plan that was told is what was expected, and not yet decided.
        self.expecting = False
        self.shared = False
        # Smart prefill: the result is None where it was not asked for.
        self.smart: SmartPrefillResult | None = None
        self.smart_plan: SmartPlan | None = None
        self.smart_planned_s = 0.0
        self.smart_steps: list[StepView] = []
        # Why a scorer gave up, where others went on: its code and its message.
        self.lost_scorer = ("", "")
        # Of the attempts before this one, and of this one if it has failed.
        self.earlier: list[Trace] = []
        self.failed_trace: Trace | None = None
        self.ended_s: float | None = None
        # Where it was refused as wrong first, and what was said: another machine may serve it.
        self.refusal: tuple[Placement, FleetError] | None = None
        self._metrics = metrics
        self._announced: list[Planned] = []
        self._running_s: float | None = None
        self._last_token_s = arrived_s
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self.begin()
        metrics.waiting(model.name, +1)

    def begin(self) -> None:
        """A new attempt, on the machine that ``placement`` names."""
        if self.failed_trace is not None:
            self.earlier.append(self.failed_trace)
            self.failed_trace = None
        #: What the engine is asked; steps may change it before the attempt.
        self.generate = self.job.request
        self.accepted: Accepted | None = None
        self.decided_s = self.arrived_s
        self.error: FleetError | None = None
        # Shared prefill: the decision, whether the helpers' bytes are this machine's own (None until all have
        # agreed), how it ended, why not as planned, and the helpers' accounts.
        self.choice: PlanChoice | None = None
        self.agreed_exact: bool | None = None
        self.sharing_ended: PrefillReport | None = None
        self.code = self.reason = ""
        self.accounts: Sequence[Account] = ()
        # Keys and values that another machine sent.
        self.fetched: StepView | None = None
        # Drafts of another worker.
        self.drafter: DrafterView | None = None
        # Another machine that answers: when it was asked, and its own trace.
        self.began_s = self.arrived_s
        self.remote: RemoteJob | None = None
        self.there: Trace | None = None
        # What the trace waits for.
        self.concluding: asyncio.Future[Any] | None = None
        # What it does now, and how far that is: (stage, done, total).
        self.progress: tuple[str, int, int] = ("", 0, 0)
        # What it waited for before its engine could be asked.
        self.loading = StageTimes()
        self._cached_in_attempt = 0
        # Tokens of its prompt that are not prefilled; None until the engine has begun.
        self._left_tokens: int | None = None
        # How much of its prompt was read, from 0 to 1.
        self.read_share = 0.0

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
        if self._left_tokens is not None:
            return self._left_tokens
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
    def exactness(self) -> Exactness:
        """How exact the answer is, by what was cached, what helpers had a part in and what is left
        out."""
        if self.smart is not None and self.smart.used:
            return "lossy"
        if self.answered_by:
            # As the client was told: that machine knows its helpers, and this one how alike the two are.
            return (self.planned or self.placement.planned).exactness
        if self.accepted is None:
            return "exact"
        if self.accepted.kept:
            return "lossy"
        if not self.accepted.exact:
            return "plan"
        if self.agreed_exact is None or self.agreed_exact:
            return "exact"
        ended = self.sharing_ended
        theirs = ended is None or not ended.code or ended.verified > self.accepted.cached
        return "plan" if theirs else "exact"

    @property
    def shared_well(self) -> bool:
        """True if others helped with its prefill to the end."""
        return self.sharing_ended is not None and not self.sharing_ended.code

    @property
    def own_steps(self) -> Sequence[StepTime]:
        """What this machine did of a prefill that was shared."""
        return self.sharing_ended.steps if self.sharing_ended is not None else ()

    @property
    def prefill_outcome(self) -> Outcome:
        """What came of its prefill, with or without helpers."""
        if self.first_token_s is None and self.finished is None:
            return "failed" if self.error is not None else "cancelled"
        if self.agreed_exact is None:
            return "local"
        return "shared" if self.shared_well else "fallback"

    @property
    def outcome(self) -> Outcome:
        if self.finished is None:
            return "failed" if self.error is not None else "cancelled"
        found: Outcome = "remote" if self.answered_by else self.prefill_outcome
        used = self.smart is not None and self.smart.used
        return "smart" if used else found

    @property
    def kept_tokens(self) -> int:
        """Tokens of the prompt that are prefilled, if some are left out; else 0."""
        return self.accepted.kept if self.accepted is not None else 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held in this attempt."""
        if self.choice is not None and self.accepted is not None:
            return self.accepted.cached
        return self._cached_in_attempt

    # ---- what happens ------------------------------------------------------------------------------------

    def announce(self, planned: Planned | None = None) -> None:
        """How it runs from now on, for the client; without ``planned`` as before, with a new smart result."""
        planned = planned or self.planned
        if planned is None:
            return
        self.planned, self.expecting = planned, False
        self.shared = self.shared or planned.shared
        if self.smart is not None:
            exactness = "lossy" if self.smart.used else planned.exactness
            planned = msgspec.structs.replace(planned, exactness=exactness, smart=self.smart)
        self._announced.append(planned)

    def expected(self) -> Planned:
        """Where it will run, as far as that is known before its prompt is tokenized, for headers that leave
        with the first progress. "exact" is not promised: parts may yet be left out, or others may help."""
        self.planned, self.expecting = self.placement.planned, True
        decided = self.smart if self.smart is not None and (self.smart.used or self.smart.code) else None
        whole = self.asked.smart is None or (decided is not None and not decided.used)
        exactness: Exactness = "plan" if whole else "lossy"
        return msgspec.structs.replace(self.planned, exactness=exactness, smart=decided)

    def take_announced(self) -> list[Planned]:
        """What has been announced since the last call."""
        found, self._announced = self._announced, []
        return found

    def decided(self, choice: PlanChoice, accepted: Accepted, now_s: float) -> None:
        """It was decided how others help with the prompt."""
        self.choice, self.accepted, self.decided_s = choice, accepted, now_s

    def failed(self, error: FleetError) -> None:
        """This attempt ended with an error."""
        self.error = error
        self.code, self.reason = self.code or error.code, self.reason or error.message

    def on_event(self, event: Loading | Event, now_s: float) -> None:
        """Note an event as it is passed on."""
        self.loading.enter(event.stage if isinstance(event, Loading) else "", now_s)
        match event:
            case Loading():
                self.progress = (event.stage, event.done, event.total)
            case Tokenized() | Accepted():
                self.progress = ("waiting", 0, 0)
                self._prompt_tokens = event.prompt_tokens
                if isinstance(event, Accepted) and self.accepted is None:
                    self.accepted, self.decided_s = event, now_s
            case Prefill():
                self.progress = ("reading the prompt", event.done, event.total)
                self._cached_in_attempt = event.cached
                self.read_share = event.done / max(1, event.total)
                self._left_tokens = max(0, event.total - event.done)
                self._cached_tokens = max(self._cached_tokens, event.cached)
                self._run(now_s)
            case Delta():
                self._run(now_s)
                self._completion_tokens += event.tokens
                if event.channel == "reasoning":
                    self._reasoning_tokens += event.tokens
                self._token(event.tokens, now_s)
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

    def _run(self, now_s: float) -> None:
        if not self.running:
            self.running = True
            self._running_s = now_s
            self._metrics.waiting(self.model.name, -1)
            self._metrics.running(self.model.name, +1)

    def _token(self, count: int, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.first_client_s = self.remote.client_s if self.remote is not None else 0.0
            self._metrics.first_token(self.model.name, now_s - self.arrived_s)
            self.progress = ("answering", 0, 0)
        elif count:
            self._metrics.tokens(self.model.name, count, now_s - self._last_token_s)
        else:
            return
        self._last_token_s = now_s
