"""The engine's own prefill of a hybrid, with and without states kept at earlier tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.harness.child import serve
from bench.harness.loaded_model import load_as_worker

CHUNK_TOKENS = 256
CACHE_BYTES = 2 << 30


def main(model_path: Path) -> None:
    loaded = load_as_worker(model_path)
    serve(lambda question: answer(loaded.model, loaded.tokenizer, loaded.facts.vocab_size, **question))


def answer(
    model: Any,
    tokenizer: Any,
    vocab_size: int,
    messages: list[dict[str, Any]],
    edited: list[dict[str, Any]],
    states: bool,
) -> dict[str, Any]:
    """Seconds to render and prefill ``messages``, and of these to save states; bytes of the states, and how
    many tokens would be computed for ``edited`` after it."""
    from mlx_lm.models.cache import make_prompt_cache

    from fleetd.engine.layers.prefill import Prefiller
    from fleetd.engine.prefixes.prefix_cache import PrefixCache
    from fleetd.engine.prompt.prompt_encoding import prepare
    from fleetd.engine.protocol import ChatPrompt, Generate
    from fleetd.engine.sequence_state import checkpoints

    prefix = PrefixCache(CACHE_BYTES)
    room = prefix.state_bytes if states else 0
    saving = Timed(checkpoints.saved)
    begun = time.perf_counter()
    prompt = prepare(Generate("first", ChatPrompt(messages)), tokenizer, vocab_size, borders=states)
    cache = make_prompt_cache(model)
    prefiller = Prefiller(model, prompt.tokens, cache, state_bytes=room, borders=prompt.borders)
    with patch.object(checkpoints, "saved", saving):
        while prefiller.remaining:
            prefiller.step(CHUNK_TOKENS)
    took_s = time.perf_counter() - begun
    prefix.store(prompt.tokens[:-1], cache, states=prefiller.states)
    other = prepare(Generate("other", ChatPrompt(edited)), tokenizer, vocab_size).tokens
    held = sum(checkpoints.nbytes(state) for state in prefiller.states.values())
    return {
        "seconds": took_s,
        "saving": saving.seconds,
        "held_bytes": held,
        "again": len(other) - prefix.longest(other),
    }


class Timed:
    """A function, and the seconds that its calls took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.perf_counter() - begun


if __name__ == "__main__":
    main(Path(sys.argv[1]))
