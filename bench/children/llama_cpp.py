"""llama.cpp, from the prebuilt wheel xllamacpp, over the GGUF file behind fleetd's default model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import xllamacpp

from bench.harness.child import serve

CONTEXT_TOKENS = 4608


def main(gguf: Path, threads: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        result = server.handle_completions(
            {
                "prompt": question["tokens"],
                "n_predict": question["max_tokens"],
                "temperature": 0,
                "cache_prompt": False,
            }
        )
        wall_s = time.perf_counter() - begun
        timings = result["timings"]
        return {
            "wall_s": wall_s,
            "prompt_n": timings["prompt_n"],
            "prefill_s": timings["prompt_ms"] / 1000,
            "predicted_n": timings["predicted_n"],
            "decode_s": timings["predicted_ms"] / 1000,
        }

    serve(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
