"""What it costs a lone machine that it could have helpers: no other machine has the model."""

from __future__ import annotations

from typing import Any

from bench.figures import Figure, Measured, alternated, at_most
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.cores import starting_on
from bench.harness.daemon import MODEL, Daemon
from bench.harness.machines import HOME, Machines
from bench.harness.samples import Samples

_LENGTH = 500
_PAIRS = 5


def measure(runs: int) -> Measured:
    seen = Samples()
    alone: dict[str, Any] = {
        "FLEETD_FLEET_ENABLED": "off",
        "FLEETD_ENGINE_THREADS": "1",
        "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1",
    }
    with Machines(helper_has_model=False) as machines, Daemon(**alone) as off:
        with starting_on(machines.cores[HOME], pid=off.process.pid):
            off.warm()
        off.complete(prompts.tokens(MODEL, 77, _LENGTH), 1)
        for run in range(runs * _PAIRS):
            prompt = prompts.tokens(MODEL, 35_000 + run, _LENGTH)
            heard: dict[bool, Heard] = {}
            for fleet in alternated(run, (True, False)):
                heard[fleet] = (machines[HOME] if fleet else off).complete(prompt, 1)
            added_s = heard[True].beside_s - heard[False].beside_s
            seen.add(share=added_s / heard[False].began_s, added_ms=1000 * added_s)
    title = "Cost of the fleet with nobody who could help, share of TTFT"
    return Measured(
        [
            Figure(title, "%", seen["share"], at_most(0.01)),
            Figure("The same in milliseconds", "ms", seen["added_ms"]),
        ],
        "Nobody who could help: a daemon with a usable peer that lacks the model, and one whose fleet is "
        f"off, take turns with the same prompts of {_LENGTH} tokens, on the same core. The cost is the "
        "difference of what TTFT has beside the engine's own work on the prompt, because that varies by more "
        "than the bar from one request to the next.",
    )
