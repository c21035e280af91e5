"""Sampling: reproducible, independent of neighbours, and from the distribution that was asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import sample_utils
from msgspec.structs import replace

from fleetd.engine.sampling import sampler as sampling
from fleetd.engine.sampling.parameters import PARAMETERS, Sampling, SamplingDefaults
from fleetd.engine.sampling.sampler import (
    BatchSampler,
    SeededSampler,
    make_processors,
    make_sampler,
    masked,
    without_ends,
)

pytestmark = pytest.mark.usefixtures("cpu_installed")
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0], dtype=np.float32)


def logprobs(logits: Any = LOGITS) -> mx.array:
    row = mx.array(logits)[None]
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


def draw(n: int, **fields: Any) -> list[int]:
    sampler = make_sampler(Sampling(**{"temperature": 1.0, "seed": 7, **fields}))
    return [int(sampler(logprobs()).item()) for _ in range(n)]


def probabilities(temperature: float = 1.0) -> Any:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    return weights / weights.sum()


def test_same_seed_same_tokens_other_seed_others() -> None:
    assert draw(50) == draw(50)
    assert draw(50) != draw(50, seed=8)
    assert draw(50, seed=-1) == draw(50, seed=(1 << 64) - 1)


def test_without_a_seed_every_answer_is_another() -> None:
    assert draw(50, seed=None) != draw(50, seed=None)


def test_the_noise_of_a_token_depends_on_nothing_drawn_before() -> None:
    plain = draw(12)
    sampler = make_sampler(Sampling(temperature=1.0, seed=7))
    other = make_sampler(Sampling(temperature=1.0, seed=99))
    mixed = []
    for step in range(12):
        other(logprobs())
        mx.random.uniform(shape=(step + 1,))
        # Another distribution at every third token: the ones between must not change.
        row = logprobs(LOGITS[::-1].copy()) if step % 3 == 2 else logprobs()
        mixed.append(int(sampler(row).item()))
    assert [t for i, t in enumerate(mixed) if i % 3 != 2] == [t for i, t in enumerate(plain) if i % 3 != 2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    n = 4000
    counts = np.bincount(draw(n, temperature=temperature), minlength=len(LOGITS))
    expected = probabilities(temperature) * n
    chi_square = float((((counts - expected) ** 2) / expected).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001; the seed is fixed


def test_seeds_are_independent_of_each_other() -> None:
    first = [draw(1, seed=seed)[0] for seed in range(3000)]
    expected = probabilities() * len(first)
    counts = np.bincount(first, minlength=len(LOGITS))
    assert float((((counts - expected) ** 2) / expected).sum()) < 24.3


def test_top_k_keeps_the_best() -> None:
    assert set(draw(300, top_k=3, temperature=5.0)) == {0, 1, 2}
    assert set(draw(300, top_k=100, temperature=5.0)) == set(range(8))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p = probabilities()
    kept = int((np.cumsum(p) - p < 0.8).sum())
    assert 1 < kept < 8
    assert set(draw(500, top_p=0.8)) == set(range(kept))


def test_min_p_is_relative_to_the_best() -> None:
    p = probabilities(2.0)
    assert set(draw(600, min_p=0.3, temperature=2.0)) == set(np.flatnonzero(p >= 0.3 * p[0]))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 1e-45},
        {"min_p": 1.0},
    ],
)
def test_the_narrowest_settings_are_greedy(fields: dict[str, float]) -> None:
    assert set(draw(40, **fields)) == {0}


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=12),
    st.floats(0.01, 5),
    st.integers(0, 20),
    st.floats(1e-7, 1),
    st.floats(0, 1),
)
def test_any_settings_draw_a_token_that_exists(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    asked = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    token = int(make_sampler(asked)(logprobs(np.array(logits, dtype=np.float32))).item())
    assert 0 <= token < len(logits)


def test_greedy_requests_share_one_sampler() -> None:
    assert make_sampler(Sampling(temperature=0.0)) is make_sampler(Sampling(temperature=0.0, seed=3))
    assert isinstance(make_sampler(Sampling(temperature=0.7)), SeededSampler)


def processed(context: list[int], prompt_tokens: int = 0, **fields: Any) -> list[float]:
    logits = mx.array(LOGITS)[None]
    for processor in make_processors(Sampling(**fields), prompt_tokens=prompt_tokens):
        logits = processor(mx.array(context), logits)
    row: list[float] = logits[0].tolist()
    return row


def changed(context: list[int], prompt_tokens: int = 0, **fields: Any) -> dict[int, float]:
    after = processed(context, prompt_tokens, **fields)
    return {i: round(a - float(b), 4) for i, (a, b) in enumerate(zip(after, LOGITS, strict=True)) if a != b}


def test_nothing_asked_nothing_done() -> None:
    assert make_processors(Sampling(temperature=0.3, top_p=0.2)) == []


def test_logit_bias_is_added() -> None:
    assert changed([1], logit_bias={2: 1.5, 7: -100.0}) == {2: 1.5, 7: -100.0}


def test_presence_counts_once_frequency_every_time_and_the_prompt_never() -> None:
    context = [0, 0, 0, 5, 1, 1, 2]
    assert changed(context, 4, presence_penalty=0.5) == {1: -0.5, 2: -0.5}
    assert changed(context, 4, frequency_penalty=0.5) == {1: -1.0, 2: -0.5}
    assert changed(context, 7, presence_penalty=0.5, frequency_penalty=0.5) == {}


def test_repetition_penalty_looks_at_the_prompt_too() -> None:
    context = [0, 5, 0, 3]
    assert changed(context, 4, repetition_penalty=2.0) == {0: -1.0, 5: -1.0}


def test_penalties_reach_back_further_than_a_page() -> None:
    assert changed([1, *[7] * 5000], 0, presence_penalty=1.0) == {1: -1.0, 7: -1.0}


def samplers(*asked: Sampling) -> list[Any]:
    return [make_sampler(one) for one in asked]


def rows(count: int, width: int, seed: int = 0) -> mx.array:
    """Log-probabilities of so many answers."""
    logits = mx.random.normal((count, width), key=mx.random.key(seed)) * 3
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


WARM, HOT = Sampling(temperature=0.8, seed=3), Sampling(temperature=1.7, seed=4)
GREEDY = Sampling(temperature=0.0)
NARROW = Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, seed=5)


@pytest.mark.parametrize(
    "asked",
    [
        (WARM, HOT),
        (WARM, WARM, GREEDY, HOT),
        (GREEDY, WARM),
        (GREEDY, GREEDY),
        (NARROW, replace(NARROW, temperature=1.0, seed=6)),
        (NARROW, GREEDY, NARROW),
        (NARROW, WARM, GREEDY),
    ],
)
@pytest.mark.parametrize("width", [8, 511, 512])
def test_each_row_of_a_batch_draws_what_it_draws_alone(asked: tuple[Sampling, ...], width: int) -> None:
    together, alone = samplers(*asked), samplers(*asked)
    batch = BatchSampler()
    for step in range(20):
        logprobs = rows(len(asked), width, step)
        batch.expect(together)
        found = batch(logprobs).tolist()
        assert found == [one(logprobs[i : i + 1]).item() for i, one in enumerate(alone)]
        assert batch.drew_all


def test_rows_with_equal_filters_are_drawn_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(sampling, "drawn", lambda logprobs, rows: calls.append(len(rows)))
    batch = BatchSampler()
    batch.expect(samplers(WARM, GREEDY, HOT))
    batch(rows(3, 8))
    assert calls == [3]


def test_a_call_for_other_rows_than_expected_draws_nothing() -> None:
    batch = BatchSampler()
    batch.expect(samplers(WARM, HOT), [], samplers(WARM))
    with pytest.raises(RuntimeError, match="1 rows are to be drawn where 2 were expected"):
        batch(rows(1, 8))


# ---- beside mlx-lm's own, and a slow model of both -------------------------------------------------------

ROWS = st.lists(st.floats(-12, 12, width=16), min_size=2, max_size=12)
TEMPERATURES = st.floats(0.05, 5)


def shown_of(logits: list[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Log-probabilities (1, V) as mlx-lm makes them of a model's logits."""
    row = mx.array([logits]).astype(dtype)
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


