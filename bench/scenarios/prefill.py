"""Prefill of a long prompt on the CPU against llama.cpp, and against mlx-lm, cured and as it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import os

from bench.figures import Figure, Measured, alternated, at_least
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL, Daemon
from bench.harness.gguf_file import gguf
from bench.harness.samples import Samples

QUICK_RUNS = 1
LONG_TOKENS = 4000
DECODE_TOKENS = 128
# Stock MLX multiplies quantised weights at about four seconds a token, dequantised ones at a tenth of one.
STOCK = {"stock": 16, "stock-f16": 512, "stock-f32": 512}
QUICK_STOCK = {"stock": 8, "stock-f16": 128, "stock-f32": 128}
_SHARED_TOKENS = 4
# One for every prompt of this process.
_SEEDS = itertools.count(2000)
_NAMES = {
    "stock": "stock mlx-lm",
    "stock-f16": "stock mlx-lm on f16 weights",
    "stock-f32": "stock mlx-lm on f32 weights",
}


def measure(runs: int) -> Measured:
    if importlib.util.find_spec("xllamacpp") is None:
        raise RuntimeError("llama.cpp's wheel is missing: pip install -e '.[bench]'")
    # A single run is a quick look.
    quick = runs <= QUICK_RUNS
    with Daemon() as daemon:
        daemon.warm()
        figures = _against_llama(daemon, runs) + _against_cured(daemon, runs)
        figures += _against_stock(daemon, QUICK_STOCK if quick else STOCK)
        if not quick:
            figures += _against_stock(daemon, {"stock-f16": LONG_TOKENS})
    return Measured(
        figures,
        f"Time from sending a prompt of {LONG_TOKENS:,} tokens through HTTP to the first token in the "
        "client, against llama.cpp's (the wheel `xllamacpp`, in process, no HTTP) on the GGUF file that "
        f"the default model was imported from, {_threads()} threads both. The wheel is built for AVX2, "
        "not for what this processor may have beyond it. Every run has a prompt of its own and neither "
        f"side may reuse another's. Decode: {DECODE_TOKENS} tokens after a short prompt, from f32 weights "
        "here and 4-bit weights there; stated as it is.\n\nmlx-lm with the cures is "
        "`mlx_lm.stream_generate` in one process, without HTTP, on the same f32 weights and with the same "
        "products: what is left is what fleetd's chunks, daemon and HTTP cost. Both get the same prompt, in "
        "turn; each run has another one.\n\nStock mlx-lm is `mlx_lm.stream_generate` in "
        "MLX as pip installs it: its own BLAS, nothing of `fleetd/engine/cpu/products.py`. Its quantised "
        "products take seconds a token, so with the weights as they are on disk it is run once on a short "
        f"prompt, not on {LONG_TOKENS:,} tokens, and compared to fleetd on prompts of the same length; how "
        "the ratio goes on from there is not measured. Dequantised weights, which mlx-lm does not make by "
        f"itself, are faster: f16 also runs the full {LONG_TOKENS:,} tokens, except in a quick look.",
    )


def _prefill_rate(daemon: Daemon, prompt: list[int]) -> float:
    """Tokens per second up to the first one of the answer, of a prompt that is new to the daemon."""
    heard = daemon.complete(prompt, 1)
    # Two texts may begin with the same word or two.
    if heard.cached > _SHARED_TOKENS:
        raise RuntimeError(f"{heard.cached} tokens of the prompt came from the prefix cache")
    return len(prompt) / heard.began_s


def _threads() -> int:
    return os.cpu_count() or 1


def _against_llama(daemon: Daemon, runs: int) -> list[Figure]:
    opening = prompts.encoded(MODEL, prompts.OPENINGS[1])
    seen = Samples()
    with Child("llama_cpp", str(gguf()), str(_threads())) as llama:
        llama.ask(tokens=opening, max_tokens=8)
        for run in range(runs):
            long = prompts.tokens(MODEL, next(_SEEDS), LONG_TOKENS)
            for side in alternated(run, ("ours", "theirs")):
                if side == "ours":
                    seen.add(prefill=_prefill_rate(daemon, long))
                    seen.add(decode=daemon.complete(opening, DECODE_TOKENS).rate)
                else:
                    said = llama.ask(tokens=long, max_tokens=1)
                    if said["prompt_n"] != LONG_TOKENS:
                        raise RuntimeError(f"llama.cpp prefilled {said['prompt_n']} tokens of {LONG_TOKENS}")
                    seen.add(their_prefill=LONG_TOKENS / said["wall_s"])
                    said = llama.ask(tokens=opening, max_tokens=DECODE_TOKENS)
                    seen.add(their_decode=(said["predicted_n"] - 1) / said["decode_s"])
    prefill = f"Prefill of {LONG_TOKENS:,} tokens"
    return [
        Figure(f"{prefill} over llama.cpp", "x", seen.ratios("prefill", "their_prefill"), at_least(1.1)),
        Figure(prefill, "tok/s", seen["prefill"]),
        Figure(f"{prefill}, llama.cpp", "tok/s", seen["their_prefill"]),
        Figure("Decode over llama.cpp", "x", seen.ratios("decode", "their_decode")),
        Figure("Decode", "tok/s", seen["decode"]),
        Figure("Decode, llama.cpp", "tok/s", seen["their_decode"]),
    ]


def _against_cured(daemon: Daemon, runs: int) -> list[Figure]:
    seen = Samples()
    with Child("mlx_lm", "cured", str(MODEL)) as cured:
        cured.ask(tokens=prompts.tokens(MODEL, 1, 2), max_tokens=1)
        for run in range(runs):
            prompt = prompts.tokens(MODEL, next(_SEEDS), LONG_TOKENS)
            for side in alternated(run, ("ours", "theirs")):
                if side == "ours":
                    seen.add(ours=_prefill_rate(daemon, prompt))
                else:
                    seen.add(theirs=LONG_TOKENS / cured.ask(tokens=prompt, max_tokens=1)["times"][0])
    name = f"Prefill of {LONG_TOKENS:,} tokens"
    return [
        Figure(f"{name} over mlx-lm with the cures", "x", seen.ratios("ours", "theirs"), at_least(0.97)),
        Figure(f"{name}, beside mlx-lm with the cures", "tok/s", seen["ours"]),
        Figure(f"{name}, mlx-lm with the cures", "tok/s", seen["theirs"]),
    ]


def _against_stock(daemon: Daemon, lengths: dict[str, int]) -> list[Figure]:
    figures: list[Figure] = []
    for mode, count in lengths.items():
        prompt = prompts.tokens(MODEL, 3000 + count, count)
        with Child("mlx_lm", mode, str(MODEL)) as stock:
            stock.ask(tokens=prompts.tokens(MODEL, 1, 2), max_tokens=1)
            theirs = count / stock.ask(tokens=prompt, max_tokens=1)["times"][0]
        # The same length, other words each time; anything else would come from the prefix cache.
        ours = [_prefill_rate(daemon, prompts.tokens(MODEL, next(_SEEDS), count)) for _ in range(3)]
        name = _NAMES[mode]
        bar = at_least(5.0) if mode == "stock" or count == LONG_TOKENS else None
        middle = sorted(ours)[1]
        figures += [
            Figure(
                f"Prefill over {name}, {count:,} tokens",
                "x",
                [middle / theirs],
                bar,
                note="one run of stock, the median of three of fleetd"
                + ("" if count == LONG_TOKENS else f"; not the {LONG_TOKENS:,} tokens of the promise"),
            ),
            Figure(f"Prefill of {count:,} tokens, {name}", "tok/s", [theirs]),
            Figure(f"Prefill of {count:,} tokens, fleetd", "tok/s", ours),
        ]
    return figures
