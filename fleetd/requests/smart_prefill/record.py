"""One prompt that was asked to be shortened, from the request to what is written down of it. Pure."""

from __future__ import annotations

import msgspec

from fleetd.compression.selection import Selection
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import DrafterView, Outcome, Trace
from fleetd.control.smart_prefill_result import Form, SmartPrefillResult
from fleetd.engine.protocol import Accepted, Delta, Event, Finished, Loading, ToolCall
from fleetd.plan.prefill import step_names
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import THIS_NAME, Exactness
from fleetd.requests.smart_prefill.bill import ScoringBill
from fleetd.requests.smart_prefill.compression_job import CompressionJob


class SmartPrefillRecord:
    """``told``: how it stands, for clients; it may change until the first token. ``bill`` is open until the
    end: scores that were of no use are not paid for."""

    def __init__(self, request_id: str, model: str, bill: ScoringBill, at_s: float, arrived_s: float) -> None:
        self.told = SmartPrefillResult()
        self.bill = bill
        self.plan: SmartPlan | None = None
        self.steps: list[StepView] = []
        self._id, self._model = request_id, model
        self.arrived_s = arrived_s
        self._at_s = at_s
        self._first_token_s: float | None = None
        self._finished: Finished | None = None
        self._drafter: DrafterView | None = None

    def heard(self, passage: CompressionJob) -> None:
        """What was found out about the prompt, however far that came."""
        self.plan, self.steps = passage.plan, passage.steps
        selection = passage.selection
        self.told = SmartPrefillResult(
            compressor=passage.compressor,
            nodes=passage.names,
            original_tokens=selection.original_tokens if selection else passage.tokens,
            compressed_tokens=selection.kept_tokens if selection else 0,
            scored_tokens=passage.scored_tokens,
        )

    def made(self, form: Form, selection: Selection, now_s: float) -> None:
        """The prompt has its form; as text it has lines that say what is missing."""
        self.told = msgspec.structs.replace(
            self.told,
            form=form,
            compressed_tokens=selection.text_tokens if form == "text" else selection.kept_tokens,
            score_s=now_s - self.arrived_s,
        )

    def on_event(self, event: Loading | Event, now_s: float) -> None:
        if isinstance(event, Delta | ToolCall) and self._first_token_s is None:
            self._first_token_s = now_s
        if isinstance(event, Finished):
            self._finished = event

    def accepted(self, event: Accepted) -> bool:
        """What a sparse prompt comes to in the engine, which also keeps what it cannot do without.

        False where that was told already.
        """
        before = self.told
        self.told = msgspec.structs.replace(
            before, original_tokens=event.prompt_tokens, compressed_tokens=event.kept
        )
        return self.told != before

    def drafted(self, drafter: DrafterView | None) -> None:
        """Whose drafts the answer was given."""
        self._drafter = drafter

    def skip(self, code: str, reason: str, now_s: float) -> None:
        """The prompt is read whole."""
        score_s = self.told.score_s or now_s - self.arrived_s
        self.told = msgspec.structs.replace(self.told, form="", code=code, reason=reason, score_s=score_s)

    @property
    def answering(self) -> bool:
        return self._first_token_s is not None

    @property
    def exactness(self) -> Exactness:
        return "lossy" if self.told.used else "exact"

    @property
    def outcome(self) -> Outcome:
        if self._first_token_s is None and self._finished is None:
            return "cancelled"
        return "smart" if self.told.used else "local"

    def trace(self) -> Trace | None:
        """None where nothing was planned: the prompt was short, or nothing could score it."""
        plan = self.plan
        if plan is None:
            return None
        smart, dense = options(plan)
        chosen, losers = (smart, [dense]) if self.told.used else (dense, [smart])
        first_s = self._first_token_s
        steps = list(self.steps)
        if self._finished is not None:
            steps.append(StepView(step_names.PREFILLED, self._finished.timings.prefill_s, machine=THIS_NAME))
        return Trace(
            id=self._id,
            at_s=self._at_s,
            model=self._model,
            prompt_tokens=self.told.original_tokens,
            cached_tokens=0,
            chosen=chosen,
            losers=losers,
            steps=steps,
            outcome=self.outcome,
            exactness=self.exactness,
            prefill_s=None if first_s is None else first_s - self.arrived_s,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            code=self.told.code,
            reason=self.told.reason,
            speculation=self._finished.speculation if self._finished is not None else None,
            drafter=self._drafter,
        )


def options(plan: SmartPlan, *, chosen: bool = False) -> tuple[OptionView, OptionView]:
    """Scoring and reading the rest; and reading all of it."""
    nodes = [*dict.fromkeys(part.scorer.name for part in plan.parts)]
    if THIS_NAME in nodes:
        nodes.remove(THIS_NAME)
    smart = OptionView(
        kind="smart",
        nodes=[*nodes, THIS_NAME],
        predicted_s=plan.predicted_s if plan.parts else None,
        steps=[
            StepView(step_names.SCORED, plan.score_s, machine=", ".join(nodes) or THIS_NAME),
            StepView(step_names.PREFILLED, plan.prefill_s, machine=THIS_NAME),
        ],
        chosen=chosen and plan.worth_it,
        code=plan.code,
        reason=plan.reason,
    )
    dense = OptionView(
        "local", [THIS_NAME], plan.dense_s or None, [StepView(step_names.PREFILLED, plan.dense_s)]
    )
    return smart, dense
