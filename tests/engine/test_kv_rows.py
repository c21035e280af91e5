"""Rows of caches as plain memory: in and out again, byte for byte, in every dtype."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from family_params import each
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from shared_runs import as_bytes, prefilled, prompt
from tiny_architectures import FAMILIES, WINDOW, tiny

from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import array_bytes, rings, row_memory, whole_states
from fleetd.engine.sequence_state.array_bytes import all_finite
from fleetd.engine.sequence_state.parts import parts
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape, RunningShape
from fleetd.engine.sequence_state.whole_states import state_buffers
from fleetd.engine.shared_prefill import frame_payloads
from fleetd.engine.shared_prefill.frame_payloads import States
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError
from fleetd.plan.prefill.split import Split

pytestmark = pytest.mark.usefixtures("cpu_installed")

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def filled(shape: KvShape, tokens: int) -> KVCache:
    cache = KVCache()
    keys = mx.random.normal((1, shape.heads, tokens, shape.key_width)).astype(shape.dtype)
    values = mx.random.normal((1, shape.heads, tokens, shape.value_width)).astype(shape.dtype)
    cache.update_and_fetch(keys, values)
    mx.eval(cache.keys, cache.values)
    return cache


def copy_into(buffers: list[memoryview], payload: list[memoryview]) -> None:
    data, at = memoryview(b"".join(payload)), 0
    for buffer in buffers:
        buffer[:] = data[at : at + buffer.nbytes]
        at += buffer.nbytes
    assert at == len(data)


def equal(a: Any, b: Any) -> bool:
    return all(
        as_bytes(x) == as_bytes(y) for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True)
    )


# How many numbers a token has between layers, where it is not one hidden state's 128: four hidden states;
# one, with keys and values of two heads of 32 each; one, with those before each block of layers; one, with
# the first values.
MORE_BETWEEN = {
    "gemma3n": 4 * 128,
    "hunyuan": 128 + 4 * 32,
    "hunyuan_3": 128 + 4 * 32,
    "hunyuan_experts": 128 + 4 * 32,
    "kimi_k3": 3 * 128,
    "kimi_k3_experts": 3 * 128,
    "rwkv7": 2 * 128,
}


@pytest.mark.parametrize("name", each(FAMILIES))
def test_a_layout_says_what_prefill_fills(name: str) -> None:
    model = tiny(name)
    stage = Stage.of(model)
    layout = KvLayout.of(stage)
    assert (layout.first, len(layout.layers)) == (0, 4)
    assert layout.hidden_bytes(3) == 3 * MORE_BETWEEN.get(name, 128) * 4
    assert stage.hidden_width == 128
    for shapes, cache in zip(
        layout.layers, stage.spread(prefilled(model, prompt(12), 11).cache), strict=True
    ):
        for shape, part in zip(shapes, parts(cache), strict=True):
            check_shape(shape, part)
    states = [part for cache in stage.empty for part in parts(cache) if isinstance(part, ArraysCache)]
    assert (layout.state_bytes > 0) is bool(states)
    # A stage without the embedding finds the same.
    assert KvLayout.of(stage.part(1, 3)) == KvLayout(1, layout.layers[1:3], layout.width, layout.dtype)
    assert KvLayout.of(stage.part(1, 3)).parts(2) == layout.parts(2)


def check_shape(shape: KvShape | RunningShape, part: Any) -> None:
    if isinstance(shape, RunningShape):
        assert shape.arrays == tuple((x.shape, x.dtype) for x in part.cache)
        assert shape.state_sizes == (part.nbytes, 0)
        return
    assert part.keys.shape[1:] == (shape.heads, part.keys.shape[2], shape.key_width)
    assert part.values.shape[1:] == (shape.heads, part.keys.shape[2], shape.value_width)
    assert (part.keys.dtype, part.values.dtype) == (shape.dtype, shape.dtype)
    assert shape.window == (WINDOW if isinstance(part, RotatingKVCache) else 0)
    rows = part.keys.shape[2]
    assert shape.sizes(rows) == (part.keys.nbytes, part.values.nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(8, 8), (8, 4)])
def test_rows_arrive_where_they_belong(dtype: mx.Dtype, widths: tuple[int, int]) -> None:
    shape = KvShape(3, *widths, dtype, 0)
    source, target = filled(shape, 300), preallocated(shape, 300)
    buffer = RowBuffer(target)
    for start, stop in ((0, 7), (7, 250), (250, 300)):
        payload = row_memory.rows(source, start, stop)
        assert sum(piece.nbytes for piece in payload) == sum(shape.sizes(stop - start))
        copy_into(buffer.rows(start, stop), payload)
    del buffer
    target.offset = 300
    assert equal(source, target)


def test_rows_from_arrays_of_their_own_are_the_same() -> None:
    shape = KvShape(3, 8, 4, mx.bfloat16, 0)
    source = filled(shape, 90)
    keys, values = row_memory.copied(source, 20, 60)
    mx.eval(keys, values)
    pieces = [piece for x in (keys, values) for piece in array_bytes.pieces(array_bytes.as_bytes(x)[0])]
    assert len(pieces) == 2  # one write each
    assert b"".join(pieces) == b"".join(row_memory.rows(source, 20, 60))


def test_rows_that_fill_their_room_lie_as_they_were_computed() -> None:
    """By token, then by head: MLX keeps such an array instead of copying it into the cache's own."""
    shape = KvShape(3, 8, 4, mx.float32, 0)
    cache = preallocated(shape, 256)
    keys, values = (mx.random.normal((1, 256, 3, width)).transpose(0, 2, 1, 3) for width in (8, 4))
    cache.update_and_fetch(keys, values)
    mx.eval(cache.keys, cache.values)
    expected = [np.ascontiguousarray(np.array(part)[0, :, 10:256]).tobytes() for part in (keys, values)]
    assert b"".join(row_memory.rows(cache, 10, 256)) == b"".join(expected)