def drawable(sampler: Any, logprobs: mx.array) -> list[int]:
    """The tokens that a sampler of ours can draw."""
    kept = sampler.filters(logprobs * mx.array([[sampler.scale]]))
    return np.flatnonzero(np.isfinite(np.array(kept[0]))).tolist()  # type: ignore[no-any-return]


def drawable_by_mlx_lm(logprobs: mx.array, **fields: Any) -> list[int]:
    """The tokens that mlx-lm's sampler can draw, which looks at them before it divides by the temperature."""
    seen: list[mx.array] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sample_utils, "categorical_sampling", lambda row, temp: seen.append(row) or mx.argmax(row, -1)
        )
        sample_utils.make_sampler(temp=1.0, **fields)(logprobs)
    return np.flatnonzero(np.isfinite(np.array(seen[0][0]))).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@given(
    ROWS,
    TEMPERATURES,
    st.one_of(
        st.fixed_dictionaries({"top_k": st.integers(2, 20)}),
        st.fixed_dictionaries({"top_p": st.floats(0.01, 0.999)}),
        st.fixed_dictionaries({"min_p": st.floats(0.001, 1)}),
    ),
)
def test_each_filter_leaves_what_mlx_lm_s_leaves(
    dtype: mx.Dtype, logits: list[float], temperature: float, asked: dict[str, Any]
) -> None:
    logprobs = shown_of(logits, dtype)
    sampler = make_sampler(Sampling(temperature=temperature, seed=1, **asked))
    scaled = logprobs.astype(mx.float32) * mx.array(1.0 / temperature)
    if "top_p" in asked:
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    theirs = {name: value for name, value in asked.items() if name != "top_k" or value < len(logits)}
    assert drawable(sampler, logprobs) == drawable_by_mlx_lm(scaled, **theirs)


