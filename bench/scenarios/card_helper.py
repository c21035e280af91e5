"""A home that computes on the CPU, and a helper with an accelerator: engines that round in other ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.figures import Figure, NotMeasured, Taking
from bench.harness import card_models, prompts
from bench.harness.card_parts import traced
from bench.harness.daemon import MODEL, Daemon
from bench.scenarios.card_shared import HELPER, HOME, Pair
from fleetd.control.prefill_trace import Trace
from fleetd.plan.prefill import step_names

_MODEL = "dense-0.6b-bf16"
_SETTINGS = {"FLEETD_CACHE_DISK": "off", "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1"}
_ANSWER_TOKENS, _LOGPROBS = 16, 5
# Few: a CPU may lack the library that makes its products quick.
TOKENS = 256
# What a request comes to of which another machine computes some or all.
HELPED = ("shared", "remote")


@dataclass(frozen=True, slots=True)
class Asked:
    """``first_s``: until the first token. ``top``: log-probabilities of the likeliest first tokens.
    ``trace``: None if no other machine was let near the prompt."""

    first_s: float
    text: str
    top: Mapping[str, float]
    trace: Trace | None


def measure(runs: int) -> Taking:
    return Taking(_figures(), _HOW)


def _figures() -> Iterator[Figure]:
    models = card_models.made(_MODEL)
    with Pair(models, [_MODEL], _SETTINGS, {"FLEETD_ENGINE_DEVICE": "cpu"}) as pair:
        pair[HELPER].warm(_MODEL)
        pair[HELPER].complete(prompts.tokens(MODEL, 7, TOKENS), 1, model=_MODEL, local_only=True)
        pair[HOME].warm(_MODEL)
        prompt = prompts.tokens(MODEL, 75_000, TOKENS)
        alone = _ask(pair[HOME], prompt, local_only=True)
        title = f"{_MODEL}, {TOKENS:,} tokens"
        yield Figure(f"TTFT of a home on the CPU alone, {title}", "s", [alone.first_s])
        asked = _ask(pair[HOME], prompt)
        assert asked.trace is not None
        yield from _compared(f"as the planner decides, {title}", asked, asked.trace, alone)


def _compared(title: str, asked: Asked, trace: Trace, alone: Asked) -> Iterator[Figure]:
    """Raises NotMeasured if the helper had no part in it: both sides would be the same."""
    note = became(trace)
    if trace.outcome not in HELPED:
        raise NotMeasured(note)
    yield Figure(f"TTFT, {title}", "s", [asked.first_s], note=note)
    yield Figure(f"One on the CPU over this, TTFT, {title}", "x", [alone.first_s / asked.first_s], note=note)
    same = float(asked.text == alone.text)
    yield Figure(f"Answers equal to the CPU's, {title}", "%", [same], note=distance(asked.top, alone.top))


def became(trace: Trace) -> str:
    """What was done with a prompt, its label, the checks, and why it went otherwise than planned."""
    checks = [s for s in trace.steps if s.name in (step_names.SPOT_CHECK, step_names.LATER_CHECK)]
    told = [f"{trace.chosen.kind}, {trace.outcome}, label {trace.exactness or 'none'}"]
    told += [f"{step.name} {1000 * step.seconds:.0f} ms" for step in checks]
    told += [f"{trace.code}: {trace.reason}"] if trace.code else []
    told += [f"no help: {one.code}: {one.reason}" for one in trace.losers if one.kind == "any"]
    return "; ".join(told)


def distance(here: Mapping[str, float], there: Mapping[str, float]) -> str:
    """How far the log-probabilities of the likeliest first tokens are from each other, in words."""
    common = here.keys() & there.keys()
    if not common:
        return "no first token is among the likeliest of both"
    most = max(abs(here[token] - there[token]) for token in common)
    return f"log-probabilities of {len(common)} first tokens differ by {most:.2g} at most"


def _ask(daemon: Daemon, prompt: list[int], **body: Any) -> Asked:
    """Raises RuntimeError for an error."""
    first_s, text, top = 0.0, "", dict[str, float]()
    body |= {"model": _MODEL, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "logprobs": _LOGPROBS}
    with daemon.stream("completions", **body) as stream:
        for frame in stream.frames():
            if frame.data is None:
                continue
            if "error" in frame.data:
                raise RuntimeError(f"the daemon said: {frame.line}")
            first_s, text = first_s or frame.at_s, text + frame.text
            for choice in frame.data.get("choices") or ():
                likeliest = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
                top = top or dict(likeliest[0] or {})
        name = stream.id
    return Asked(first_s, text, top, None if body.get("local_only") else traced(daemon, name))


_HOW = (
    "Two paired daemons on loopback: home computes on the CPU, in 32-bit floats, the helper on the "
    "accelerator, in bfloat16. The same prompt of token ids, greedy, is kept to home, and then answered as "
    "the planner decides: no half of it can go to a helper that computes in another precision. The notes say "
    "what became of the plan, with which label, and how far the likeliest first tokens' log-probabilities "
    "are from home's own. If the planner leaves the helper out, there is no row."
)
