"""A machine and a slower one: the slow one still helps, by nearly as much as it can."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench import prompts
from bench.figures import Figure, Measured, alternated, at_least
from bench.shard_ceiling import sum_of_speeds
from bench.shard_machines import HELPER, LOOPBACK, Machines, why_none
from bench.throwaway import MODEL

SLOW = 1 / 3
_LENGTH = 4000
# Speeds are compared on a prompt that the slow machine is through with in a tolerable time.
_SPEED_LENGTH = 1000
_MOST_RUNS = 5


@dataclass
class _Seen:
    gained: list[float] = field(default_factory=list)
    of_sum: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    how: list[str] = field(default_factory=list)


def measure(runs: int) -> Measured:
    if why := why_none(LOOPBACK, SLOW):
        return Measured([], f"Unequal machines: not run, {why}.")
    seen = _Seen()
    with Machines(helper_share=SLOW) as machines:
        for run in range(min(runs, _MOST_RUNS)):
            _one(machines, run, seen)
    return Measured(_figures(seen), _HOW)


def _one(machines: Machines, run: int, seen: _Seen) -> None:
    known = prompts.tokens(MODEL, 33_000 + run, _SPEED_LENGTH)
    fast_s = machines.ask(known, alone=True).ttft_s
    slow_s = machines.ask(known, alone=True, at=HELPER).ttft_s
    prompt = prompts.tokens(MODEL, 34_000 + run, _LENGTH)
    found = {alone: machines.ask(prompt, alone=alone) for alone in alternated(run, (True, False))}
    gained = found[True].ttft_s / found[False].ttft_s
    seen.gained.append(gained)
    seen.of_sum.append(gained / sum_of_speeds([fast_s, slow_s]))
    seen.slower.append(fast_s / slow_s)
    seen.how.append(found[False].how)


def _figures(seen: _Seen) -> list[Figure]:
    title = f"With a slower machine's help over alone, TTFT at {_LENGTH:,} tokens"
    return [
        Figure(title, "x", seen.gained, at_least(1.0), note="; ".join(dict.fromkeys(seen.how))),
        Figure("Share of the sum of both speeds", "%", seen.of_sum, at_least(0.85)),
        Figure("The slower machine's speed, share of the other's", "%", seen.slower),
    ]


_HOW = (
    "Unequal: the same with a helper whose worker may use a third of its core (a CPU quota of 10 ms periods, "
    "in force before the worker starts). Speeds are those of each machine alone on a prompt of "
    f"{_SPEED_LENGTH:,} tokens, in the same run; their sum over the faster one's is what both could give."
)
