"""What is written down of one prompt that others could have helped with, put together while it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import DrafterView, Outcome, Speculated, Trace
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Loading,
    Prefill,
    Shared,
    StepTime,
    ToolCall,
)
from fleetd.errors import FleetError
from fleetd.plan.prefill.choice import PlanChoice
from fleetd.requests.job import THIS_NAME, Exactness
from fleetd.requests.prefill_sharing import planner_facts

# A helper's name, and what it did by its own account.
Account = tuple[str, Sequence[StepTime]]


class SharingRecord:
    """``code`` and ``reason``: why it did not go as planned, "" where it did."""

    def __init__(self, request_id: str, model: str, at_s: float, arrived_s: float) -> None:
        self.code = self.reason = ""
        self._id, self._model = request_id, model
        self._at_s, self._arrived_s = at_s, arrived_s
        self._choice: PlanChoice | None = None
        self._accepted: Accepted | None = None
        self._cached = 0
        self._decided_s = arrived_s
        self._first_token_s: float | None = None
        self._finished = self._failed = False
        self._speculation: Speculated | None = None
        self._drafter: DrafterView | None = None
        # None until all helpers have agreed; then whether their bytes are this machine's own.
        self._exact: bool | None = None
        self._shared: Shared | None = None

    # ---- what happens, in this order -----------------------------------------------------------------------

    def decided(self, choice: PlanChoice, accepted: Accepted, now_s: float) -> None:
        self._choice, self._accepted, self._decided_s = choice, accepted, now_s
        self._cached = accepted.cached

    def agreed(self, exact: bool) -> None:
        self._exact = exact

    def gave_up(self, error: FleetError) -> None:
        """A helper failed, before the engine noticed."""
        self.code, self.reason = error.code, error.message

    def ended(self, shared: Shared) -> None:
        self._shared = shared
        if not shared.code:
            self.code = self.reason = ""
        elif not self.code:
            self.code, self.reason = shared.code, shared.reason

    def on_event(self, event: Loading | Event, now_s: float) -> None:
        if isinstance(event, Accepted) and self._accepted is None:
            self._accepted, self._decided_s = event, now_s
        if isinstance(event, Prefill) and self._choice is None:
            self._cached = event.cached
        if isinstance(event, Delta | ToolCall) and self._first_token_s is None:
            self._first_token_s = now_s
        if isinstance(event, Finished):
            self._finished, self._speculation = True, event.speculation

    def drafted(self, drafter: DrafterView | None) -> None:
        """Whose drafts the answer was given."""
        self._drafter = drafter

    def failed(self, error: FleetError) -> None:
        self._failed = True
        self.code, self.reason = self.code or error.code, self.reason or error.message

    # ---- what came of it -----------------------------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether it was decided how others help with the prompt."""
        return self._choice is not None

    @property
    def went_well(self) -> bool:
        return self._shared is not None and not self._shared.code

    @property
    def steps(self) -> Sequence[StepTime]:
        """What this machine did of a prefill that was shared."""
        return self._shared.steps if self._shared is not None else ()

    @property
    def exactness(self) -> Exactness:
        """Of the state that the answer rests on: what was cached, and what helpers had a part in."""
        if self._accepted is None:
            return "exact"
        if self._accepted.kept:
            return "lossy"
        if not self._accepted.exact:
            return "plan"
        if self._exact is None or self._exact:
            return "exact"
        ended = self._shared
        theirs = ended is None or not ended.code or ended.verified > self._accepted.cached
        return "plan" if theirs else "exact"

    @property
    def outcome(self) -> Outcome:
        if self._first_token_s is None and not self._finished:
            return "failed" if self._failed else "cancelled"
        if self._exact is None:
            return "local"
        return "shared" if self.went_well else "fallback"

    def trace(self, accounts: Iterable[Account]) -> Trace | None:
        """None where there was nothing to decide, and nobody drafted for the answer either."""
        if self._accepted is None or (self._choice is None and self._drafter is None):
            return None
        chosen, losers = OptionView("local", [THIS_NAME], None, chosen=True), list[OptionView]()
        if self._choice is not None:
            chosen, *losers = planner_facts.views(self._choice, limits.TRACE_LOSERS)
        own: Account = (THIS_NAME, self.steps)
        first_s = self._first_token_s
        return Trace(
            id=self._id,
            at_s=self._at_s,
            model=self._model,
            prompt_tokens=self._accepted.prompt_tokens,
            cached_tokens=self._cached,
            kept_tokens=self._accepted.kept,
            chosen=chosen,
            losers=losers,
            steps=[
                StepView(step.name, step.seconds, step.n_bytes, machine)
                for machine, steps in (*accounts, own)
                for step in steps[: limits.SHARE_STEPS]
            ],
            outcome=self.outcome,
            exactness=self.exactness,
            prefill_s=None if first_s is None else first_s - self._decided_s,
            ttft_s=None if first_s is None else first_s - self._arrived_s,
            code=self.code,
            reason=self.reason,
            verified_tokens=self._shared.verified if self._shared is not None else 0,
            speculation=self._speculation,
            drafter=self._drafter,
        )
