"""The prefix cache finds the longest beginning, keeps requests apart and stays within its bounds."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from fleetd import limits
from fleetd.engine.measure.memory import RowBound
from fleetd.engine.prefixes.prefix_cache import PrefixCache

pytestmark = pytest.mark.usefixtures("on_cpu")
FEW = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def kv(tokens: list[int]) -> list[Any]:
    """A cache whose keys are the tokens themselves, so that a mix-up shows."""
    layer = KVCache()
    rows = mx.array(tokens, dtype=mx.float32).reshape(1, 1, -1, 1)
    layer.update_and_fetch(rows, rows)
    return [layer]


def held(cache: list[Any]) -> list[int]:
    tokens: list[int] = cache[0].keys_and_values()[0].reshape(-1).astype(mx.int32).tolist()
    return tokens


@given(st.lists(FEW, max_size=8), FEW)
def test_finds_the_longest_beginning_and_exactly_its_numbers(
    stored: list[list[int]], prompt: list[int]
) -> None:
    cache = PrefixCache(1 << 40)
    for tokens in stored:
        cache.store(tokens, kv(tokens))
    hit = cache.fetch(prompt)
    head = prompt[:-1]
    best = max(
        (n for t in stored for n in range(len(head) + 1) if t[:n] == head[:n] and len(t) >= n), default=0
    )
    assert hit.tokens == best
    assert (held(hit.cache) if hit.cache else []) == head[:best]
    cache.validate()


def test_what_one_request_writes_no_other_sees() -> None:
    cache = PrefixCache(1 << 40)
    cache.store([1, 2, 3], kv([1, 2, 3]))
    for extra in (7, 8):
        hit = cache.fetch([1, 2, 3, 4, 5])
        assert hit.cache is not None
        assert held(hit.cache) == [1, 2, 3]
        rows = mx.full((1, 1, 300, 1), float(extra))
        hit.cache[0].update_and_fetch(rows, rows)
        hit.cache[0].keys[..., :3, :] = 99.0
        mx.eval(hit.cache[0].keys)
    again = cache.fetch([1, 2, 3, 4]).cache
    assert again is not None
    assert held(again) == [1, 2, 3]


def test_namespaces_do_not_mix() -> None:
    cache = PrefixCache(1 << 40)
    cache.store([1, 2, 3], kv([1, 2, 3]), "sparse")
    assert cache.fetch([1, 2, 3, 4]).tokens == 0
    assert cache.fetch([1, 2, 3, 4], "sparse").tokens == 3
    # What one has neither replaces the other's nor is kept instead of it.
    for tokens in ([5, 6], [7, 8, 9]):
        cache.store(tokens, kv(tokens))
    for tokens in ([5, 6, 6], [7, 8]):
        cache.store(tokens, kv(tokens), "sparse")
    assert [cache.longest(prompt) for prompt in ([5, 6, 0], [7, 8, 9, 0])] == [2, 3]
    assert [cache.longest(prompt, "sparse") for prompt in ([5, 6, 6, 0], [7, 8, 0])] == [3, 2]


def test_one_token_is_always_left() -> None:
    cache = PrefixCache(1 << 40)
    cache.store([1, 2, 3], kv([1, 2, 3]))
    assert cache.fetch([1, 2, 3]).tokens == 2
    assert cache.fetch([1]).tokens == 0


def test_bounded_by_bytes_and_entries_least_recently_used_first() -> None:
    one = sum(layer.nbytes for layer in kv([0]))
    cache = PrefixCache(3 * one, max_entries=2)
    for first in (1, 2):
        cache.store([first, 0], kv([first, 0]))
    assert cache.fetch([1, 0, 0]).tokens == 2  # used: now 2 is the oldest
    cache.store([3, 0], kv([3, 0]))
    assert [cache.fetch([n, 0, 0]).tokens for n in (1, 2, 3)] == [2, 0, 2]
    assert (len(cache), cache.nbytes) == (2, 2 * one)
    cache.trim(one)
    assert (len(cache), cache.nbytes) == (1, one)
    cache.trim(0)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_bounded_by_the_rows_that_other_machines_have() -> None:
    cache = PrefixCache(1 << 40, rows=RowBound(12, spare=2))
    for first in (1, 2, 3, 4):
        cache.store([first, 0], kv([first, 0]))
        cache.validate()
    assert [cache.fetch([n, 0, 0]).tokens for n in (1, 2, 3, 4)] == [0, 2, 2, 2]
    cache.store([5] * 10, kv([5] * 10))
    assert (len(cache), cache.fetch([5] * 11).tokens) == (1, 10)
    cache.store([6] * 11, kv([6] * 11))
    cache.validate()
    assert (len(cache), cache.fetch([5] * 11).tokens) == (1, 10)


def test_what_another_machine_sent_serves_if_it_saves_a_block_and_goes_with_that_machine() -> None:
    block, studio = limits.CACHE_BLOCK_TOKENS, frozenset({"studio"})
    tokens, cache = list(range(block + 8)), PrefixCache(1 << 40)
    cache.store(tokens, kv(tokens), origins=studio)
    hit = cache.fetch([*tokens, 1])
    assert (hit.tokens, hit.origins) == (block + 8, studio)
    for shared, served in ((block, 0), (block + 1, block + 1)):
        prompt = [*tokens[:shared], -1, -1]
        assert cache.longest(prompt) == cache.fetch(prompt).tokens == served
    # What was computed here serves from its first token on, and is kept beside the same from elsewhere.
    own = [*tokens[:20], -2]
    cache.store(own, kv(own))
    assert cache.longest([*own, 1]) == 21
    assert cache.longest([*tokens[: block + 4], -1, -1]) == 20
    cache.store(tokens, kv(tokens))
    cache.forget(["another", "studio"])
    cache.validate()
    assert cache.fetch([*tokens, 1]).origins == frozenset()
    assert cache.longest([*tokens, 1]) == block + 8


def test_nothing_is_kept_under_a_machine_that_was_forgotten_nor_beside_what_was_computed_here() -> None:
    block = limits.CACHE_BLOCK_TOKENS
    tokens, cache = list(range(block + 8)), PrefixCache(1 << 40)
    cache.forget(["studio"])
    cache.store(tokens, kv(tokens), origins=frozenset({"studio", "kitchen"}))
    assert len(cache) == 0
    cache.store(tokens, kv(tokens))
    cache.store(tokens, kv(tokens), origins=frozenset({"kitchen"}))
    assert len(cache) == 1
    assert cache.fetch([*tokens, 1]).origins == frozenset()


def test_too_big_for_the_cache_is_not_stored() -> None:
    cache = PrefixCache(10)
    cache.store([1, 2], kv([1, 2]))
    assert len(cache) == 0


def test_a_longer_entry_replaces_its_beginnings_and_serves_them() -> None:
    cache = PrefixCache(1 << 40)
    cache.store([1, 2], kv([1, 2]))
    cache.store([1, 2, 3, 4], kv([1, 2, 3, 4]))
    cache.store([1, 2, 3], kv([1, 2, 3]))
    assert len(cache) == 1
    assert cache.fetch([1, 2, 9]).tokens == 2


def test_a_short_share_of_a_long_entry_is_small() -> None:
    cache = PrefixCache(1 << 40)
    long = list(range(5000))
    cache.store(long, kv(long))
    hit = cache.fetch([0, 1, 2, -1])
    assert hit.tokens == 3
    assert hit.cache is not None
    assert hit.cache[0].nbytes == 3 * 4 * 2


def test_finding_a_short_share_of_long_entries_is_quick() -> None:
    cache = PrefixCache(1 << 40)
    long = list(range(100_000))
    for i in range(10):
        cache.store([*long[:-1], -i], kv([0]))
    begun = time.perf_counter()
    assert cache.fetch([0, 1, 2, -1]).tokens == 3
    assert time.perf_counter() - begun < 20.0  # a search that copies its path per step takes minutes


def test_a_recurrent_state_serves_only_what_continues_it() -> None:
    state = ArraysCache(1)
    state[0] = mx.ones((1, 4))
    cache = PrefixCache(1 << 40)
    cache.store([1, 2, 3, 4, 5], [state])
    # A longer one that cannot be taken back does not serve what a shorter one would, nor the other way round.
    cache.store([1, 2, 3], [state])
    assert cache.longest([1, 2, 3, 4, 5, 6]) == 5
    assert cache.fetch([1, 2, 9]).tokens == 0
    assert cache.fetch([1, 2, 3]).tokens == 0
    assert cache.fetch([1, 2, 3, 4]).tokens == 3


def test_a_window_that_has_moved_on_serves_only_what_continues_it() -> None:
    cache = PrefixCache(1 << 40)
    for n, expected in ((6, 3), (12, 0)):
        layer = RotatingKVCache(8)
        rows = mx.arange(n, dtype=mx.float32).reshape(1, 1, n, 1)
        layer.update_and_fetch(rows, rows)
        cache.store([n, *range(1, n)], [layer])
        assert cache.fetch([n, 1, 2, 99, 98]).tokens == expected
        assert cache.fetch([n, *range(1, n), 99]).tokens == n


@pytest.mark.parametrize("n", [20, 60, 100])
def test_a_sliding_window_model_continues_from_the_cache_as_without(n: int) -> None:
    model = tiny_models.sliding(window=32)
    tokens = tiny_models.prompt(130)
    plain = make_prompt_cache(model)
    expected = model(mx.array([tokens]), cache=plain)[:, -1]
    stored = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens[:n]]), cache=stored))
    cache = PrefixCache(1 << 40)
    cache.store(tokens[:n], stored)
    for _ in range(2):
        hit = cache.fetch(tokens)
        assert hit.tokens == n
        logits = model(mx.array([tokens[n:]]), cache=hit.cache)[:, -1]
        assert mx.allclose(logits, expected, atol=1e-3)
    # Another ending, of which only a part is shared: right, whether it could be used or not.
    other = [*tokens[: n - 5], 1, 2, 3]
    hit = cache.fetch(other)
    assert hit.tokens == (n - 5 if n < 32 else 0)
    start = hit.cache or make_prompt_cache(model)
    logits = model(mx.array([other[hit.tokens :]]), cache=start)[:, -1]
    assert mx.allclose(logits, model(mx.array([other]), cache=make_prompt_cache(model))[:, -1], atol=1e-3)
