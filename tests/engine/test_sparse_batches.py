"""Sparse and dense answers in one batch, coming and going, give what each gives alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from family_params import each
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny_architectures import FAMILIES, VOCAB, WINDOW, tiny

from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller, leading, leading_cache
from fleetd.engine.sparse_prefill.sparse_caches import SparseKV, SparseWindow, parted, rows, sparse_cache

pytestmark = pytest.mark.usefixtures("cpu_installed")


@dataclass(frozen=True)
class Asked:
    """``at``: the step before which it joins; ``share`` of its prompt that is kept, 1 for a dense one."""

    at: int
    length: int
    share: float
    steps: int


ASKED = [Asked(0, 40, 1.0, 12), Asked(0, 150, 0.4, 9), Asked(3, 90, 1.0, 4), Asked(5, 200, 0.3, 6)]


def computed(model: Any, sparse: Sparse, asked: Asked) -> tuple[list[int], list[Any]]:
    """Its prompt and the cache of all of that but the last token."""
    seed = mx.random.key(asked.length)
    tokens: list[int] = mx.random.randint(0, VOCAB, (asked.length,), key=seed).tolist()
    if asked.share == 1.0:
        dense = Prefiller(model, tokens, make_prompt_cache(model))
        while dense.step(64):
            pass
        return tokens, dense.cache
    drawn = np.random.default_rng(asked.length).random(asked.length) < asked.share
    kept = sparse.kept([int(i) for i in np.flatnonzero(drawn)], asked.length)
    assert len(kept) < asked.length
    prefiller = SparsePrefiller.begin(model, tokens, kept)
    while prefiller.step(64):
        pass
    return tokens, prefiller.cache


def decoded(model: Any, sparse: Sparse, together: list[Asked]) -> list[npt.NDArray[np.float32]]:
    """Each one's log-probabilities (steps, V), all in one batch."""
    generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()))
    found: dict[int, list[npt.NDArray[np.float32]]] = {}
    uids: dict[int, int] = {}
    for step in range(max(a.at + a.steps for a in together) + 2):
        for index, asked in enumerate(together):
            if asked.at == step:
                tokens, cache = computed(model, sparse, asked)
                (uid,) = generator.insert(
                    [tokens[-1:]], max_tokens=[asked.steps], caches=[rows(cache)], all_tokens=[tokens[:-1]]
                )
                uids[index], found[uid] = uid, []
        for response in generator.next()[1]:
            found[response.uid].append(np.array(response.logprobs))
    generator.close()
    assert [len(found[uids[i]]) for i in range(len(together))] == [a.steps for a in together]
    return [np.stack(found[uids[i]]) for i in range(len(together))]


# Experts' matrices round by what they are computed with (decision 4); test_windows.py has windows' bits.
ROUNDED = {n for n, a in FAMILIES.items() if a.chunks == "same"} | {"mistral"}


# mlx-lm's gemma2 takes one answer at a time: its mask has no room for the rows of a batch.
@pytest.mark.parametrize(
    "name", each((name for name, a in FAMILIES.items() if not a.whole and name != "gemma2"), every=4)
)
def test_an_answer_is_the_same_alone_and_among_dense_and_sparse_ones(name: str) -> None:
    model = tiny(name)
    sparse = Sparse.of(model)
    together = decoded(model, sparse, ASKED)
    for asked, mine in zip(ASKED, together, strict=True):
        (alone,) = decoded(model, sparse, [Asked(0, asked.length, asked.share, asked.steps)])
        if name in ROUNDED:
            assert float(np.abs(mine - alone).max()) < 1e-4
        else:
            assert np.array_equal(mine, alone)


