"""Answers that are held to a rule with a state say what they say under the same rule without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import speculating
import tiny_architectures
from group_machines import group_of, lazy
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import GREEDY, Run, Scripted, guessing, perfect, right_for

from fleetd.engine.loop import decoding
from fleetd.engine.protocol import Sampling
from fleetd.engine.sampling.sampler import LogitsProcessor
from fleetd.engine.speculation.sources import Context

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(50)]
SAMPLED = Sampling(temperature=0.7, seed=11, top_p=0.9, top_k=50)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={9: 1.5})
RECENT = 3


def allowed(answer: Sequence[int]) -> list[bool]:
    """Token ``n`` of an answer is ``n`` modulo 3, and none of the last three."""
    return [token % 3 == len(answer) % 3 and token not in answer[-RECENT:] for token in range(VOCAB)]


def masked(logits: mx.array, free: Sequence[bool]) -> mx.array:
    return mx.where(mx.array(list(free))[None], logits, mx.array(-mx.inf, logits.dtype))


@dataclass
class Rule:
    """``allowed`` as an ``AnswerMatcher``; its ``text`` must be the answer in the end."""

    text: list[int] = field(default_factory=list)
    failure: str = ""
    masked_drafts: int = 0
    forbidden: int = 0

    @property
    def open(self) -> bool:
        return len(self.text) % 3 == 1

    @property
    def held(self) -> int:
        return len(self.text)

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert allowed(self.text)[token]
            self.text.append(token)

    def allowed(self, drafts: Sequence[int]) -> int:
        text = list(self.text)
        for at, draft in enumerate(drafts):
            if not allowed(text)[draft]:
                self.forbidden += 1
                return at
            text.append(draft)
        return len(drafts)

    def forced(self, most: int) -> list[int]:
        return []

    def masks(self, drafts: Sequence[int] = ()) -> list[Any]:
        self.masked_drafts += len(drafts)
        return [np.array(allowed([*self.text, *drafts[:at]])) for at in range(self.allowed(drafts) + 1)]


def plainly_ruled(prompt_tokens: int) -> LogitsProcessor:
    """The same without a state."""
    return lambda tokens, logits: masked(logits, allowed(tokens[prompt_tokens:].tolist()))


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def make_model() -> Callable[[str], Any]:
    return functools.cache(tiny_architectures.tiny)


@pytest.fixture
def llama(make_model: Callable[[str], Any]) -> Any:
    return make_model("llama")


def ruled(monkeypatch: pytest.MonkeyPatch, make: Callable[[int], LogitsProcessor]) -> None:
    """Answers that begin from now on also have what ``make`` makes for the length of their prompt."""
    own = decoding.make_processors

    def make_processors(sampling: Any, defaults: Any, prompt_tokens: int) -> list[LogitsProcessor]:
        return [*own(sampling, defaults, prompt_tokens), make(prompt_tokens)]

    monkeypatch.setattr(decoding, "make_processors", make_processors)


def answers(run: Run, asked: dict[str, Any], rules: list[Rule] | None = None) -> Run:
    """``run`` after the answers to prompts, with sources and fields, that are asked for at once. Each is held
    to a Rule of its own, which comes into ``rules``, or to the same without a state."""
    with pytest.MonkeyPatch.context() as patched:
        if rules is None:
            ruled(patched, plainly_ruled)
        for name, (prompt, sources, fields) in asked.items():
            rule = None
            if rules is not None:
                rules.append(rule := Rule())
            run.submit(name, prompt, *sources, matcher=rule, **fields)
        run.finish()
    return run


def well_formed(answer: Sequence[int]) -> bool:
    return all(allowed(answer[:i])[token] for i, token in enumerate(answer))


SOURCES: dict[str, Callable[[list[int]], list[Scripted]]] = {
    "perfect": lambda whole: [perfect(whole)],
    "right for three": lambda whole: [right_for(whole, 3)],
    "allowed but wrong": lambda whole: [wrong_by(whole, 3)],
    "random": lambda whole: [guessing(VOCAB, 3)],
    "lookup and suffix": lambda whole: [],
}


def wrong_by(whole: Sequence[int], step: int) -> Scripted:
    """Right for two tokens, then tokens that the rule allows."""
    right = right_for(whole, 2)

    def say(tokens: Sequence[int], width: int) -> list[int]:
        drafts = right.propose(Context(tokens, width))[:2]
        for at in range(len(tokens) + len(drafts), min(len(tokens) + width, len(whole))):
            drafts.append((whole[at] + step * 9) % (VOCAB - VOCAB % 3))
        return drafts

    return Scripted(say)


def fields_of(sampling: Sampling) -> dict[str, Any]:
    return {"sampling": sampling, "max_tokens": 40, "top_logprobs": 1}


@pytest.fixture(scope="module")
def plainly(make_model: Callable[[str], Any], tokenizer: Any) -> Callable[[Sampling], Run]:
    """The answer without drafts."""
    runs: dict[str, Run] = {}

    def of(sampling: Sampling) -> Run:
        if repr(sampling) not in runs:
            run = Run(make_model("llama"), tokenizer)
            runs[repr(sampling)] = answers(run, {"r": (PROMPT, [], fields_of(sampling))})
        return runs[repr(sampling)]

    return of


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, id=f"{kind}-{name}", marks=() if kind in quick else pytest.mark.long)
        for name, sampling, quick in (
            ("greedy", GREEDY, SOURCES),
            ("sampled", SAMPLED, ("allowed but wrong", "random")),
            ("penalised", PENALISED, ("perfect", "right for three")),
        )
        for kind in SOURCES
    ],
)
def test_an_answer_by_rules_is_the_same_with_and_without_drafts(
    llama: Any, tokenizer: Any, plainly: Callable[[Sampling], Run], kind: str, sampling: Sampling
) -> None:
    plain, fields = plainly(sampling), fields_of(sampling)
    whole = plain.tokens["r"]
    assert well_formed(whole[len(PROMPT) :])
    rules: list[Rule] = []
    run = Run(llama, tokenizer, speculating.speculation(VOCAB))
    sources = SOURCES[kind](whole)
    answers(run, {"r": (PROMPT, sources, fields)}, rules)
    assert run.said("r") == plain.said("r")
    (rule,) = rules
    # The turn of the last token is not in ``whole``.
    assert rule.text[: len(whole) - len(PROMPT)] == whole[len(PROMPT) :]
    if sampling is GREEDY:
        assert rule.masked_drafts > 0 or kind != "allowed but wrong"
        assert rule.forbidden > 0 or kind != "right for three"
    if kind == "perfect":
        report = run.finished("r").speculation
        assert report is not None
        assert report.accepted == report.drafted


@pytest.mark.parametrize("kind", SOURCES)
def test_an_answer_by_rules_is_the_same_with_blocks_ahead_over_several_machines(
    llama: Any, tokenizer: Any, plainly: Callable[[Sampling], Run], kind: str
) -> None:
    """Masks of a block are made while the one before it, whose drafts may be wrong, is under way."""
    plain = plainly(SAMPLED)
    group = lazy(group_of(llama, 1, 3), 4)
    run = Run(group.model, tokenizer, speculating.speculation(VOCAB))
    rules: list[Rule] = []
    answers(run, {"r": (PROMPT, SOURCES[kind](plain.tokens["r"]), fields_of(SAMPLED))}, rules)
    assert run.said("r") == plain.said("r")


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_of_a_batch_have_states_of_their_own(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """In the batch and out of it, with a step that is begun ahead; one draws beside greedy ones."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 0)
    asked = {
        name: (PROMPT[: 30 + i], {"sampling": sampling, "max_tokens": 30 - 10 * i})
        for i, (name, sampling) in enumerate((("a", GREEDY), ("b", SAMPLED), ("c", PENALISED)))
    }
    alone = {}
    for name, (prompt, fields) in asked.items():
        plain = answers(Run(llama, tokenizer), {name: (prompt, [], fields)})
        alone[name] = plain
    rules: list[Rule] = []
    run = Run(llama, tokenizer, speculating.speculation(VOCAB, computes_ahead=ahead))
    for name, (prompt, fields) in asked.items():
        rules.append(Rule())
        run.submit(name, prompt, right_for(alone[name].tokens[name], 3), matcher=rules[-1], **fields)
        for _ in range(3):
            run.turn()
    run.finish()
    assert run.moves > 0
    for name, plain in alone.items():
        assert run.said(name)[:-1] == plain.said(name)[:-1]


