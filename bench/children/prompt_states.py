"""The engine's own prefill of a hybrid, with and without states kept at earlier tokens."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from fleetd.engine import cpu

CHUNK_TOKENS = 256
CACHE_BYTES = 2 << 30


def main(model_path: Path) -> None:
    if not cpu.preload_blas() and sys.platform == "linux":
        raise SystemExit("no BLAS to preload: install mkl")
    # mlx binds to the BLAS that is loaded first, so it is imported only now.
    from fleetd.engine import loading, worker
    from fleetd.engine.settings import WorkerSettings

    worker.quiet_libraries()
    device = loading.pick_device("auto")
    if device == "cpu":
        cpu.install()
    loaded = loading.load(WorkerSettings("bench", str(model_path)), device, lambda report: None)
    serve(lambda question: answer(loaded.model, **question))


def answer(model: Any, tokens: list[int], states: bool, edited: int) -> dict[str, Any]:
    """Seconds to prefill ``tokens``, bytes of the states, and how many tokens would be computed for the same
    prompt with its last ``edited`` tokens changed."""
    from mlx_lm.models.cache import make_prompt_cache

    from fleetd.engine.prefill import Prefiller
    from fleetd.engine.prefix_cache import PrefixCache
    from fleetd.engine.sequence_state import checkpoints

    prefix = PrefixCache(CACHE_BYTES)
    cache = make_prompt_cache(model)
    prefiller = Prefiller(model, tokens, cache, state_bytes=prefix.state_bytes if states else 0)
    begun = time.perf_counter()
    while prefiller.remaining:
        prefiller.step(CHUNK_TOKENS)
    took_s = time.perf_counter() - begun
    prefix.store(tokens[:-1], cache, states=prefiller.states)
    other = [*tokens[:-edited], *((token + 1) % 1000 for token in tokens[-edited:])]
    held = sum(checkpoints.nbytes(state) for state in prefiller.states.values())
    return {"seconds": took_s, "held_bytes": held, "again": len(other) - prefix.longest(other)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
