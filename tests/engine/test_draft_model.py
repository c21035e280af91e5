"""A real model drafts: its KV is rolled back to wherever the text goes on otherwise, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
import tiny_architectures
import tiny_models
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.speculation.drafter import DraftModel
from fleetd.errors import ModelUnsupported


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.smollm2()


def fresh(model: Any, text: Sequence[int]) -> int:
    """The next token, computed from nothing."""
    logits = model(mx.array(list(text))[None], cache=make_prompt_cache(model))
    token: int = mx.argmax(logits[0, -1]).item()  # type: ignore[assignment]
    return token


def test_every_path_is_guessed_as_if_nothing_else_had_been(model: Any) -> None:
    """Texts and paths that grow, branch and turn back at random."""
    rng = random.Random(5)
    drafting, text = DraftModel(model), tiny_models.prompt(12)
    drafting.committed(text)
    path: list[int] = []
    for _ in range(40):
        if rng.random() < 0.4:
            new = path[: rng.randint(0, 2)] + [rng.randrange(tiny_models.VOCAB)] * rng.randint(0, 1)
            text += new
            drafting.committed(new)
            path = path[len(new) :] if path[: len(new)] == new else []
        else:
            path = [*path[: rng.randint(0, len(path))], rng.randrange(tiny_models.VOCAB)]
        guess = drafting.guess(path)
        assert guess.first == fresh(model, [*text, *path])
        assert 1 >= guess.p_first >= guess.p_second > 0
        assert guess.first != guess.second
        assert drafting.held == len(text) + len(path)
        assert drafting.missing(path) == 0


def test_a_long_text_is_prefilled_in_pieces(model: Any) -> None:
    drafting, text = DraftModel(model), tiny_models.prompt(50)
    drafting.committed(text)
    assert drafting.missing([]) == 49
    drafting.prefill([], 30)
    assert (drafting.missing([]), drafting.held) == (19, 30)
    drafting.prefill([], 30)
    assert (drafting.missing([]), drafting.held) == (0, 49)
    assert drafting.guess([]).first == fresh(model, text)


def test_a_cache_that_rotates_or_runs_cannot_be_rolled_back() -> None:
    with pytest.raises(ModelUnsupported):
        DraftModel(tiny_models.sliding())
    # A mark undoes a pass as a whole, and a drafter goes back to any token.
    with pytest.raises(ModelUnsupported):
        DraftModel(tiny_architectures.tiny("lfm2"))
