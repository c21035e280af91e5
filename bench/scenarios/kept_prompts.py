"""Prompts on the disk: what a restart costs, and what keeping them costs everything else."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import prompts
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples

TOKENS = 4000
# Written while its answer is decoded.
BESIDE_TOKENS, ANSWER_TOKENS = 1500, 128
# New each time, so that all that keeping does is to look for them.
NEW_TOKENS, NEW_PROMPTS = 500, 3


def measure(runs: int) -> Measured:
    seen = Samples()
    for run in range(runs):
        _restart(run, seen)
    for run in range(runs):
        for side in alternated(run, ("kept", "off")):
            with Daemon(FLEETD_CACHE_DISK="on" if side == "kept" else "off") as daemon:
                daemon.warm()
                _beside(daemon, run, side, seen)
                _nothing_to_reuse(daemon, run, side, seen)
    return Measured(
        [
            Figure(
                f"After a restart the same {TOKENS:,} tokens, share of the cold TTFT",
                "%",
                seen.ratios("warm", "cold"),
                at_most(0.08),
            ),
            Figure("Tokens that were restored", "%", seen["restored"], at_least(0.95), of="worst"),
            Figure("Restarts with the same answer", "%", seen["same"], at_least(1.0), of="worst"),
            Figure("TTFT, cold", "s", seen["cold"]),
            Figure("TTFT, after the restart", "s", seen["warm"]),
            Figure("Reading from the disk", "ms", seen["restore_ms"]),
            Figure(
                "Decode while its prompt is written, share of decode with nothing kept",
                "%",
                seen.ratios("decode kept", "decode off"),
                at_least(0.98),
            ),
            Figure(
                f"TTFT of {NEW_TOKENS} new tokens, share of that with nothing kept",
                "%",
                seen.ratios("new kept", "new off"),
                at_most(1.005),
                note=f"median of {NEW_PROMPTS} prompts on either side of each run",
            ),
        ],
        f"The default model, prompts of token ids, greedy. A daemon reads {TOKENS:,} tokens and is stopped; "
        "another on the same home, whose model is loaded, reads the same again. Files come from the system's "
        "cache of pages. Then two daemons by turns, one that keeps prompts and one with `cache.disk` off: "
        f"{ANSWER_TOKENS} tokens decoded after a new prompt of {BESIDE_TOKENS:,}, whose blocks are written "
        "meanwhile, and new prompts of which the disk has nothing.",
    )


def _restart(run: int, seen: Samples) -> None:
    prompt = prompts.tokens(MODEL, 8000 + run, TOKENS)
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        home = Path(folder) / "h"
        with Daemon(home=home) as daemon:
            daemon.warm()
            cold = daemon.complete(prompt, 8)
        with Daemon(home=home) as daemon:
            daemon.warm()
            warm = daemon.complete(prompt, 8)
    seen.add(
        cold=cold.began_s,
        warm=warm.began_s,
        restored=warm.timings.get("restored_n", 0) / TOKENS,
        restore_ms=warm.timings.get("restore_ms", 0.0),
        same=float(cold.text == warm.text),
    )


def _beside(daemon: Daemon, run: int, side: str, seen: Samples) -> None:
    heard = daemon.complete(prompts.tokens(MODEL, 8100 + run, BESIDE_TOKENS), ANSWER_TOKENS)
    seen[f"decode {side}"].append(heard.rate)


def _nothing_to_reuse(daemon: Daemon, run: int, side: str, seen: Samples) -> None:
    asked = [
        daemon.complete(prompts.tokens(MODEL, 8200 + 10 * run + number, NEW_TOKENS), 1).began_s
        for number in range(NEW_PROMPTS)
    ]
    seen[f"new {side}"].append(sorted(asked)[len(asked) // 2])
