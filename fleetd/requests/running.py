"""What is told of a request while it runs. Pure."""

from __future__ import annotations

from fleetd.control.fleet_change import RunningRequest
from fleetd.control.prefill_plan import OptionView
from fleetd.requests.placement import planner_facts
from fleetd.requests.request import Request


def running_request(request: Request, now_s: float) -> RunningRequest:
    stage, done, total = request.attempt.progress
    usage, _ = request.so_far(now_s)
    accepted, first_s = request.attempt.accepted, request.first_token_s
    return RunningRequest(
        id=request.id,
        model=request.model.name,
        route=request.asked.route,
        asked_by=request.asked.asked_by,
        at_s=request.at_s,
        # Whole seconds: a finer age would be a change at every look.
        age_s=float(int(now_s - request.arrived_s)),
        stage=stage,
        done=done,
        total=total,
        prompt_tokens=accepted.prompt_tokens if accepted is not None else 0,
        cached_tokens=request.cached_tokens,
        kept_tokens=request.kept_tokens,
        completion_tokens=usage.completion_tokens,
        ttft_s=None if first_s is None else first_s - request.arrived_s,
        exactness=request.exactness,
        plan=_plan(request),
    )


def _plan(request: Request) -> OptionView:
    choice = request.attempt.sharing.choice
    if choice is not None and not request.answered_by:
        return planner_facts.view(choice.best, chosen=True)
    planned = request.planned or request.placement.planned
    return OptionView(planned.kind, [*planned.nodes], None, chosen=True, reason=planned.reason)
