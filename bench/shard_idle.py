"""What it costs a lone machine that it could have helpers: nobody around has the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench import prompts
from bench.figures import Figure, Measured, alternated, at_most
from bench.shard_core import starting_on
from bench.shard_machines import HOME, Machines
from bench.throwaway import MODEL, Daemon

_LENGTH = 500
_PAIRS = 5


@dataclass
class _Seen:
    share: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)


def measure(runs: int) -> Measured:
    seen = _Seen()
    with (
        Machines(helper_has_model=False) as machines,
        Daemon(
            FLEETD_FLEET_ENABLED="off", FLEETD_ENGINE_THREADS="1", FLEETD_ENGINE_PREFIX_CACHE_BYTES="1"
        ) as off,
    ):
        with starting_on(machines.cores[HOME], None, off.process.pid):
            off.warm()
        off.complete(prompts.tokens(MODEL, 77, _LENGTH), 1)
        for run in range(runs * _PAIRS):
            _one(machines, off, run, seen)
    return Measured(
        [
            Figure(
                "Cost of the fleet with nobody who could help, share of TTFT", "%", seen.share, at_most(0.01)
            ),
            Figure("The same in milliseconds", "ms", seen.added_ms),
        ],
        _HOW,
    )


def _one(machines: Machines, off: Daemon, run: int, seen: _Seen) -> None:
    prompt = prompts.tokens(MODEL, 35_000 + run, _LENGTH)
    beside_s: dict[bool, float] = {}
    ttft_s: dict[bool, float] = {}
    for fleet in alternated(run, (True, False)):
        heard = (machines[HOME] if fleet else off).complete(prompt, 1)
        ttft_s[fleet] = heard.began_s
        beside_s[fleet] = heard.began_s - float(heard.timings["prompt_ms"]) / 1000
    added_s = beside_s[True] - beside_s[False]
    seen.share.append(added_s / ttft_s[False])
    seen.added_ms.append(1000 * added_s)


_HOW = (
    "Nobody who could help: a daemon with a usable peer that lacks the model, and one whose fleet is off, "
    f"take turns with the same prompts of {_LENGTH} tokens, on the same core. The cost is the difference of "
    "what TTFT has beside the engine's own work on the prompt, because that varies by more than the bar from "
    "one request to the next."
)
