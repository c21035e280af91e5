"""A drafter made of a model's first layers, and an output head that is fitted to what they give.

    hidden state after layer k, normed ── a linear map ── hidden state behind the model's last norm ── head

The map is the ridge regression over the tokens of the model's own answers: one pass, no gradients, and the
same every time. Multiplied with the model's table it is the drafter's own output head, so that the drafter is
a model as any other. The map alone is the "tuned lens" (Belrose et al., 2023).

In shapes B is the batch, L the tokens of a text, D the width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from eval.head_answers import Answers

# Of the trace of the inputs' squares.
_RIDGE = 1e-3
# Texts at once.
_ROWS = 8


def fitted(model: Any, layers: int, answers: Iterable[Answers]) -> npt.NDArray[np.float32]:
    """The map from what the first ``layers`` give, normed, to the model's hidden states: (D, D)."""
    width = model.args.hidden_size
    square, product = np.zeros((width, width)), np.zeros((width, width))
    for states, batch, rows in _states(model, layers, answers):
        counted = np.arange(states.shape[1])[None] < batch.lengths[rows, None] - 1
        # The first token's states are unlike all others.
        counted[:, 0] = False
        given, wanted = states[counted], batch.hidden[rows][counted].astype(np.float32)
        square += given.T @ given
        product += given.T @ wanted
    held = square + _RIDGE * np.trace(square) / width * np.eye(width)
    return np.linalg.solve(held, product).astype(np.float32)


def right(model: Any, layers: int, found: npt.NDArray[np.float32], answers: Iterable[Answers]) -> float:
    """The share of the answers' tokens that the first ``layers`` and the map ``found`` foresee."""
    hits = total = 0
    for states, batch, rows in _states(model, layers, answers):
        places = np.arange(states.shape[1])[None]
        counted = (places < batch.lengths[rows, None] - 1) & (places >= batch.prompt_tokens - 1)
        said = batch.tokens[rows, 1:][counted]
        logits = model.model.embed_tokens.as_linear(mx.array(states[counted] @ found))
        hits += int((np.array(mx.argmax(logits, -1)) == said).sum())
        total += len(said)
    return hits / max(1, total)


def output_head(model: Any, found: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """What gives logits of the normed states: (tokens, D)."""
    # Row by row of the map, through whatever holds the table. Files are written from memory as it lies.
    head = np.array(model.model.embed_tokens.as_linear(mx.array(found)))
    return np.ascontiguousarray(head.T, dtype=np.float16)


def _states(
    model: Any, layers: int, answers: Iterable[Answers]
) -> Iterator[tuple[npt.NDArray[np.float32], Answers, slice]]:
    """What the first layers give for some rows of each batch, normed: (rows, L - 1, D)."""
    ones = mx.ones(model.args.hidden_size)
    for batch in answers:
        for begin in range(0, len(batch.kinds), _ROWS):
            rows = slice(begin, begin + _ROWS)
            state = model.model.embed_tokens(mx.array(batch.tokens[rows, :-1]))
            for layer in model.model.layers[:layers]:
                state = layer(state, "causal", None)
            normed = mx.fast.rms_norm(state, ones, model.args.rms_norm_eps)
            yield np.array(normed.astype(mx.float32)), batch, rows