@pytest.mark.parametrize(("tokens", "room"), [(0, 256), (1, 256), (256, 256), (257, 512)])
def test_room_is_made_in_the_steps_of_a_local_cache(tokens: int, room: int) -> None:
    shape = KvShape(2, 8, 8, mx.float32, 0)
    assert KVCache.step == 256
    assert preallocated(shape, tokens).keys.shape[2] == room


def test_a_prefix_is_copied_and_left_alone() -> None:
    shape = KvShape(2, 8, 4, mx.float32, 0)
    prefix = filled(shape, 40)
    before = [as_bytes(x) for x in prefix.keys_and_values()]
    cache = preallocated(shape, 300, prefix)
    assert cache.offset == 40
    assert equal(cache, prefix)
    more = mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 4))
    cache.update_and_fetch(*more)
    assert [as_bytes(x) for x in prefix.keys_and_values()] == before


def test_what_is_added_to_a_shorter_view_is_not_in_the_longer_one() -> None:
    shape = KvShape(2, 8, 8, mx.float32, 0)
    cache = preallocated(shape, 60, filled(shape, 50))
    before = [as_bytes(x) for x in cache.keys_and_values()]
    short = row_memory.truncated(cache, 20)
    short.update_and_fetch(mx.ones((1, 2, 9, 8)), mx.ones((1, 2, 9, 8)))
    assert (short.offset, cache.offset) == (29, 50)
    assert [as_bytes(x) for x in cache.keys_and_values()] == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_rotates_travels_whole(dtype: mx.Dtype) -> None:
    shape = KvShape(2, 8, 4, dtype, 16)
    for sizes in ([5], [10, 10], [40], [12, 1, 1, 1, 1, 1, 1, 1], [20, 1, 7]):
        source = RotatingKVCache(16)
        for size in sizes:
            keys = mx.random.normal((1, 2, size, 8)).astype(dtype)
            values = mx.random.normal((1, 2, size, 4)).astype(dtype)
            source.update_and_fetch(keys, values)
        mx.eval(source.keys, source.values)
        held, seen = source.keys.shape[2], source.offset
        head = FrameHeader(Kind.STATE, 0, 0, seen, shape.sizes(held), source._idx)
        frame = Frame(head, state_buffers(shape, head.sizes[0]))
        payload, sizes, index = whole_states.state(source)
        assert (sizes, index) == (head.sizes, head.index)
        copy_into(frame.buffers, payload)
        target = whole_states.rotated(RotatingKVCache(16), shape, seen, head.index, frame.buffers)
        assert RingState.of(target) == RingState.of(source)
        assert as_bytes(target.keys) == as_bytes(source.keys)
        assert as_bytes(target.values) == as_bytes(source.values)
        # Both go on alike.
        next_rows = mx.ones((1, 2, 3, 8), dtype), mx.ones((1, 2, 3, 4), dtype)
        for a, b in zip(
            source.update_and_fetch(*next_rows), target.update_and_fetch(*next_rows), strict=True
        ):
            assert as_bytes(a) == as_bytes(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_running_state_travels_whole(dtype: mx.Dtype) -> None:
    shape = RunningShape((((1, 3, 8), dtype), ((1, 2, 4, 4), mx.float32)))
    source = ArraysCache(2)
    source[0] = mx.random.normal((1, 3, 8)).astype(dtype)
    source[1] = mx.random.normal((1, 2, 4, 4)).swapaxes(2, 3)
    payload, sizes, index = whole_states.state(source)
    assert (sizes, index) == (shape.state_sizes, 0)
    buffers = state_buffers(shape, sizes[0])
    copy_into(buffers, payload)
    target = whole_states.running(ArraysCache(2), shape, buffers)
    assert [as_bytes(x) for x in target.cache] == [as_bytes(x) for x in source.cache]


@pytest.mark.parametrize("sizes", [[5], [10, 10], [40], [1] * 40, [12, 1, 1, 1, 1, 1], [20, 1, 7, 1]])
def test_how_far_a_cache_rotates_is_known_without_its_rows(sizes: list[int]) -> None:
    cache = RotatingKVCache(16)
    for done, size in enumerate(sizes):
        rows = mx.zeros((1, 2, size, 8))
        cache.update_and_fetch(rows, rows)
        assert RingState(0, 0, 0).after(RotatingKVCache(16), sizes[: done + 1]) == RingState.of(cache)
    more = mx.zeros((1, 2, 9, 8))
    turn = RingState.of(cache)
    cache.update_and_fetch(more, more)
    assert turn.after(RotatingKVCache(16), [9]) == RingState.of(cache)


ROTATED = [[5], [10, 10], [40], [3, 1, 1], [20, 7], [1] * 40, [20, 1, 7, 1], [20] + [1] * 16]


def ring_of(sizes: list[int], keep: int = 0) -> RotatingKVCache:
    """Of tokens whose rows are their numbers."""
    ring, token = RotatingKVCache(16, keep), 0
    for size in sizes:
        rows = mx.arange(token, token + size, dtype=mx.float32).reshape(1, 1, size, 1)
        ring.update_and_fetch(rows, rows)
        token += size
    return ring


def numbers(found: tuple[mx.array, mx.array] | None) -> list[float] | None:
    return None if found is None else np.array(found[1]).reshape(-1).tolist()


@pytest.mark.parametrize("sizes", ROTATED)
def test_a_token_is_found_in_a_cache_that_rotates(sizes: list[int]) -> None:
    ring, seen = ring_of(sizes), sum(sizes)
    held = np.array(ring.keys)[:, :, : min(seen, ring.keys.shape[2])].reshape(-1).tolist()
    for token in range(seen):
        assert numbers(rings.rows(ring, token, 1)) == ([token] if token in held else None)
    first = int(min(held))
    assert numbers(rings.rows(ring, first, seen - first)) == list(range(first, seen))


@pytest.mark.parametrize("sizes", ROTATED)
def test_a_cache_that_rotates_is_cut_where_a_whole_window_is_left(sizes: list[int]) -> None:
    ring, seen = ring_of(sizes), sum(sizes)
    for token in range(rings.first_cut(ring), seen + 1):
        earlier, rows = rings.before(ring, token), mx.full((1, 1, 3, 1), token, dtype=mx.float32)
        assert int(earlier.offset) == token
        keys, _ = earlier.update_and_fetch(rows, rows)
        window = [float(t) for t in range(max(0, token - 15), token)]
        assert np.array(keys).reshape(-1).tolist()[-len(window) - 3 :] == [*window, token, token, token]
    assert int(ring.offset) == seen, "the cache itself stays as it is"
    if rings.first_cut(ring):
        assert rings.rows(ring, rings.first_cut(ring) - 16, 1) is None, "one earlier, the window is not whole"


def test_a_cache_that_always_keeps_its_first_rows_is_not_cut_once_it_has_rotated() -> None:
    assert rings.first_cut(ring_of([10], keep=2)) == 0
    assert rings.first_cut(ring_of([20, 20], keep=2)) == 40
    assert rings.rows(ring_of([20, 20], keep=2), 39, 1) is None


def test_a_cache_that_is_not_what_the_chunks_leave_is_refused() -> None:
    layout = KvLayout(0, (), 12, mx.float32)
    states = States({(3, 0): RotatingKVCache(16)}, layout, Split("tokens", (0, 20, 30), 4, 0, 30, 10))
    right = RotatingKVCache(16)
    for _ in range(3):
        right.update_and_fetch(mx.zeros((1, 2, 10, 8)), mx.zeros((1, 2, 10, 8)))
    states.check((3, 0), 30, right)
    wrong = RotatingKVCache(16)
    wrong.update_and_fetch(mx.zeros((1, 2, 30, 8)), mx.zeros((1, 2, 30, 8)))
    with pytest.raises(ProtocolError, match="layer 3"):
        states.check((3, 0), 30, wrong)
    with pytest.raises(ProtocolError):
        states.check((3, 0), 20, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_survive(dtype: mx.Dtype) -> None:
    hidden = mx.random.normal((1, 5, 12)).astype(dtype)
    mx.eval(hidden)
    data = frame_payloads.hidden_payload(hidden)
    layout = KvLayout(0, (), 12, dtype)
    assert data.nbytes == layout.hidden_bytes(5)
    frame = Frame(FrameHeader(Kind.HIDDEN, 2, 0, 5, (data.nbytes, 0)), [memoryview(bytearray(data))])
    back = frame_payloads.hidden_of(frame, layout)
    assert back.shape == hidden.shape
    assert back.dtype == dtype
    assert as_bytes(back) == as_bytes(hidden)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_found_in_the_rows_that_are_looked_at(
    dtype: mx.Dtype, bad: float
) -> None:
    array = mx.full((1, 2, 8, 4), 3e4).astype(dtype)
    assert all_finite(array, 0, 8)
    if dtype == mx.uint32:
        return
    array[0, 1, 5, 3] = bad
    assert not all_finite(array, 2, 6)
    assert not all_finite(array, 5, 6)
    assert all_finite(array, 0, 5)
    assert all_finite(array, 6, 8)
