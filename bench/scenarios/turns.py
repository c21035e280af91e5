"""A chat's second turn: only what is new should be prefilled."""

from __future__ import annotations

from bench.figures import Figure, Measured, at_most
from bench.harness import prompts
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples

FIRST_TOKENS = 3000
ANSWER_TOKENS = 32


def measure(runs: int) -> Measured:
    seen = Samples()
    with Daemon() as daemon:
        daemon.warm()
        for run in range(runs):
            talk = [{"role": "user", "content": prompts.text(MODEL, 1000 + run, FIRST_TOKENS)}]
            opening = daemon.chat(talk, ANSWER_TOKENS)
            talk += [
                {"role": "assistant", "content": opening.text},
                {"role": "user", "content": "And what happened then?"},
            ]
            going_on = daemon.chat(talk, ANSWER_TOKENS)
            new = int(going_on.usage["prompt_tokens"]) - going_on.cached
            seen.add(first=opening.began_s, second=going_on.began_s, new=new)
    return Measured(
        [
            Figure(
                f"Second turn after {FIRST_TOKENS:,} tokens, share of the first turn's TTFT",
                "%",
                seen.ratios("second", "first"),
                at_most(0.10),
                note=f"{max(seen['new'])} tokens at most were new to the prefix cache",
            ),
            Figure("TTFT, first turn", "s", seen["first"]),
            Figure("TTFT, second turn", "s", seen["second"]),
        ],
        f"A chat through HTTP: a first message of {FIRST_TOKENS:,} tokens, an answer of up to "
        f"{ANSWER_TOKENS}, then a short question with the whole history sent again. Each run has a text of "
        "its own. TTFT runs from sending the request to the first frame of the answer in the client.",
    )
