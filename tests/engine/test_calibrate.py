"""Calibration measures within its time, and leaves no trace."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
from asking import ask, run
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny_architectures import tiny

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.calibrate import (
    CHUNKS,
    CONTEXT_BYTES,
    CONTEXTS,
    DECODE_SHARE,
    DECODE_STEPS,
    FIRST,
    GPU_CHUNKS,
    ONE_SIZE,
    OTHERS,
    REPEATS,
    Calibration,
    Measurement,
)
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.made_up import made_up
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.part_speeds import PartCalibration
from fleetd.hardware.other_load import CpuReading
from fleetd.models.folder import ModelFolder


class Paced:
    """A model that takes ``seconds(n)`` for n tokens, on a clock of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.sizes: list[int] = []
        self.seen: list[list[int]] = []
        self.caches: list[Any] = []

    def make_cache(self) -> list[Any]:
        self.caches.append([SimpleNamespace(state=mx.array(0.0))])
        return self.caches[-1]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        assert cache is self.caches[-1]
        self.seen.append(tokens[0].tolist())
        self.sizes.append(tokens.shape[1])
        self.now += self.seconds(tokens.shape[1])
        return mx.zeros((1, tokens.shape[1], 4))

    def measure(
        self, budget_s: float = limits.CALIBRATE_S, context_tokens: int = 4096, **options: Any
    ) -> Measurement:
        return Calibration(
            self, 50, context_tokens, budget_s, clock=lambda: self.now, load=self.load, **options
        ).measured()

    def load(self) -> CpuReading | None:
        return CpuReading(self.now, self.now, self.now, 1)


def test_a_fast_device_is_measured_with_the_largest_chunks_twice() -> None:
    model = Paced(lambda n: 0.01 if n == 1 else n / 1000)
    speeds = model.measure()
    assert model.sizes == [1] * DECODE_STEPS + [*CHUNKS, *CHUNKS[:0:-1]]
    assert len(model.caches) == 1 + len(CHUNKS) + 2, "every chunk begins a context of its own"
    assert speeds.speed.prefill_tok_s == pytest.approx(1000)
    assert speeds.speed.decode_tok_s == pytest.approx(100)


def test_a_gpu_is_measured_with_what_it_may_be_given() -> None:
    """Each size that may be chosen twice; none that would take longer than a chunk may."""
    model = Paced(lambda n: 0.01 if n == 1 else 0.1 + n / 4000)
    speeds = model.measure(limits.CALIBRATE_GPU_S, sizes=GPU_CHUNKS)
    assert {n: model.sizes.count(n) >= 2 for n in GPU_CHUNKS if n > 16} == dict.fromkeys(GPU_CHUNKS[1:], True)
    assert speeds.chunk_s == pytest.approx({n: 0.1 + n / 4000 for n in GPU_CHUNKS})
    # The rate is still that of the size that plans take it for.
    assert speeds.speed.prefill_tok_s == pytest.approx(256 / (0.1 + 256 / 4000))
    slow = Paced(lambda n: 0.01 if n == 1 else n / 400)
    assert max(slow.measure(limits.CALIBRATE_GPU_S, sizes=GPU_CHUNKS).chunk_s) == 512


def test_the_best_runs_count_and_one_slow_token_does_not() -> None:
    steps = iter([0.01, 0.01, 0.09, 0.01, 0.01])
    chunks = iter([0.016, 0.064, 0.4, 0.256, 0.256, 0.064])
    model = Paced(lambda n: next(steps if n == 1 else chunks))
    speeds = model.measure()
    assert speeds.speed.decode_tok_s == pytest.approx(100)
    assert speeds.speed.prefill_tok_s == pytest.approx(1000)


def test_a_slow_device_is_measured_with_what_fits() -> None:
    model = Paced(lambda n: 0.06 if n == 1 else n / 60)
    speeds = model.measure(budget_s=2.0)
    # After 64 tokens, in a second, there is no time for 256, nor for 64 again.
    assert model.sizes == [1] * DECODE_STEPS + [16, 64, 16]
    assert speeds.speed.prefill_tok_s == pytest.approx(60)
    assert model.now - 100.0 <= 2.0


