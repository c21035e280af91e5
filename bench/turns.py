"""A chat's second turn: only what is new should be prefilled."""

from __future__ import annotations

from bench import prompts
from bench.figures import Figure, Measured, at_most, ratios
from bench.throwaway import MODEL, Daemon

TITLE = "Second turn of a chat"
RUNS, QUICK_RUNS = 5, 1
FIRST_TOKENS = 3000
ANSWER_TOKENS = 32


def measure(runs: int) -> Measured:
    first: list[float] = []
    second: list[float] = []
    sizes: list[int] = []
    with Daemon() as daemon:
        daemon.warm()
        for run in range(runs):
            talk = [{"role": "user", "content": prompts.text(MODEL, 1000 + run, FIRST_TOKENS)}]
            with daemon.stream("chat/completions", messages=talk, max_tokens=ANSWER_TOKENS) as stream:
                opening = stream.hear()
            talk += [
                {"role": "assistant", "content": opening.text},
                {"role": "user", "content": "And what happened then?"},
            ]
            with daemon.stream("chat/completions", messages=talk, max_tokens=ANSWER_TOKENS) as stream:
                going_on = stream.hear()
            first.append(opening.began_s)
            second.append(going_on.began_s)
            cached = (going_on.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            sizes.append(int(going_on.usage["prompt_tokens"]) - int(cached))
    return Measured(
        [
            Figure(
                f"Second turn after {FIRST_TOKENS:,} tokens, share of the first turn's TTFT",
                "%",
                ratios(second, first),
                at_most(0.10),
                note=f"{max(sizes)} tokens at most were new to the prefix cache",
            ),
            Figure("TTFT, first turn", "s", first),
            Figure("TTFT, second turn", "s", second),
        ],
        f"A chat through HTTP: a first message of {FIRST_TOKENS:,} tokens, an answer of up to "
        f"{ANSWER_TOKENS}, then a short question with the whole history sent again. Each run has a text of "
        "its own. TTFT runs from sending the request to the first frame of the answer in the client.",
    )
