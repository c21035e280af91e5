"""A shared prefill is the local one: the same keys, values and logits, however it was divided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pipes import Clock
from typing import Any

import mlx.core as mx
import pytest
from examples import examples
from family_params import EXPERTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache
from shared_runs import LAYERS, SharedRun, as_bytes, prompt
from tiny_architectures import FAMILIES, LONG, WITHOUT_EXPERTS, config_of, in_int8, tiny

from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import PrefillWithHelpers
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.errors import InvalidValue
from fleetd.plan.prefill.split import Split, checked

pytestmark = pytest.mark.usefixtures("cpu_installed")

# Windows are 32 tokens: prefixes and chunks below, at and above, ragged ends, and chunks of a single token.
SPLITS = {
    "half the layers": Split("layers", (0, 2, 4), LAYERS, 0, 97, 32),
    "half the layers after a prefix": Split("layers", (0, 2, 4), LAYERS, 45, 150, 48),
    "all layers with helpers": Split("layers", (0, 1, 2, 4, 4), LAYERS, 20, 101, 40),
    "three helpers": Split("layers", (0, 1, 2, 3, 4), LAYERS, 0, 70, 33),
    "all elsewhere": Split("layers", (0, 4, 4), LAYERS, 33, 90, 64),
    "half the tokens": Split("tokens", (0, 64, 97), LAYERS, 0, 97, 32),
    "half the tokens after a prefix": Split("tokens", (45, 93, 150), LAYERS, 45, 150, 48),
    "tokens of three helpers": Split("tokens", (20, 60, 100, 140, 181), LAYERS, 20, 181, 40),
    "a part that fills its room at once": Split("tokens", (0, 256, 280), LAYERS, 0, 280, 256),
    "all tokens elsewhere": Split("tokens", (33, 97, 130, 130), LAYERS, 33, 130, 64),
}

# Gemma 3n, whose last two of four layers read the keys of the first two.
SHARED_KEYS = {"text_config": {**config_of("gemma3n")["text_config"], "num_kv_shared_layers": 2}}

# Keys and values alone, windows, latent ones with an index, running states, experts; and all else.
KINDS = ["llama", "gemma3_text", "deepseek_v32", "qwen3_5", "falcon_h1", "mixtral"]
OTHERS = sorted(set(FAMILIES) - set(KINDS))


def check_splits(name: str, *kinds: str, int8: bool = False) -> None:
    model = in_int8(tiny(name)) if int8 else tiny(name)
    for kind in kinds:
        run = SharedRun(model, checked(SPLITS[kind]))
        run.check(run.finish().cache)


def by_turns(names: Iterable[str], ways: Sequence[Any], whole: Collection[str] = ()) -> list[Any]:
    """Each name with each way; in the quick run with one of them, unless it is in ``whole``."""
    return [
        pytest.param(
            name,
            way,
            marks=pytest.mark.long
            if name in LONG or (name not in whole and number % len(ways) != turn)
            else (),
        )
        for number, name in enumerate(sorted(names))
        for turn, way in enumerate(ways)
    ]


@pytest.mark.parametrize(
    ("name", "way"), by_turns(FAMILIES, ["all layers with helpers", "tokens of three helpers"], ["llama"])
)
def test_any_split_gives_the_bytes_of_local_prefill(name: str, way: str) -> None:
    check_splits(name, way)


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(n, marks=pytest.mark.long) for n in OTHERS)])
def test_one_helper_gives_the_bytes_of_local_prefill(name: str) -> None:
    check_splits(name, "half the layers after a prefix", "all elsewhere", "half the tokens after a prefix")


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_5"])
def test_any_split_gives_the_bytes_of_local_prefill_in_int8(name: str) -> None:
    check_splits(name, "all layers with helpers", "half the tokens after a prefix", int8=True)


@pytest.mark.parametrize(
    ("name", "way"),
    by_turns(
        set(FAMILIES) - EXPERTS,
        ["half the layers after a prefix", "half the tokens after a prefix"],
        ["llama"],
    ),
)
def test_any_split_gives_the_bytes_of_local_prefill_in_bf16(name: str, way: str) -> None:
    model = tiny(name, **WITHOUT_EXPERTS.get(name, {}))
    model.set_dtype(mx.bfloat16)
    run = SharedRun(model, SPLITS[way])
    run.check(run.finish().cache)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_helpers_that_hold_their_own_layers_only(split: Split) -> None:
    run = SharedRun(tiny("llama"), split, stages=True)
    run.check(run.finish().cache)


@pytest.mark.parametrize(
    ("name", "way"),
    by_turns(
        ["qwen3_5", "gemma4_text", "falcon_h1", "gemma3n", "hunyuan", "kimi_k3"],
        ["half the layers after a prefix", "three helpers"],
    ),
)
def test_helpers_that_hold_only_some_layers_of_a_model_of_many_kinds(name: str, way: str) -> None:
    run = SharedRun(tiny(name), SPLITS[way], stages=True)
    run.check(run.finish().cache)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma4_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": False}),
        ("afm7", {"num_kv_reuse_layers": 2}),
        ("gemma3n", SHARED_KEYS),
    ],
)
@pytest.mark.parametrize(
    "split", [Split("layers", (0, 1, 2), 2, 20, 101, 40), Split("tokens", (20, 60, 101), 2, 20, 101, 40)]
)
def test_layers_that_only_read_earlier_keys_are_left_out(
    split: Split, name: str, changes: dict[str, Any]
) -> None:
    """The prompt needs the layers that make keys, and no others."""
    run = SharedRun(tiny(name, **changes), split)
    run.check(run.finish().cache)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_cut_after_any_chunk_give_the_bytes_of_local_prefill(name: str) -> None:
    model = tiny(name)
    for chunk in (16, 33, 64):
        for cut in range(chunk, 130, chunk):
            run = SharedRun(model, Split("tokens", (0, cut, 130), LAYERS, 0, 130, chunk))
            run.check(run.finish().cache)
    for first in range(1, LAYERS):
        for second in range(first + 1, LAYERS + 1):
            run = SharedRun(model, Split("layers", (0, first, second, LAYERS), LAYERS, 0, 70, 33))
            run.check(run.finish().cache)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    cached = draw(st.sampled_from([0, 0, 1, 17, 60]))
    new, chunk = draw(st.integers(1, 120)), draw(st.integers(3, 70))
    helpers = draw(st.integers(1, 3))
    if draw(st.booleans()):
        inner = sorted(draw(st.sets(st.integers(1, LAYERS), min_size=helpers, max_size=helpers)))
        return Split("layers", (0, *inner, LAYERS), LAYERS, cached, cached + new, chunk)
    # Where a chunk ends, which is also where the prompt does.
    ends = [*range(cached + chunk, cached + new, chunk), cached + new]
    helpers = min(helpers, len(ends))
    inner = sorted(draw(st.sets(st.sampled_from(ends), min_size=helpers, max_size=helpers)))
    return Split("tokens", (cached, *inner, cached + new), LAYERS, cached, cached + new, chunk)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


@settings(examples(36), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=splits(), tick=st.sampled_from([0.0, 1.0]), data=st.data())
def test_random_splits_in_any_order_of_turns(
    llama: Any, split: Split, tick: float, data: st.DataObject
) -> None:
    """With ``tick`` every turn is one chunk, through one layer where tokens are split."""
    run = SharedRun(llama, checked(split), clock=Clock(tick=tick), predicted_s=1e6)
    orders = st.permutations(range(split.machines))
    order = data.draw(st.lists(orders, min_size=1, max_size=5))
    turn = iter(range(1 << 30))
    run.check(run.finish(lambda _: order[next(turn) % len(order)]).cache)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_5", "half the layers"),
        ("gemma3_text", "half the tokens"),
        pytest.param("llama", "half the layers", marks=pytest.mark.long),
        pytest.param("deepseek_v3", "half the tokens", marks=pytest.mark.long),
        pytest.param("gemma3_text", "half the layers", marks=pytest.mark.long),
        pytest.param("deepseek_v3", "half the layers", marks=pytest.mark.long),
        pytest.param("llama", "half the tokens", marks=pytest.mark.long),
        pytest.param("qwen3_5", "half the tokens", marks=pytest.mark.long),
    ],
)
def test_what_is_decoded_and_kept_of_it_is_the_same(name: str, kind: str) -> None:
    """Batched decoding and the prefix cache are given its caches as they are given local ones."""
    model, split = tiny(name), SPLITS[kind]
    shared, local = SharedRun(model, split), SharedRun(model, split)
    answers = []
    for caches in (shared.finish().cache, local.local().cache):
        store = PrefixCache(1 << 30)
        store.store(shared.tokens[:-1], caches)
        generator = BatchGenerator(model, stream=mx.default_stream(mx.cpu))
        (uid,) = generator.insert([shared.tokens[-1:]], max_tokens=[20], caches=[caches])
        answer: list[int] = []
        while len(answer) < 20:
            answer += [response.token for response in generator.next()[1] if response.uid == uid]
        generator.close()
        hit = store.fetch([*shared.tokens[:-1], 5, 6])
        assert hit.tokens == split.tokens
        follow = model(mx.array([[5, 6]]), cache=hit.cache)
        answers.append((answer, as_bytes(follow)))
    assert answers[0] == answers[1]


# ---- What it looks like to the scheduler -----------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_progress_grows_and_ends_with_the_prompt(split: Split) -> None:
    run = SharedRun(tiny("llama"), split, clock=Clock(tick=1.0), predicted_s=1e6)
    seen = [run.home.progress]
    for _ in run.turns():
        assert run.home.progress >= seen[-1]
        assert run.home.done <= run.home.progress
        seen.append(run.home.progress)
    assert seen[0] == split.cached
    assert seen[-1] == split.tokens == run.home.done


@pytest.mark.parametrize(
    ("name", "split"),
    [
        # In the quick run of rows alone every second split; of windows and of running states some, in turn.
        pytest.param(
            name,
            split,
            id=f"{way}-{name}",
            marks=()
            if number % 2 == 0 and (name == "llama" or number % 4 == 2 * (name == "qwen3_5"))
            else pytest.mark.long,
        )
        for number, (way, split) in enumerate(SPLITS.items())
        for name in ("llama", "gemma3_text", "qwen3_5")
    ],
)
def test_what_is_verified_at_any_time_can_be_gone_on_from_alone(name: str, split: Split) -> None:
    model = tiny(name)
    run = SharedRun(model, split, clock=Clock(tick=1.0), predicted_s=1e6)
    looked = set()
    for _ in run.turns():
        done, caches = run.home.verified
        assert len(caches) == LAYERS
        assert all(cache.offset == done for cache in caches if not isinstance(cache, ArraysCache))
        if done in looked:
            continue
        looked.add(done)
        # On copies: this prefill goes on.
        run.check(run.local([copy_on_write(cache) for cache in caches], done).cache)
    if split.kind == "layers" and name == "llama":
        chunks = {chunk.stop for chunk in split.chunks_of(split.helpers)}
        assert looked >= chunks - {split.tokens}, "a chunk that was complete was not verified"


def test_a_split_of_another_prompt_or_model_is_refused() -> None:
    model = tiny("llama")
    stage = Stage.of(model)
    layout, tokens = KvLayout.of(stage), list(prompt(98))
    split = SPLITS["half the layers"]

    def opened(name: str, rank: Any) -> Any:
        raise AssertionError("no stream is opened for a split that is refused")

    for wrong, prefix in (
        (Split("layers", (0, 2, 4), LAYERS, 0, 98, 32), None),
        (Split("layers", (0, 2, 5), 5, 0, 97, 32), None),
        (Split("layers", (0, 2, 4), LAYERS, 4, 97, 32), None),
        (split, stage.make_caches()),
        (Split("layers", (0, 0, 4), LAYERS, 0, 97, 32), None),
    ):
        with pytest.raises(InvalidValue):
            SharedPrefill(stage, layout, tokens, prefix, PrefillWithHelpers("a", wrong, 1.0), opened)