def test_what_a_chunk_costs_is_told_apart_also_where_there_is_no_time_for_large_ones() -> None:
    """A core of its own: 85 ms for each chunk. The rate is that of the largest size all the same."""
    model = Paced(lambda n: 0.045 if n == 1 else 0.085 + n * 0.006)
    speeds = model.measure(budget_s=2.0)
    assert max(model.sizes) < CHUNKS[-1]
    assert speeds.speed.prefill_fixed_s == pytest.approx(0.085)
    assert speeds.speed.prefill_tok_s == pytest.approx(256 / (0.085 + 256 * 0.006))


def test_one_size_of_chunk_says_too_little_of_a_slow_device() -> None:
    """A model of two billion parameters: by a chunk of 16 a third less than its prompts get."""
    seconds: Callable[[int], float] = lambda n: 0.4 if n == 1 else 0.25 + n / 27  # noqa: E731
    slow = Paced(seconds).measure()
    assert (list(slow.chunk_s), slow.speed.doubt) == ([16], ONE_SIZE)
    assert slow.speed.prefill_tok_s < 0.75 * 256 / seconds(256)
    # With a second size what a chunk costs is known; a model that can be given no second one has none.
    assert Paced(seconds).measure(budget_s=8.0).speed.doubt == ""
    assert Paced(seconds).measure(context_tokens=16).speed.doubt == ""


def test_single_tokens_leave_most_of_the_time_to_chunks() -> None:
    model = Paced(lambda n: 0.2 if n == 1 else n / 100)
    model.measure(budget_s=2.0)
    assert model.sizes == [1, 1, 16, 64, 64, 16]


def test_a_device_that_is_slower_than_the_budget_computes_one_token() -> None:
    model = Paced(lambda n: 3.0 * n)
    assert model.measure() == Measurement(MeasuredSpeed(0.0, pytest.approx(1 / 3)))
    assert model.sizes == [1]


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.05, 0.1, 0.3, 0.49, 0.51, 1.0, 1.9])
@pytest.mark.parametrize("tokens_per_step", [1, 4, 20, 200])
def test_the_budget_is_kept_whatever_the_speed(step_s: float, tokens_per_step: int) -> None:
    """For every device on which a chunk takes no longer, by the token, than a smaller one."""
    model = Paced(lambda n: step_s if n == 1 else max(step_s, n * step_s / tokens_per_step))
    speeds = model.measure()
    # The first chunk may turn out slower than expected, by as much as a token at a time is.
    slack = max(0.0, 16 * step_s / tokens_per_step - FIRST * step_s)
    assert model.now - 100.0 <= limits.CALIBRATE_S + slack + 1e-9
    assert speeds.speed.decode_tok_s == pytest.approx(1 / step_s)
    decoding = step_s * model.sizes.count(1)
    assert decoding <= max(step_s, DECODE_SHARE * limits.CALIBRATE_S + 1e-9)


def test_no_chunk_is_longer_than_the_context() -> None:
    model = Paced(lambda n: 0.001)
    model.measure(context_tokens=64)
    assert max(model.sizes) == 64
    model = Paced(lambda n: 0.001)
    assert model.measure(context_tokens=8).speed.prefill_tok_s == 0
    assert model.sizes == [1] * DECODE_STEPS


def test_the_tokens_of_a_chunk_differ_and_are_in_the_vocabulary() -> None:
    model = Paced(lambda n: 0.001)
    model.measure()
    for tokens in model.seen:
        assert all(0 <= token < 50 for token in tokens)
        assert len(set(tokens)) == min(len(tokens), 50)


# ---- Beside other programs ---------------------------------------------------------------------------------


class Crowded(Paced):
    """A model whose chunks take the next of ``factors`` times as long as they should, then again as long."""

    def __init__(self, *factors: float, others: float = 0.0) -> None:
        super().__init__(lambda n: 0.01 if n == 1 else n / 1000 * self.factor())
        self.factors = iter(factors)
        self.others = others
        self.busy_s = 0.0

    def factor(self) -> float:
        return next(self.factors, 1.0)

    def load(self) -> CpuReading:
        """Of four cores, of which this process has one and others their share."""
        return CpuReading((1.0 + 4 * self.others) * self.now, self.now, self.now, 4)


