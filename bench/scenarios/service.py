"""The daemon as a service: how fast it is there, how small, how soon it speaks, and how it takes trouble."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from bench.figures import Figure, Measured, at_most
from bench.harness import prompts, random_llama
from bench.harness.child import ROOT
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples
from fleetd.models.catalog import DEFAULT_MODEL

LONG_TOKENS = 4000
# A long prompt takes a quarter of a minute: fewer of these than of the rest.
_LONG_RUNS = 3
_QUEUED_S = 10.0
# 270 million parameters.
_LARGER = "larger"
_LARGER_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3904,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
_SHORT = [{"role": "user", "content": "Say hello."}]


def measure(runs: int) -> Measured:
    seen = Samples()
    long_runs = min(runs, _LONG_RUNS)
    for run in range(runs):
        with Daemon() as daemon:
            memory = psutil.Process(daemon.process.pid).memory_info().rss
            seen.add(ready_s=daemon.ready_s, rss_mb=memory / 1e6, status_ms=1000 * _status_s(daemon.home))
            if run < long_runs:
                _long_prompts(daemon, run, seen)
    # One stream at a time, so that a second request gets its turn exactly when the first one's slot is free.
    with Daemon(FLEETD_ENGINE_MAX_STREAMS="1") as daemon:
        daemon.warm()
        for run in range(long_runs):
            long = prompts.tokens(MODEL, 6000 + run, LONG_TOKENS)
            # Deeper in the prompt the engine's steps take longer: not always at its easy beginning.
            seen.add(cancel_prefill_s=_cancelled(daemon, long, run, ": keepalive ", 3 + 5 * run))
            seen.add(cancel_decode_s=_cancelled(daemon, long[:50], run + 500, "data: ", 5))
        for run in range(long_runs):
            _killed(daemon, prompts.tokens(MODEL, 7000 + run, 200), seen)
        for _ in range(runs):
            daemon.control("POST", "/fleet/v1/models/unload", {"model": DEFAULT_MODEL})
            seen.add(second_s=daemon.chat(_SHORT, 4).began_s)
    for _ in range(long_runs):
        with (
            tempfile.TemporaryDirectory(prefix="fleetd-bench-") as empty,
            Daemon(models=Path(empty)) as daemon,
        ):
            seen.add(first_s=daemon.chat(_SHORT, 4).began_s)
    _load_larger(long_runs, seen)
    return Measured(_figures(seen), _HOW)


def _status_s(home: Path) -> float:
    """`fleetctl status` from the start of its process to its end."""
    fleetctl = Path(sys.executable).with_name("fleetctl")
    begun = time.perf_counter()
    command = [str(fleetctl), "--home", str(home), "status"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    took_s = time.perf_counter() - begun
    if "ready" not in done.stdout:
        raise RuntimeError(f"fleetctl status said:\n{done.stdout}{done.stderr}")
    return took_s


def _long_prompts(daemon: Daemon, run: int, seen: Samples) -> None:
    """A long prompt that also has to load the model, then one that finds it loaded."""
    cold, loaded = (_ask_long(daemon, seed + 2 * run) for seed in (5000, 5001))
    seen.add(cold_headers_ms=1000 * cold.headers_s, cold_gap_s=cold.gap_s)
    seen.add(headers_ms=1000 * loaded.headers_s, gap_s=loaded.gap_s)


def _ask_long(daemon: Daemon, seed: int) -> Heard:
    return daemon.chat([{"role": "user", "content": prompts.text(MODEL, seed, LONG_TOKENS)}], 4)


def _cancelled(daemon: Daemon, prompt: list[int], seed: int, until: str, lines: int) -> float:
    """Seconds from a client's leaving to the start of a request that waited for its slot.

    The client leaves after so many ``lines`` that begin with ``until``.
    """
    queued = threading.Event()

    def wait() -> float:
        with daemon.stream("completions", prompt=prompts.tokens(MODEL, seed, 8), max_tokens=1) as waiting:
            queued.set()
            heard = waiting.hear()
            return heard.sent + heard.beside_s

    with (
        ThreadPoolExecutor(1) as aside,
        daemon.stream("completions", prompt=prompt, max_tokens=512) as leaving,
    ):
        beyond = (frame for frame in leaving.frames() if frame.line.startswith(until))
        for _ in range(lines):
            next(beyond)
        behind = aside.submit(wait)
        queued.wait(_QUEUED_S)
        # Accepted is not yet queued: let the worker see it.
        time.sleep(0.2)
        left = time.perf_counter()
        leaving.close()
        return behind.result() - left


def _killed(daemon: Daemon, prompt: list[int], seen: Samples) -> None:
    """Seconds from SIGKILL to the error in the stream, and from there to the next request's first token."""
    with daemon.stream("completions", prompt=prompt, max_tokens=512) as stream:
        frames = stream.frames()
        next(frame for frame in frames if frame.text)
        os.kill(daemon.status()["engines"][0]["pid"], signal.SIGKILL)
        killed = time.perf_counter()
        error = next(frame for frame in frames if frame.data is not None and "error" in frame.data)
        seen.add(killed_s=stream.sent + error.at_s - killed)
        assert error.data is not None
        if not error.data["error"].get("code"):
            raise RuntimeError(f"the error has no code: {error.line}")
    seen.add(after_s=daemon.complete(prompt, 4).began_s)


