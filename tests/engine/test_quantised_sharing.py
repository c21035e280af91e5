"""Shared prefills, sparse ones and scores of a model whose keys and values are held in 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_events import RequestEvents
from shared_runs import LAYERS, SharedRun, as_bytes, staged
from sharing import Sharing, prompt, workers, write
from tiny_architectures import tiny

from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.quantised_rows import quantise_rows
from fleetd.engine.sequence_state import row_memory
from fleetd.engine.sequence_state.array_bytes import as_bytes as bytes_view
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.packed_caches import PackedKVCache
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.engine.sequence_state.shapes import PackedShape
from fleetd.engine.shared_prefill import frame_payloads
from fleetd.engine.shared_prefill.fingerprint import layer_hashes
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller
from fleetd.engine.streams.frames import Kind
from fleetd.plan.prefill.split import Split, checked

SPLITS = [
    Split("layers", (0, 1, 2, 4, 4), LAYERS, 20, 101, 40),
    Split("tokens", (20, 60, 100, 140, 181), LAYERS, 20, 181, 40),
]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.kind)
@pytest.mark.parametrize(
    ("name", "bits"), [("llama", 8), ("llama", 4), ("gemma3_text", 8), ("qwen3_5", 4), ("deepseek_v32", 8)]
)
def test_any_split_gives_the_bytes_of_local_prefill(name: str, bits: Any, split: Split) -> None:
    model = tiny(name)
    assert quantise_rows(model, bits).bits == bits
    run = SharedRun(model, checked(split))
    cache = run.finish().cache
    kinds = {type(layer) for layer in cache}
    assert kinds == {type(layer) for layer in make_prompt_cache(model)}
    run.check(cache)


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.kind)
def test_rows_that_differ_in_rounding_are_alike_once_they_are_numbers(split: Split) -> None:
    """Of words no length can be told: a helper that rounds otherwise would be taken for a liar."""
    model, theirs = tiny("llama"), tiny("llama")
    for layer in theirs.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.k_proj.weight * (1 + 1e-3)
    for one in (model, theirs):
        quantise_rows(one, 8)
    run = SharedRun(model, checked(split), theirs=theirs, exact=False)
    assert not run.finish().remaining


@pytest.mark.usefixtures("cpu_installed")
def test_a_worker_computes_for_others_as_they_hold_rows() -> None:
    plain, quantised = tiny("llama"), tiny("llama")
    quantise_rows(quantised, 8)
    here, there = (Sharable.of(Stage.of(model), "cpu", {}, None) for model in (quantised, plain))
    assert here.arithmetic == there.arithmetic, "how a prompt is held is no property of the machine"
    assert there.with_kv_bits(8).layout == here.layout
    assert here.with_kv_bits(0).layout == there.layout
    kinds = {type(cache) for cache in there.with_kv_bits(8).stage.make_caches()}
    assert kinds == {PackedKVCache}
    assert here.layout.kept_bytes(range(LAYERS), 100) < there.layout.kept_bytes(range(LAYERS), 100) / 3


def test_a_scale_that_is_not_finite_is_found(on_cpu: None) -> None:
    packing = RowPacking.of(8, 64, 32, mx.bfloat16)
    assert packing is not None
    shape = PackedShape.of(2, packing)
    cache = row_memory.preallocated(shape, 10)
    numbers = [mx.random.normal((1, 2, 10, width), key=mx.random.key(1)) for width in (64, 32)]
    kind_of(cache).fill(cache, *numbers, 10)
    layout: Any = SimpleNamespace(parts=lambda layer: [shape])

    def finite() -> bool:
        # A buffer for each head, keys first, as they are read.
        heads = [
            memoryview(head).cast("B") for part in (cache.keys, cache.values) for head in bytes_view(part)[0]
        ]
        head = SimpleNamespace(kind=Kind.ROWS, layer=0, part=0)
        frame: Any = SimpleNamespace(head=head, buffers=heads)
        return frame_payloads.finite(frame, layout)

    assert finite()
    assert all(bool(mx.all(mx.isfinite(array))) for array in kind_of(cache).floats(cache))
    cache.values[0, 1, 7, -1] = mx.array(0x7FC00000, mx.uint32)
    assert not finite()
    assert not all(bool(mx.all(mx.isfinite(array))) for array in kind_of(cache).floats(cache))


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_sparse_prompt_of_all_tokens_is_the_dense_one(name: str) -> None:
    model = tiny(name)
    quantise_rows(model, 8)
    sparse = Sparse.of(model)
    tokens = [(7 * i + 3) % 64 for i in range(90)]
    whole = SparsePrefiller.begin(model, tokens, sparse.kept(range(90), 90))
    dense = Prefiller(model, tokens, make_prompt_cache(model))
    for each in (whole, dense):
        while each.step(32):
            pass
    one = mx.array([tokens[-1:]])
    assert as_bytes(model(one, cache=whole.cache)) == as_bytes(model(one, cache=dense.cache))
    # Some are left out, and what follows is decoded in a batch.
    some = SparsePrefiller.begin(model, tokens, sparse.kept(range(0, 90, 3), 90))
    while some.step(32):
        pass
    held = [layer for layer in some.cache if hasattr(layer, "packing")]
    assert held
    assert all(type(layer.merge([layer])).__name__ == "PackedBatchKVCache" for layer in held)


@pytest.mark.usefixtures("cpu_installed")
def test_the_fingerprint_is_that_of_plain_rows() -> None:
    plain, quantised = tiny("qwen3_5"), tiny("qwen3_5")
    quantise_rows(quantised, 4)
    stage, layout = staged(quantised)
    assert layer_hashes(stage.as_computed, layout) == layer_hashes(*staged(plain))


@pytest.mark.one_loop
@pytest.mark.parametrize(("home_bits", "helper_bits"), [(8, 0), (4, 8), (0, 8)])
async def test_helpers_send_rows_as_the_machine_that_answers_holds_them(
    tmp_path: Path, home_bits: int, helper_bits: int
) -> None:
    """Real workers and sockets: the answer is that of the home worker alone, to the last bit."""
    path = write(tmp_path / "tiny")
    async with (
        workers(path, 1, kv_bits=home_bits) as (home,),
        workers(path, 1, kv_bits=helper_bits, name="helper") as (helper,),
    ):
        assert home.facts is not None
        assert home.facts.shape.kv_bits == home_bits
        for seed, kind in enumerate(["layers", "tokens"]):
            sharing = Sharing(home, [helper], prompt(f"r{seed}", 600, seed))
            told = await sharing.run(kind)
            assert (told.error, told.shared.code) == (None, "")
            assert sharing.assisted(), [a.error for a in sharing.assists]
            home.free_memory(prompts=True)
            assert told.numbers == await answered(home, seed)
            assert (told.numbers == await answered(helper, seed)) == (home_bits == helper_bits)


async def answered(engine: EngineProcess, seed: int) -> list[Any]:
    """The numbers of the same prompt where nobody helps."""
    told = RequestEvents()
    async for event in engine.stream(prompt(f"alone {seed}", 600, seed, shared=False)):
        told.events.append(event)
    return told.numbers
