"""Two machines that are alike read one prompt with a hybrid: most of its layers keep a running state."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.figures import Figure, Measured, at_least, at_most
from bench.harness.child import Child
from bench.harness.daemon import MODEL
from bench.harness.machines import Machines, why_none
from bench.harness.samples import Samples
from bench.scenarios.prefill_ceiling import ceiling, handed_off_s
from fleetd.models.catalog import DEFAULT_MODEL

LENGTH, QUICK_LENGTH = 4000, 1000
_ANSWER_TOKENS = 8


def measure(runs: int) -> Measured:
    """Raises RuntimeError where two machines cannot be had on this one, or nothing was shared."""
    if why := why_none():
        raise RuntimeError(why)
    seen, how, length = Samples(), list[str](), LENGTH if runs > 1 else QUICK_LENGTH
    with tempfile.TemporaryDirectory() as folder:
        # Under the name that all benchmarks ask for.
        with Child("hybrid_model", str(Path(folder) / DEFAULT_MODEL), str(MODEL)) as child:
            layers = int(child.ask()["layers"])
        with Machines(models=Path(folder)) as machines:
            for run in range(runs):
                how.append(_one(machines, run, length, layers, seen))
    if not seen["of_ceiling"]:
        raise RuntimeError(f"no prompt of {length} tokens was shared: {'; '.join(how)}")
    return Measured(_figures(seen, how, length), _HOW)


def _one(machines: Machines, run: int, length: int, layers: int, seen: Samples) -> str:
    alone, shared = machines.both(run, 47_000 + run, length, _ANSWER_TOKENS)
    gained, trace = alone.ttft_s / shared.ttft_s, shared.trace
    same = (alone.heard.text, alone.heard.count) == (shared.heard.text, shared.heard.count)
    seen.add(gained=gained, alone_s=alone.ttft_s, shared_s=shared.ttft_s, same=float(same))
    if shared.shared and trace is not None and trace.chosen.kind in ("layers", "tokens"):
        seen.add(
            of_ceiling=gained / ceiling(trace, layers),
            handed_off=handed_off_s(trace, layers) / shared.ttft_s,
        )
    return shared.how


def _figures(seen: Samples, how: list[str], length: int) -> list[Figure]:
    chosen = "; ".join(f"{how.count(one)} x {one}" for one in dict.fromkeys(how))
    note = f"the planner's choices: {chosen}"
    title = f"{length:,} tokens"
    return [
        Figure(f"Two machines over one, TTFT at {title}", "x", seen["gained"], at_least(1.7), note=note),
        Figure(f"Share of that split's ceiling, {title}", "%", seen["of_ceiling"], at_least(0.92)),
        Figure(
            f"Idle while rows and states are on their way, share of TTFT, {title}",
            "%",
            seen["handed_off"],
            at_most(0.03),
        ),
        Figure(f"TTFT of one machine, {title}", "s", seen["alone_s"]),
        Figure(f"TTFT of two machines, {title}", "s", seen["shared_s"]),
        Figure("Answers of two machines equal to one's", "%", seen["same"], at_least(1), of="worst"),
    ]


_HOW = (
    "As shared prefill above, with a model of Qwen 3.5's shape and random weights: 16 layers of width 576, "
    "in three of four a gated delta rule with eight heads of 64 numbers and a convolution over four tokens, "
    "in the fourth attention. Its running states travel before its last chunk, for the check, and after it."
)
