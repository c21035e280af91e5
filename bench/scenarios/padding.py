"""What exactness costs: decode with and without what makes a token's bits independent of the batch."""

from __future__ import annotations

from contextlib import ExitStack

from bench.figures import Figure, Measured, alternated, ratios
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL

TOKENS = 64
_MODES = ("cured", "unpadded", "loose")


def measure(runs: int) -> Measured:
    prompt = prompts.encoded(MODEL, prompts.OPENINGS[1])
    rates: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with ExitStack() as stack:
        children = {mode: stack.enter_context(Child("mlx_lm", mode, str(MODEL))) for mode in _MODES}
        for child in children.values():
            child.ask(tokens=prompt, max_tokens=8)
        for run in range(runs):
            for mode in alternated(run, _MODES):
                times = children[mode].ask(tokens=prompt, max_tokens=TOKENS)["times"]
                rates[mode].append((len(times) - 1) / (times[-1] - times[0]))
    return Measured(
        [
            Figure(
                "Decode with row padding, share of without", "%", ratios(rates["cured"], rates["unpadded"])
            ),
            Figure(
                "Decode as shipped, share of nothing reproducible",
                "%",
                ratios(rates["cured"], rates["loose"]),
                note="without padding, and MKL out of its reproducible mode",
            ),
            Figure("Decode as shipped", "tok/s", rates["cured"]),
            Figure("Decode without row padding", "tok/s", rates["unpadded"]),
            Figure("Decode, nothing reproducible", "tok/s", rates["loose"]),
        ],
        f"Three processes with `mlx_lm.stream_generate`, {TOKENS} tokens each in turn: the CPU path as "
        "shipped; the same without padding products to a minimum of rows (`row_stable`); and that with "
        "MKL free to choose its kernels. The first is the one whose exactness is tested.",
    )
