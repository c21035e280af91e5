"""Subagents of one agent that ask three machines, of which one has read what they begin with."""

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
# The first forks, by which the links and what comes over them are measured.
_FIRST = 1


def measure(runs: int) -> Measured:
    seen, shared = Samples(), SHARED_TOKENS if runs > 1 else QUICK_SHARED_TOKENS
    with Fleet(_MACHINES) as fleet, ThreadPoolExecutor(FORKS) as pool:
        fleet.start_all()
        for name in _MACHINES:
            fleet[name].warm()
        wait_for(partial(_loaded, fleet), _KNOWN_WITHIN_S, 0.1, fleet[_MACHINES[0]].log)
        for run in range(_FIRST):
            _ask(fleet, pool, "first", _prompts("first", run, shared), seen)
        for run in range(_FIRST, _FIRST + runs):
            for side in alternated(run, ("together", "apart", "strangers")):
                _ask(fleet, pool, side, _prompts(side, run, shared), seen)
    return Measured(_figures(seen, shared), _HOW)


def _prompts(side: str, run: int, shared: int) -> list[list[int]]:
    """What all have in common is read before, and last in the list."""
    first = {"first": 600_000, "together": 700_000, "apart": 800_000, "strangers": 900_000}[side] + 100 * run
    begin, own = prompts.tokens(MODEL, first, shared), range(first + 1, first + FORKS + 1)
    if side == "strangers":
        return [*(prompts.tokens(MODEL, seed, shared + OWN_TOKENS) for seed in own), begin]
    return [*(begin + prompts.tokens(MODEL, seed, OWN_TOKENS) for seed in own), begin]


def _ask(fleet: Fleet, pool: ThreadPoolExecutor, side: str, asked: list[list[int]], seen: Samples) -> None:
    *forks, first = asked
    alone = {"local_only": True} if side == "apart" else {}
    fleet[_MACHINES[0]].complete(first, 1, **alone)

    def ask(daemon: Daemon, prompt: list[int]) -> tuple[Heard, bool]:
        with daemon.stream("completions", prompt=prompt, max_tokens=ANSWER_TOKENS, **alone) as stream:
            return stream.hear(), stream.plan.startswith("remote")

    daemons = [fleet[_MACHINES[number % len(_MACHINES)]] for number in range(FORKS)]
    found = list(pool.map(ask, daemons, forks))
    seen[side, "p90"].append(percentile([heard.began_s for heard, _ in found], 0.9))
    seen[side, "new"].append(sum(int(heard.usage["prompt_tokens"]) - heard.cached for heard, _ in found))
    seen[side, "elsewhere"].append(sum(elsewhere for _, elsewhere in found))
    seen[side, "fetched"].append(sum(int(heard.timings.get("fetched_n", 0)) for heard, _ in found))


def _figures(seen: Samples, shared: int) -> list[Figure]:
    return [
        Figure(
            f"{FORKS} forks of {shared:,} tokens over three machines: TTFT of the ninth of ten, as a share "
            "of that where each machine keeps to itself",
            "%",
            seen.ratios(("together", "p90"), ("apart", "p90")),
            at_most(0.35),
            note=f"{seen['together', 'new'][0]:,.0f} tokens were computed instead of "
            f"{seen['apart', 'new'][0]:,.0f}",
        ),
        Figure(
            "The same as a share of that of prompts with nothing in common",
            "%",
            seen.ratios(("together", "p90"), ("strangers", "p90")),
            note=f"{seen['strangers', 'new'][0]:,.0f} tokens were computed",
        ),
        Figure("Tokens of forks that were fetched", "count", seen["together", "fetched"]),
        Figure("Forks that another machine answered", "count", seen["together", "elsewhere"]),
        Figure("TTFT of forks, ninth of ten", "s", seen["together", "p90"]),
        Figure("TTFT where each machine keeps to itself, ninth of ten", "s", seen["apart", "p90"]),
        Figure("TTFT of prompts with nothing in common, ninth of ten", "s", seen["strangers", "p90"]),
    ]


def _loaded(fleet: Fleet) -> bool:
    """True once each machine knows that the others have the model loaded."""
    peers = [fleet.peer(at, name) for at in _MACHINES for name in _MACHINES if name != at]
    return all(
        any(m["name"] == DEFAULT_MODEL and m["state"] == "loaded" and m["digest"] for m in peer["models"])
        for peer in peers
    )


_HOW = (
    "Three daemons on loopback that share the cores of this machine, with the default model loaded. One "
    f"of them has read a prompt. Then {FORKS} that begin with it and go on {OWN_TOKENS} tokens of their own "
    "are asked at the same time, by turns at the three machines. Compared with the same where prompts are "
    "`local_only`: each machine reads the common beginning once, and none knows what another has. By turns "
    f"also {FORKS} prompts of that length that have nothing in common. Answers of {ANSWER_TOKENS} tokens; "
    f"TTFT as the client sees it. {_FIRST} such round comes before, by which the links are measured."
)
