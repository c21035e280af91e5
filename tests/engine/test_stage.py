"""A model in pieces is the model: hidden states, keys and values, and logits have the bytes of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from family_params import EXPERTS, each, few, in_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import MODEL_REMAPPING
from tiny_architectures import FAMILIES, LONG, VOCAB, WINDOW, WITHOUT_EXPERTS, config_of, tiny

from fleetd.engine.layers.architectures import ANY_TEXT, CUT, REFUSED, architecture_of
from fleetd.engine.layers.between_layers import BETWEEN
from fleetd.engine.layers.layer_calls import PER_LAYER_MODULES
from fleetd.engine.layers.stage import Stage, architecture_for
from fleetd.engine.sequence_state.parts import parts
from fleetd.errors import InvalidValue, ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")

LAYERS = 4
# Every way to cut four layers into one, two or three stages.
CUTS = [cuts for n in range(3) for cuts in itertools.combinations(range(1, LAYERS), n)]
# Keys and values alone, and more than a hidden state: all cuts in the quick run, too.
KINDS = {"llama", "kimi_k3"}
# Beyond the window and beyond a block of attention, with single tokens and ragged ends.
SIZES = [48, 1, 7, 1, 70]

Bytes = npt.NDArray[np.float32]


@dataclass
class StageRun:
    """What one way of running the tokens gave."""

    logits: list[mx.array] = field(default_factory=list)
    # After each layer that was looked at, chunk by chunk: hidden states, and what else the next layers read.
    hidden: dict[int, list[list[mx.array]]] = field(default_factory=dict)
    caches: list[Any] = field(default_factory=list)

    def kv(self) -> list[Bytes]:
        return [exact(x) for cache in self.caches for x in arrays_of(cache)]

    def check(self, whole: StageRun) -> None:
        assert_equal(self.logits, whole.logits, "logits")
        for layer, chunks in self.hidden.items():
            for mine, theirs in zip(chunks, whole.hidden[layer], strict=True):
                # The whole model may go on holding what no further layer reads.
                assert 0 < len(mine) <= len(theirs)
                assert_equal(mine, theirs[: len(mine)], f"hidden states after layer {layer}")
        for layer, (mine, theirs) in enumerate(zip(self.caches, whole.caches, strict=True)):
            assert type(mine) is type(theirs)
            assert [plain(part) for part in parts(mine)] == [plain(part) for part in parts(theirs)]
            assert_equal(arrays_of(mine), arrays_of(theirs), f"keys and values of {layer}")


def plain(cache: Any) -> dict[str, Any]:
    """A cache's offsets and sizes; its arrays as their shapes, with the room that is left in them."""
    return {k: v.shape if isinstance(v, mx.array) else v for k, v in vars(cache).items() if k != "cache"}


def arrays_of(cache: Any) -> list[mx.array]:
    """All that a layer keeps: keys and values of its tokens, or the arrays of a running state."""
    found: list[mx.array] = []
    for part in parts(cache):
        found.extend(part.cache if isinstance(part, ArraysCache) else part.keys_and_values())
    return found


def exact(array: mx.array) -> Bytes:
    """bf16 has no type in NumPy; all of it lies within f32."""
    return np.array(array.astype(mx.float32))


def assert_equal(mine: Sequence[mx.array], theirs: Sequence[mx.array], what: str) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(exact(a), exact(b)), f"{what} differ"


def prompt(n: int) -> list[int]:
    tokens: list[int] = mx.random.randint(0, VOCAB, (n,), key=mx.random.key(3)).tolist()
    return tokens


def chunked(tokens: list[int], sizes: Sequence[int]) -> Iterator[mx.array]:
    """Chunks of ``sizes``, the last of them repeated."""
    at = 0
    for size in itertools.chain(sizes[:-1], itertools.repeat(sizes[-1])):
        if at >= len(tokens):
            return
        yield mx.array([tokens[at : at + size]])
        at += size


def states_of(out: Any) -> list[mx.array]:
    """All that a layer hands to the next: one array or several, or blocks of earlier hidden states."""
    hidden, *more = out if isinstance(out, tuple) else (out,)
    found = [mx.array(hidden)]
    for other in more:
        found += other if isinstance(other, tuple) else [getattr(other, "raw", other)]
    return [array for array in found if array is not None]


