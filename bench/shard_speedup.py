"""Two machines that are alike: how much sooner the first token comes, and that nothing is lost afterwards."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from functools import cache

from bench import prompts
from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.shard_ceiling import ceiling, step_s
from bench.shard_machines import HELPER, HOME, Asked, Machines
from bench.throwaway import MODEL

LENGTHS = (2000, 4000)
_BARS = {2000: at_least(1.6), 4000: at_least(1.7)}
_ANSWER_TOKENS = 96
_HANDED_OFF = "exposed hand-off"
# What the cores give to two at once is a property of the machine; a few looks are enough.
_MOST_TOGETHER = 3


@dataclass
class _Seen:
    alone_s: list[float] = field(default_factory=list)
    shared_s: list[float] = field(default_factory=list)
    gained: list[float] = field(default_factory=list)
    of_ceiling: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    how: list[str] = field(default_factory=list)


@dataclass
class _Both:
    together: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    decode_whole: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)


def measure(runs: int) -> Measured:
    seen, both = {length: _Seen() for length in LENGTHS}, _Both()
    with Machines() as machines:
        for run in range(runs):
            for length in LENGTHS:
                _one(machines, run, length, seen[length], both)
        for run in range(min(runs, _MOST_TOGETHER)):
            both.together.append(_together(machines, run))
    return Measured(_figures(seen, both), _HOW)


@cache
def model_layers() -> int:
    return int(json.loads((MODEL / "config.json").read_text())["num_hidden_layers"])


def _one(machines: Machines, run: int, length: int, seen: _Seen, both: _Both) -> None:
    prompt = prompts.tokens(MODEL, 31_000 + 100 * run + length, length)
    found: dict[bool, Asked] = {}

    def each() -> None:
        both.connections.append(machines.worker_connections())

    for alone in alternated(run, (True, False)):
        found[alone] = machines.ask(prompt, alone=alone, answer_tokens=_ANSWER_TOKENS, each=each)
    alone, shared = found[True], found[False]
    seen.alone_s.append(alone.ttft_s)
    seen.shared_s.append(shared.ttft_s)
    seen.gained.append(alone.ttft_s / shared.ttft_s)
    seen.how.append(shared.how)
    both.same.append(float((alone.heard.text, alone.heard.count) == (shared.heard.text, shared.heard.count)))
    if shared.trace is not None and shared.trace.chosen.kind in ("layers", "tokens"):
        seen.of_ceiling.append(seen.gained[-1] / ceiling(shared.trace, model_layers()))
    if shared.shared and shared.trace is not None:
        seen.exposed.append(step_s(shared.trace, _HANDED_OFF, "this") / shared.ttft_s)
        both.decode.append(shared.heard.steady_rate / alone.heard.steady_rate)
        both.decode_whole.append(shared.heard.rate / alone.heard.rate)


def _together(machines: Machines, run: int) -> float:
    """Work per time of both workers at once, each with its own prompt, over that of one at a time."""
    length = LENGTHS[0]
    prompt = prompts.tokens(MODEL, 32_000 + run, length)
    one_s = {name: machines.ask(prompt, alone=True, at=name).ttft_s for name in (HOME, HELPER)}
    at_once: dict[str, float] = {}

    def ask(name: str) -> None:
        at_once[name] = machines.ask(prompt, alone=True, at=name).ttft_s

    threads = [threading.Thread(target=ask, args=(name,)) for name in one_s]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(one_s[name] / at_once[name] for name in one_s)


def _figures(seen: dict[int, _Seen], both: _Both) -> list[Figure]:
    figures = []
    for length in reversed(LENGTHS):
        one, title = seen[length], f"{length:,} tokens"
        if not one.of_ceiling or not one.exposed:
            raise RuntimeError(f"no prompt of {title} was shared: {'; '.join(one.how)}")
        figures += [
            Figure(
                f"Two machines over one, TTFT at {title}", "x", one.gained, _BARS[length], note=_told(one.how)
            ),
            Figure(f"Share of that split's ceiling, {title}", "%", one.of_ceiling, at_least(0.92)),
            Figure(f"Hand-off not hidden by work, share of TTFT, {title}", "%", one.exposed, at_most(0.03)),
            Figure(f"TTFT of one machine, {title}", "s", one.alone_s),
            Figure(f"TTFT of two machines, {title}", "s", one.shared_s),
        ]
    decode = "Decode after a shared prefill, share of decode after a local one"
    same = "Answers of two machines equal to one's"
    return [
        *figures,
        Figure(decode, "%", both.decode, at_least(0.98), note="by the usual time from token to token"),
        Figure("The same from the first token to the last", "%", both.decode_whole),
        Figure(same, "%", both.same, at_least(1), of="worst"),
        Figure(
            "Connections of the worker to other machines while it decodes",
            "count",
            [float(max(both.connections))],
            at_most(0),
            note=f"the most at any of {len(both.connections):,} tokens; without one nothing can cross",
        ),
        Figure("Both workers' own prompts at once over one after the other", "x", both.together),
    ]


def _told(how: list[str]) -> str:
    return "the planner's choices: " + "; ".join(f"{how.count(one)} x {one}" for one in dict.fromkeys(how))


_HOW = (
    "Alike: two daemons on loopback, whose workers compute on one core each; prompts of token ids through "
    "HTTP, each asked twice, once kept to this machine and once not, in turns, with an answer of "
    f"{_ANSWER_TOKENS} greedy tokens. The planner chooses the split. TTFT runs from sending the request to "
    "the first frame of the answer in the client. The prefix cache is off, so that the same prompt can be "
    "asked again. Both prefill in chunks of 256 tokens, alone as together: by itself a slow core takes "
    "smaller ones, not to keep others waiting, and pays for each, which would make sharing look better "
    "than it is. The ceiling of layers is 2m / (m + 1) for m chunks, that of tokens 2L / (L + 1) for L "
    "layers: what is lost while the first step of all is made; it knows nothing of chunks that cost "
    "more the later they are, nor of cores that slow each other. The last row tells that: each worker "
    "gets a prompt "
    f"of {LENGTHS[0]:,} tokens, alone and both at once; 2 is two cores that do not feel each other."
)
