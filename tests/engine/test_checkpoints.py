"""A prompt whose end is edited goes on from a checkpoint, in models of which no token can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
import tiny_architectures
import tiny_models
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from fleetd import limits
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.sequence_state import checkpoints

pytestmark = pytest.mark.usefixtures("cpu_installed")
ROOM = 1 << 40
# A gated delta rule, a convolution, Mamba 2 and attention in each layer, windows that move.
FAMILIES = ["qwen3_next", "lfm2", "falcon_h1", "gemma3_text"]


def _quick(*names: str) -> list[Any]:
    """Each family in one of the tests in the quick run, in all of them in the long one."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in FAMILIES]


def prompt_of(tokens: int) -> list[int]:
    return [token % tiny_architectures.VOCAB for token in tiny_models.prompt(tokens)]


def prefilled(
    model: Any, tokens: list[int], prefix: PrefixCache, *, chunk: int = 512, borders: Sequence[int] = ()
) -> Prefiller:
    hit = prefix.fetch(tokens)
    cache = hit.cache or make_prompt_cache(model)
    room = prefix.state_bytes
    prefiller = Prefiller(model, tokens, cache, hit.tokens, state_bytes=room, borders=borders)
    while prefiller.step(chunk):
        pass
    return prefiller


def logits(model: Any, prefiller: Prefiller) -> mx.array:
    return model(mx.array(prefiller.tokens[-1:])[None], cache=prefiller.cache)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    made = tiny_architectures.tiny(request.param)
    mx.set_default_device(before)
    return made


@pytest.mark.parametrize("model", _quick("qwen3_next", "gemma3_text"), indirect=True)
def test_an_edited_last_message_computes_that_message_and_at_most_a_block(model: Any) -> None:
    prompt, prefix = prompt_of(1100), PrefixCache(ROOM)
    first = prefilled(model, prompt, prefix)
    prefix.store(prompt[:-1], first.cache, states=first.states)
    edited = prompt[:-200] + [(token + 1) % tiny_architectures.VOCAB for token in prompt[-200:]]
    cached = prefix.fetch(edited).tokens
    assert len(edited) - cached <= 200 + limits.CHECKPOINT_BLOCK_TOKENS
    warm, cold = prefilled(model, edited, prefix), prefilled(model, edited, PrefixCache(ROOM))
    assert mx.array_equal(logits(model, warm), logits(model, cold))
    # The stored state is as it was, and serves the first prompt again.
    again = prefilled(model, prompt, prefix)
    assert mx.array_equal(logits(model, again), logits(model, prefilled(model, prompt, PrefixCache(ROOM))))
    prefix.validate()


@given(st.integers(1, 100_000), st.data())
def test_places_bound_what_is_computed_again(tokens: int, data: st.DataObject) -> None:
    places, block = checkpoints.places(tokens), limits.CHECKPOINT_BLOCK_TOKENS
    assert places == sorted(set(places))
    assert len(places) <= limits.CHECKPOINTS_PER_PROMPT
    assert all(0 < place < tokens and place % block == 0 for place in places)
    changed = data.draw(st.integers(1, min(tokens, block * (1 << limits.CHECKPOINTS_PER_PROMPT - 2))))
    begin = max((place for place in places if place <= tokens - changed), default=0)
    assert tokens - begin <= (changed + block if changed <= block else 2 * changed + 2 * block)


TOKENS = st.integers(0, 20_000) | st.integers(0, 80).map(lambda n: n * limits.CHECKPOINT_BLOCK_TOKENS)


@given(st.integers(1, 20_000), st.lists(TOKENS, max_size=8), TOKENS)
@example(3000, [2048], 0)  # where the rule has a place, too
def test_borders_have_places_of_their_own_and_there_are_no_more_places_for_it(
    tokens: int, borders: list[int], done: int
) -> None:
    places = checkpoints.places(tokens, borders, done)
    assert places == sorted(set(places))
    assert len(places) <= limits.CHECKPOINTS_PER_PROMPT
    assert all(done < place < tokens for place in places)
    # What the disk has, and from where another machine's are checked.
    assert {place for place in checkpoints.places(tokens)[-2:] if place > done} <= set(places)
    # For edits in mid-conversation, whatever the borders are.
    last, left = (tokens - 1) // limits.CHECKPOINT_BLOCK_TOKENS, limits.CHECKPOINTS_PER_PROMPT
    farther = left - 2 - limits.CHECKPOINTS_AT_BORDERS
    assert farther >= 2
    for i in range(2, 2 + farther):
        place = (last - (1 << i) + 1) * limits.CHECKPOINT_BLOCK_TOKENS
        assert place <= done or place in places
    for border in borders[: limits.CHECKPOINTS_AT_BORDERS]:
        if done <= border < tokens - 1:
            nearest = max(place for place in (done, *places) if place <= border)
            assert border - nearest < limits.CHECKPOINT_APART_TOKENS


@pytest.mark.parametrize("model", _quick("lfm2", "falcon_h1"), indirect=True)
def test_what_is_edited_behind_a_border_is_all_that_is_computed_again(model: Any) -> None:
    prompt, prefix, border = prompt_of(1100), PrefixCache(ROOM), 901
    first = prefilled(model, prompt, prefix, borders=[1095, border])
    prefix.store(prompt[:-1], first.cache, states=first.states)
    assert sorted(first.states) == [256, 768, border, 1024, 1095]
    edited = prompt[:border] + [(token + 1) % tiny_architectures.VOCAB for token in prompt[border:]]
    assert prefix.fetch(edited).tokens == border
    warm, cold = (
        prefilled(model, edited, cache, borders=[1095, border]) for cache in (prefix, PrefixCache(ROOM))
    )
    assert mx.array_equal(logits(model, warm), logits(model, cold))
    prefix.validate()


def test_a_model_with_rows_alone_keeps_no_states_and_its_chunks() -> None:
    model = tiny_models.smollm2()
    prefiller = Prefiller(model, tiny_models.prompt(700), make_prompt_cache(model), state_bytes=ROOM)
    assert prefiller.step(600) == 600
    assert not prefiller.states


def running(number: float) -> list[Any]:
    layer = ArraysCache(1)
    layer[0] = mx.full((1, 1024), number)
    return [layer]


def test_states_that_do_not_fit_are_left_out_and_all_others_are_counted() -> None:
    tokens, states = list(range(600)), {256: running(1.0), 512: running(2.0)}
    one = running(3.0)[0].nbytes
    prefix = PrefixCache(one * 3)
    prefix.store(tokens, running(3.0), states=states)
    assert prefix.nbytes == one * 3
    assert prefix.fetch([*tokens[:300], 0]).tokens == 256
    small = PrefixCache(one * 2)
    small.store(tokens, running(3.0), states=states)
    assert small.nbytes == one
    assert small.fetch([*tokens[:300], 0]).tokens == 0
    assert small.fetch([*tokens, 0]).tokens == 600


def test_of_states_that_do_not_all_fit_the_latest_are_kept() -> None:
    mx.set_default_device(mx.cpu)
    model = tiny_architectures.tiny("lfm2")
    whole = Prefiller(model, prompt_of(1100), make_prompt_cache(model), state_bytes=ROOM)
    while whole.step(512):
        pass
    one = checkpoints.nbytes(whole.states[1024])
    small = Prefiller(model, prompt_of(1100), make_prompt_cache(model), state_bytes=one)
    while small.step(512):
        pass
    assert sorted(whole.states) == checkpoints.places(1100)
    assert list(small.states) == [1024]