@given(st.floats(1.5, 10.0), st.integers(1, REPEATS - 2))
def test_what_comes_and_goes_beside_it_is_measured_again_until_it_is_gone(slower: float, runs: int) -> None:
    """Each disturbed run of the largest chunk takes half as long again as the one before."""
    model = Crowded(1.0, 1.0, *(slower * 1.5**run for run in range(runs)))
    speeds = model.measure(budget_s=1e6)
    assert not speeds.speed.doubt
    assert speeds.speed.prefill_tok_s == pytest.approx(1000)
    assert model.sizes.count(CHUNKS[-1]) == runs + 2


def test_chunks_that_never_agree_are_told_as_doubtful() -> None:
    model = Crowded(*(1.3**power for power in range(20, 0, -1)))
    doubt = model.measure(budget_s=1e6).speed.doubt
    assert doubt.startswith("equal chunks took times that differ by 30")
    assert model.sizes.count(CHUNKS[-1]) == REPEATS


@pytest.mark.parametrize(
    ("others", "doubtful"), [(0.0, False), (OTHERS - 0.01, False), (OTHERS + 0.01, True)]
)
def test_chunks_that_agree_beside_steady_work_of_others_are_doubtful_too(
    others: float, doubtful: bool
) -> None:
    """They took 4.6 times as long as they should, each of them."""
    model = Crowded(*[4.6] * 100, others=others)
    speeds = model.measure(budget_s=100.0)
    assert bool(speeds.speed.doubt) is doubtful
    told = f"CPU {100 * others:.0f} % busy with other programs when measured"
    assert not doubtful or speeds.speed.doubt == told


def test_where_others_left_no_time_for_any_chunk_that_is_doubtful_too() -> None:
    model = Crowded(*[1000.0] * 100, others=0.9)
    model.seconds = lambda n: 2.0 * n
    speeds = model.measure()
    assert speeds.speed.prefill_tok_s == 0
    assert speeds.speed.doubt == "CPU 90 % busy with other programs when measured"


def test_a_system_that_does_not_tell_its_load_leaves_it_to_the_runs() -> None:
    model = Crowded()
    speeds = Calibration(model, 50, 4096, 3.0, clock=lambda: model.now, load=lambda: None).measured()
    assert not speeds.speed.doubt


def test_the_share_of_others_is_of_all_cores_and_over_long_enough() -> None:
    begun = CpuReading(100.0, 5.0, 10.0, 2)
    assert CpuReading(102.0, 6.0, 11.0, 2).others_share(begun) == 0.5
    assert CpuReading(101.0, 6.5, 11.0, 2).others_share(begun) == 0.0, "counters of two kinds differ a little"
    assert CpuReading(109.0, 5.0, 11.0, 2).others_share(begun) == 1.0
    assert CpuReading(109.0, 5.0, 10.1, 2).others_share(begun) == 0.0
    now = CpuReading.now()
    assert now is not None
    assert now.busy_s > 0
    assert now.cores > 0


# ---- Behind a context --------------------------------------------------------------------------------------


class Attentive(Paced):
    """One with ordinary caches, whose tokens take ``context_s`` more for each one before their chunk."""

    def __init__(self, seconds: Callable[[int], float], context_s: float, row_width: int = 4) -> None:
        super().__init__(seconds)
        self.context_s = context_s
        self.row_width = row_width
        self.contexts: list[int] = []

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        n, before = tokens.shape[1], cache[0].offset
        self.sizes.append(n)
        self.contexts.append(before)
        self.now += self.seconds(n) + self.context_s * n * before
        rows = mx.zeros((1, 2, n, self.row_width))
        for layer in cache:
            layer.update_and_fetch(rows, rows)
        return mx.zeros((1, n, 4))