def run_whole(model: Any, tokens: list[int], sizes: Sequence[int]) -> StageRun:
    """mlx-lm's own forward pass, its layers' outputs noted as they come."""
    run = StageRun(caches=make_prompt_cache(model))
    noted: list[list[mx.array]] = []
    one_state = not architecture_for(model).between
    kinds: list[Any] = list({type(layer) for layer in model.layers})
    stock = {kind: kind.__call__ for kind in kinds}

    def noting(self: Any, *given: Any, **named: Any) -> Any:
        out = stock[type(self)](self, *given, **named)
        noted.append(states_of(out[0] if one_state and isinstance(out, tuple) else out))
        return out

    for kind in kinds:
        kind.__call__ = noting
    try:
        for chunk in chunked(tokens, sizes):
            run.logits.append(model(chunk, cache=run.caches))
    finally:
        for kind in kinds:
            kind.__call__ = stock[kind]
    run.hidden = {layer: noted[layer::LAYERS] for layer in range(LAYERS)}
    return run


def handed_on(stage: Stage, hidden: mx.array) -> list[mx.array]:
    """What a stage gave, as the next layer takes it."""
    return states_of(BETWEEN[stage.architecture.between].unpacked(stage.args, stage.last, hidden))


def run_cut(model: Any, tokens: list[int], sizes: Sequence[int], cuts: Sequence[int]) -> StageRun:
    """Each chunk through the stages between ``cuts``."""
    stages = [Stage.of(model).part(a, b) for a, b in itertools.pairwise([0, *cuts, LAYERS])]
    caches = [stage.make_caches() for stage in stages]
    run = StageRun(hidden={stage.last - 1: [] for stage in stages})
    start = 0
    for chunk in chunked(tokens, sizes):
        hidden = stages[0].embed(chunk)
        for stage, own in zip(stages, caches, strict=True):
            hidden = stage.run(hidden, own, stage.inputs(chunk, start))
            # As it would be sent: nothing of the stage before is left to be computed with the next.
            mx.eval(hidden, [cache.state for cache in own if cache is not None])
            run.hidden[stage.last - 1].append(handed_on(stage, hidden))
        run.logits.append(stages[-1].finish(hidden))
        start += chunk.shape[1]
    run.caches = [cache for own in caches for cache in own if cache is not None]
    return run


# ---- Any cut ---------------------------------------------------------------------------------------------


def check_cuts(name: str, cuts: Sequence[Sequence[int]]) -> None:
    model, tokens = tiny(name), prompt(sum(SIZES))
    whole = run_whole(model, tokens, SIZES)
    for each_cut in cuts:
        run_cut(model, tokens, SIZES, each_cut).check(whole)


@pytest.mark.parametrize("name", each(FAMILIES))
def test_a_cut_behind_each_layer_gives_the_bytes_of_the_whole_model(name: str) -> None:
    check_cuts(name, [(2,), (1, 3)])


@pytest.mark.parametrize(
    "name",
    few(FAMILIES, KINDS),
)
def test_any_cut_gives_the_bytes_of_the_whole_model(name: str) -> None:
    check_cuts(name, CUTS)


@pytest.mark.parametrize("name", each(set(FAMILIES) - EXPERTS, every=2))
def test_any_cut_gives_the_bytes_of_the_whole_model_in_bf16(name: str) -> None:
    model, tokens = tiny(name, **WITHOUT_EXPERTS.get(name, {})), prompt(sum(SIZES))
    model.set_dtype(mx.bfloat16)
    whole = run_whole(model, tokens, SIZES)
    assert {x.dtype for x in whole.logits} == {mx.bfloat16}
    run_cut(model, tokens, SIZES, (1, 3)).check(whole)


