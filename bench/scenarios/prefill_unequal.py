"""A machine and a slower one: the slow one still helps, by nearly as much as it can."""

from __future__ import annotations

from bench.figures import Figure, Measured, at_least
from bench.harness import prompts
from bench.harness.daemon import MODEL
from bench.harness.machines import HELPER, LOOPBACK, Machines, why_none
from bench.harness.samples import Samples
from bench.scenarios.prefill_ceiling import error, sum_of_speeds

SLOW = 1 / 3
_LENGTH = 4000
# Speeds are compared on a prompt that the slow machine is through with in a tolerable time.
_SPEED_LENGTH = 1000
_MOST_RUNS = 5


def measure(runs: int) -> Measured:
    if why := why_none(LOOPBACK, SLOW):
        return Measured([], f"Unequal machines: not run, {why}.")
    seen, how = Samples(), dict[str, None]()
    with Machines(shares=(1.0, SLOW)) as machines:
        for run in range(min(runs, _MOST_RUNS)):
            known = prompts.tokens(MODEL, 33_000 + run, _SPEED_LENGTH)
            fast_s = machines.ask(known, alone=True).ttft_s
            slow_s = machines.ask(known, alone=True, at=HELPER).ttft_s
            alone, planned = machines.both(run, 34_000 + run, _LENGTH)
            gained = alone.ttft_s / planned.ttft_s
            seen.add(gained=gained, of_sum=gained / sum_of_speeds([fast_s, slow_s]), slower=fast_s / slow_s)
            how[planned.how] = None
            if planned.trace is not None and (off := error(planned.trace)) is not None:
                seen.add(off=abs(off))
    title = f"With a slower machine's help over alone, TTFT at {_LENGTH:,} tokens"
    return Measured(
        [
            Figure(title, "x", seen["gained"], at_least(1.0), note="; ".join(how)),
            Figure("Share of the sum of both speeds", "%", seen["of_sum"], at_least(0.85)),
            *([Figure("Predicted off actual, a slower helper", "%", seen["off"])] if seen["off"] else []),
            Figure("The slower machine's speed, share of the other's", "%", seen["slower"]),
        ],
        "Unequal: the same with a helper whose worker may use a third of its core (a CPU quota of 10 ms "
        "periods, in force before the worker starts). Speeds are those of each machine alone on a prompt of "
        f"{_SPEED_LENGTH:,} tokens, in the same run; their sum over the faster one's is what both could "
        "give.",
    )