def by_itself(model: Any, sparse: Sparse, asked: Asked, block: int) -> npt.NDArray[np.float32]:
    """The log-probabilities of ``decoded``, on caches of its own: the last tokens ``block`` per pass, as
    drafts that are right are verified, after a pass of which all but one token was taken back."""
    (expected,) = decoded(model, sparse, [asked])
    tokens, cache = computed(model, sparse, asked)
    cache = parted(cache, len(tokens) - 1 - int(as_slots(cache)))
    text = [tokens[-1], *(int(row.argmax()) for row in expected)]
    if rollback.room(cache) >= 3:
        model(mx.array([[text[0], 5, 6]]), cache=cache)
        rollback.take_back(cache, 3)
    found: list[npt.NDArray[np.float32]] = []
    while len(found) < asked.steps:
        coming = text[len(found) : min(len(found) + block, asked.steps)]
        logits = model(mx.array([coming]), cache=cache)[0].astype(mx.float32)
        found.extend(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return np.stack(found)


def as_slots(cache: list[Any]) -> int:
    """Tokens that are in a sparse cache."""
    full = [layer.offset for layer in cache if isinstance(layer, SparseKV)]
    return int(full[0]) if full else int(cache[0].offset)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(
    "name", each((name for name, a in FAMILIES.items() if not a.whole and name != "gemma2"), every=6)
)
def test_an_answer_by_itself_is_the_same_as_in_a_batch(name: str, block: int) -> None:
    """For a block the rounding of windows is that of other products."""
    model = tiny(name)
    sparse = Sparse.of(model)
    asked = ASKED[1]
    mine = by_itself(model, sparse, asked, block)
    (expected,) = decoded(model, sparse, [asked])
    assert float(np.abs(mine - expected).max()) < 1e-4


def test_a_batch_that_begins_with_a_dense_row_keeps_the_positions_of_the_others() -> None:
    model = tiny("llama")
    sparse = Sparse.of(model)
    caches = [rows(computed(model, sparse, asked)[1]) for asked in ASKED[:2]]
    batch = caches[0][0].merge([layers[0] for layers in caches])
    assert batch.offset.tolist() == [39, 149]


# ---- The caches themselves -------------------------------------------------------------------------------


def test_a_window_is_decoded_in_only_once_it_has_no_gaps() -> None:
    model = tiny("gemma3_text")
    sparse = Sparse.of(model)
    assert sparse.tail == WINDOW + 1
    tokens = [1] * 100
    gap = SparsePrefiller.begin(model, tokens, [*range(80), *range(90, 100)])
    gap.step(64)
    with pytest.raises(ValueError, match="gaps"):
        gap.step(64)


def test_a_windows_rows_are_let_go_once_no_token_sees_them() -> None:
    window = SparseWindow(8)
    row = mx.zeros((1, 1, 4, 2))
    for first in (0, 4, 100):
        window.expect(range(first, first + 4))
        window.make_mask(4)
        keys, _ = window.update_and_fetch(row, row)
    assert keys.shape[2] == 4


def test_other_kinds_of_caches_are_refused() -> None:
    with pytest.raises(TypeError, match="SparseKV"):
        sparse_cache(SparseKV())


def test_a_dense_prefix_is_taken_over_and_given_back() -> None:
    model, tokens = tiny("qwen3"), list(range(60))
    Sparse.of(model)
    kept = [*range(30), *range(50, 60)]
    dense = Prefiller(model, tokens, make_prompt_cache(model))
    dense.step(30)
    with pytest.raises(ValueError, match="prefix"):
        SparsePrefiller.begin(model, tokens, kept, dense.cache, 31)
    alone = SparsePrefiller.begin(model, tokens, kept)
    after = SparsePrefiller.begin(model, tokens, kept, dense.cache, 30)
    assert after.remaining == 9
    for prefiller in (alone, after):
        while prefiller.step(7):
            pass
    assert leading(kept) == 30
    given_back = leading_cache(kept, alone.cache)
    assert given_back is not None
    for mine, theirs, native, given in zip(alone.cache, after.cache, dense.cache, given_back, strict=True):
        assert all(map(mx.array_equal, mine.keys_and_values(), theirs.keys_and_values()))
        assert type(given) is KVCache
        assert given.offset == 30
        assert all(map(mx.array_equal, given.keys_and_values(), native.keys_and_values()))
