"""``ignore_eos`` and ``min_tokens``: how long answers get, apart, in the batch and with drafts alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import speculating
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run, guessing, perfect, right_for

from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.protocol import Delta, Sampling

pytestmark = pytest.mark.usefixtures("cpu_installed")
SAMPLED = Sampling(temperature=0.7, seed=11, top_p=0.9)
FIELDS: dict[str, dict[str, Any]] = {
    "ignore_eos": {"ignore_eos": True, "max_tokens": 30},
    "min_tokens": {"min_tokens": 20, "max_tokens": 40},
    "both": {"ignore_eos": True, "min_tokens": 30, "max_tokens": 30},
    "min_tokens, with a stop string": {"min_tokens": 3, "max_tokens": 40, "stop": ["o"]},
}


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def chain(chain_path: Path) -> Any:
    return load_model(chain_path)[0]


def prompt(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode("xyz<hello>"))


def said(run: Run, name: str = "r") -> str:
    return "".join(e.text for e in run.events if isinstance(e, Delta) and e.id == name)


def run_of(chain: Any, tokenizer: Any, *names: str, **fields: Any) -> Run:
    """Answers without drafts; several run in one batch."""
    run = Run(chain, tokenizer)
    for name in names or ("r",):
        run.submit(name, prompt(tokenizer), **fields)
    run.finish()
    return run


def answer(run: Run, tokenizer: Any) -> list[int]:
    """The tokens, but for the last one."""
    return run.tokens["r"][len(prompt(tokenizer)) :]


def test_an_answer_goes_on_after_end_tokens_which_have_no_text(chain: Any, tokenizer: Any) -> None:
    plain = run_of(chain, tokenizer)
    longer = run_of(chain, tokenizer, **FIELDS["ignore_eos"])
    done = longer.finished("r")
    assert plain.finished("r").reason == "stop"
    assert (done.reason, done.usage.completion_tokens) == ("length", 30)
    assert said(longer).startswith(said(plain))
    ends = set(tokenizer.eos_token_ids)
    assert ends & set(answer(longer, tokenizer))
    assert not any(tokenizer.decode([end]) in said(longer) for end in ends)
    assert sum(e.tokens for e in longer.events if isinstance(e, Delta)) == 30


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_no_end_token_is_chosen_before_so_many(chain: Any, tokenizer: Any, bias: float) -> None:
    ends = set(tokenizer.eos_token_ids)
    sampling = Sampling(temperature=0.0, logit_bias=dict.fromkeys(ends, bias))
    run = run_of(chain, tokenizer, sampling=sampling, **FIELDS["min_tokens"])
    assert run.finished("r").usage.completion_tokens > 20
    assert not ends & set(answer(run, tokenizer)[:20])
    if bias:
        assert (run.finished("r").reason, run.finished("r").usage.completion_tokens) == ("stop", 21)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *(pytest.param(kind, GREEDY, id=f"{kind}-greedy") for kind in FIELDS),
        *(
            pytest.param(kind, SAMPLED, id=f"{kind}-sampled", marks=() if number == 0 else pytest.mark.long)
            for number, kind in enumerate(FIELDS)
        ),
    ],
)
def test_drafts_and_neighbours_change_nothing(
    chain: Any, tokenizer: Any, kind: str, sampling: Sampling
) -> None:
    fields = {**FIELDS[kind], "sampling": sampling, "top_logprobs": 1}
    plain = run_of(chain, tokenizer, **fields)
    whole = plain.tokens["r"]
    for source in (perfect(whole), right_for(whole, 2), guessing(512, 3)):
        run = Run(chain, tokenizer, speculating.speculation(512))
        run.submit("r", prompt(tokenizer), source, **fields)
        run.finish()
        assert run.said("r") == plain.said("r")
    together = run_of(chain, tokenizer, "r", "s", **fields)
    for name in "rs":  # the second has its prompt from the first, which its usage says
        assert together.said(name)[:-1] == plain.said("r")[:-1]
        assert together.finished(name).reason == plain.finished("r").reason


def test_stop_strings_are_looked_for_after_so_many_tokens(tokenizer: Any) -> None:
    def text(min_tokens: int) -> tuple[str, str | None]:
        state = AnswerText("r", tokenizer, ["lo"], min_tokens=min_tokens)
        pieces = [p for token in tokenizer.encode("hello, hello") for p in state.push(token)]
        return "".join(p.text for p in [*pieces, *state.finish()] if isinstance(p, Delta)), state.stopped_by

    tokens = len(tokenizer.encode("hello, hello"))
    assert text(0) == ("hel", "lo")
    assert text(tokens - 2) == ("hello, hel", "lo")
    assert text(tokens) == ("hello, hello", None)


def test_nor_in_text_of_those_tokens_that_comes_with_the_end(tokenizer: Any) -> None:
    """A blank is held back until it is known what follows it."""
    tokens = tokenizer.encode("a b ")
    state = AnswerText("r", tokenizer, [" "], min_tokens=len(tokens), plain=True)
    pieces = [p for token in tokens for p in state.push(token)] + state.finish()
    assert "".join(p.text for p in pieces if isinstance(p, Delta)) == "a b "
    assert state.stopped_by is None
