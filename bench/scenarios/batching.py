"""Eight answers at once against one at a time, and whether the company changes any of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.figures import Figure, Measured, alternated, at_least, ratios
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon

TOKENS = 96


def measure(runs: int) -> Measured:
    together: list[float] = []
    single: list[float] = []
    equal: list[float] = []
    with Daemon() as daemon, ThreadPoolExecutor(len(prompts.OPENINGS)) as clients:
        daemon.warm()
        for run in range(runs):
            # A number in front makes each run's prompts new to the prefix cache.
            asked = [prompts.encoded(MODEL, f"{run + 1}. {opening}") for opening in prompts.OPENINGS]
            answers: dict[str, list[Heard]] = {}
            for side in alternated(run, ("one", "eight")):
                if side == "one":
                    answers[side] = [daemon.complete(prompt, TOKENS) for prompt in asked]
                else:
                    answers[side] = list(clients.map(lambda prompt: daemon.complete(prompt, TOKENS), asked))
            single.append(_one_by_one(answers["one"]))
            together.append(_side_by_side(answers["eight"]))
            pairs = zip(answers["one"], answers["eight"], strict=True)
            equal.append(sum(a.text == b.text and a.count == b.count for a, b in pairs) / len(asked))
    return Measured(
        [
            Figure("Eight concurrent streams over one", "x", ratios(together, single), at_least(1.5)),
            Figure("Decode, eight streams together", "tok/s", together),
            Figure("Decode, one stream", "tok/s", single),
            Figure(
                "Concurrent answers equal to the same request alone",
                "%",
                equal,
                at_least(1.0),
                of="worst",
                note=f"{len(prompts.OPENINGS) * runs} pairs of answers compared, text and token count",
            ),
        ],
        f"Eight different prompts of 9 to 21 tokens, greedy, up to {TOKENS} tokens each, through HTTP: "
        "alone one after the other, and all at once. Together: all tokens but each answer's first, over "
        "the time from the very first token of any to the very last; so late starters and early finishers "
        "count against it. One: the same sum over the eight lone answers' own times. Which side goes first "
        "changes from run to run.",
    )


def _one_by_one(answers: list[Heard]) -> float:
    steps = sum(answer.count - 1 for answer in answers)
    return steps / sum(answer.text_s[-1] - answer.text_s[0] for answer in answers)


def _side_by_side(answers: list[Heard]) -> float:
    steps = sum(answer.count - 1 for answer in answers)
    begun = min(answer.sent + answer.text_s[0] for answer in answers)
    ended = max(answer.sent + answer.text_s[-1] for answer in answers)
    return steps / (ended - begun)