@pytest.mark.parametrize(
    ("bits", "name"),
    in_turn(
        [4, 8],
        [
            "llama",
            "qwen2",
            "gemma2",
            "gemma3_text",
            "phi3",
            "glm4",
            "qwen3_moe",
            "gpt_oss",
            "qwen3_5",
            "gemma4_text",
            "gemma3n",
            "hunyuan",
            "kimi_k3",
        ],
    ),
)
def test_any_cut_of_a_quantised_model_gives_the_bytes_of_the_whole(name: str, bits: int) -> None:
    model, tokens = tiny(name), prompt(70)
    wanted = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def quantised(path: str, module: nn.Module) -> bool:
        """As mlx-lm chooses."""
        able = hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
        return able and bool(wanted(path, module))

    nn.quantize(model, group_size=32, bits=bits, class_predicate=quantised)
    whole = run_whole(model, tokens, [48, 1, 21])
    run_cut(model, tokens, [48, 1, 21], (1, 3)).check(whole)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "qwen3_moe",
        "deepseek_v3",
        "qwen3_5",
        "gemma4_text",
        "nemotron_h",
        "gemma3n",
        "hunyuan",
        "kimi_k3",
    ],
)
def test_layer_after_layer_gives_the_bytes_of_chunk_after_chunk(name: str) -> None:
    """As a token split runs it: a layer's keys and values are whole before the next layer begins."""
    model, tokens = tiny(name), prompt(sum(SIZES))
    whole = run_whole(model, tokens, SIZES)
    stage = Stage.of(model)
    caches, starts = stage.make_caches(), list(itertools.accumulate(SIZES, initial=0))
    run = StageRun(caches=[cache for cache in caches if cache is not None])
    inputs = [stage.inputs(*given) for given in zip(chunked(tokens, SIZES), starts, strict=False)]
    chunks = [stage.embed(chunk) for chunk in chunked(tokens, SIZES)]
    for layer in range(LAYERS):
        part = stage.part(layer, layer + 1)
        chunks = [part.run(h, [caches[layer]], one) for h, one in zip(chunks, inputs, strict=True)]
        mx.eval(chunks, [cache.state for cache in caches[layer : layer + 1] if cache is not None])
        run.hidden[layer] = [handed_on(part, hidden) for hidden in chunks]
    run.logits = [stage.finish(hidden) for hidden in chunks]
    run.check(whole)


@pytest.mark.long
@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    n=st.integers(2, 300),
    sizes=st.lists(st.integers(1, 130), min_size=1, max_size=6),
    cuts=st.sampled_from(CUTS),
)
def test_any_cut_in_any_chunks(name: str, n: int, sizes: list[int], cuts: tuple[int, ...]) -> None:
    sizes = [*sizes[:-1], max(16, sizes[-1])]
    model = tiny(name)
    run_cut(model, prompt(n), sizes, cuts).check(run_whole(model, prompt(n), sizes))


# ---- Any chunks ------------------------------------------------------------------------------------------

WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "smollm3": {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2},
}
SAME = {name for name, architecture in FAMILIES.items() if architecture.chunks == "same"}
WITHOUT: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None, "layer_types": None}}


@pytest.mark.parametrize("name", each((n for n, a in FAMILIES.items() if a.chunks != "same"), every=2))
def test_the_chunks_do_not_matter(name: str) -> None:
    """What the table says of these: a stage that is given other chunks still gives the same bytes."""
    model, tokens = tiny(name, **WITHOUT.get(name, {})), prompt(230)
    one = run_cut(model, tokens, [230], (2,))
    for sizes in ([64], [193, 36, 1], [1, 15, 1, 111, 1, 63]):
        other = run_cut(model, tokens, sizes, (1, 3))
        assert np.array_equal(together(other.logits), together(one.logits))
        assert all(np.array_equal(a, b) for a, b in zip(other.kv(), one.kv(), strict=True))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            (n, {}) if n in sorted(SAME - LONG)[::2] else pytest.param(n, {}, marks=pytest.mark.long)
            for n in sorted(SAME)
        ),
        *WINDOWED.items(),
        ("mistral", {}),
    ],
)
def test_where_the_chunks_matter_they_change_no_more_than_rounding(
    name: str, changes: dict[str, Any]
) -> None:
    model, tokens = tiny(name, **changes), prompt(230)
    one = together(run_cut(model, tokens, [230], (2,)).logits)
    scale = float(np.abs(one).max())
    for sizes in ([64], [1, 15, 1, 111, 1, 63]):
        other = together(run_cut(model, tokens, sizes, (1, 3)).logits)
        assert float(np.abs(other - one).max()) < 1e-5 * scale


def together(chunks: list[mx.array]) -> Bytes:
    return np.concatenate([exact(chunk) for chunk in chunks], axis=1)


# ---- What a stage holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(FAMILIES))
def test_a_stages_caches_are_those_that_the_whole_model_makes(name: str) -> None:
    model = tiny(name)
    stage = Stage.of(model)
    expected = stage.spread(make_prompt_cache(model))
    made = [c for a in range(LAYERS) for c in stage.part(a, a + 1).make_caches()]
    for mine, theirs in zip(made, expected, strict=True):
        assert type(mine) is type(theirs)
        assert [vars(part) for part in parts(mine)] == [vars(part) for part in parts(theirs)]