def allowed(p: Any, top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """The definition: the tokens that certainly may be drawn, and those that may be, by rounding and ties."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    some = order[:top_k] if top_k else order
    reach = [i for i in some if p[i] > 0.999 * p[some[-1]]]
    maybe = {i for i in order if p[i] >= 0.999 * p[some[-1]]}
    sure = set(some) - set(reach) if len(some) < len(order) else set(some)
    whole = sum(p[i] for i in some)
    for i in order:
        above = sum(p[j] for j in some if p[j] > 1.001 * p[i]) / whole
        below = sum(p[j] for j in some if p[j] > 0.999 * p[i] and j != i) / whole
        if top_p < 1 and below > top_p - 1e-4:
            sure.discard(i)
        if top_p < 1 and above > top_p + 1e-4:
            maybe.discard(i)
        if p[i] < 1.001 * min_p * p[order[0]] and i != order[0]:
            sure.discard(i)
        if p[i] < 0.999 * min_p * p[order[0]]:
            maybe.discard(i)
    return sure, maybe


@examples(90)
@given(ROWS, TEMPERATURES, st.integers(2, 20), st.floats(0.01, 1), st.floats(0, 1))
def test_all_filters_together_leave_what_their_definition_leaves(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampler = make_sampler(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1))
    weights = np.array(logits, dtype=np.float64) / temperature
    p = np.exp(weights - weights.max())
    sure, maybe = allowed(p / p.sum(), top_k, top_p, min_p)
    found = set(drawable(sampler, shown_of(logits)))
    assert sure <= found <= maybe
    assert found


@given(
    ROWS,
    st.lists(st.integers(0, 11), max_size=14),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    st.sampled_from([0.0, 0.5, -1.5]),
    st.sampled_from([0.0, 0.25, -2.0]),
    st.dictionaries(st.integers(0, 11), st.floats(-100, 100, width=16), max_size=4),
)
def test_the_processors_do_what_mlx_lm_s_do_and_leave_the_model_s_logits_alone(
    logits: list[float],
    context: list[int],
    prompt: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    width = len(logits)
    tokens = [token % width for token in context]
    prompt = min(prompt, len(tokens))
    bias = {token % width: value for token, value in bias.items()}
    asked = Sampling(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    theirs = mx.array([logits])
    for fields, seen in (
        ({"logit_bias": bias}, tokens),
        ({"repetition_penalty": repetition}, tokens),
        ({"presence_penalty": presence}, tokens[prompt:]),
        ({"frequency_penalty": frequency}, tokens[prompt:]),
    ):
        for name in [name for name in fields if name.endswith("penalty")]:
            fields[name.replace("penalty", "context_size")] = len(tokens) + 1
        for processor in sample_utils.make_logits_processors(**fields):
            theirs = processor(mx.array(seen, dtype=mx.int32), theirs)
    slow = np.array(logits, dtype=np.float64)
    for token, value in bias.items():
        slow[token] += value
    for token in set(tokens):
        slow[token] = slow[token] * repetition if slow[token] < 0 else slow[token] / repetition
    for token in set(tokens[prompt:]):
        slow[token] -= presence + frequency * tokens[prompt:].count(token)
    given_logits = mx.array([logits, logits])
    ours = given_logits[:1]
    for processor in make_processors(asked, prompt_tokens=prompt):
        ours = processor(mx.array(tokens, dtype=mx.int32), ours)
    assert ours.tolist() == theirs.tolist()
    assert np.allclose(np.array(ours[0]), slow, rtol=1e-5, atol=1e-4)
    assert given_logits.tolist() == [logits, logits]


@given(ROWS, st.sets(st.integers(0, 11), min_size=1), st.integers(0, 5), st.integers(0, 5), st.integers(0, 8))
def test_no_end_is_chosen_before_the_answer_has_its_least_tokens(
    logits: list[float], ends: set[int], prompt: int, least: int, generated: int
) -> None:
    tokens = mx.zeros((prompt + generated,), dtype=mx.int32)
    after = without_ends(ends, least, prompt)(tokens, mx.array([logits]))[0].tolist()
    barred = ends if generated < least else set()
    assert after == [-np.inf if i in barred else value for i, value in enumerate(logits)]


@pytest.mark.parametrize("end", [-1, 3, 1 << 30])
def test_an_end_that_the_model_has_no_logit_for_bars_nothing(end: int) -> None:
    """A model's files may name it. Numbers behind the row are another array's."""
    rows = mx.zeros((1, 3))
    assert without_ends({end}, 5, 0)(mx.zeros((1,), mx.int32), rows).tolist() == [[0.0] * 3]
    assert without_ends({end, 1}, 5, 0)(mx.zeros((1,), mx.int32), rows).tolist() == [[0.0, -np.inf, 0.0]]


def test_a_recommended_top_k_is_a_whole_number_or_left_out() -> None:
    assert SamplingDefaults.of_model({"top_k": 40.0}).top_k == 40
    assert SamplingDefaults.of_model({"top_k": 40.5}) == SamplingDefaults()
    sampler = make_sampler(Sampling(temperature=1.0, seed=1), SamplingDefaults.of_model({"top_k": 3.0}))
    assert {int(sampler(logprobs()).item()) for _ in range(100)} <= {0, 1, 2}


@pytest.mark.parametrize("value", [None, True, "0.5", [0.5], -0.5, 1e3, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_recommendation_that_makes_no_sense_is_left_out(name: str, value: Any) -> None:
    assert SamplingDefaults.of_model({name: value}) == SamplingDefaults()


def test_the_table_has_each_parameter_once_and_agrees_with_the_arithmetic() -> None:
    table = {each.field: each for each in PARAMETERS}
    assert tuple(table) == Sampling.__struct_fields__
    assert len(table) == len(PARAMETERS)
    recommended = msgspec.structs.asdict(SamplingDefaults())
    assert {name: table[name].neutral for name in recommended} == recommended
    assert {name for name, each in table.items() if each.alike} == set(sampling._Filters.__struct_fields__)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(1, 9), (3, 9), (3, 1, 9)])
def test_a_mask_leaves_what_is_allowed_to_the_bit(kind: mx.Dtype, shape: tuple[int, ...]) -> None:
    logits = (mx.random.normal(shape, key=mx.random.key(3)) * 50).astype(kind)
    allowed = np.random.default_rng(2).random((*shape[:-1], 7)) > 0.5
    whole = mx.array(np.concatenate([allowed, np.zeros((*shape[:-1], 2), np.bool_)], axis=-1))
    expected = mx.where(whole, logits, mx.array(-mx.inf, kind))
    found = masked(logits, allowed)
    assert (found.dtype, found.shape) == (kind, shape)
    assert mx.array_equal(found, expected)
