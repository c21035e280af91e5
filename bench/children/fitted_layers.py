"""Fits an output head to a model's first layers, and writes both as a model.

python -m bench.children.fitted_layers MODEL          then one question per drafter; see ``_Fitting``
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from bench.harness.loaded_model import load_as_worker


def main(model_path: Path) -> None:
    serve(_Fitting(load_as_worker(model_path).model).answer)


class _Fitting:
    def __init__(self, model: Any) -> None:
        self._model = model

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """``folder``: to be made. ``layers``; ``answers``: a folder that ``eval.fit_head`` keeps; ``tokens``:
        to fit to, about. Says the share of right guesses in answers that it was not fitted to, of how many
        tokens, and the digest of the head."""
        # These import MLX, which has to be after the BLAS that it binds to.
        from bench.harness.drafting import first_layers
        from eval import cut_fitting, head_answers

        layers, kept = question["layers"], Path(question["answers"])
        pieces = head_answers.pieces_of(kept, question["tokens"])
        found = cut_fitting.fitted(self._model, layers, map(head_answers.read, pieces))
        head = cut_fitting.output_head(self._model, found)
        first_layers(Path(question["folder"]), layers, head)
        held = map(head_answers.read, head_answers.held_out(kept))
        share = cut_fitting.right(self._model, layers, found, held)
        return {"right": share, "sha256": hashlib.sha256(head.tobytes()).hexdigest()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
