"""What is told of a request while it runs, and written down at its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd import limits
from fleetd.control.daemon_status import RunningRequest
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Speculated, Trace, TraceStep
from fleetd.errors import FleetError
from fleetd.plan.prefill import step_names
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import THIS_NAME, Job, Planned
from fleetd.requests.placement import planner_facts
from fleetd.requests.placement.way_views import way_view
from fleetd.requests.request import Request
from fleetd.requests.request_plan import RequestPlan, plan_of
from fleetd.requests.request_steps import timeline
from fleetd.requests.summary import missed, summary
from fleetd.requests.timeline import Span, steps_of


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
    planned = request.planned or request.placement.planned
    choice = request.attempt.sharing.choice
    if choice is not None and not request.answered_by and planned.kind != "group":
        return planner_facts.view(choice.best, chosen=True)
    return _as_planned(planned)


def _as_planned(planned: Planned) -> OptionView:
    return OptionView(
        planned.kind, [*planned.nodes], None, chosen=True, reason=planned.reason, cuts=[*planned.cuts]
    )


def trace_of(request: Request) -> Trace:
    """The trace of the request: its last attempt, with the earlier ones inside."""
    attempt, shortening = request.attempt, request.smart
    there, report = attempt.there, attempt.sharing.report
    smart_plan = shortening.plan if shortening is not None else None
    chosen, losers = _options(request, smart_plan)
    first_s, since_s = request.first_token_s, attempt.decided_s
    if shortening is not None and smart_plan is not None:
        # What was planned begins with the scores. Loads come before it.
        since_s = shortening.planned_s or request.arrived_s
    prompt_tokens, cached_tokens, kept_tokens = _tokens(request)
    code, reason = _why(request)
    usage, finished = request.so_far(first_s or since_s)[0], request.finished
    prefill_s = None if first_s is None else first_s - since_s
    speculation = finished.speculation if finished is not None else None
    there_speculation = there.speculation if there is not None else None
    plan, ttft_s = plan_of(request), None if first_s is None else first_s - request.arrived_s
    trace = Trace(
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
        steps=_steps(request, plan),
        outcome=request.outcome,
        exactness=request.exactness,
        kv_bits=request.planned.kv_bits if request.planned is not None else 0,
        wire_bits=request.planned.wire_bits if request.planned is not None else 0,
        prefill_s=prefill_s,
        ttft_s=ttft_s,
        code=code,
        reason=reason,
        verified_tokens=report.verified if report is not None else 0,
        stages=[*finished.stages] if finished is not None else [],
        speculation=speculation,
        drafter=attempt.drafter,
        completion_tokens=usage.completion_tokens,
        saved_s=_saved_s(chosen, losers, prefill_s, speculation or there_speculation),
        took_s=None if request.ended_s is None else request.ended_s - request.arrived_s,
        asked_by=request.asked.asked_by,
        client=request.asked.client,
        answered_by=request.answered_by,
        there=None if there is None else msgspec.structs.replace(there, steps=[]),
        earlier=list(request.earlier),
        capped=list(request.placement.capped),
        kept_where=request.placement.kept_where,
        machine=request.here,
        clock_s=request.arrived_s,
        planned_ttft_s=plan.first_s,
        alone_s=plan.alone_s,
        late=missed(ttft_s, plan.first_s),
        parked=_parked(request),
    )
    return msgspec.structs.replace(trace, summary=summary(trace))


def refused_trace(
    job: Job, model: str, here: str, error: FleetError, *, at_s: float, times: tuple[float, float]
) -> Trace:
    """The trace of a request for which no model or no machine was found.

    Args:
        times: when it arrived and when it was refused, by the monotonic clock.
    """
    arrived_s, ended_s = times
    waiting = Span(step_names.WAITING, here, arrived_s, ended_s)
    trace = Trace(
        id=job.request.id,
        at_s=at_s,
        model=model,
        chosen=OptionView("local", [THIS_NAME], None, chosen=True),
        steps=steps_of(Span(step_names.REQUEST, here, arrived_s, ended_s, parts=(waiting,))),
        outcome="failed",
        code=error.code,
        reason=error.message,
        took_s=ended_s - arrived_s,
        asked_by=job.asked_by,
        client=job.client,
        machine=here,
        clock_s=arrived_s,
    )
    return msgspec.structs.replace(trace, summary=summary(trace))


def _tokens(request: Request) -> tuple[int, int, int]:
    """Tokens of the prompt, those of them that were not computed, and those that were kept of it."""
    accepted, shortening = request.attempt.accepted, request.smart
    if shortening is not None and (shortening.plan is not None or shortening.result.used):
        # As the compressor counts.
        result = shortening.result
        return result.original_tokens, 0, result.compressed_tokens if result.used else request.kept_tokens
    return accepted.prompt_tokens if accepted is not None else 0, request.cached_tokens, request.kept_tokens


def _why(request: Request) -> tuple[str, str]:
    """Why it was not done as chosen, as a code and as a sentence; both "" if it was."""
    attempt, shortening = request.attempt, request.smart
    if attempt.code or shortening is None:
        return attempt.code, attempt.reason
    result = shortening.result
    return (result.code, result.reason) if result.code else shortening.lost_scorer


def _parked(request: Request) -> str:
    """That the model gave way to the one that scored, as a sentence; "" if it did not."""
    result = request.smart.result if request.smart is not None else None
    if result is None or result.parked is None:
        return ""
    loads, model = result.parked, request.model.name
    scored = ", scored and" if result.used else " and"
    return (
        f"{result.compressor} and {model} do not fit together: {result.compressor} was loaded in "
        f"{loads.scorer_s:.1f} s{scored} gave way to {model}, which was loaded in {loads.model_s:.1f} s."
    )


def _steps(request: Request, plan: RequestPlan) -> list[TraceStep]:
    """The steps of a request that has ended."""
    if request.ended_s is None:
        return []
    return steps_of(timeline(request, request.ended_s), plan.steps)[: limits.TRACE_STEPS]


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


def _options(request: Request, smart_plan: SmartPlan | None) -> tuple[OptionView, list[OptionView]]:
    """The way that was taken, then the others."""
    choice = request.attempt.sharing.choice
    planned = request.planned or request.placement.planned
    chosen, losers = OptionView("local", [THIS_NAME], None, chosen=True), list[OptionView]()
    if planned.kind == "group":
        # Its prompt is read by all machines of the group, whatever others would have done with it.
        chosen, choice = _as_planned(planned), None
    elif request.answered_by:
        placed = request.placement
        chosen = OptionView("remote", [*planned.nodes], placed.first_s, [*placed.steps], chosen=True)
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
        return (smart, [dense, *_other_form(smart_plan)]) if used else (dense, [smart])
    if not used:
        return chosen, [*losers, smart]
    # Scored, and what is kept is prefilled as the planner chose.
    others = [_in_front(smart_plan, way) for way in losers]
    return _in_front(smart_plan, chosen), [dense, *others, *_other_form(smart_plan)]


def _in_front(plan: SmartPlan, way: OptionView, *, loaded: bool = True) -> OptionView:
    """Smart prefill, and then this way to prefill what it keeps. ``loaded``: it does not price the load of
    the model that answers."""
    if plan.parking is not None and not loaded:
        plan = msgspec.structs.replace(plan, parking=msgspec.structs.replace(plan.parking, target_s=0.0))
    smart, _ = smart_options(plan)
    return msgspec.structs.replace(
        way,
        kind="smart",
        prefill=way.kind,
        nodes=[*dict.fromkeys([*smart.nodes[:-1], *way.nodes])],
        predicted_s=None if way.predicted_s is None else plan.score_s + plan.reload_s + way.predicted_s,
        steps=[*smart.steps[:-1], *way.steps],
        form=smart.form,
    )


def _other_form(plan: SmartPlan) -> list[OptionView]:
    """The best way in the form that was not chosen, with the reason; [] if there is nothing to tell."""
    passed = plan.form.passed
    if passed is None:
        return []
    found = _in_front(plan, way_view(passed), loaded=not _prices_load(plan))
    return [msgspec.structs.replace(found, form="text" if plan.form.chosen == "sparse" else "sparse")]


def _prices_load(plan: SmartPlan) -> bool:
    """True if the load of the model that answers is in the price of each way to answer, too."""
    return plan.parking is not None and plan.parking.needed


def ways_in_front(plan: SmartPlan, kept: Sequence[OptionView]) -> list[OptionView]:
    """Smart prefill in front of each of the ways to prefill what it keeps, the best one first.

    Only the best one if smart prefill does not pay.
    """
    smart, _ = smart_options(plan)
    # Ways without a price are closed; those of a machine that has too little room now, for one.
    kept = [way for way in kept if way.predicted_s is not None]
    if not kept or not plan.parts:
        return [msgspec.structs.replace(smart, chosen=plan.worth_it)]
    found = [
        msgspec.structs.replace(
            _in_front(plan, way, loaded=not _prices_load(plan)),
            chosen=way.chosen and plan.worth_it,
            code=plan.code or way.code,
            reason=plan.reason or way.reason,
        )
        for way in kept
    ]
    return [*found, *_other_form(plan)] if plan.worth_it else found[:1]


def smart_options(plan: SmartPlan, *, at: str = THIS_NAME) -> tuple[OptionView, OptionView]:
    """Scoring and reading the rest; and reading all of it. ``at``: the machine that answers."""
    scorers = [*dict.fromkeys(part.scorer.name for part in plan.parts)]
    others = [name for name in scorers if name != THIS_NAME]
    load_s = plan.parking.scorer_s if plan.parking is not None else 0.0
    smart = OptionView(
        kind="smart",
        nodes=[*(name for name in scorers if name != at), at],
        predicted_s=plan.predicted_s if plan.parts else None,
        steps=[
            *([StepView(step_names.LOADED, load_s, machine=THIS_NAME)] if load_s else []),
            StepView(step_names.SCORED, plan.score_s - load_s, machine=", ".join(others) or THIS_NAME),
            *([StepView(step_names.RELOADED, plan.reload_s, machine=THIS_NAME)] if plan.reload_s else []),
            # Another machine reads it as any other prompt.
            StepView(
                step_names.PREFILLED if at == THIS_NAME else step_names.COMPUTED, plan.prefill_s, machine=at
            ),
        ],
        code=plan.code,
        reason=plan.reason,
        form=plan.form.chosen,
    )
    dense = OptionView("local", [at], plan.dense_s or None, [StepView(step_names.PREFILLED, plan.dense_s)])
    return smart, dense
