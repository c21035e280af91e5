"""Prompts on the disk: what a restart costs, and what keeping them costs everything else."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from bench.figures import Figure, Measured, alternated, at_least, at_most
from bench.harness import page_cache, prompts
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd import limits

TOKENS = 4000
# Written while its answer is decoded; so many turns for each run.
BESIDE_TOKENS, ANSWER_TOKENS, TURNS = 1500, 128, 4
# New each time, so that all that keeping does is to look for them, here and on another machine.
NEW_TOKENS = 2000
_BLOCK, _WITHIN_S = limits.CACHE_BLOCK_TOKENS, 120.0
# What a restore may take besides its bytes, and how fast it must read these.
_FIXED_MS, _BYTES_PER_MS = 50.0, 1e6


def measure(runs: int) -> Measured:
    seen = Samples()
    for run in range(runs):
        _restart(run, seen)
    with Daemon(FLEETD_CACHE_DISK="on") as kept, Daemon(FLEETD_CACHE_DISK="off") as off:
        for daemon in (kept, off):
            daemon.warm()
        for turn in range(TURNS * runs):
            for side in alternated(turn, ("kept", "off")):
                _beside(kept if side == "kept" else off, turn, side, seen)
            # Nothing is written beside the next turn of the other one.
            whole = (turn + 1) * (BESIDE_TOKENS // _BLOCK * _BLOCK)
            _until_written(kept, whole)
    with Fleet(["asked", "beside"]) as fleet:
        fleet.start_all()
        fleet["asked"].warm()
        for run in range(runs):
            _nothing_to_reuse(fleet["asked"], run, seen)
    return Measured(_figures(seen), _HOW)


def _restart(run: int, seen: Samples) -> None:
    prompt = prompts.tokens(MODEL, 8000 + run, TOKENS)
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        home = Path(folder) / "h"
        with Daemon(home=home) as daemon:
            daemon.warm()
            cold = daemon.complete(prompt, 8)
        with Daemon(home=home) as daemon:
            daemon.warm()
            page_cache.bring(home / "cache" / "kv" / "blocks", "warm")
            before = _models(daemon, "read_bytes")
            warm = daemon.complete(prompt, 8)
            n_bytes = _models(daemon, "read_bytes") - before
    restore_ms = warm.timings.get("restore_ms", 0.0)
    seen.add(
        cold=cold.began_s,
        warm=warm.began_s,
        restored=warm.timings.get("restored_n", 0) / TOKENS,
        restore_ms=restore_ms,
        bound=restore_ms / (n_bytes / _BYTES_PER_MS + _FIXED_MS),
        same=float(cold.text == warm.text),
    )


def _models(daemon: Daemon, name: str) -> int:
    """A figure of the disk cache, over all models."""
    return sum(int(model[name]) for model in json.loads(daemon.control("GET", "/fleet/v1/cache"))["models"])


def _written(daemon: Daemon) -> int:
    return _models(daemon, "block_tokens")


def _until_written(daemon: Daemon, tokens: int) -> None:
    wait_for(lambda: _written(daemon) >= tokens, _WITHIN_S, 0.05, daemon.log)


def _beside(daemon: Daemon, turn: int, side: str, seen: Samples) -> None:
    heard = daemon.complete(prompts.tokens(MODEL, 8100 + turn, BESIDE_TOKENS), ANSWER_TOKENS)
    seen[f"decode {side}"].append(heard.rate)


def _nothing_to_reuse(daemon: Daemon, run: int, seen: Samples) -> None:
    before = _looked_s(daemon)
    heard = daemon.complete(prompts.tokens(MODEL, 8600 + run, NEW_TOKENS), 1)
    looked_s = _looked_s(daemon) - before
    seen.add(looked=looked_s / heard.began_s, looked_ms=looked_s * 1000)


def _looked_s(daemon: Daemon) -> float:
    """How long prompts have waited to hear that there is nothing of them."""
    shown = daemon.control("GET", "/metrics").decode()
    found = re.findall(r"^fleetd_kept_lookup_seconds_sum\{.*\} (\S+)$", shown, re.MULTILINE)
    return sum(float(value) for value in found)


def _figures(seen: Samples) -> list[Figure]:
    return [
        Figure(
            f"After a restart the same {TOKENS:,} tokens, share of the cold TTFT",
            "%",
            seen.ratios("warm", "cold"),
            at_most(0.08),
        ),
        Figure(
            "Reading them, share of their bytes at 1 GB/s and 50 ms",
            "%",
            seen["bound"],
            at_most(1.0),
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
            f"Looking for {NEW_TOKENS:,} new tokens here and on another machine, share of their TTFT",
            "%",
            seen["looked"],
            at_most(0.005),
        ),
        Figure("Looking for them", "ms", seen["looked_ms"]),
    ]


_HOW = (
    f"The default model, prompts of token ids, greedy. A daemon reads {TOKENS:,} tokens and is stopped; "
    "another on the same home, whose model is loaded, reads the same again; its files are read before, "
    "so that the system has them in memory. Then two daemons at the same time, one that keeps prompts "
    f"and one with `cache.disk` off, {TURNS} short turns of either for each run: {ANSWER_TOKENS} tokens "
    f"decoded after a new prompt of {BESIDE_TOKENS:,}, whose blocks are written meanwhile; the shares "
    "are formed turn by turn. Then two machines of a fleet, of which one is asked new prompts: "
    "`fleetd_kept_lookup_seconds` of its `/metrics` says how long these waited to hear that nothing of "
    "them is kept, before they were placed, of its own disk and of the other machine."
)
