"""What is told of a request while it runs, and written down at its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd import limits
from fleetd.control.fleet_change import RunningRequest
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Speculated, Trace
from fleetd.plan.prefill import step_names
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import THIS_NAME
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
        client=request.asked.client,
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
        plan=_plan_of(request),
    )


def _plan_of(request: Request) -> OptionView:
    choice = request.attempt.sharing.choice
    if choice is not None and not request.answered_by:
        return planner_facts.view(choice.best, chosen=True)
    planned = request.planned or request.placement.planned
    return OptionView(planned.kind, [*planned.nodes], None, chosen=True, reason=planned.reason)


def trace_of(request: Request) -> Trace:
    """The trace of the request: its last attempt, with the earlier ones inside."""
    attempt, shortening = request.attempt, request.smart
    accepted, there, report = attempt.accepted, attempt.there, attempt.sharing.report
    smart = shortening.result if shortening is not None else None
    smart_plan = shortening.plan if shortening is not None else None
    chosen, losers = _options(request, smart_plan)
    first_s, since_s = request.first_token_s, attempt.decided_s
    prompt_tokens = accepted.prompt_tokens if accepted is not None else 0
    cached_tokens, kept_tokens = request.cached_tokens, request.kept_tokens
    if smart is not None and smart.used:
        prompt_tokens, cached_tokens, kept_tokens = smart.original_tokens, 0, smart.compressed_tokens
    if shortening is not None and smart_plan is not None:
        # What was planned begins with the scores, and counts as the compressor does. Loads come before it.
        since_s = shortening.planned_s or request.arrived_s
        prompt_tokens, cached_tokens = shortening.result.original_tokens, 0
    code, reason = attempt.code, attempt.reason
    if shortening is not None and not code:
        result = shortening.result
        code, reason = (result.code, result.reason) if result.code else shortening.lost_scorer
    usage, finished = request.so_far(first_s or since_s)[0], request.finished
    prefill_s = None if first_s is None else first_s - since_s
    speculation = finished.speculation if finished is not None else None
    there_speculation = there.speculation if there is not None else None
    return Trace(
        id=request.id,
        at_s=request.at_s,
        model=request.model.name,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kept_tokens=kept_tokens,
        restored_tokens=0 if finished is None else finished.timings.restored_tokens,
        fetched_tokens=0 if finished is None else finished.timings.fetched_tokens,
        fetched_from="" if finished is None else finished.timings.fetched_from,
        chosen=chosen,
        losers=losers,
        steps=[*load_steps(request), *_steps(request, smart_plan)],
        outcome=request.outcome,
        exactness=request.exactness,
        prefill_s=prefill_s,
        ttft_s=None if first_s is None else first_s - request.arrived_s,
        code=code,
        reason=reason,
        verified_tokens=report.verified if report is not None else 0,
        speculation=speculation,
        drafter=attempt.drafter,
        completion_tokens=usage.completion_tokens,
        saved_s=_saved_s(chosen, losers, prefill_s, speculation or there_speculation),
        took_s=None if request.ended_s is None else request.ended_s - request.arrived_s,
        asked_by=request.asked.asked_by,
        client=request.asked.client,
        answered_by=request.answered_by,
        there=there,
        earlier=list(request.earlier),
        capped=list(request.placement.capped),
        kept_where=request.placement.kept_where,
    )


def _saved_s(
    chosen: OptionView, losers: Sequence[OptionView], prefill_s: float | None, drafts: Speculated | None
) -> float | None:
    """Seconds saved, as ``Trace`` defines it; a prompt that was read here alone saved nothing."""
    alone_s = next((option.predicted_s for option in losers if option.kind == "local"), None)
    found = [drafts.saved_s] if drafts is not None else []
    if chosen.kind != "local" and alone_s is not None and prefill_s is not None:
        found.append(alone_s - prefill_s)
    return sum(found) if found else None


def attempt_of(request: Request, now_s: float) -> Trace:
    """The trace of an attempt that has just failed."""
    return msgspec.structs.replace(trace_of(request), took_s=now_s - request.attempt.began_s, earlier=[])


def load_steps(request: Request) -> list[StepView]:
    """What was downloaded and loaded before the prompt could be read, stage by stage. Empty if another
    machine answered and tells it itself."""
    if request.attempt.there is not None:
        return []
    machine = request.answered_by or THIS_NAME
    return [StepView(stage, seconds, machine=machine) for stage, seconds in request.attempt.loading.seconds]


def share_steps(request: Request) -> list[StepView]:
    """What helpers did by their own accounts, then what this machine did of a shared prefill."""
    sharing = request.attempt.sharing
    return [
        StepView(step.name, step.seconds, step.n_bytes, machine)
        for machine, steps in (*sharing.accounts, (THIS_NAME, sharing.own_steps))
        for step in steps[: limits.SHARE_STEPS]
    ]


def _steps(request: Request, smart_plan: SmartPlan | None) -> list[StepView]:
    """The steps that are known here. If another machine answered, its own trace has the rest."""
    attempt = request.attempt
    found = [*request.smart.steps] if request.smart is not None and smart_plan is not None else []
    timings = request.finished.timings if request.finished is not None else None
    if request.answered_by:
        there_s = attempt.there.took_s if attempt.there is not None else None
        if there_s is not None and request.ended_s is not None:
            rest_s = request.ended_s - attempt.began_s - there_s
            found.append(StepView(step_names.NETWORK, max(0.0, rest_s)))
        return found
    shared = share_steps(request)
    if timings is not None:
        found.append(StepView(step_names.QUEUED, timings.queue_s, machine=THIS_NAME))
        if timings.restored_tokens:
            found.append(StepView(step_names.RESTORED, timings.restore_s, machine=THIS_NAME))
        if attempt.fetched is not None:
            found.append(attempt.fetched)
    found += shared
    if timings is not None:
        if smart_plan is not None or not shared:
            name = step_names.COMPUTED if smart_plan is None else step_names.PREFILLED
            found.append(StepView(name, timings.prefill_s, machine=THIS_NAME))
        found.append(StepView(step_names.ANSWERED, timings.decode_s, machine=THIS_NAME))
    return found


def _options(request: Request, smart_plan: SmartPlan | None) -> tuple[OptionView, list[OptionView]]:
    """The way that was taken, then the others."""
    choice = request.attempt.sharing.choice
    chosen, losers = OptionView("local", [THIS_NAME], None, chosen=True), list[OptionView]()
    if request.answered_by:
        planned = request.planned or request.placement.planned
        chosen = OptionView("remote", [*planned.nodes], None, chosen=True)
    elif choice is not None:
        chosen, *losers = planner_facts.views(choice, limits.TRACE_LOSERS)
    if smart_plan is None:
        return chosen, losers
    smart, dense = smart_options(smart_plan, at=request.answered_by or THIS_NAME)
    used = request.shortened
    if choice is None:
        if request.answered_by:
            # That machine's own plan has its steps.
            dense = msgspec.structs.replace(dense, kind=chosen.kind, nodes=chosen.nodes, steps=[])
        return (smart, [dense]) if used else (dense, [smart])
    if not used:
        return chosen, [*losers, smart]
    # Both: scored, and what is kept is prefilled as the planner chose.
    nodes = [*dict.fromkeys([*smart.nodes[:-1], *chosen.nodes])]
    predicted_s = None if chosen.predicted_s is None else smart_plan.score_s + chosen.predicted_s
    steps = [*smart.steps[:1], *chosen.steps]
    both = msgspec.structs.replace(
        smart, nodes=nodes, predicted_s=predicted_s, steps=steps, chosen=True, cuts=chosen.cuts
    )
    return both, [dense, *losers]


def ways_in_front(plan: SmartPlan, kept: Sequence[OptionView]) -> list[OptionView]:
    """Smart prefill in front of each of the ways to prefill what it keeps, the best one first.

    Only the best one if smart prefill does not pay.
    """
    smart, _ = smart_options(plan)
    if not kept or not plan.parts:
        return [msgspec.structs.replace(smart, chosen=plan.worth_it)]
    scorers = smart.nodes[:-1]
    found = [
        msgspec.structs.replace(
            way,
            kind="smart",
            prefill=way.kind,
            nodes=[*dict.fromkeys([*scorers, *way.nodes])],
            predicted_s=plan.score_s + way.predicted_s,
            steps=[smart.steps[0], *way.steps],
            chosen=way.chosen and plan.worth_it,
            code=plan.code or way.code,
            reason=plan.reason or way.reason,
        )
        for way in kept
        if way.predicted_s is not None
    ]
    return found if plan.worth_it else found[:1]


def smart_options(plan: SmartPlan, *, at: str = THIS_NAME) -> tuple[OptionView, OptionView]:
    """Scoring and reading the rest; and reading all of it. ``at``: the machine that answers."""
    scorers = [*dict.fromkeys(part.scorer.name for part in plan.parts)]
    others = [name for name in scorers if name != THIS_NAME]
    smart = OptionView(
        kind="smart",
        nodes=[*(name for name in scorers if name != at), at],
        predicted_s=plan.predicted_s if plan.parts else None,
        steps=[
            StepView(step_names.SCORED, plan.score_s, machine=", ".join(others) or THIS_NAME),
            # Another machine reads it as any other prompt.
            StepView(
                step_names.PREFILLED if at == THIS_NAME else step_names.COMPUTED, plan.prefill_s, machine=at
            ),
        ],
        code=plan.code,
        reason=plan.reason,
    )
    dense = OptionView("local", [at], plan.dense_s or None, [StepView(step_names.PREFILLED, plan.dense_s)])
    return smart, dense
