"""What is written down of a request at its end. Pure: a request in, a trace or nothing out."""

from __future__ import annotations

import msgspec

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Trace
from fleetd.plan.prefill import step_names
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import SmartPlan
from fleetd.requests.job import THIS_NAME
from fleetd.requests.prefill_sharing import planner_facts
from fleetd.requests.request import Request


def trace_of(request: Request) -> Trace | None:
    """None where nothing was decided about the prompt, nothing drafted for the answer, and nothing loaded."""
    smart, accepted = request.smart, request.accepted
    smart_plan = request.smart_plan if smart is not None else None
    told = request.choice is not None or request.drafter is not None or request.loading.seconds
    if smart_plan is None and (accepted is None or not told):
        return None
    chosen, losers = _options(request, smart_plan)
    first_s, since_s = request.first_token_s, request.decided_s
    prompt_tokens = accepted.prompt_tokens if accepted is not None else 0
    cached_tokens = request.cached_tokens
    if smart is not None and smart_plan is not None:
        # What was planned begins with the scores, and counts as the compressor does. Loads come before it.
        since_s = request.smart_planned_s or request.arrived_s
        prompt_tokens, cached_tokens = smart.original_tokens, 0
    return Trace(
        id=request.id,
        at_s=request.at_s,
        model=request.model.name,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kept_tokens=request.kept_tokens,
        chosen=chosen,
        losers=losers,
        steps=[*load_steps(request), *_steps(request, smart_plan)],
        outcome=request.outcome,
        exactness=request.exactness,
        prefill_s=None if first_s is None else first_s - since_s,
        ttft_s=None if first_s is None else first_s - request.arrived_s,
        code=request.code or (smart.code if smart is not None else ""),
        reason=request.reason or (smart.reason if smart is not None else ""),
        verified_tokens=request.sharing_ended.verified if request.sharing_ended is not None else 0,
        speculation=request.finished.speculation if request.finished is not None else None,
        drafter=request.drafter,
    )


def load_steps(request: Request) -> list[StepView]:
    """What was downloaded and loaded before the prompt could be read, stage by stage."""
    machine = THIS_NAME if request.placement.node_id == THIS_NODE else ""
    return [StepView(stage, seconds, machine=machine) for stage, seconds in request.loading.seconds]


def share_steps(request: Request) -> list[StepView]:
    """What helpers did by their own accounts, then what this machine did of a shared prefill."""
    return [
        StepView(step.name, step.seconds, step.n_bytes, machine)
        for machine, steps in (*request.accounts, (THIS_NAME, request.own_steps))
        for step in steps[: limits.SHARE_STEPS]
    ]


def _steps(request: Request, smart_plan: SmartPlan | None) -> list[StepView]:
    if smart_plan is None:
        return share_steps(request)
    steps = [*request.smart_steps, *share_steps(request)]
    if request.finished is not None:
        steps.append(StepView(step_names.PREFILLED, request.finished.timings.prefill_s, machine=THIS_NAME))
    return steps


def _options(request: Request, smart_plan: SmartPlan | None) -> tuple[OptionView, list[OptionView]]:
    """The way that was taken, then the others."""
    chosen, losers = OptionView("local", [THIS_NAME], None, chosen=True), list[OptionView]()
    if request.choice is not None:
        chosen, *losers = planner_facts.views(request.choice, limits.TRACE_LOSERS)
    if smart_plan is None:
        return chosen, losers
    smart, dense = smart_options(smart_plan)
    used = request.smart is not None and request.smart.used
    if request.choice is None:
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


def smart_options(plan: SmartPlan, *, chosen: bool = False) -> tuple[OptionView, OptionView]:
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
