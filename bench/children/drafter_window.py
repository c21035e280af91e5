"""A drafter's model and a long text: what it keeps, when its first guess comes, how many guesses are right.

The drafter is the first layers of the model whose answer it guesses, with that model's norm and head.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from bench.harness.loaded_model import load_as_worker

# Tokens of a chunk of prefill.
CHUNK = 512


def main(model_path: Path) -> None:
    serve(_Texts(load_as_worker(model_path).model).answer)


class _Texts:
    def __init__(self, model: Any) -> None:
        self._model = model

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        prompt: list[int] = question["prompt"]
        if question["mode"] == "answer":
            return {"answer": self._answer(prompt, question["tokens"])}
        return self._drafted(prompt, question["answer"], question["layers"], question["window"])

    def _answer(self, prompt: list[int], count: int) -> list[int]:
        """The model's own, greedy."""
        from fleetd.engine.speculation.drafter import DraftModel

        whole = _unbounded(DraftModel(self._model))
        whole.committed(prompt)
        found: list[int] = []
        for _ in range(count):
            while whole.missing([]) > CHUNK:
                whole.prefill([], CHUNK)
            found.append(whole.guess([]).first)
            whole.committed(found[-1:])
        return found

    def _drafted(self, prompt: list[int], answer: list[int], layers: int, window: bool) -> dict[str, Any]:
        from fleetd.engine.sequence_state.parts import arrays
        from fleetd.engine.speculation.drafter import DraftModel

        drafting = DraftModel(_first_layers(self._model, layers))
        drafting = drafting if window else _unbounded(drafting)
        begun = time.perf_counter()
        drafting.committed(prompt)
        while drafting.missing([]) > CHUNK:
            drafting.prefill([], CHUNK)
        guess = drafting.guess([]).first
        first_s = time.perf_counter() - begun
        right = 0
        for token in answer:
            right += guess == token
            drafting.committed([token])
            guess = drafting.guess([]).first
        held = sum(array.nbytes for array in arrays(drafting._cache.layers))
        return {"bytes": held, "first_s": first_s, "right": right / max(1, len(answer))}


def _first_layers(model: Any, layers: int) -> Any:
    """A model of the same weights that ends after so many layers."""
    cut = copy.copy(model)
    cut.model = copy.copy(model.model)
    cut.model.layers = model.model.layers[:layers]
    return cut


def _unbounded(drafting: Any) -> Any:
    """As a drafter that keeps all of a text."""
    from fleetd import limits

    class Whole(type(drafting)):  # type: ignore[misc]
        def committed(self, tokens: list[int]) -> None:
            kept = limits.DRAFT_WINDOW_TOKENS
            limits.DRAFT_WINDOW_TOKENS = limits.DRAFT_TEXT_TOKENS
            try:
                super().committed(tokens)
            finally:
                limits.DRAFT_WINDOW_TOKENS = kept

    drafting.__class__ = Whole
    return drafting


if __name__ == "__main__":
    main(Path(sys.argv[1]))