def test_a_chunk_behind_a_context_tells_what_the_context_costs() -> None:
    model = Attentive(lambda n: 0.02 if n == 1 else 0.01 + n / 1000, 1e-6)
    speeds = model.measure()
    assert speeds.speed.prefill_context_s == pytest.approx(1e-6)
    assert speeds.speed.prefill_fixed_s == pytest.approx(0.01)
    assert speeds.speed.prefill_tok_s == pytest.approx(256 / 0.266)
    # Attention was plain to see behind the shorter context.
    assert max(model.contexts) == CONTEXTS[0]
    assert model.now - 100.0 <= limits.CALIBRATE_S


class CompiledLate(Attentive):
    """One whose first run of each kind takes as long as an H100's host took to compile a kernel."""

    def __init__(self, seconds: Callable[[int], float], context_s: float) -> None:
        super().__init__(seconds, context_s)
        self.compiled: set[tuple[int, int]] = set()

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        kind = tokens.shape[1], cache[0].offset if tokens.shape[1] > 1 else 0
        self.now += 0 if kind in self.compiled else 50
        self.compiled.add(kind)
        return super().__call__(tokens, cache)


def test_kernels_that_are_compiled_at_their_first_use_change_no_figure() -> None:
    seconds: Callable[[int], float] = lambda n: 0.01 if n == 1 else 0.01 + n / 4000  # noqa: E731
    wanted = Attentive(seconds, 1e-6).measure(limits.CALIBRATE_GPU_S, sizes=GPU_CHUNKS)
    late = CompiledLate(seconds, 1e-6)
    found = late.measure(limits.CALIBRATE_GPU_S, sizes=GPU_CHUNKS, compiles=True)
    assert found.chunk_s == pytest.approx(wanted.chunk_s)
    assert found.speed.prefill_context_s == pytest.approx(wanted.speed.prefill_context_s)
    # One more token lies before the steps.
    assert found.speed.decode_tok_s == pytest.approx(wanted.speed.decode_tok_s, rel=1e-3)
    # As it was measured before: the largest sizes were never reached, and a context seemed dear.
    misled = CompiledLate(seconds, 1e-6).measure(limits.CALIBRATE_GPU_S, sizes=GPU_CHUNKS)
    assert max(misled.chunk_s, default=0) < max(wanted.chunk_s)


def test_a_context_that_hardly_shows_is_made_longer() -> None:
    model = Attentive(lambda n: 0.001 if n == 1 else n / 10_000, 1e-9)
    assert model.measure(context_tokens=16_384).speed.prefill_context_s == pytest.approx(1e-9)
    assert max(model.contexts) == CONTEXTS[1]
    model = Attentive(lambda n: 0.001 if n == 1 else n / 10_000, 1e-9)
    model.measure(context_tokens=4096)
    assert max(model.contexts) == CONTEXTS[0]


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.05, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("context_s", [0.0, 1e-7, 1e-6])
def test_contexts_keep_to_the_budget_too(step_s: float, context_s: float) -> None:
    model = Attentive(lambda n: max(step_s, n * step_s / 20), context_s)
    model.measure()
    # A chunk behind a context is taken to be twice as long as without; it may be more.
    slack = max(0.0, max(n * c for n, c in zip(model.sizes, model.contexts, strict=True)) * context_s)
    assert model.now - 100.0 <= limits.CALIBRATE_S + slack + 1e-9


def test_another_program_behind_a_context_is_not_taken_for_the_context() -> None:
    """The first run behind each took three times as long: a long prompt would seem to take minutes."""
    measured: set[tuple[int, int]] = set()

    class Interrupted(Attentive):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            before, offset = self.now, cache[0].offset
            out = super().__call__(tokens, cache)
            run = (tokens.shape[1], offset)
            if offset and run[0] > 1 and run not in measured:
                measured.add(run)
                self.now += 2 * (self.now - before)
            return out

    model = Interrupted(lambda n: 0.02 if n == 1 else n / 1000, 1e-7)
    assert model.measure().speed.prefill_context_s == pytest.approx(1e-7)