def _load_larger(runs: int, seen: Samples) -> None:
    """First token after a larger model's first load on a home, and after its second."""
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        random_llama.build(Path(folder) / _LARGER, _LARGER_SHAPE)
        for _ in range(runs):
            with Daemon(models=Path(folder)) as daemon:
                seen.add(larger_first_s=daemon.chat(_SHORT, 4, model=_LARGER).began_s)
                daemon.control("POST", "/fleet/v1/models/unload", {"model": _LARGER})
                seen.add(larger_second_s=daemon.chat(_SHORT, 4, model=_LARGER).began_s)


def _figures(seen: Samples) -> list[Figure]:
    before = "Response headers, the same before the model is loaded"
    prefill = "Slot free after the client left, in prefill"
    decode = "Slot free after the client left, in decode"
    return [
        Figure("Daemon ready", "s", seen["ready_s"], at_most(0.4)),
        Figure("Resident memory before a model loads", "MB", seen["rss_mb"], at_most(64)),
        Figure("`fleetctl status`, start to exit", "ms", seen["status_ms"], at_most(200)),
        Figure("Response headers, 4,000-token prompt", "ms", seen["headers_ms"], at_most(50)),
        Figure(before, "ms", seen["cold_headers_ms"], at_most(50)),
        Figure("Longest silence during that prefill", "s", seen["gap_s"], at_most(5.0), of="worst"),
        Figure("Longest silence, loading included", "s", seen["cold_gap_s"], at_most(5.0), of="worst"),
        Figure(prefill, "s", seen["cancel_prefill_s"], at_most(1.0), of="worst"),
        Figure(decode, "s", seen["cancel_decode_s"], at_most(1.0), of="worst"),
        Figure("Typed error after the worker is killed", "s", seen["killed_s"], at_most(2.0), of="worst"),
        Figure("First token of the next request, worker started again", "s", seen["after_s"], at_most(4.0)),
        Figure("First token of a short chat, second load of the model", "s", seen["second_s"], at_most(2.5)),
        Figure("First token of a new home's first chat", "s", seen["first_s"], at_most(15.0)),
        Figure(f"{_LARGER_FIRST}, first load", "s", seen["larger_first_s"], at_most(15.0)),
        Figure(f"{_LARGER_FIRST}, second load", "s", seen["larger_second_s"], at_most(5.0)),
    ]


_LARGER_FIRST = "First token of a short chat, model of 270M parameters in f16"
_HOW = (
    "Each run starts a daemon on a fresh home. Ready: from starting the process to the first status that "
    "says so, asked every 2 ms. Memory: resident set of the daemon process, then. Headers: from "
    f"connecting's end to the end of the response's headers, for a streamed chat of {LONG_TOKENS:,} tokens. "
    "Silence: the longest time without a byte from the request to the end of the answer. A slot is free "
    "when a request that was queued behind it, on a daemon with a single slot, starts to be computed: its "
    "first token's arrival less its own prefill. In prefill the client leaves at three depths of the "
    "prompt, because a leaving client waits for the engine's step to end. The worker is killed with "
    "SIGKILL in the middle of an answer. For the second load the model is unloaded, and the next chat waits "
    "for it. A new home has no model yet: its first chat waits until the default model is downloaded from "
    "the package index, or from pip's cache of it, imported, loaded and measured. The model of 270M "
    "parameters is a llama with random weights; its file is in the system's cache."
)
