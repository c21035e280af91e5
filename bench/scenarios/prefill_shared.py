"""Two machines that are alike: how much sooner the first token comes, and that nothing is lost afterwards."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from bench.figures import Figure, Measured, at_least, at_most
from bench.harness import prompts
from bench.harness.daemon import MODEL
from bench.harness.machines import HELPER, HOME, Machines
from bench.harness.samples import Samples
from bench.scenarios.prefill_ceiling import HOME as HOME_NAME
from bench.scenarios.prefill_ceiling import ceiling, handed_off_s, later_check_s, step_s
from fleetd.plan.prefill import step_names

LENGTHS = (2000, 4000)
_BARS = {2000: at_least(1.6), 4000: at_least(1.7)}
_ANSWER_TOKENS = 96
# What the cores give to two at once is a property of the machine; a few looks are enough.
_MOST_TOGETHER = 3


def measure(runs: int) -> Measured:
    seen, how = Samples(), {length: list[str]() for length in LENGTHS}
    with Machines() as machines:
        for run in range(runs):
            for length in LENGTHS:
                how[length].append(_one(machines, run, length, seen))
        for run in range(min(runs, _MOST_TOGETHER)):
            seen.add(together=_together(machines, run))
    return Measured(_figures(seen, how), _HOW)


@cache
def model_layers() -> int:
    return int(json.loads((MODEL / "config.json").read_text())["num_hidden_layers"])


def _one(machines: Machines, run: int, length: int, seen: Samples) -> str:
    def each() -> None:
        seen["connections"].append(machines.worker_connections())

    alone, shared = machines.both(run, 31_000 + 100 * run + length, length, _ANSWER_TOKENS, each)
    gained, trace = alone.ttft_s / shared.ttft_s, shared.trace
    seen[length, "alone_s"].append(alone.ttft_s)
    seen[length, "shared_s"].append(shared.ttft_s)
    seen[length, "gained"].append(gained)
    seen.add(same=float((alone.heard.text, alone.heard.count) == (shared.heard.text, shared.heard.count)))
    if trace is not None and trace.chosen.kind in ("layers", "tokens"):
        seen[length, "of_ceiling"].append(gained / ceiling(trace, model_layers()))
    if shared.shared and trace is not None:
        seen[length, "handed_off"].append(handed_off_s(trace, model_layers()) / shared.ttft_s)
        seen[length, "checked"].append(later_check_s(trace) / shared.ttft_s)
        made = step_s(trace, step_names.LATER_CHECK, HOME_NAME)
        seen[length, "made"].append(float(made > 0))
        seen.add(decode=shared.heard.steady_rate / alone.heard.steady_rate)
        seen.add(decode_whole=shared.heard.rate / alone.heard.rate)
    return shared.how


def _together(machines: Machines, run: int) -> float:
    """Work per time of both workers at once, each with its own prompt, over that of one at a time."""
    prompt = prompts.tokens(MODEL, 32_000 + run, LENGTHS[0])

    def ask(name: str) -> float:
        return machines.ask(prompt, alone=True, at=name).ttft_s

    names = (HOME, HELPER)
    one_s = [ask(name) for name in names]
    with ThreadPoolExecutor(len(names)) as clients:
        return sum(one / both for one, both in zip(one_s, clients.map(ask, names), strict=True))


def _figures(seen: Samples, how: dict[int, list[str]]) -> list[Figure]:
    figures = []
    for length in reversed(LENGTHS):
        title = f"{length:,} tokens"
        if not seen[length, "of_ceiling"] or not seen[length, "handed_off"]:
            raise RuntimeError(f"no prompt of {title} was shared: {'; '.join(how[length])}")
        chosen = "; ".join(f"{how[length].count(one)} x {one}" for one in dict.fromkeys(how[length]))
        names = ("gained", "of_ceiling", "handed_off", "checked")
        gained, of_ceiling, handed_off, checked = (seen[length, name] for name in names)
        figures += [
            Figure(
                f"Two machines over one, TTFT at {title}",
                "x",
                gained,
                _BARS[length],
                note=f"the planner's choices: {chosen}",
            ),
            Figure(f"Share of that split's ceiling, {title}", "%", of_ceiling, at_least(0.92)),
            Figure(
                f"Idle while rows are on their way, share of TTFT, {title}", "%", handed_off, at_most(0.03)
            ),
            Figure(
                f"Check of later tokens of the helper on average, share of TTFT, {title}",
                "%",
                checked,
                at_most(0.01),
                note=f"made in {sum(seen[length, 'made']):.0f} of {len(checked)} prompts",
            ),
            Figure(f"TTFT of one machine, {title}", "s", seen[length, "alone_s"]),
            Figure(f"TTFT of two machines, {title}", "s", seen[length, "shared_s"]),
        ]
    return [
        *figures,
        Figure(
            "Decode after a shared prefill, share of decode after a local one",
            "%",
            seen["decode"],
            at_least(0.98),
            note="by the usual time from token to token",
        ),
        Figure("The same from the first token to the last", "%", seen["decode_whole"]),
        Figure("Answers of two machines equal to one's", "%", seen["same"], at_least(1), of="worst"),
        Figure(
            "Connections of the worker to other machines while it decodes",
            "count",
            [max(seen["connections"])],
            at_most(0),
            note=f"the most at any of {len(seen['connections']):,} tokens; without one nothing can cross",
        ),
        Figure("Both workers' own prompts at once over one after the other", "x", seen["together"]),
    ]


_HOW = (
    "Alike: two daemons on loopback, whose workers compute on one core each; prompts of token ids through "
    "HTTP, each asked twice, once kept to this machine and once not, in turns, with an answer of "
    f"{_ANSWER_TOKENS} greedy tokens. The planner chooses the split. TTFT runs from sending the request to "
    "the first frame of the answer in the client. The prefix cache is off, so that the same prompt can be "
    "asked again. Both prefill in chunks of 256 tokens, alone as together: by itself a slow core takes "
    "smaller ones, not to keep others waiting, and pays for each, which would make sharing look better "
    "than it is. The ceiling of layers is 2m / (m + 1) for m chunks, that of tokens 2L / (L + 1) for L "
    "layers: what is lost while the first step of all is made; it knows nothing of chunks that cost "
    "more the later they are, nor of cores that slow each other. The check of later tokens is left out by "
    "chance where it would take more than its share: its time counts by how probable it was, or, where it "
    "was left out, the first check's time. Idle is home where it waits for rows longer "
    "than the helper's own work explains, by the step times of both: its first piece, or what it has to do "
    "more than home. The last row tells that: each worker "
    "gets a prompt "
    f"of {LENGTHS[0]:,} tokens, alone and both at once; 2 is two cores that do not feel each other."
)
