"""Drafts at several acceptance rates for a hybrid, where a wrong one makes the next pass compute again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples

TOKENS = 128
_PROMPT_TOKENS = 200
ACCEPTANCES = (0.0, 0.5, 0.8, 0.95)


def measure(runs: int) -> Measured:
    """Raises RuntimeError where drafts change an answer."""
    seen, accepted = Samples(), Samples()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "hybrid"
        with Child("hybrid_model", str(model), str(MODEL)):
            pass
        with Child("speculation", str(model)) as child:
            verdict = child.ask(mode="verdict")
            child.ask(mode="plain", prompts=[[1, 2, 3]], max_tokens=8)
            for run in range(runs):
                _one(child, run, seen, accepted)
    return Measured(_figures(seen, accepted, verdict), _HOW)


def _one(child: Child, run: int, seen: Samples, accepted: Samples) -> None:
    asked = {"prompts": [prompts.tokens(MODEL, 900 + run, _PROMPT_TOKENS)], "max_tokens": TOKENS}
    truth = child.ask(mode="plain", **asked)
    for acceptance in ACCEPTANCES:
        said: dict[str, dict[str, Any]] = {}
        for side in alternated(run, ("plain", "played")):
            said[side] = child.ask(mode=side, truth=truth["seen"], acceptance=acceptance, **asked)
            seen[acceptance, side].append(said[side]["rate"])
        for (plain,), (played,) in [(said["plain"]["answers"], said["played"]["answers"])]:
            if (plain["text"], plain["logprobs"]) != (played["text"], played["logprobs"]):
                raise RuntimeError(f"drafts changed an answer at an acceptance of {acceptance}")
            accepted[acceptance].append(played["accepted"] / max(1, played["drafted"]))
            accepted[acceptance, "drafted"].append(played["drafted"])


def _figures(seen: Samples, accepted: Samples, verdict: dict[str, Any]) -> list[Figure]:
    figures = []
    for acceptance in ACCEPTANCES:
        drafted = sum(accepted[acceptance, "drafted"]) / len(accepted[acceptance, "drafted"])
        share = sum(accepted[acceptance]) / len(accepted[acceptance])
        figures.append(
            Figure(
                f"Decode of a hybrid, each draft right with {100 * acceptance:.0f} %, times plain",
                "x",
                seen.ratios((acceptance, "played"), (acceptance, "plain")),
                at_least(0.98),
                note=f"{drafted:.0f} tokens drafted, {100 * share:.0f} % of them accepted",
            )
        )
    curve = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in verdict["curve"].items())
    note = f"{verdict['text']}; tv(n)/t1: {curve}"
    return [*figures, Figure("Probe of a hybrid", "s", [verdict["probe_s"]], note=note)]


_HOW = (
    f"A model of Qwen 3.5's shape with random weights, one answer of {TOKENS} tokens at a time, plain and "
    "drafted for in turn. The drafts are played: a source that knows the answer says each token wrongly with "
    "the given chance. After a wrong draft the next pass computes again what was right beside it. Text and "
    "log-probabilities are compared."
)