def test_caches_made_twice_share_nothing() -> None:
    model = tiny("gemma3_text")
    stage = Stage.of(model)
    one, two = stage.make_caches(), stage.make_caches()
    stage.run(stage.embed(mx.array([prompt(5)])), one)
    assert [c.offset for c in one] == [5] * LAYERS
    assert [c.offset for c in two] == [0] * LAYERS
    assert [c.offset for c in stage.make_caches()] == [0] * LAYERS


def test_the_windows_are_those_of_the_models_layers() -> None:
    windows = [isinstance(c, RotatingKVCache) for c in Stage.of(tiny("gemma3_text")).part(1, 4).empty]
    assert windows == [False, True, False]


@pytest.mark.parametrize("tied", [True, False])
def test_each_stage_holds_what_its_own_layers_need(tied: bool) -> None:
    stage = Stage.of(tiny("llama", tie_word_embeddings=tied))
    head = {"embed_tokens"} if tied else {"lm_head"}
    assert held(stage.part(0, 2)) == {"layers", "embed_tokens"}
    assert held(stage.part(1, 3)) == {"layers"}
    assert held(stage.part(1, 3).part(2, 3)) == {"layers"}
    assert held(stage.part(2, 4)) == {"layers", "norm"} | head
    assert held(stage.part(0, 4)) == {"layers", "norm", "embed_tokens"} | head
    inner = stage.part(1, 2).weights_bytes
    assert stage.part(1, 3).weights_bytes == 2 * inner
    assert stage.part(0, 2).weights_bytes == 2 * inner + VOCAB * 128 * 4
    assert stage.part(2, 4).weights_bytes == 2 * inner + (VOCAB + 1) * 128 * 4


def test_what_joins_and_parts_several_hidden_states_is_held_at_the_ends() -> None:
    stage = Stage.of(tiny("gemma3n"))
    inputs = {"layers", "embed_tokens", *PER_LAYER_MODULES}
    assert held(stage.part(0, 2)) == {*inputs, "altup_projections"}
    assert held(stage.part(1, 3)) == inputs
    assert held(stage.part(2, 4)) == {*inputs, "altup_unembed_projections", "norm"}
    stage = Stage.of(tiny("kimi_k3"))
    assert held(stage.part(0, 2)) == {"layers", "embed_tokens"}
    ends = {"output_attn_res_proj", "output_attn_res_norm", "norm", "lm_head"}
    assert held(stage.part(2, 4)) == {"layers", *ends}


def held(stage: Stage) -> set[str]:
    return set(stage.weights.children())


def shared_keys() -> Any:
    """Gemma 4 of the small kind: the last two of four layers read the keys of the first two."""
    return tiny("gemma4_text", num_kv_shared_layers=2, use_double_wide_mlp=False)


def test_layers_that_read_the_last_keys_are_run_where_these_are() -> None:
    model, tokens = tiny("afm7", num_kv_reuse_layers=2), prompt(sum(SIZES))
    whole = run_whole(model, tokens, SIZES)
    for cuts in ((), (1,)):
        run_cut(model, tokens, SIZES, cuts).check(whole)
    assert Stage.of(model).prefilled == 2
    for cuts in ((2,), (3,)):
        with pytest.raises(ValueError, match="reads keys of layer 1"):
            run_cut(model, tokens, SIZES, cuts)


def shared_caches(layers: int) -> Any:
    """Gemma 3n, whose last ``layers`` of four read the keys of the last layers that have some."""
    return tiny(
        "gemma3n", text_config={**config_of("gemma3n")["text_config"], "num_kv_shared_layers": layers}
    )


@pytest.mark.parametrize("made", [shared_keys, partial(shared_caches, 2)])
def test_layers_that_read_earlier_keys_are_run_where_these_are(made: Callable[[], Any]) -> None:
    model, tokens = made(), prompt(sum(SIZES))
    whole = run_whole(model, tokens, SIZES)
    run_cut(model, tokens, SIZES, ()).check(whole)
    with pytest.raises(ValueError, match="layer 2 reads keys of layer 0"):
        run_cut(model, tokens, SIZES, (1,))


def test_a_cut_may_lie_before_the_keys_that_later_layers_read() -> None:
    model, tokens = shared_caches(1), prompt(sum(SIZES))
    whole = run_whole(model, tokens, SIZES)
    for cuts in ((), (1,)):
        run_cut(model, tokens, SIZES, cuts).check(whole)
    assert Stage.of(model).prefilled == 3
    with pytest.raises(ValueError, match="layer 3 reads keys of layer 1"):
        run_cut(model, tokens, SIZES, (2,))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hunyuan", {"use_cla": False}),
        ("kimi_k3", {"text_config": {**config_of("kimi_k3")["text_config"], "attn_res_block_size": None}}),
    ],
)
def test_of_models_without_more_than_a_hidden_state_that_alone_travels(
    name: str, changes: dict[str, Any]
) -> None:
    model, tokens = tiny(name, **changes), prompt(70)
    assert Stage.of(model).width == 128
    run_cut(model, tokens, [48, 1, 21], (1, 3)).check(run_whole(model, tokens, [48, 1, 21]))