def test_a_hybrid_that_undoes_whole_passes_follows_the_rules(
    make_model: Callable[[str], Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3_5")
    fields = {"max_tokens": 30, "top_logprobs": 1}
    plain = answers(Run(model, tokenizer), {"r": (PROMPT, [], fields)})
    rules: list[Rule] = []
    run = Run(model, tokenizer, speculating.speculation(VOCAB))
    sources = [wrong_by(plain.tokens["r"], 3)]
    answers(run, {"r": (PROMPT, sources, fields)}, rules)
    assert run.said("r") == plain.said("r")
    assert rules[0].masked_drafts > 0


def test_a_prompt_that_was_kept_begins_with_a_new_state(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt goes on from the first one's answer, and two choices share a third."""
    rules: list[Rule] = []
    runs = []
    for held in (None, rules):
        run = Run(llama, tokenizer, speculating.speculation(VOCAB))
        answers(run, {"a": (PROMPT, [], {"max_tokens": 20})}, held)
        longer = [*run.tokens["a"], 5, 6]
        answers(run, {"b": (longer, [], {"max_tokens": 20})}, held)
        choices = {name: (longer, [], {"max_tokens": 10, "sampling": SAMPLED}) for name in "cd"}
        answers(run, choices, held)
        assert run.finished("b").usage.cached_tokens > len(PROMPT)
        runs.append(run)
    assert len(rules) == 4
    for name in "abcd":
        assert runs[0].said(name) == runs[1].said(name)