def test_a_context_that_would_take_too_much_memory_is_not_made_up() -> None:
    per_token = 2 * 2 * 2 * 4  # layers, keys and values, heads, bytes
    model = Attentive(lambda n: 0.001, 1e-6, row_width=1 + CONTEXT_BYTES // per_token // CONTEXTS[0])
    assert model.measure().speed.prefill_context_s == 0
    assert max(model.contexts) < DECODE_STEPS


# ---- A real (tiny) model ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("make", [tiny_models.smollm2, tiny_models.sliding])
def test_answers_are_what_they_would_be_without_it(make: Callable[[], Any]) -> None:
    model, tokens = make(), mx.array([tiny_models.prompt(40)])
    mx.random.seed(5)
    before, drawn = model(tokens, cache=make_prompt_cache(model)), mx.random.uniform(shape=(4,))
    mx.eval(before, drawn)
    mx.random.seed(5)
    # What other tests have left, and what the stream's thread has computed and not let go yet.
    gc.collect()
    mx.synchronize()
    held = mx.get_active_memory()
    speeds = Calibration(model, tiny_models.VOCAB, 4096, 1.0).measured()
    mx.synchronize()
    assert (mx.get_active_memory(), mx.get_cache_memory()) == (held, 0)
    assert min(speeds.speed.prefill_tok_s, speeds.speed.decode_tok_s) > 0
    assert mx.array_equal(model(tokens, cache=make_prompt_cache(model)), before)
    assert mx.array_equal(mx.random.uniform(shape=(4,)), drawn)


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("held", [(0, 1), (1, 2), (0, 2)])
def test_some_layers_are_told_as_the_whole_model_at_their_pace(
    held: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.smollm2()
    whole = Stage.of(model)
    part = whole.part(*held)
    ran: list[tuple[int, int]] = []

    def scripted(calibration: Any) -> Measurement:
        layers = calibration._model
        caches = layers.make_cache()
        assert len(caches) == part.last - part.first
        for count in (1, 100):
            out = layers(mx.zeros((1, count), mx.int32), caches)
            ran.append((out.shape[1], caches[0].offset))
            assert len(set(out[0, :, 0].tolist())) > count // 2
        return Measurement(MeasuredSpeed(100.0, 10.0, 1e-6, 0.1, "doubt"))

    monkeypatch.setattr(Calibration, "runs", lambda _self: iter(()))
    monkeypatch.setattr(Calibration, "found", scripted)
    share = (held[1] - held[0]) / whole.total
    found = PartCalibration(part, KvLayout.of(part), 4096, 1.0).measured()
    assert ran == [(1, 1), (100, 101)]
    assert found == Measurement(
        MeasuredSpeed(
            pytest.approx(100 * share), 0.0, pytest.approx(1e-6 / share), pytest.approx(0.1 / share), "doubt"
        )
    )


@pytest.mark.one_loop
async def test_a_loaded_model_tells_its_speeds_and_nothing_is_left_of_the_measuring(
    pool: EnginePool, chain: ModelFolder
) -> None:
    await run(pool, chain, ask("<hello>"))
    async with asyncio.timeout(60):
        while not pool.status()[0].prefix_entries:  # noqa: ASYNC110 — told with its next beat
            await asyncio.sleep(0.01)
    (status,) = pool.status()
    assert status.speed.prefill_tok_s > 0
    assert status.speed.decode_tok_s > 0
    # Of the one request that came.
    assert status.prefix_entries == 1


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text", "falcon_h1", "gpt_oss"])
def test_states_and_windows_are_measured_behind_a_context_too(family: str) -> None:
    """Without it, a hybrid would be priced as if all of its layers were attention."""
    model = tiny(family)
    short, tokens = make_prompt_cache(model), mx.array([[1, 2, 3]])
    model(tokens, cache=short)
    context, more = 96, 16
    caches = made_up(short, context, more, CONTEXT_BYTES)
    assert caches is not None
    held = [kind_of(part).held(part) for part in all_parts(caches)]
    assert set(held) <= {context, None}
    grown = [part.keys.shape[2] for part in all_parts(caches) if kind_of(part).plain]
    model(mx.array([[5] * more]), cache=caches)
    # There was room for the chunk: nothing was copied to take it.
    assert [part.keys.shape[2] for part in all_parts(caches) if kind_of(part).plain] == grown
    assert [kind_of(part).held(part) for part in all_parts(caches)] == [
        None if count is None else context + more for count in held
    ]
    assert made_up(short, context, more, most_bytes=1) is None
