"""Subagents of one agent over three machines: what their common beginning costs, kept or not kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.figures import Figure, Measured, alternated, at_most, percentile
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL

_MACHINES = ("one", "two", "three")
FORKS = 8
SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 4000, 64, 16
QUICK_SHARED_TOKENS = 1000
# Keys and values are dropped as soon as an answer ends.
_NOTHING = {"FLEETD_CACHE_DISK": "off", "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1"}
_KNOWN_WITHIN_S = 120.0


def measure(runs: int) -> Measured:
    seen, shared = Samples(), SHARED_TOKENS if runs > 1 else QUICK_SHARED_TOKENS
    for run in range(runs):
        for side in alternated(run, ("kept", "nothing")):
            _side(side, run, shared, seen)
    return Measured(
        [
            Figure(
                f"{FORKS} forks of {shared:,} tokens over three machines: TTFT of the ninth of ten, as a "
                "share of that with nothing kept",
                "%",
                seen.ratios("kept p90", "nothing p90"),
                at_most(0.35),
                note=f"{seen['kept new'][0]:,.0f} tokens were computed instead of "
                f"{seen['nothing new'][0]:,.0f}; others answered {seen['kept there'][0]:.0f} forks",
            ),
            Figure("TTFT, ninth of ten", "s", seen["kept p90"]),
            Figure("TTFT, ninth of ten, with nothing kept", "s", seen["nothing p90"]),
        ],
        "Three daemons on loopback that share the cores of this machine, with the default model loaded. "
        f"One of them has read a prompt and is then asked {FORKS} at the same time that begin with it and go "
        f"on for {OWN_TOKENS} tokens of their own; answers of {ANSWER_TOKENS} tokens. Without: neither "
        "memory nor disk keep anything. TTFT as the client sees it.",
    )


def _side(side: str, run: int, shared: int, seen: Samples) -> None:
    settings = _NOTHING if side == "nothing" else {}
    with Fleet(_MACHINES) as fleet, ThreadPoolExecutor(FORKS) as pool:
        for name in _MACHINES:
            fleet.start(name, **settings)
        fleet.until_usable(*_MACHINES)
        for name in _MACHINES:
            fleet[name].warm()
        wait_for(lambda: _loaded(fleet), _KNOWN_WITHIN_S, 0.1, fleet[_MACHINES[0]].log)
        begin = prompts.tokens(MODEL, 70_000 + 100 * run, shared)
        fleet[_MACHINES[0]].complete(begin, 1, local_only=False)

        def ask(number: int) -> tuple[Heard, bool]:
            own = prompts.tokens(MODEL, 70_001 + 100 * run + number, OWN_TOKENS)
            body = {"prompt": begin + own, "max_tokens": ANSWER_TOKENS}
            with fleet[_MACHINES[0]].stream("completions", **body) as stream:
                return stream.hear(), stream.plan.startswith("remote")

        found = list(pool.map(ask, range(FORKS)))
    heard = [each for each, _ in found]
    seen[f"{side} p90"].append(percentile([each.began_s for each in heard], 0.9))
    seen[f"{side} new"].append(sum(int(each.usage["prompt_tokens"]) - each.cached for each in heard))
    seen[f"{side} there"].append(sum(there for _, there in found))


def _loaded(fleet: Fleet) -> bool:
    """True once the machine that is asked knows that the others have the model loaded."""
    peers = [fleet.peer(_MACHINES[0], name) for name in _MACHINES[1:]]
    return all(
        any(m["name"] == DEFAULT_MODEL and m["state"] == "loaded" and m["digest"] for m in peer["models"])
        for peer in peers
    )
