"""A real model drafts: what it keeps is taken back to wherever the text goes on otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pipes import Events, MemoryPipe
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny_architectures
import tiny_models
from mlx_lm.models.cache import ChunkedKVCache, KVCache, make_prompt_cache
from tiny_architectures import VOCAB

from fleetd import limits
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import DraftFor, DraftReport, Failed
from fleetd.engine.speculation import drafter_window
from fleetd.engine.speculation.draft_guests import DraftGuests
from fleetd.engine.speculation.drafter import DraftModel, DraftWriter
from fleetd.engine.speculation.lookahead import Lookahead
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import ModelUnsupported


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        # Running states: gated delta, short convolutions, state-space layers.
        "qwen3_5",
        pytest.param("lfm2", marks=pytest.mark.long),
        pytest.param("jamba", marks=pytest.mark.long),
        # Windows of 32 tokens, which move in these texts.
        "gpt_oss",
        "gemma4",
        # An index beside keys and values.
        pytest.param("deepseek_v32", marks=pytest.mark.long),
    ],
)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_architectures.tiny(request.param)


def words(n: int) -> list[int]:
    return [token % VOCAB for token in tiny_models.prompt(n)]


def fresh(model: Any, text: Sequence[int]) -> int:
    """The next token, computed from nothing."""
    logits = model(mx.array(list(text))[None], cache=make_prompt_cache(model))
    token: int = mx.argmax(logits[0, -1]).item()  # type: ignore[assignment]
    return token


def test_every_path_is_guessed_as_if_nothing_else_had_been(model: Any) -> None:
    """Texts and paths that grow, branch and turn back at random."""
    rng = random.Random(5)
    drafting, text = DraftModel(model), words(12)
    drafting.committed(text)
    path: list[int] = []
    for _ in range(25):
        if rng.random() < 0.4:
            new = path[: rng.randint(0, 2)] + [rng.randrange(VOCAB)] * rng.randint(0, 1)
            text += new
            drafting.committed(new)
            path = path[len(new) :] if path[: len(new)] == new else []
        else:
            path = [*path[: rng.randint(0, len(path))], rng.randrange(VOCAB)]
        guess = drafting.guess(path)
        assert guess.first == fresh(model, [*text, *path])
        assert 1 >= guess.p_first >= guess.p_second > 0
        assert guess.first != guess.second
        assert drafting.held == len(text) + len(path)
        assert drafting.missing(path) == 0


def test_a_long_text_is_prefilled_in_pieces(model: Any) -> None:
    drafting, text = DraftModel(model), words(50)
    drafting.committed(text)
    assert drafting.missing([]) == 49
    drafting.prefill([], 30)
    assert (drafting.missing([]), drafting.held) == (19, 30)
    drafting.prefill([], 30)
    assert (drafting.missing([]), drafting.held) == (0, 49)
    assert drafting.guess([]).first == fresh(model, text)


def windowed(text: Sequence[int]) -> list[int]:
    """What is seen of a text."""
    return [*text[: limits.DRAFT_SINK_TOKENS], *text[drafter_window.begins(len(text)) :]]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRAFT_SINK_TOKENS", 4)
    monkeypatch.setattr(limits, "DRAFT_WINDOW_TOKENS", 40)


@pytest.mark.usefixtures("narrow")
def test_what_is_seen_of_a_text_depends_on_its_length_and_moves_by_steps() -> None:
    text = list(range(500))
    before: list[int] = []
    for length in range(1, 500):
        seen = windowed(text[:length])
        assert len(seen) == drafter_window.seen(length) <= 44
        assert seen == text[:length] if length <= 44 else len(seen) > 24
        assert seen[:4] == text[: min(4, length)]
        assert seen[-1] == text[length - 1]
        # Mostly a text that grows is only added to.
        assert seen[:-1] == before or length % 20 == 5
        before = seen


@pytest.mark.usefixtures("narrow")
def test_a_text_of_any_length_is_drafted_for_with_the_memory_of_a_window(model: Any) -> None:
    rng = random.Random(5)
    counting, text = CountingModel(model), words(300)
    drafting = DraftModel(counting)
    drafting.committed(text)
    assert drafting.missing([]) == len(windowed(text)) - 1 < 44
    drafting.prefill([], 300)
    for _ in range(12):
        path = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        assert drafting.guess(path).first == fresh(model, [*windowed(text), *path])
        new = [*path[: rng.randint(0, 4)], *words(rng.randint(1, 9))]
        text += new
        drafting.committed(new)
        assert drafting.held <= 44 + 4
    drafting.guess([])
    # The next turn goes on from what was read in this one.
    tokens, cache = drafting.kept
    assert tokens == windowed(text)[: len(tokens)]
    prefix = PrefixCache(1 << 30)
    prefix.store(tokens, cache, "guessed")
    more = [*text, 9] if len(text) % 20 != 4 else text
    again = DraftModel(model, lambda tokens: prefix.fetch(tokens, "guessed"))
    again.committed(more)
    assert again.held == len(tokens)
    assert again.guess([]).first == fresh(model, windowed(more))


class CountingModel:
    """Notes how many tokens each pass computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> Any:
        self.passes.append(tokens.shape[1])
        return self._model(tokens, cache=cache)


