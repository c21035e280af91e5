"""The sentence that says of a request where its time went, against the plan and against one machine. Pure.

31 s: 14 s loading the model on studio (planned 3), 16 s reading together. Alone: about 29 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleetd.control.prefill_trace import TextsWork, Trace, TraceStep
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.step_names import LOADING, PHASES, WAITING, WRITING

# A part of the time that is not worth a word.
_LEAST = 0.05
# A miss of the plan that is worth one: by more than half, and by more than 100 ms.
MISS, MISS_S = 1.5, 0.1
_KINDS = {"shared": "together", "fallback": "together, then alone"}


def summary(trace: Trace) -> str:
    """One or two sentences; "" for a request that has not ended."""
    if trace.took_s is None:
        return ""
    if trace.texts is not None:
        return _of_texts(trace, trace.texts, trace.took_s)
    unfinished = {"failed": "Failed", "cancelled": "Cancelled"}.get(trace.outcome, "")
    if trace.ttft_s is None:
        return _unfinished(trace, unfinished or "Ended without a token")
    parts = ", ".join(_parts(trace, trace.ttft_s)) or "reading"
    first = f"{spoken(trace.ttft_s)}: {parts}."
    said = "(planned " in parts
    return " ".join([first, *_against(trace, trace.ttft_s, said), *_after(trace, trace.ttft_s, unfinished)])


def _of_texts(trace: Trace, work: TextsWork, took_s: float) -> str:
    """40 s: 3.0 s waiting, 37 s reading. 1,000 texts (64,000 tokens), by 2 machines."""
    what = "document" if work.route == "rerank" else "text"
    done = sum(machine.texts for machine in work.machines)
    if trace.outcome in ("failed", "cancelled"):
        unfinished = _unfinished(trace, trace.outcome.capitalize())
        return f"{unfinished} {done:,} of {work.texts:,} {what}s were done."
    parts = ", ".join(_parts(trace, took_s)) or "reading"
    machines = len([machine for machine in work.machines if machine.texts])
    by = f", by {machines} machines" if machines > 1 else ""
    counted = f"{done:,} {what}{'' if done == 1 else 's'} ({trace.prompt_tokens:,} tokens)"
    return f"{spoken(took_s)}: {parts}. {counted[0].upper()}{counted[1:]}{by}."


def spoken(seconds: float) -> str:
    """1.234 → "1.2 s", 31.4 → "31 s", 125 → "2 min 5 s", 0.1234 → "0.12 s"."""
    if seconds >= 59.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    digits = 0 if seconds >= 9.95 else 1 if seconds >= 0.995 else 2
    return f"{seconds:.{digits}f} s"


def missed(actual_s: float | None, planned_s: float | None) -> bool:
    """True if it took more than half as long again as planned, and that is more than 100 ms."""
    if actual_s is None or planned_s is None:
        return False
    return actual_s > MISS * planned_s and actual_s - planned_s > MISS_S


def phase_seconds(trace: Trace, until_s: float) -> dict[str, float]:
    """Seconds of each phase before ``until_s`` after the arrival."""
    found = dict.fromkeys(PHASES, 0.0)
    for step in _phases(trace):
        found[step.name] += max(0.0, min(step.end_s, until_s) - step.begin_s)
    return found


def _phases(trace: Trace) -> Iterator[TraceStep]:
    return (step for step in trace.steps if step.parent == 0 and step.name in PHASES)


def _parts(trace: Trace, first_s: float) -> Iterator[str]:
    """The phases before the first token that took a part worth a word."""
    for name, seconds in phase_seconds(trace, first_s).items():
        if seconds >= _LEAST * first_s and seconds and name != WRITING:
            steps = [step for step in _phases(trace) if step.name == name]
            plan = next((step.planned_s for step in steps if step.planned_s is not None), None)
            said = f" (planned {_planned(plan)})" if plan is not None and missed(seconds, plan) else ""
            yield f"{spoken(seconds)} {_doing(trace, name, steps)}{said}"


def _planned(seconds: float) -> str:
    """Without the unit if that is seconds: it stands before."""
    return spoken(seconds).removesuffix(" s").removesuffix(".0")


def _doing(trace: Trace, name: str, steps: list[TraceStep]) -> str:
    machine = max(steps, key=lambda step: step.end_s - step.begin_s).machine
    away = f" on {machine}" if machine != trace.machine else ""
    if name == LOADING:
        return f"loading the model{away}"
    if name == WAITING:
        return "waiting"
    return f"reading{_way_of_reading(trace)}{away}"


def _way_of_reading(trace: Trace) -> str:
    told = trace.there or trace
    parts = {step.name for step in trace.steps}
    together = _KINDS.get(told.outcome, "") or _KINDS.get(trace.outcome, "")
    if step_names.AGREED in parts and not together:
        together = "together"
    shortened = "what smart prefill kept" if trace.outcome == "smart" else ""
    return "".join(f" {part}" for part in (shortened, together) if part)


def _against(trace: Trace, first_s: float, said: bool) -> Iterator[str]:
    """``said``: which part was planned to take less has been said."""
    if not said and missed(first_s, trace.planned_ttft_s) and trace.planned_ttft_s:
        times = first_s / trace.planned_ttft_s
        much = f"{times:.1f}x the planned time" if times < 100 else "far more than planned"
        yield f"That is {much} ({spoken(trace.planned_ttft_s)})."
    alone = trace.chosen.kind == "local" and not trace.answered_by and not trace.kept_tokens
    if trace.alone_s is not None and not alone:
        yield f"Alone: about {spoken(trace.alone_s)}."


def _after(trace: Trace, first_s: float, unfinished: str) -> Iterator[str]:
    rest_s = (trace.took_s or 0.0) - first_s
    tokens = trace.completion_tokens
    if rest_s > _LEAST * (trace.took_s or 0.0) and tokens > 1:
        yield f"Then {spoken(rest_s)} writing {tokens:,} tokens."
    if unfinished:
        yield f"{unfinished} after {spoken(trace.took_s or 0.0)}{_because(trace)}"


def _unfinished(trace: Trace, what: str) -> str:
    took_s = trace.took_s or 0.0
    last = max(_phases(trace), key=lambda step: step.end_s, default=None)
    doing = f", while {_doing(trace, last.name, [last])}" if last is not None and took_s >= MISS_S else ""
    return f"{what} after {spoken(took_s)}{doing}{_because(trace)}"


def _because(trace: Trace) -> str:
    return f": {trace.reason}" if trace.reason else "."
