"""Sliding windows on a CPU: an answer has the same bits alone and beside others, wherever its rings are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from family_params import few
from group_machines import group_of
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from test_group_sparse import KEPT, PROMPTS, VOCAB
from tiny_architectures import FAMILIES, LONG, OWN, config_of, tiny
from turned_scheduler import TurnedScheduler

from fleetd.engine.cpu import products
from fleetd.engine.groups.sparse_rows import sparse_of
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import Delta, Generate, Keep, Sampling, TokenPrompt
from fleetd.engine.sequence_state.batches import extracted, merged
from fleetd.engine.sparse_prefill.sparse import Sparse

pytestmark = pytest.mark.usefixtures("cpu_installed")

WINDOWS = sorted(name for name in FAMILIES if "sliding" in json.dumps(config_of(name)))
DENSE: list[Any] = [None] * len(PROMPTS)
# Rings alone, and with sinks; the others are read in chunks, in the quick run.
BATCHED = {"cohere2", "gemma4_text", "gpt_oss"}


def wide(name: str) -> Any:
    """The tiny model with a token for each of the tokenizer's."""
    changes: dict[str, Any] = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    own = OWN[name]
    if "text_config" in own:
        return tiny(name, text_config={**own["text_config"], **changes})
    return tiny(name, **changes)


class LongAnswers(TurnedScheduler):
    def put(self, name: str, tokens: list[int], kept: list[int] | None) -> None:
        request = Generate(
            name,
            TokenPrompt(tokens),
            sampling=Sampling(temperature=0.0),
            top_logprobs=2,
            # The rings turn once around and on.
            max_tokens=40,
            ignore_eos=True,
            keep=None if kept is None else Keep({}),
        )
        self.scheduler.inbox.put(PreparedPrompt(request, tokens, kept=kept))

    def answers(self, kept: list[Any], *, together: bool) -> list[Any]:
        for number, prompt in enumerate(PROMPTS):
            self.put(f"p{number}", prompt, kept[number])
            if not together:
                self.finish()
        self.finish()
        return [
            [(delta.text, delta.logprobs) for delta in self.of(f"p{number}", Delta)]
            for number in range(len(PROMPTS))
        ]


def bench(model: Any, sparse: Sparse | None, chain_path: Path) -> LongAnswers:
    # Of other sizes while something else is answered, as a worker's are.
    chunks = FixedChunks(48, 16)
    return LongAnswers(model, load_tokenizer(chain_path), context_tokens=1024, chunks=chunks, sparse=sparse)


@pytest.mark.parametrize("name", few(WINDOWS, BATCHED))
def test_an_answer_has_the_same_bits_alone_and_in_a_batch(name: str, chain_path: Path) -> None:
    model = wide(name)
    assert any(
        isinstance(part, RotatingKVCache)
        for cache in model.make_cache()
        for part in getattr(cache, "caches", [cache])
    )
    alone = bench(model, None, chain_path).answers(DENSE, together=False)
    assert bench(model, None, chain_path).answers(DENSE, together=True) == alone


@pytest.mark.parametrize("name", few(WINDOWS, set(WINDOWS) - LONG - BATCHED))
def test_chunks_change_no_bit(name: str) -> None:
    model, tokens = tiny(name), PROMPTS[1]

    def logits(sizes: list[int]) -> bytes:
        cache, done, rows = make_prompt_cache(model), 0, []
        for size in [*sizes, len(tokens)]:
            if done < len(tokens):
                rows.append(np.array(model(mx.array([tokens[done : done + size]]), cache=cache)))
                done += size
        return np.concatenate(rows, axis=1).tobytes()

    whole = logits([])
    for sizes in ([64] * 4, [1, 15, 1, 111, 1, 63], [100, *[1] * 200]):
        assert logits(sizes) == whole, sizes


@pytest.mark.parametrize("name", few(["gemma3_text", "gpt_oss", "cohere2"], ["gpt_oss"]))
def test_a_sparse_prompts_answer_has_them_too(name: str, chain_path: Path) -> None:
    model = wide(name)
    sparse = Sparse.of(model)
    alone = bench(model, sparse, chain_path).answers(KEPT, together=False)
    assert bench(model, sparse, chain_path).answers(KEPT, together=True) == alone
    # Some of each.
    mixed = [KEPT[0], None, KEPT[2]]
    found = bench(model, sparse, chain_path).answers(mixed, together=True)
    assert (found[0], found[2]) == (alone[0], alone[2])


