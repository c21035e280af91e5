"""Streaming decode through the daemon and HTTP against mlx-lm alone: what the layers in between cost."""

from __future__ import annotations

from bench.figures import Figure, Measured, alternated, at_least, ratios
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL, Daemon

TOKENS = 128


def measure(runs: int) -> Measured:
    prompt = prompts.encoded(MODEL, prompts.OPENINGS[1])
    served: list[float] = []
    alone: list[float] = []
    same: list[float] = []
    with Daemon() as daemon:
        daemon.warm()
        with Child("mlx_lm", "cured", str(MODEL)) as raw:
            raw.ask(tokens=prompt, max_tokens=8)
            for run in range(runs):
                texts: dict[str, str] = {}
                for side in alternated(run, ("http", "raw")):
                    if side == "http":
                        heard = daemon.complete(prompt, TOKENS)
                        served.append(heard.rate)
                        texts[side] = heard.text
                    else:
                        said = raw.ask(tokens=prompt, max_tokens=TOKENS)
                        alone.append((len(said["times"]) - 1) / (said["times"][-1] - said["times"][0]))
                        texts[side] = said["text"]
                same.append(float(texts["http"].strip() == texts["raw"].strip()))
    return Measured(
        [
            Figure(
                "Decode through HTTP, share of raw mlx-lm",
                "%",
                ratios(served, alone),
                at_least(0.97),
                note="both with the same CPU cures",
            ),
            Figure("Decode through HTTP", "tok/s", served),
            Figure("Decode, mlx-lm `stream_generate`", "tok/s", alone),
            Figure("Runs in which both gave the same text", "%", same, at_least(1.0), of="worst"),
        ],
        f"A daemon process, server-sent events over loopback TCP, the default model, greedy, {TOKENS} "
        "tokens; beside it a process that only runs `mlx_lm.stream_generate` with the cures of "
        "`fleetd/engine/cpu/products.py`. The rate is taken from the first to the last token, in the client "
        "and in the process respectively.",
    )