def test_layers_that_keep_nothing_at_the_end_are_not_prefilled() -> None:
    stage = Stage.of(shared_keys())
    assert (stage.total, stage.prefilled) == (LAYERS, 2)
    assert (stage.prefilling.first, stage.prefilling.last) == (0, 2)
    assert Stage.of(tiny("nemotron_h", hybrid_override_pattern=["M", "*", "-", "-"])).prefilled == 2
    assert Stage.of(tiny("nemotron_h")).prefilled == LAYERS


@pytest.mark.parametrize(
    ("name", "code"),
    [
        # A text model within one that reads pictures is cut as what it is.
        ("mistral3", "ministral3"),
        ("mistral3_small_4", "mistral4"),
        ("mistral3_llama", "llama"),
        # As published configs name them.
        ("minimax_m2", "minimax"),
        ("bailing_v3", "bailing_moe_v3"),
    ],
)
def test_a_model_is_cut_by_its_code_whatever_its_config_calls_it(name: str, code: str) -> None:
    model, tokens = tiny(name), prompt(70)
    assert Stage.of(model).architecture is FAMILIES[name] is CUT[code]
    run_cut(model, tokens, [48, 1, 21], (1, 3)).check(run_whole(model, tokens, [48, 1, 21]))


def test_every_other_name_of_code_that_can_be_cut_has_its_small_model() -> None:
    """A new name in mlx-lm asks whether its configs are what was tested."""
    for name, code in MODEL_REMAPPING.items():
        if code in CUT:
            assert FAMILIES[name] is CUT[code], name


# ---- What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 4), (4, 5)])
def test_layers_that_the_model_does_not_have_are_refused(first: int, last: int) -> None:
    with pytest.raises(InvalidValue, match="of 4"):
        Stage.of(tiny("llama")).part(first, last)


def test_layers_that_the_stage_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidValue, match="here are 1 to 3 of 4"):
        Stage.of(tiny("llama")).part(1, 3).part(0, 2)


def test_only_the_ends_embed_and_finish() -> None:
    stage = Stage.of(tiny("qwen2"))
    with pytest.raises(ValueError, match="layer 0"):
        # Its head is the embedding's matrix: it could, and would be wrong.
        stage.part(2, 4).embed(mx.array([[1]]))
    with pytest.raises(ValueError, match="layer 3"):
        stage.part(0, 2).finish(mx.zeros((1, 1, 128)))


@pytest.mark.parametrize("name", ["mamba", "llama4", "something_new"])
def test_what_cannot_be_cut_is_refused_by_name_with_the_reason(name: str) -> None:
    with pytest.raises(ModelUnsupported, match=name) as refused:
        Stage.of(type("Model", (), {"__module__": f"mlx_lm.models.{name}"})())
    assert REFUSED.get(name, "no test shows") in str(refused.value)


@pytest.mark.parametrize("odd", [ChunkedKVCache(8), QuantizedKVCache()])
def test_a_layer_with_a_cache_of_an_unknown_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, odd: Any
) -> None:
    """A newer mlx-lm may keep other things for an architecture than the one that was tested."""
    model = tiny("llama")
    caches = [*make_prompt_cache(model)[:-1], odd]
    monkeypatch.setattr(type(model), "make_cache", lambda self: caches, raising=False)
    with pytest.raises(ModelUnsupported, match=type(odd).__name__):
        Stage.of(model)
    monkeypatch.setattr(type(model), "make_cache", lambda self: caches[:-1])
    with pytest.raises(ModelUnsupported, match="3 caches for 4 layers"):
        Stage.of(model)


def test_the_tables_name_what_mlx_lm_has_and_nothing_twice() -> None:
    assert not set(CUT) & set(REFUSED)
    for code in [*CUT, *REFUSED, *ANY_TEXT]:
        assert find_spec(f"mlx_lm.models.{code}"), code
    for code in CUT:
        assert architecture_of(code) is CUT[code]
        assert any(architecture is CUT[code] for architecture in FAMILIES.values()), code
