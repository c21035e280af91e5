"""Keys and values in 8 or 4 bits: an answer is the same alone, in a batch, with drafts, after a restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import disk_worker
import mlx.core as mx
import pytest
import speculating
from family_params import in_turn
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from shared_runs import as_bytes
from speculating import Run, lying, perfect, right_for
from tiny_architectures import FAMILIES, VOCAB, tiny

from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.load.model_reading import warm_up
from fleetd.engine.load.quantised_rows import RowPrecision, quantise_rows
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Speculate
from fleetd.engine.sequence_state.packed_caches import PackedKVCache
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe

pytestmark = pytest.mark.usefixtures("cpu_installed")
PROMPT = [(7 * i + 3) % 64 for i in range(90)]
OTHERS = [[(5 * i + 11) % 64 for i in range(40)], [9, 8, 7, 6, 5, 4, 3, 2]]
# Rows alone; windows beside them; windows with sinks; running states; latents; keys read by later layers.
QUICK = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "deepseek_v3", "gemma3n"]
IN_BATCH = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "deepseek_v3"]


def held(name: str, bits: int) -> tuple[Any, RowPrecision]:
    model = tiny(name)
    return model, quantise_rows(model, bits)


def run_of(model: Any, path: Path, *prompts: list[int], verdict: Any = None, source: Any = None) -> Run:
    """Answers of prompts that come at once. ``source``: drafts for the first."""
    drafting = None if verdict is None else speculating.speculation(VOCAB, verdict=verdict)
    run = Run(model, load_tokenizer(path), drafting)
    for number, prompt in enumerate(prompts):
        sources = () if source is None else (source,)
        wanted = Speculate(enabled=bool(sources))
        run.submit(str(number), prompt, *sources, max_tokens=30, top_logprobs=2, speculate=wanted)
    run.finish()
    return run


def answered(model: Any, path: Path, *prompts: list[int]) -> list[list[Any]]:
    run = run_of(model, path, *prompts)
    return [run.said(str(number)) for number in range(len(prompts))]


def check_drafts(model: Any, path: Path, make_sources: Sequence[Callable[[list[int]], Any]]) -> None:
    """With any drafts an answer is the one without."""
    verdict = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=ProbePlan.of("cpu", 0.0))
    plain = run_of(model, path, PROMPT, verdict=verdict)
    for make in make_sources:
        drafted = run_of(model, path, PROMPT, verdict=verdict, source=make(plain.tokens["0"]))
        assert drafted.said("0") == plain.said("0")


@pytest.mark.parametrize(("bits", "name"), in_turn([8, 4], IN_BATCH))
def test_an_answer_is_the_same_alone_and_in_a_batch(name: str, bits: int, chain_path: Path) -> None:
    model, found = held(name, bits)
    assert found.bits == bits
    (alone,) = answered(model, chain_path, PROMPT)
    assert alone != answered(tiny(name), chain_path, PROMPT)[0], "the setting has an effect"
    together = answered(model, chain_path, PROMPT, *OTHERS)
    assert together[0] == alone
    assert together[1:] == [answered(model, chain_path, other)[0] for other in OTHERS]


@pytest.mark.parametrize(("bits", "name"), in_turn([8, 4], QUICK))
def test_an_answer_is_the_same_with_drafts(name: str, bits: int, chain_path: Path) -> None:
    model, _ = held(name, bits)
    check_drafts(model, chain_path, [perfect, lambda whole: right_for(whole, 2), lambda _: lying(VOCAB, 6)])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", QUICK)
def test_the_price_of_tokens_is_what_caches_hold(name: str, bits: int) -> None:
    model, _ = held(name, bits)
    cache = make_prompt_cache(model)
    tokens = 2 * KVCache.step
    mx.eval(model(mx.array([[t % VOCAB for t in range(tokens)]]), cache=cache))
    rows = [part for part in all_parts(cache) if isinstance(part, PackedKVCache)]
    assert sum(part.nbytes for part in rows) == tokens * warm_up(model).token_bytes


@pytest.mark.parametrize(("bits", "share"), [(8, 0.53125), (4, 0.28125)])
def test_a_row_of_16_bits_takes_its_share(bits: int, share: float) -> None:
    packing = RowPacking.of(bits, 128, 128, mx.bfloat16)
    assert packing is not None
    assert 4 * packing.words(128) == share * 2 * 128


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_a_prompt_that_forks_from_a_kept_one_is_read_on(name: str) -> None:
    model, _ = held(name, 8)
    prefix = PrefixCache(1 << 40)

    def read(tokens: list[int]) -> tuple[int, Prefiller]:
        hit = prefix.fetch(tokens)
        cache = hit.cache or make_prompt_cache(model)
        alone = Prefiller(model, tokens, cache, hit.tokens, state_bytes=prefix.state_bytes, borders=[64])
        while alone.step(64):
            pass
        return hit.tokens, alone

    _, first = read(PROMPT)
    prefix.store(PROMPT[:-1], first.cache, states=first.states)
    fork = [*PROMPT[:70], 90, 91, 92]
    kept, warm = read(fork)
    assert kept >= 64
    cold = Prefiller(model, fork, make_prompt_cache(model), 0)
    cold.step(64)
    while cold.step(64):
        pass
    one = mx.array([fork[-1:]])
    assert as_bytes(model(one, cache=warm.cache)) == as_bytes(model(one, cache=cold.cache))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5", "deepseek_v32"])
def test_a_prompt_restored_from_the_disk_gives_the_same_answer(
    name: str, chain_path: Path, tmp_path: Path
) -> None:
    model, _ = held(name, 4)
    prompt = [(7 * i + 3) % 64 for i in range(2 * disk_worker.BLOCK + 88)]
    tokenizer, settings = load_tokenizer(chain_path), disk_worker.settings_in(tmp_path)
    first = disk_worker.Worker(model, tokenizer, settings)
    first.ask("cold", prompt)
    first.stop()
    second = disk_worker.Worker(model, tokenizer, settings)
    warm = second.ask("warm", prompt)
    assert warm.timings.restored_tokens == 2 * disk_worker.BLOCK
    assert second.text("warm") == first.text("cold")
    second.stop()
    # Rows of another form under the same name are not taken.
    plain = disk_worker.Worker(tiny(name), tokenizer, settings)
    assert plain.ask("plain", prompt).timings.restored_tokens == 0
    plain.stop()


def test_what_cannot_be_quantised_stays_and_is_said() -> None:
    model, found = held("gemma3_text", 8)
    kinds = [type(part).__name__ for part in all_parts(make_prompt_cache(model))]
    assert kinds.count("PackedKVCache") == kinds.count("RotatingKVCache") == 2
    assert found.text == "8 bits in 2 of 4 caches; windows, states and odd widths as computed"
    _, found = held("mamba2", 8)
    assert found == RowPrecision(text="as computed: none of its 4 caches can hold 8 bits")
    model = tiny("llama", head_dim=40)
    assert not quantise_rows(model, 8).bits, "rows of 40 numbers are no whole groups"


@given(
    st.sampled_from([8, 4]),
    st.sampled_from([32, 64, 96, 128]),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
def test_a_row_is_packed_alone(bits: int, width: int, dtype: mx.Dtype, rows: int, seed: int) -> None:
    packing = RowPacking.of(bits, width, width, dtype)
    assert packing is not None
    numbers = mx.random.normal((1, 2, rows, width), key=mx.random.key(seed)).astype(dtype)
    words = packing.pack(numbers)
    assert words.shape == (1, 2, rows, packing.words(width))
    at = seed % rows
    assert mx.array_equal(packing.pack(numbers[:, :, at : at + 1]), words[:, :, at : at + 1])
    back = packing.unpack(words, width)
    assert back.dtype == dtype
    assert mx.array_equal(packing.unpack(words[:, :, at : at + 1], width), back[:, :, at : at + 1])
    step = mx.abs(numbers.astype(mx.float32)).max() * 2 / (2**bits - 1)
    assert mx.abs(back.astype(mx.float32) - numbers.astype(mx.float32)).max() <= 2 * step


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_answers_the_same_with_drafts(name: str, chain_path: Path) -> None:
    model, _ = held(name, 8)
    check_drafts(model, chain_path, [lambda whole: right_for(whole, 2)])