def test_what_was_right_is_all_that_is_computed_again(model: Any) -> None:
    """The text goes on otherwise after every few guesses: what is read again is since it was last saved."""
    counting, text = CountingModel(model), words(70)
    drafting = DraftModel(counting)
    drafting.committed(text)
    drafting.prefill([], 69)
    counting.passes.clear()
    for right in (3, 0, 1, 2, 3):
        path: list[int] = []
        for _ in range(4):
            path.append(drafting.guess(path).first)
        other = (path[right] + 1) % VOCAB
        drafting.committed([*path[:right], other])
        text += [*path[:right], other]
    assert drafting.guess([]).first == fresh(model, text)
    # Two turns' worth at most: a state is saved once in each.
    assert max(counting.passes) <= 8


def test_a_text_goes_on_from_what_was_kept_of_an_earlier_one(model: Any) -> None:
    first, text = DraftModel(model), words(60)
    first.committed(text)
    first.guess([])
    tokens, cache = first.kept
    assert tokens == text[: len(tokens)]
    prefix = PrefixCache(1 << 30)
    prefix.store(tokens, cache, "guessed")
    more = [*text, 5, 6, 7]
    second = DraftModel(model, lambda tokens: prefix.fetch(tokens, "guessed"))
    second.committed(more)
    assert second.held == len(tokens)
    assert second.guess([]).first == fresh(model, more)
    assert second.guess([9]).first == fresh(model, [*more, 9])
    assert second.guess([8]).first == fresh(model, [*more, 8])


class BreakingModel(CountingModel):
    """Fails in its third pass, when some layers have taken the tokens and others have not."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> Any:
        logits = super().__call__(tokens, cache=cache)
        if len(self.passes) == 3:
            raise RuntimeError("no memory on the device")
        return logits


@pytest.mark.parametrize("breaks", [True, False])
def test_of_a_step_that_broke_off_nothing_is_kept_and_the_worker_goes_on(model: Any, breaks: bool) -> None:
    """What the cache holds then is not what its tokens say; and to compute it fails again."""
    reports: list[Any] = []
    prefix = PrefixCache(1 << 30)
    guests = DraftGuests(
        budget=KvBudget.of(1 << 30, 1024),
        emit=reports.append,
        streams=HandedOverStreams(lambda: None),
        model=BreakingModel(model) if breaks else CountingModel(model),
        ends=frozenset(),
        context_tokens=4096,
        vocab_size=VOCAB,
        prefix=prefix,
    )
    guests.begin(DraftFor("r"))
    (task,) = guests._tasks
    ends: list[MemoryPipe] = []

    def opened(place: Any) -> MemoryPipe:
        ends.append(MemoryPipe(place, Events()))
        return ends[-1]

    drafting = guests._models["r"]
    task.work = DraftWriter(drafting, opened, Lookahead(), context_tokens=4096, vocab_size=VOCAB)
    source = RemoteSource(opened, words(50), VOCAB)
    ends[0].join(ends[1])
    for _ in range(4):
        guests.turn(16)
    source.close()
    for _ in range(2):
        guests.turn(16)
    assert not len(guests)
    assert isinstance(reports[-1], Failed if breaks else DraftReport)
    assert guests.budget.used_bytes == 0
    kept = [(entry.namespace, len(entry.tokens)) for entry in prefix._entries.values()]
    assert kept == ([] if breaks else [("guessed", 50)])


def test_a_cache_of_an_unknown_kind_cannot_be_taken_back() -> None:
    model = SimpleNamespace(make_cache=lambda: [KVCache(), ChunkedKVCache(8)], layers=[])
    with pytest.raises(ModelUnsupported, match="ChunkedKVCache"):
        DraftModel(model)
