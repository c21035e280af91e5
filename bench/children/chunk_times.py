"""``chunk_times FOLDER``: what chunks of a prompt take a model behind as many tokens as are asked for.

A chunk's time depends on how many rows are before it, and not on what they say: so these are made up, and the
chunks are computed by the engine's own prefill, in a model that was loaded as a worker does it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from bench.harness.loaded_model import load_as_worker


def main(model_path: Path) -> None:
    from fleetd.engine.measure.chunk_size import PacedChunks

    loaded = load_as_worker(model_path)
    # As long as they are in a worker: on a CPU by the pace of the chunk before.
    paced = PacedChunks()
    serve(lambda question: {"chunks": timed(loaded.model, loaded.facts.vocab_size, paced, **question)})


def timed(
    model: Any,
    vocabulary: int,
    paced: Any,
    *,
    start: int,
    count: int,
    chunk: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, int, float]]:
    """Compute ``count`` chunks behind ``start`` tokens that were not computed.

    Args:
        paced: tells the size of a chunk, if ``chunk`` does not.

    Returns of each chunk the tokens before it, its tokens, and its seconds.

    Raises:
        ValueError: a context for this model cannot be made up.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from fleetd.engine.layers.prefill import Prefiller
    from fleetd.engine.sequence_state.made_up import made_up

    cache: list[Any] | None = make_prompt_cache(model)
    room = count * max(chunk, paced.largest)
    if start:
        # A token tells how wide rows are.
        mx.eval(model(mx.array([[1]]), cache=cache))
        cache = made_up(cache or [], start, room, sys.maxsize)
        if cache is None:
            raise ValueError("this model has no cache whose context can be made up")
    tokens = [(7919 * place + 1) % vocabulary for place in range(start + room + 1)]
    prefiller = Prefiller(model, tokens, cache or [], done=start)
    found = []
    for _ in range(count):
        before, begun_s = prefiller.done, clock()
        done = prefiller.step(chunk or paced.size(shared=False, context=before))
        took_s = clock() - begun_s
        paced.learn(done, took_s)
        found.append((before, done, took_s))
    mx.clear_cache()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
