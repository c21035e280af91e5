"""What cannot be cut at a token lies on the disk as snapshots: restored it is what it was, or a miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
import tiny_architectures
import tiny_models
from disk_worker import BLOCK, ROOM, Worker, blocks_of, restored, settings_in, tier, written
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tiny_architectures import FAMILIES

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_names import state_name
from fleetd.cache.machine_key import MachineKey
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import DENSE, PrefixCache
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.array_bytes import as_bytes
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot, BlockLayout
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.rings import RingState

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# Rows, and an index beside them; windows; a gated delta rule, Mamba 2 with attention, alone, convolutions.
SAMPLE = {"llama", "deepseek_v32", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2", "lfm2"}


@pytest.fixture(autouse=True)
def a_state_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_BLOCK_TOKENS", BLOCK)


@pytest.fixture
def settings(tmp_path: Path) -> DiskCacheSettings:
    return settings_in(tmp_path)


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    return [token % tiny_architectures.VOCAB for token in tiny_models.prompt(tokens, seed)]


def prefilled(model: Any, tokens: list[int]) -> Prefiller:
    prefiller = Prefiller(model, tokens, make_prompt_cache(model), state_bytes=ROOM)
    while prefiller.step(300):
        pass
    return prefiller


def kept(model: Any, settings: DiskCacheSettings, tokens: list[int]) -> PrefixCache:
    """Compute a prompt and keep it on the disk; what memory has of it."""
    first, memory = prefilled(model, tokens), PrefixCache(ROOM)
    memory.store(tokens[:-1], first.cache, states=first.states)
    disk = tier(model, settings)
    disk.store(tokens[:-1], first.cache, DENSE, first.states, local_only=False)
    written(disk)
    return memory


def bytes_of(cache: list[Any] | None) -> list[Any]:
    """Of everything that is kept, and where windows are written next."""
    assert cache
    return [
        (
            getattr(part, "offset", None),
            RingState.of(part) if kind_of(part).window(part) else None,
            [as_bytes(mx.contiguous(array)).tobytes() for array in kind_of(part).kept(part)],
        )
        for part in all_parts(cache)
    ]


def answer(model: Any, cache: list[Any] | None, tokens: list[int]) -> bytes:
    """Logits after the rest of a prompt, and after some tokens more."""
    logits = [model(mx.array([tokens]), cache=cache)[:, -1]]
    logits += [model(mx.array([[token]]), cache=cache)[:, -1] for token in (3, 5, 8)]
    return as_bytes(mx.concatenate(logits)).tobytes()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.long) for kind in sorted(FAMILIES)],
)
def test_every_family_is_restored_byte_for_byte(kind: str, settings: DiskCacheSettings) -> None:
    model, tokens = tiny_architectures.tiny(kind), prompt_of(2 * BLOCK + 20)
    memory = kept(model, settings, tokens)
    hit = restored(model, settings, tokens)
    family = FAMILIES[kind]
    windows = any(kind_of(part).window(part) for part in all_parts(make_prompt_cache(model)))
    assert checkpoints.needed(hit.cache or []) is (windows or family.keeps_state)
    # What docs/models.md says.
    assert family.windows == "where set" or windows is (family.windows == "yes") or family.keeps_state
    known = memory.fetch(tokens[: 2 * BLOCK + 1])
    assert hit.tokens == known.tokens == 2 * BLOCK
    assert bytes_of(hit.cache) == bytes_of(known.cache)
    rest = tokens[2 * BLOCK :]
    assert answer(model, hit.cache, rest) == answer(model, known.cache, rest)


def _with_quantised_rows() -> Any:
    model = tiny_architectures.tiny("llama")
    model.make_cache = lambda: [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    return model


@pytest.mark.parametrize(
    "make", [_with_quantised_rows, lambda: tiny_architectures.in_int8(tiny_architectures.tiny("llama"))]
)
def test_rows_of_quantised_models_are_restored_byte_for_byte(
    make: Callable[[], Any], settings: DiskCacheSettings
) -> None:
    model, tokens = make(), prompt_of(2 * BLOCK + 20)
    memory = kept(model, settings, tokens)
    hit, known = restored(model, settings, tokens), memory.fetch(tokens[: 2 * BLOCK + 1])
    assert hit.tokens == known.tokens == 2 * BLOCK
    assert bytes_of(hit.cache) == bytes_of(known.cache)
    rest = tokens[2 * BLOCK :]
    assert answer(model, hit.cache, rest) == answer(model, known.cache, rest)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_rows_that_fill_their_room_are_kept_too(kind: str, settings: DiskCacheSettings) -> None:
    """MLX keeps such as they were computed, by token and then by head."""
    model, tokens = tiny_architectures.tiny(kind), prompt_of(BLOCK)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache), [layer.state for layer in cache])
    disk = tier(model, settings)
    disk.store(tokens, cache, DENSE, local_only=False)
    written(disk)
    assert bytes_of(restored(model, settings, [*tokens, 1]).cache) == bytes_of(cache)


# ---- Where snapshots lie ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    made = tiny_architectures.tiny("lfm2")
    mx.set_default_device(before)
    return made


def test_a_changed_end_goes_on_from_the_last_snapshot_before_it(
    hybrid: Any, settings: DiskCacheSettings
) -> None:
    tokens = prompt_of(5 * BLOCK + 20)
    kept(hybrid, settings, tokens)
    assert checkpoints.places(len(tokens)) == [2 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    other = prompt_of(3 * BLOCK, seed=2)
    for same, found in ((5 * BLOCK, 5), (5 * BLOCK - 1, 4), (4 * BLOCK - 1, 2), (2 * BLOCK - 1, 0)):
        changed = tokens[:same] + other
        assert restored(hybrid, settings, changed).tokens == found * BLOCK


def test_rows_past_the_last_snapshot_are_not_written(hybrid: Any, settings: DiskCacheSettings) -> None:
    first, disk = prefilled(hybrid, prompt_of(2 * BLOCK + 20)), tier(hybrid, settings)
    tokens, states = first.tokens[:-1], {BLOCK: first.states[BLOCK]}
    disk.store(tokens, first.cache, DENSE, states, local_only=False)
    disk.store(tokens, first.cache, DENSE, local_only=False)
    written(disk)
    assert len(blocks_of(settings)) == 2


def test_a_model_that_keeps_no_rows_has_snapshots_alone(settings: DiskCacheSettings) -> None:
    model = tiny_architectures.tiny("mamba2")
    kept(model, settings, prompt_of(5 * BLOCK + 20))
    assert len(blocks_of(settings)) == 3


# ---- Damage ----------------------------------------------------------------------------------------------


def file_of(settings: DiskCacheSettings, disk: DiskTier, tokens: list[int], number: int, what: str) -> Path:
    """Where a block of the prompt lies, or the snapshot at its end."""
    name = disk._names(tokens, DENSE, local_only=False)[number]
    key = MachineKey.load_or_create(Path(settings.key_file))
    return Path(settings.folder) / "blocks" / key.file_name(state_name(name) if what == "state" else name)


@pytest.mark.parametrize("harm", ["changed", "cut short", "gone"])
@pytest.mark.parametrize(("what", "left"), [("state", 1), ("rows", 1), ("both states", 0)])
def test_what_is_damaged_is_a_miss_there_and_an_earlier_snapshot_serves(
    hybrid: Any, settings: DiskCacheSettings, harm: str, what: str, left: int
) -> None:
    tokens = prompt_of(2 * BLOCK + 20)
    memory, disk = kept(hybrid, settings, tokens), tier(hybrid, settings)
    damaged = {"state": [(1, "state")], "rows": [(1, "rows")], "both states": [(0, "state"), (1, "state")]}
    for number, of in damaged[what]:
        file = file_of(settings, disk, tokens, number, of)
        match harm:
            case "changed":
                data = file.read_bytes()
                file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            case "cut short":
                file.write_bytes(file.read_bytes()[:-1])
            case "gone":
                file.unlink()
    # The second time what was damaged is forgotten.
    for _ in range(2):
        hit = restored(hybrid, settings, tokens)
        assert hit.tokens == left * BLOCK
        if left:
            assert bytes_of(hit.cache) == bytes_of(memory.fetch(tokens[: BLOCK + 1]).cache)


def arriving(kind: str) -> tuple[BlockLayout, BlockHeader, list[memoryview]]:
    model = tiny_architectures.tiny(kind)
    first = prefilled(model, prompt_of(BLOCK + 20))
    layout = BlockLayout.of(first.cache)
    return layout, *layout.snapshot(first.states[BLOCK], BLOCK)


def with_sizes(header: BlockHeader, sizes: list[int]) -> BlockHeader:
    return msgspec.structs.replace(header, sizes=sizes)


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2", "falcon_h1"])
def test_a_snapshot_of_another_place_or_shape_is_not_taken(kind: str) -> None:
    layout, header, buffers = arriving(kind)

    def read(header: BlockHeader, buffers: list[memoryview]) -> None:
        snapshot = ArrivingSnapshot(layout)
        for target, buffer in zip(snapshot.targets(0, header), buffers, strict=False):
            target[:] = buffer[: len(target)].cast("B")
        snapshot.check()

    read(header, buffers)
    rings = msgspec.msgpack.decode(bytes(buffers[0]), type=list[RingState])
    wrong: list[tuple[BlockHeader, list[memoryview]]] = [
        (msgspec.structs.replace(header, tokens=2 * BLOCK), buffers),
        (msgspec.structs.replace(header, layout="rows"), buffers),
        (with_sizes(header, header.sizes[:-1]), buffers),
        (with_sizes(header, [*header.sizes, 4]), buffers),
        (with_sizes(header, [*header.sizes[:-1], header.sizes[-1] // 2]), buffers),
        (with_sizes(header, [limits.CACHE_BLOCK_BYTES, *header.sizes[1:]]), buffers),
    ]
    for others in ([*rings, RingState(BLOCK, 1, 1)], [RingState(r.seen + 1, r.held, r.index) for r in rings]):
        if others != rings:
            encoded = memoryview(msgspec.msgpack.encode(others))
            wrong.append((with_sizes(header, [len(encoded), *header.sizes[1:]]), [encoded, *buffers[1:]]))
    for changed in wrong:
        with pytest.raises(BlockDamaged):
            read(*changed)


@given(st.binary(max_size=200))
def test_a_snapshot_whose_rings_are_noise_is_damaged_and_nothing_else(noise: bytes) -> None:
    snapshot = ArrivingSnapshot(BlockLayout(()))
    snapshot._buffers = [memoryview(noise)]
    try:
        snapshot.check()
    except BlockDamaged:
        return
    assert noise == msgspec.msgpack.encode([])


# ---- In a worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text"])
def test_after_a_restart_a_conversation_goes_on_from_the_disk(
    kind: str, chain_path: Path, settings: DiskCacheSettings
) -> None:
    model = tiny_architectures.tiny(kind, vocab_size=tiny_models.VOCAB)
    tokenizer = load_tokenizer(chain_path)
    prompt = tiny_models.prompt(2 * BLOCK + 30)
    following = [*prompt, *tiny_models.prompt(60, 2)]
    first = Worker(model, tokenizer, settings)
    first.ask("first", prompt)
    first.ask("following", following)
    first.stop()
    second = Worker(model, tokenizer, settings)
    assert second.ask("first", prompt).timings.restored_tokens == 2 * BLOCK
    second.stop()
    third = Worker(model, tokenizer, settings)
    ended = third.ask("following", following)
    assert ended.timings.restored_tokens == ended.usage.cached_tokens == 2 * BLOCK
    assert second.text("first") == first.text("first")
    assert third.text("following") == first.text("following")
    third.stop()


def test_the_rest_of_what_memory_has_of_a_hybrid_comes_from_the_disk(
    chain_path: Path, settings: DiskCacheSettings
) -> None:
    model = tiny_architectures.tiny("lfm2", vocab_size=tiny_models.VOCAB)
    tokenizer, prompt = load_tokenizer(chain_path), tiny_models.prompt(2 * BLOCK + 88)
    first = Worker(model, tokenizer, settings)
    first.ask("long", prompt)
    first.stop()
    second = Worker(model, tokenizer, settings)
    assert second.ask("short", prompt[: BLOCK + 44]).timings.restored_tokens == BLOCK
    ended = second.ask("long", prompt)
    assert (ended.usage.cached_tokens, ended.timings.restored_tokens) == (2 * BLOCK, BLOCK)
    assert second.text("long") == first.text("long")
    # What came from the disk is a checkpoint in memory now.
    edited = [*prompt[: 2 * BLOCK + 20], *tiny_models.prompt(30, 3)]
    ended = second.ask("edited", edited)
    assert (ended.usage.cached_tokens, ended.timings.restored_tokens) == (2 * BLOCK, 0)
    second.stop()
