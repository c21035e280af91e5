"""A helper with memory for half of a model and a prompt: the second prompt is shared with its layers."""

from __future__ import annotations

from bench.figures import Figure, Measured
from bench.harness.machines import LOOPBACK, Machines, why_none
from bench.harness.samples import Samples
from fleetd.models.memory_need import WORKING_BYTES

QUICK_RUNS = 1
LENGTH, QUICK_LENGTH = 2000, 1000
# Of a core each: other work on the cores then changes little.
SHARE = 0.4
# Enough for the default model (540 MB in f32), or for half of it and a prompt; not for it and a prompt.
HELPER_BYTES = WORKING_BYTES + 600_000_000
LAYERS = 30


def measure(runs: int) -> Measured:
    """Raises RuntimeError where cores cannot be shared out on this machine."""
    shares = (SHARE, SHARE)
    if why := why_none(LOOPBACK, *shares):
        raise RuntimeError(why)
    length = QUICK_LENGTH if runs <= QUICK_RUNS else LENGTH
    seen, how = Samples(), dict[str, None]()
    with Machines(shares=shares, helper_bytes=HELPER_BYTES) as machines:
        first, last = machines.part_of_helper()
        for run in range(runs):
            alone, planned = machines.both(run, 41_000 + run, length)
            seen.add(gained=alone.ttft_s / planned.ttft_s, alone_s=alone.ttft_s)
            seen.add(same=float(alone.heard.text == planned.heard.text))
            how[planned.how] = None
    note = f"the helper has layers {first} to {last - 1} of {LAYERS}; {'; '.join(how)}"
    title = f"With a helper that has half of the layers over alone, TTFT at {length:,} tokens"
    return Measured(
        [
            Figure(title, "x", seen["gained"], note=note),
            Figure(f"TTFT alone, {length:,} tokens", "s", seen["alone_s"]),
            Figure("First tokens equal", "%", seen["same"], of="worst"),
        ],
        f"Two daemons on loopback, each of whose workers may use {SHARE:.0%} of its core and comes before "
        "all other work there. The helper's memory is limited so that the model would leave no room for a "
        "prompt; a first long one has it load the layers beside which it has room. Then each prompt is asked "
        "alone and as the planner decides, in turns.",
    )
