"""A model over several machines says what it says whole, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import tiny_architectures
from group_machines import group_of
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.sequence_state.kinds import all_plain

PLAIN = [
    name
    for name in tiny_architectures.FAMILIES
    if all_plain(make_prompt_cache(tiny_architectures.tiny(name)))
]
TOKENS = mx.array([[5, 7, 11, 13, 17, 19, 23]])


def same(ours: mx.array, theirs: mx.array) -> bool:
    return bool(np.array_equal(np.array(ours.view(mx.uint8)), np.array(theirs.view(mx.uint8))))


@pytest.mark.parametrize("family", PLAIN)
def test_any_cut_gives_the_logits_of_the_whole_model(family: str, on_cpu: None) -> None:
    whole = tiny_architectures.tiny(family)
    total = len(whole.layers)
    chunks = (TOKENS, mx.array([[3]]), mx.array([[4, 9]]))
    cache = make_prompt_cache(whole)
    expected = [whole(chunk, cache=cache) for chunk in chunks]
    for cuts in [(at,) for at in range(1, total)] + [(1, 2), (1, 3)]:
        group = group_of(whole, *cuts)
        cache = group.model.make_cache()
        for chunk, right in zip(chunks, expected, strict=True):
            assert same(group.model(chunk, cache), right), cuts
