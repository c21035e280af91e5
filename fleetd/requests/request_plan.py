"""What was planned for a request until its first token, step by step and in all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd.control.prefill_plan import StepView
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.choice import PlanChoice
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import THIS_NAME
from fleetd.requests.request import Request

# What passes before a prompt is read, and what the planner adds for the way to another machine.
_BEFORE = frozenset(
    (step_names.WOKEN, step_names.QUEUED, step_names.LOADED, step_names.PULLED, step_names.NETWORK)
)


class RequestPlan(msgspec.Struct, frozen=True):
    """``steps`` have the names of machines."""

    steps: Sequence[StepView] = ()
    # Seconds from the arrival to the first token; None if they were not priced.
    first_s: float | None = None
    # The same if the machine that was asked had read and answered alone.
    alone_s: float | None = None


def plan_of(request: Request) -> RequestPlan:
    """The plan by which it was answered; of a request that moved, the seconds of its first plan."""
    first, last = request.first_placement, request.placement
    machine = request.answered_by or request.here
    placed = _named(last.steps, request.here, machine)
    before = [step for step in placed if step.name in _BEFORE]
    smart = request.smart.plan if request.smart is not None else None
    choice = request.attempt.sharing.choice if not request.answered_by else None
    there = request.attempt.there
    if smart is not None and request.shortened:
        loads = [step for step in _named(first.steps, request.here, machine) if step.name in _BEFORE]
        if smart.parking is not None:
            # The load that the first plan expected comes after the scores.
            loads = [step for step in loads if step.name != step_names.LOADED]
        reading = _scored(smart, request.here, machine)
        return RequestPlan([*loads, *reading], _sum([*loads, *reading]), first.alone_s)
    if choice is not None:
        reading = _named([StepView(*step) for step in choice.best.steps], request.here, machine)
        before_s = _sum(before)
        alone_s = _alone_s(choice)
        return RequestPlan(
            [*before, *reading],
            before_s + choice.best.predicted_s,
            first.alone_s if alone_s is None else before_s + alone_s,
        )
    if there is not None and there.chosen.steps:
        placed = [*before, *_named(there.chosen.steps, machine, machine)]
    return RequestPlan(placed, first.first_s, first.alone_s)


def _named(steps: Iterable[StepView], here: str, machine: str) -> list[StepView]:
    """Steps with the names of machines; those that name none are of ``machine``."""
    names = {"": machine, THIS_NAME: here}
    return [replace(step, machine=names.get(step.machine, step.machine)) for step in steps]


def _scored(plan: SmartPlan, here: str, machine: str) -> list[StepView]:
    scorers = {here if part.scorer.here else part.scorer.name for part in plan.parts}
    # They score at the same time.
    scored = [StepView(step_names.SCORED, plan.score_s, machine=name) for name in sorted(scorers)[:1]]
    name = step_names.PREFILLED if machine == here else step_names.COMPUTED
    if plan.reload_s:
        scored.append(StepView(step_names.RELOADED, plan.reload_s, machine=here))
    return [*scored, StepView(name, plan.prefill_s, machine=machine)]


def _alone_s(choice: PlanChoice) -> float | None:
    options = (choice.best, *choice.rejected)
    return next((option.predicted_s for option in options if option.kind == "local"), None)


def _sum(steps: Iterable[StepView]) -> float:
    return sum(step.seconds for step in steps)
