"""Hidden states that draft sources ask for: those of committed tokens and no others, however computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from family_params import in_turn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import GREEDY, Run, Scripted, perfect, right_for

from fleetd.engine.layers import hidden_states
from fleetd.engine.layers.hidden_states import noted_states
from fleetd.engine.layers.stage import Stage
from fleetd.engine.loop import decoding
from fleetd.engine.protocol import Sampling, Speculate
from fleetd.engine.speculation.canonical_width import WideSteps
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe
from fleetd.engine.speculation.sources import Context

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(30)]
LAYERS = (0, 1)
# No draft but those of the test.
ALONE = Speculate(sources=["scripted"])
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def model_of() -> Callable[[str], Any]:
    return functools.cache(tiny_architectures.tiny)


@dataclass
class HiddenReader(Scripted):
    """Keeps the rows that it is given, by layer and token; a row that comes again must be the same."""

    hidden_layers: tuple[int, ...] = LAYERS
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)
    # The newest row's token, counted from the end of the text: 1 is the newest token.
    newest: set[int] = field(default_factory=set)

    def propose(self, context: Context) -> list[int]:
        if (hidden := context.hidden) is not None:
            assert sorted(hidden.states) == sorted(self.hidden_layers)
            for layer, states in hidden.states.items():
                for i, row in enumerate(states):
                    here = bytes(memoryview(row))
                    assert self.rows.setdefault((layer, hidden.start + i), here) == here
                self.newest.add(len(context.tokens) - hidden.start - states.shape[0] + 1)
        return super().propose(context)


def single_steps(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> dict[tuple[int, int], bytes]:
    """The rows of a whole text, a token per pass."""
    cache = make_prompt_cache(model)
    found = {}
    for at, token in enumerate(tokens):
        with noted_states(model, layers) as states:
            mx.eval(model(mx.array([[token]]), cache=cache))
        found.update({(layer, at): bytes(memoryview(noted[0][0, 0])) for layer, noted in states.items()})
    return found


def check(model: Any, source: HiddenReader, tokens: Sequence[int], least: int) -> None:
    """All rows are those of the text, and none is missing from the prompt's last token on, to ``least``."""
    truth = single_steps(model, tokens, source.hidden_layers)
    assert source.rows
    assert all(truth[key] == row for key, row in source.rows.items())
    given = {at for _, at in source.rows}
    assert set(range(len(PROMPT) - 1, least)) <= given


def spec(model: Any, **changes: Any) -> Any:
    plan = ProbePlan((20,), (2, 16), 2, every=True)
    verdict = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=plan)
    assert verdict.exact
    return speculating.speculation(VOCAB, verdict=verdict, **changes)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "lfm2", "gemma4_text", "deepseek_v3", "gpt_oss"])
def test_what_is_noted_lies_between_the_layers_and_the_model_is_as_before(
    name: str, model_of: Callable[[str], Any]
) -> None:
    model = model_of(name)
    stage = Stage.of(model)
    kinds = [type(layer) for layer in model.layers]
    tokens = mx.array([PROMPT])
    plain = model(tokens, cache=make_prompt_cache(model))
    with noted_states(model, range(stage.total + 1)) as states:
        logits = model(tokens, cache=make_prompt_cache(model))
        model(tokens, cache=make_prompt_cache(model))
    assert sorted(states) == list(range(stage.total))
    assert all(len(noted) == 2 for noted in states.values())
    assert mx.array_equal(plain, logits)
    hidden, inputs = stage.embed(tokens), stage.inputs(tokens, 0)
    caches = stage.make_caches()
    for last in range(1, stage.total + 1):
        run = stage.part(0, last).run(hidden, stage.make_caches()[:last], inputs)
        assert mx.array_equal(run, states[last - 1][0])
    assert mx.array_equal(stage.finish(stage.run(hidden, caches, inputs)), plain)
    assert [type(layer) for layer in model.layers] == kinds
    assert not any(hidden_states._NOTED in vars(layer) for layer in model.layers)


def test_a_model_that_fails_is_left_as_it_was(model_of: Callable[[str], Any]) -> None:
    model = model_of("llama")
    kinds = [type(layer) for layer in model.layers]
    with pytest.raises(ValueError, match="a model that breaks"), noted_states(model, LAYERS):
        raise ValueError("a model that breaks")
    assert [type(layer) for layer in model.layers] == kinds


def test_several_states_of_a_token_are_none(model_of: Callable[[str], Any]) -> None:
    model = model_of("gemma3n")
    with noted_states(model, LAYERS) as states:
        model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    assert states == {0: [], 1: []}


