from __future__ import annotations

import itertools
import tracemalloc

import msgspec
import numpy as np
import pytest

from fleetd.compression.packed import PackedScores
from fleetd.compression.token_scores import (
    PAIRS,
    SINK_TOKENS,
    SegmentScores,
    join,
    log_sum_exp,
    merge,
    pooled,
    reduced,
)

HEADS, QUERIES, TOKENS = 3, 5, 400


@pytest.fixture
def logits() -> np.ndarray:
    random = np.random.default_rng(1)
    found = random.normal(size=(HEADS, QUERIES, TOKENS)).astype(np.float32)
    found[1, 2, 77] += 9  # what one query of one head looks for
    return found


def segment(logits: np.ndarray, first: int = 0, last: int = TOKENS) -> SegmentScores:
    starts = np.arange(first, last, dtype=np.int32) * 4
    return SegmentScores.of_logits(starts, starts + 4, np.ascontiguousarray(logits[..., first:last]))


def one_pass(logits: np.ndarray) -> np.ndarray:
    """Softmax over all tokens, the best head of each query, the mean of the two best queries; no sinks."""
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    by_query = np.sort(p.max(axis=0), axis=0)
    values = by_query[-2:].mean(axis=0)
    values[:SINK_TOKENS] = 0
    return values


@pytest.mark.parametrize("cuts", [[], [200], [100, 200, 300], [1, 2, 399], list(range(20, 400, 20))])
def test_segments_merge_to_one_softmax(logits: np.ndarray, cuts: list[int]) -> None:
    bounds = [0, *cuts, TOKENS]
    parts = [segment(logits, a, b) for a, b in itertools.pairwise(bounds)]
    merged = merge(parts[::-1], pool=1)
    np.testing.assert_allclose(merged.values, one_pass(logits), rtol=2e-5)
    assert merged.starts.tolist() == [4 * n for n in range(TOKENS)]
    assert int(merged.values.argmax()) == 77


def test_attention_that_found_nothing_makes_the_beginning_of_a_text_matter_no_more(
    logits: np.ndarray,
) -> None:
    plain = merge([segment(logits)])
    logits[..., 0] += 12
    assert reduced(segment(logits))[0] > 0.9
    sunk = merge([segment(logits)])
    assert sunk.values[:10].max() <= plain.values.max()
    # What is left to the others is less, and the best one of them is the same.
    assert 70 <= int(sunk.values.argmax()) <= 84


def test_sums_alone_are_not_enough() -> None:
    """Without the other segments' sums a dull segment's best token would pass for the text's best."""
    logits = np.zeros((1, 1, 20), np.float32)
    logits[0, 0, 3] = 10
    dull, needle = segment(logits, 10, 20), segment(logits, 0, 10)
    assert reduced(dull).max() == pytest.approx(0.1)
    assert merge([needle, dull], pool=1).values[10:].max() < 1e-4


def test_joining_first_changes_nothing(logits: np.ndarray) -> None:
    a, b, c = segment(logits, 0, 100), segment(logits, 100, 250), segment(logits, 250)
    twice, once = merge([join([a, b]), c]), merge([a, b, c])
    np.testing.assert_allclose(twice.values, once.values, rtol=1e-6)


def test_few_pairs_of_many_are_enough_unless_the_weights_turn() -> None:
    random = np.random.default_rng(2)
    logits = random.normal(size=(8, 20, TOKENS)).astype(np.float32)
    merged = merge([segment(logits, 0, 200), segment(logits, 200)], pool=1)
    assert segment(logits).pairs.shape == (TOKENS, PAIRS)
    np.testing.assert_allclose(merged.values, one_pass(logits), rtol=2e-5)


def test_equal_logits_are_kept_in_the_order_of_the_pairs() -> None:
    assert segment(np.zeros((2, 3, TOKENS), np.float32)).pairs.tolist() == [[0, 1, 2, 3, 4, 5]] * TOKENS


def test_reducing_takes_less_memory_than_the_logits() -> None:
    logits = np.random.default_rng(3).normal(size=(16, 8, 20_000)).astype(np.float32)
    starts = np.arange(20_000, dtype=np.int32)
    tracemalloc.start()
    try:
        found = SegmentScores.of_logits(starts, starts + 1, logits)
        assert tracemalloc.get_traced_memory()[1] < logits.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found.log_sums, log_sum_exp(logits))


def test_large_logits_do_not_overflow() -> None:
    assert log_sum_exp(np.array([[1000.0, 1000.0]], np.float32)) == pytest.approx([1000 + np.log(2)])


def test_pool_averages_over_what_is_there() -> None:
    found = pooled(np.array([6, 0, 0, 0, 0, 3], np.float32), 3)
    assert found.tolist() == [3, 2, 0, 0, 1, 1.5]
    assert pooled(np.array([2.0], np.float32), 13).tolist() == [2]
    assert pooled(np.array([1.0, 4.0], np.float32), 1).tolist() == [1, 4]


def test_packed_and_back(logits: np.ndarray) -> None:
    found = segment(logits)
    wire = msgspec.msgpack.encode(found.packed())
    again = SegmentScores.unpack(msgspec.msgpack.decode(wire, type=PackedScores))
    for name in ("starts", "ends", "pairs", "logits", "log_sums"):
        np.testing.assert_array_equal(getattr(found, name), getattr(again, name))
    np.testing.assert_array_equal(merge([again]).values, merge([found]).values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 4},
        {"queries": 0},
        {"starts": b""},
        {"ends": b"\0" * 8},
        {"logits": b"\0" * 4},
        {"logits": np.full(TOKENS * 15, np.nan, "<f4").tobytes()},
        {"pairs": np.full(TOKENS * 15, 99, "<u2").tobytes()},
        {"pairs": b"", "logits": b""},
        {"starts": np.arange(TOKENS, 0, -1, dtype="<i4").tobytes()},
        {"ends": np.zeros(TOKENS, "<i4").tobytes()},
        {"ends": np.arange(5 * TOKENS, 4 * TOKENS, -1, dtype="<i4").tobytes()},
        {"logits": np.full(TOKENS * 15, 1e30, "<f4").tobytes()},
        {"log_sums": np.zeros(15, "<f4").tobytes()},
        {"log_sums": b"\0\0\xc0\x7f" * 15},
    ],
)
def test_what_does_not_fit_together_is_refused(logits: np.ndarray, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="scores"):
        SegmentScores.unpack(msgspec.structs.replace(segment(logits).packed(), **wrong))


def test_a_logit_may_exceed_its_sum_by_what_rounding_adds() -> None:
    one = segment(np.full((1, 1, 1), 7.0, np.float32), 0, 1).packed()
    found = SegmentScores.unpack(msgspec.structs.replace(one, logits=np.float32(7.0005).tobytes()))
    assert reduced(found) == pytest.approx([1.0], rel=1e-3)
    with pytest.raises(ValueError, match="more than the sum"):
        SegmentScores.unpack(msgspec.structs.replace(one, logits=np.float32(7.01).tobytes()))


def test_tokens_are_within_the_characters_that_they_start_in(logits: np.ndarray) -> None:
    found = segment(logits, 10, 20)
    assert found.within(40, 77)
    assert not found.within(41, 100)
    assert not found.within(0, 76)


def test_only_segments_of_one_text_merge(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no segments"):
        merge([])
    with pytest.raises(ValueError, match="different"):
        merge([segment(logits, 0, 200), segment(logits[:2], 200)])
    with pytest.raises(ValueError, match="overlap"):
        merge([segment(logits, 0, 201), segment(logits, 200)])
