"""Subagents of one agent over three machines: what their common beginning costs, and without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.figures import Figure, Measured, alternated, at_most, percentile
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL

_MACHINES = ("one", "two", "three")
FORKS = 8
SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 4000, 64, 16
QUICK_SHARED_TOKENS = 1000
_KNOWN_WITHIN_S = 120.0


def measure(runs: int) -> Measured:
    seen, shared = Samples(), SHARED_TOKENS if runs > 1 else QUICK_SHARED_TOKENS
    with Fleet(_MACHINES) as keeping, Fleet(_MACHINES) as off, ThreadPoolExecutor(FORKS) as pool:
        for fleet, disk in ((keeping, "on"), (off, "off")):
            for name in _MACHINES:
                fleet.start(name, FLEETD_CACHE_DISK=disk)
            fleet.until_usable(*_MACHINES)
            for name in _MACHINES:
                fleet[name].warm()
            wait_for(partial(_loaded, fleet), _KNOWN_WITHIN_S, 0.1, fleet[_MACHINES[0]].log)
        for run in range(runs):
            for side in alternated(run, ("forks", "without", "strangers")):
                fleet = off if side == "without" else keeping
                _ask(fleet[_MACHINES[0]], pool, side, _prompts(side, run, shared), seen)
    return Measured(_figures(seen, shared), _HOW)


def _prompts(side: str, run: int, shared: int) -> list[list[int]]:
    """What all have in common is read before, and last in the list."""
    seeds = range(70_000 + 100 * run, 70_000 + 100 * run + FORKS + 1)
    begin = prompts.tokens(MODEL, seeds[0], shared)
    if side != "strangers":
        return [*(begin + prompts.tokens(MODEL, seed, OWN_TOKENS) for seed in seeds[1:]), begin]
    return [prompts.tokens(MODEL, 500_000 + seed, shared + OWN_TOKENS) for seed in seeds]


def _ask(daemon: Daemon, pool: ThreadPoolExecutor, side: str, asked: list[list[int]], seen: Samples) -> None:
    *forks, first = asked
    daemon.complete(first, 1)

    def ask(prompt: list[int]) -> tuple[Heard, str]:
        with daemon.stream("completions", prompt=prompt, max_tokens=ANSWER_TOKENS) as stream:
            return stream.hear(), stream.plan if stream.plan.startswith("remote") else ""

    found = list(pool.map(ask, forks))
    seen[f"{side} p90"].append(percentile([heard.began_s for heard, _ in found], 0.9))
    seen[f"{side} new"].append(sum(int(heard.usage["prompt_tokens"]) - heard.cached for heard, _ in found))
    seen[f"{side} there"].append(sum(bool(plan) for _, plan in found))
    seen[f"{side} machines"].append(len({plan for _, plan in found}))
    seen[f"{side} fetched"].append(sum(int(heard.timings.get("fetched_n", 0)) for heard, _ in found))


def _figures(seen: Samples, shared: int) -> list[Figure]:
    return [
        Figure(
            f"{FORKS} forks of {shared:,} tokens over three machines: TTFT of the ninth of ten, as a share "
            "of that of the same forks with nothing kept on disks",
            "%",
            seen.ratios("forks p90", "without p90"),
            at_most(0.35),
            note=f"other machines answered {seen['forks there'][0]:.0f} of the forks and "
            f"{seen['without there'][0]:.0f} of those without",
        ),
        Figure(
            "The same as a share of that of prompts with nothing in common",
            "%",
            seen.ratios("forks p90", "strangers p90"),
            note=f"{seen['forks new'][0]:,.0f} tokens were computed instead of "
            f"{seen['strangers new'][0]:,.0f}",
        ),
        Figure("Tokens of forks that were fetched", "count", seen["forks fetched"]),
        Figure("Machines that answered forks", "count", seen["forks machines"]),
        Figure("Machines that answered forks with nothing on disks", "count", seen["without machines"]),
        Figure("TTFT of forks, ninth of ten", "s", seen["forks p90"]),
        Figure("TTFT of forks with nothing on disks, ninth of ten", "s", seen["without p90"]),
        Figure("TTFT of prompts with nothing in common, ninth of ten", "s", seen["strangers p90"]),
    ]


def _loaded(fleet: Fleet) -> bool:
    """True once the machine that is asked knows that the others have the model loaded."""
    peers = [fleet.peer(_MACHINES[0], name) for name in _MACHINES[1:]]
    return all(
        any(m["name"] == DEFAULT_MODEL and m["state"] == "loaded" and m["digest"] for m in peer["models"])
        for peer in peers
    )


_HOW = (
    "Three daemons on loopback that share the cores of this machine, with the default model loaded. One "
    f"of them has read a prompt and is then asked {FORKS} at the same time that begin with it and go on "
    f"{OWN_TOKENS} tokens of their own; by turns, the same forks of three others with `cache.disk` off, so "
    "that nothing can be fetched, and as many prompts of that length that have nothing in common, after "
    f"another such prompt. Answers of {ANSWER_TOKENS} tokens; TTFT as the client sees it."
)