@pytest.mark.parametrize(
    ("name", "case"),
    in_turn(["llama", "qwen3_5"], {"0": (0, GREEDY), "3": (3, PENALISED), "16": (16, GREEDY)}),
)
def test_rows_of_refused_drafts_are_not_given(
    model_of: Callable[[str], Any], tokenizer: Any, name: str, case: tuple[int, Sampling]
) -> None:
    right, sampling = case
    """Alone, drafts wrong at once, after three tokens, never; a hybrid undoes whole passes."""
    model = model_of(name)
    plain = Run(model, tokenizer)
    plain.submit("r", PROMPT, sampling=sampling, max_tokens=40)
    plain.finish()
    whole = plain.tokens["r"]
    source = HiddenReader(right_for(whole, right).say)
    run = Run(model, tokenizer, spec(model))
    run.submit("r", PROMPT, source, sampling=sampling, max_tokens=40)
    run.finish()
    assert run.said("r") == plain.said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.drafted > report.accepted or right == 16
    check(model, source, whole, len(PROMPT) + 20)
    assert 2 in source.newest


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_plain_steps_are_given(
    model_of: Callable[[str], Any], tokenizer: Any, *, ahead: bool
) -> None:
    model = model_of("llama")
    source = HiddenReader(lambda tokens, width: [])
    run = Run(model, tokenizer, spec(model, computes_ahead=ahead))
    run.submit("r", PROMPT, source, max_tokens=20, speculate=ALONE)
    run.finish()
    check(model, source, run.tokens["r"], len(PROMPT) + 17)


def test_rows_of_steps_that_are_two_wide_are_given_once(
    model_of: Callable[[str], Any], tokenizer: Any
) -> None:
    model = model_of("llama")
    source = HiddenReader(lambda tokens, width: [])
    run = Run(WideSteps(model, 1 << 20), tokenizer, spec(model))
    run.submit("r", PROMPT, source, max_tokens=20, speculate=ALONE)
    run.finish()
    check(model, source, run.tokens["r"], len(PROMPT) + 17)
    assert source.newest == {2}


def test_several_answers_have_rows_of_their_own(
    model_of: Callable[[str], Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the batch, where one joins and one asks for other layers, then side by side with drafts."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 0)
    model = model_of("llama")
    prompts = {"a": PROMPT, "b": [*PROMPT[:29], 9], "c": [*PROMPT[:29], 11]}
    plain = Run(model, tokenizer)
    for name, prompt in prompts.items():
        plain.submit(name, prompt, max_tokens=36)
    plain.finish()
    run = Run(model, tokenizer, spec(model))
    monkeypatch.setattr(run.decoding.rounds, "step_s", lambda size: 100.0 * size)
    sources = {name: HiddenReader(right_for(plain.tokens[name], 5).say) for name in prompts}
    sources["b"].hidden_layers = (1,)
    states_of = HiddenReader.propose

    def propose(source: HiddenReader, context: Context) -> list[int]:
        # All layers that a source of this batch has asked for are there.
        if context.hidden is not None:
            own = {layer: context.hidden.states[layer] for layer in source.hidden_layers}
            context = Context(context.tokens, context.width, type(context.hidden)(context.hidden.start, own))
        return states_of(source, context)

    monkeypatch.setattr(HiddenReader, "propose", propose)
    for name, prompt in prompts.items():
        run.submit(name, prompt, sources[name], max_tokens=36)
        for _ in range(4):
            run.turn()
    run.finish()
    assert run.moves > 0
    for name in prompts:
        assert run.said(name)[:-1] == plain.said(name)[:-1]
        truth = single_steps(model, plain.tokens[name], sources[name].hidden_layers)
        assert all(truth[key] == row for key, row in sources[name].rows.items())
        # The batch has computed the newest token's row, a verified pass has not.
        assert sources[name].newest == {1, 2}


class HeadSource(HiddenReader):
    """Drafts what the model's own head says of the newest token's row, where there is one."""

    def __init__(self, model: Any) -> None:
        super().__init__(lambda tokens, width: [], hidden_layers=(len(model.layers) - 1,))
        self._stage = Stage.of(model)

    def propose(self, context: Context) -> list[int]:
        super().propose(context)
        if (hidden := context.hidden) is None:
            return []
        states = hidden.states[self.hidden_layers[0]]
        said = mx.argmax(self._stage.finish(states[None]), axis=-1)[0].tolist()
        known = context.tokens[hidden.start + 1 :]
        assert said[: len(known)] == list(known[: len(said)])
        return said[len(known) :]


def test_what_the_models_own_head_says_of_the_newest_row_is_right(
    model_of: Callable[[str], Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LEAST_DRAFTS", 1)
    model = model_of("llama")
    run = Run(model, tokenizer, spec(model))
    run.submit("long", PROMPT, HeadSource(model), max_tokens=60)
    for i in range(4):
        run.submit(f"short{i}", PROMPT[:20], max_tokens=3)
        while not run.decoding.batch:
            run.turn()
        while run.decoding.batch:
            run.turn()
    run.finish()
    report = run.finished("long").speculation
    assert report is not None
    scripted = report.sources["scripted"]
    assert scripted.drafted == scripted.accepted == 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Classes that were made to note states; the layers' own classes otherwise."""
    seen: list[Any] = []
    make = hidden_states._noting
    monkeypatch.setattr(hidden_states, "_noting", lambda kind: seen.append(kind) or make(kind))
    return seen


def test_nothing_is_noted_where_no_source_asks(
    model_of: Callable[[str], Any], tokenizer: Any, calls: list[Any]
) -> None:
    model = model_of("llama")
    plain = Run(model, tokenizer)
    plain.submit("a", PROMPT, max_tokens=30)
    plain.finish()
    run = Run(model, tokenizer, spec(model))
    source = perfect(plain.tokens["a"])
    run.submit("a", PROMPT, source, max_tokens=30)
    run.finish()
    for name in ("b", "c"):
        run.submit(name, PROMPT[:20], max_tokens=10)
    run.finish()
    assert run.finished("a").speculation is not None
    assert calls == []