@pytest.mark.parametrize("name", few(["gemma3_text", "gpt_oss"], ["gemma3_text"]))
def test_windows_longer_than_a_piece_of_a_sum_do(name: str, chain_path: Path) -> None:
    model = tiny(name, vocab_size=VOCAB, sliding_window=products.PIECE + 40)
    alone = bench(model, None, chain_path).answers(DENSE, together=False)
    assert bench(model, None, chain_path).answers(DENSE, together=True) == alone


@pytest.mark.parametrize(
    ("name", "cuts"),
    [pytest.param("gemma3_text", (2,), marks=pytest.mark.long), ("gpt_oss", (1, 3))],
)
def test_members_of_a_group_keep_to_it(name: str, cuts: tuple[int, ...], chain_path: Path) -> None:
    model = wide(name)
    alone = bench(model, Sparse.of(model), chain_path).answers(DENSE, together=False)
    for together in (False, True):
        group = group_of(wide(name), *cuts)
        assert (
            bench(group.model, sparse_of(group.model), chain_path).answers(DENSE, together=together) == alone
        )


# ---- the caches ------------------------------------------------------------------------------------------

WINDOW = 8


def token(position: int) -> mx.array:
    """A row (1, 1, 1, 1) that says which token it is of."""
    return mx.full((1, 1, 1, 1), float(position))


def add(cache: Any, start: int, count: int) -> list[float]:
    """The tokens that are read after ``count`` more in one pass."""
    rows = mx.concatenate([token(start + n) for n in range(count)], axis=2)
    keys, values = cache.update_and_fetch(rows, rows)
    assert np.array_equal(np.array(keys), np.array(values))
    found: list[float] = keys[0, 0, :, 0].tolist()
    return found


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("first", [1, 3, WINDOW, 2 * WINDOW + 3])
def test_a_window_is_read_in_the_order_of_its_tokens(first: int, keep: int) -> None:
    cache = RotatingKVCache(WINDOW, keep=keep)
    add(cache, 0, first)
    for position in range(first, first + 3 * WINDOW):
        read = add(cache, position, 1)
        assert read == sorted(read)
        assert read[-1] == position
        assert len(read) == min(position + 1, WINDOW)
        assert read[:keep] == list(range(min(keep, position + 1)))
        again = cache.keys_and_values()[0]
        assert again[0, 0, :, 0].tolist() == read
    # A block behind a ring that has turned.
    read = add(cache, position + 1, 3)
    assert read == sorted(read)
    assert read[-4:] == [position, position + 1, position + 2, position + 3]


@pytest.mark.parametrize("window", [3, WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_mask_fits_that_order(window: int) -> None:
    """Also that of a model whose window is smaller than what its cache keeps."""
    for first in (2, WINDOW + 5):
        cache = RotatingKVCache(WINDOW)
        add(cache, 0, first)
        for position in range(first, first + 2 * WINDOW + 3):
            mask = cache.make_mask(1, window_size=window)
            read = add(cache, position, 1)
            seen = read if mask is None else np.array(read)[np.array(mask)].tolist()
            assert seen == list(range(max(0, position + 1 - min(window, WINDOW)), position + 1))


@pytest.mark.parametrize("window", [3, WINDOW])
@pytest.mark.parametrize("lengths", [(1, 2), (2, 20), (WINDOW, 3), (13, 30), (30, 13, 1)])
def test_rows_of_a_batch_are_read_in_that_order(lengths: tuple[int, ...], window: int) -> None:
    caches = [RotatingKVCache(WINDOW) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        add(cache, 0, length)
    (batch,) = merged([[cache] for cache in caches])
    assert isinstance(batch, BatchRotatingKVCache)
    at = list(lengths)
    for step in range(3 * WINDOW):
        if step == WINDOW + 3:
            # One more joins, and the first leaves, while the ring has turned.
            late = RotatingKVCache(WINDOW)
            add(late, 0, 5)
            batch.extend(BatchRotatingKVCache.merge([late]))
            at.append(5)
            batch.filter(list(range(1, len(at))))
            at = at[1:]
        mask = np.array(batch.make_mask(1, window_size=window))
        rows = mx.concatenate([token(position) for position in at])
        keys, _ = batch.update_and_fetch(rows, rows)
        for row, position in enumerate(at):
            seen = np.array(keys)[row, 0, :, 0][mask[row, 0, 0]].tolist()
            assert seen == list(range(max(0, position + 1 - window), position + 1))
        at = [position + 1 for position in at]
    # What is kept lies as it did: a row taken out goes on.
    (own,) = extracted([batch], 0)
    assert add(own, at[0], 1) == list(range(max(0, at[0] + 1 - WINDOW), at[0] + 1))
