"""Smart prefill on a pair that costs what real pairs cost: the target is worth eight scorers."""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, ratios
from bench.harness import prompts, smart_chats
from bench.harness.child import Child
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples
from bench.harness.smart_chats import RATIO, TARGET
from fleetd.models.catalog import DEFAULT_MODEL

# Of smart prefill. The whole prompt, read once, takes ten minutes, over which a machine's pace evens out.
QUICK_RUNS = 1
LENGTH, QUICK_LENGTH = 8000, 2000
_OFF_TOKENS, _OFF_TRIES = 400, 10
_DECODED = 32


def measure(runs: int) -> Measured:
    quick = runs <= QUICK_RUNS
    length = QUICK_LENGTH if quick else LENGTH
    seen, mode = Samples(), ""
    with smart_chats.models() as models, Daemon(models=models) as daemon:
        # The target is loaded and its speed measured; of the scorer nothing is known yet.
        _ask(daemon, TARGET, 7, 600, smart=False)
        _ask(daemon, TARGET, 8, length, smart=True)
        why_not = _missed(daemon, seen)
        mode = _note(seen, *_ask(daemon, TARGET, 100, length, smart=True))
        dense_s = _ask(daemon, TARGET, 200, length, smart=False)[0]
        half_s = _ask(daemon, TARGET, 201, length // 2, smart=False)[0]
        seen.add(cost=dense_s / _ask(daemon, DEFAULT_MODEL, 300, length, smart=False)[0])
        for run in range(1, runs):
            mode = _note(seen, *_ask(daemon, TARGET, 100 + run, length, smart=True))
        for run in range(runs):
            _off(daemon, seen, run)
    with Child("mlx_lm", "cured", str(MODEL)) as raw:
        for run in range(runs):
            _not_installed(raw, seen, run)
    return Measured(
        _figures(seen, length, dense_s, half_s, why_not), _HOW.format(length=length, ratio=RATIO, mode=mode)
    )


def _note(seen: Samples, first_s: float, told: dict[str, Any]) -> str:
    """The form that was chosen."""
    report = told["smart_prefill"]
    if report["mode"] == "full":
        raise RuntimeError(f"nothing was left out: {report['skipped']}")
    kept = report["compressed_tokens"] / report["original_tokens"]
    seen.add(smart_s=first_s, score_s=told["timings"]["score_ms"] / 1000, kept=kept)
    return str(report["mode"])


def _missed(daemon: Daemon, seen: Samples) -> str:
    """Note how far the prediction of the last request was from what it took, as a share of that.

    Returns why there was none: a first prompt that is not scored leaves the other figures as they are.
    """
    (trace,) = json.loads(daemon.control("GET", "/fleet/v1/traces?last=1"))["traces"]
    if trace["chosen"]["kind"] != "smart":
        return f"{trace['code']}: {trace['reason']}"
    print(
        f"first smart prefill: {trace['ttft_s']:.1f} s, of which {trace['prefill_s']:.1f} s after the plan, "
        f"predicted {trace['chosen']['predicted_s']:.1f} s"
    )
    seen.add(first=abs(float(trace["chosen"]["predicted_s"]) / float(trace["prefill_s"]) - 1))
    return ""


def _off(daemon: Daemon, seen: Samples, run: int) -> None:
    """A prompt that is too short, asked with smart prefill and without: what looking at it takes."""
    for n in range(_OFF_TRIES):
        for smart in alternated(n, (True, False)):
            seed = 1000 + 100 * run + 2 * n + smart
            first_s = _ask(daemon, DEFAULT_MODEL, seed, _OFF_TOKENS, smart=smart)[0]
            seen["asked_s" if smart else "plain_s"].append(first_s)


def _not_installed(raw: Child, seen: Samples, run: int) -> None:
    """The same prompt in one process, with smart prefill's wrappers in the model and with none."""
    for n in range(_OFF_TRIES):
        tokens = prompts.tokens(MODEL, 2000 + 100 * run + n, _OFF_TOKENS)
        for wrapped in alternated(n, (True, False)):
            times = raw.ask(tokens=tokens, max_tokens=_DECODED, wrapped=wrapped)["times"]
            seen["first", wrapped].append(times[0])
            seen["each", wrapped].append((times[-1] - times[0]) / (len(times) - 1))


def _ask(daemon: Daemon, model: str, seed: int, count: int, *, smart: bool) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and what the last chunks said."""
    wanted = {"target_ratio": RATIO, "compressor_model": DEFAULT_MODEL} if smart else None
    answered = smart_chats.ask(daemon, model, smart_chats.chat(seed, count), smart=wanted)
    return answered.first_s, answered.said


def _figures(seen: Samples, length: int, dense_s: float, half_s: float, why_not: str) -> list[Figure]:
    gained = [dense_s / smart_s for smart_s in seen["smart_s"]]
    # T(n) = a n + b n^2 from two lengths: the share of the second term at the full one.
    q = max(0.0, min(1.0, (2 * dense_s - 4 * half_s) / dense_s))
    ideal = [
        1 / (score_s / dense_s + (1 - q) * kept + q * kept**2)
        for score_s, kept in zip(seen["score_s"], seen["kept"], strict=True)
    ]
    off = statistics.median_high(seen["asked_s"]) / statistics.median_high(seen["plain_s"]) - 1
    at = f"{length} tokens"
    return [
        Figure(f"target's cost per token over the scorer's, {at}", "x", seen["cost"], at_least(8)),
        *_first(seen["first"], why_not),
        Figure(f"first token, all of {at}", "s", [dense_s]),
        Figure(f"first token, smart prefill of {at}", "s", seen["smart_s"]),
        Figure("share of the tokens that is kept", "%", seen["kept"]),
        Figure("sooner by", "x", gained, at_least(3)),
        Figure("of what the formula allows", "%", ratios(gained, ideal), at_least(0.9)),
        Figure("the scorer's share of the time", "%", seen.ratios("score_s", "smart_s"), at_most(0.25)),
        Figure(f"{_OFF}, first token", "%", _added(seen, "first"), at_most(0.005)),
        Figure(f"{_OFF}, each token", "%", _added(seen, "each"), at_most(0.005)),
        Figure(
            "asked for and too short, against not asked for",
            "%",
            [off],
            at_most(0.005),
            note="the wrapper is installed on both sides: this is what looking at the request takes",
        ),
    ]


def _first(off: list[float], why_not: str) -> list[Figure]:
    """A prompt that is not scored is a miss too, and is shown as one."""
    title = "a new home's first smart prefill"
    scored = Figure(f"{title} that is scored", "count", [float(not why_not)], at_least(1), note=why_not)
    return [scored, *([Figure(f"{title}: prediction off by", "%", off, at_most(0.25))] if off else [])]


def _added(seen: Samples, what: str) -> list[float]:
    return [ratio - 1 for ratio in seen.ratios((what, True), (what, False))]


_OFF = "installed and not asked for, against not installed"
_HOW = (
    "One daemon, one machine: SmolLM2-135M scores, and a llama of random weights with the same tokenizer "
    "answers, one after the other on all cores. Prompts are chats of {length} tokens and a question, each "
    "its own; `target_ratio` {ratio}, which came out as the form {mode}. The time to the first token is a "
    "client's, over HTTP, with everything in it: scoring, selection, prefill of what is kept. The formula is "
    "1 / (rho + (1-q) k + q k^2): rho the scorer's time over the dense one, k the share that is kept, q "
    "attention's share of the dense time, from two lengths. What smart prefill costs where nobody asks for "
    "it is measured without a daemon: one process with mlx-lm and the CPU's cures answers prompts of "
    f"{_OFF_TOKENS} tokens with {_DECODED}, with the wrapper around every layer's rope and with none, in "
    "turns; figures are of pairs."
)
