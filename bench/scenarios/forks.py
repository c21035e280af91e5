"""Subagents that begin alike, at the same time: the beginning should be prefilled once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.figures import Figure, Measured, at_most
from bench.harness import prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples

FORKS = 4
SHARED_TOKENS, OWN_TOKENS = 2000, 64


def measure(runs: int) -> Measured:
    seen = Samples()
    with Daemon() as daemon, ThreadPoolExecutor(FORKS) as pool:
        daemon.warm()

        def ask(text: str) -> Heard:
            return daemon.chat([{"role": "user", "content": text}], 1)

        for run in range(runs):
            alone = ask(prompts.text(MODEL, 2000 + 10 * run, SHARED_TOKENS + OWN_TOKENS))
            begin = prompts.text(MODEL, 2001 + 10 * run, SHARED_TOKENS)
            own = [prompts.text(MODEL, 2002 + 10 * run + n, OWN_TOKENS) for n in range(FORKS)]
            together = list(pool.map(ask, (begin + each for each in own)))
            new = sum(int(each.usage["prompt_tokens"]) - each.cached for each in together)
            seen.add(alone=alone.began_s, last=max(each.began_s for each in together), new=new)
    return Measured(
        [
            Figure(
                f"{FORKS} prompts at once with {SHARED_TOKENS:,} tokens in common, the last one's TTFT as a "
                "share of one prompt's alone",
                "%",
                seen.ratios("last", "alone"),
                at_most(1.5),
                note=f"{max(seen['new'])} tokens at most were computed for all of them",
            ),
            Figure("TTFT, one prompt alone", "s", seen["alone"]),
            Figure(f"TTFT, the last of {FORKS}", "s", seen["last"]),
        ],
        f"Chats through HTTP: one prompt of {SHARED_TOKENS + OWN_TOKENS:,} tokens, then {FORKS} at the same "
        f"time that have their first {SHARED_TOKENS:,} in common and {OWN_TOKENS} of their own; answers of "
        "one token. TTFT runs from sending the request to the first frame of the answer in the client.",
    )
