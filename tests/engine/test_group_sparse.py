"""Prompts of which tokens are left out, over several machines: the answers are the whole model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from group_machines import Group, group_of
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tiny_architectures import tiny
from turned_scheduler import TurnedScheduler

from fleetd.engine.failures import MemberLost
from fleetd.engine.groups.messages import GoOn
from fleetd.engine.groups.sparse_rows import SparseRemote, sparse_of
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import Accepted, Delta, Finished, Generate, Keep, Sampling, TokenPrompt
from fleetd.engine.sparse_prefill.sparse import Sparse, SparsePrefiller
from fleetd.engine.sparse_prefill.sparse_caches import sparse_cache
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = 512
PROMPTS = [[(7 * n + 11 * seed) % 256 for n in range(180 + 30 * seed)] for seed in range(3)]
#: The beginning without a gap, then every third token, then a stretch.
KEPT = [[*range(40), *range(40, 140, 3), *range(150, len(prompt) - 20)] for prompt in PROMPTS]


class Bench(TurnedScheduler):
    def __init__(self, model: Any, sparse: Sparse, chain_path: Path) -> None:
        settings = {"context_tokens": 1024, "chunks": FixedChunks(48, 16), "sparse": sparse}
        super().__init__(model, load_tokenizer(chain_path), **settings)

    def put(self, name: str, tokens: list[int], kept: list[int] | None) -> None:
        request = Generate(
            name,
            TokenPrompt(tokens),
            sampling=Sampling(temperature=0.0),
            top_logprobs=2,
            max_tokens=6,
            keep=None if kept is None else Keep({}),
        )
        self.scheduler.inbox.put(PreparedPrompt(request, tokens, kept=kept))

    def answer(self, name: str) -> list[Any]:
        assert self.of(name, Finished)
        return [(delta.text, delta.logprobs) for delta in self.of(name, Delta)]


def asked(bench: Bench) -> list[Any]:
    """Answers to prompts with and without gaps, alone, then together, then once more."""
    named = [(f"p{n}", prompt, kept) for n, (prompt, kept) in enumerate(zip(PROMPTS, KEPT, strict=True))]
    named += [("dense", PROMPTS[0], None)]
    for name, prompt, kept in named[:2]:
        bench.put(f"alone {name}", prompt, kept)
        bench.finish()
    for name, prompt, kept in named:
        bench.put(name, prompt, kept)
    bench.finish()
    for name, prompt, kept in named:
        bench.put(f"again {name}", prompt, kept)
        bench.finish()
    names = ["alone p0", "alone p1", *(name for name, *_ in named), *(f"again {name}" for name, *_ in named)]
    return [(name, bench.answer(name), bench.of(name, Finished)[-1].usage.cached_tokens) for name in names]


@pytest.mark.parametrize(("name", "cuts"), [("llama", (2,)), ("gemma3_text", (1, 3))])
def test_answers_are_those_of_the_whole_model(chain_path: Path, name: str, cuts: tuple[int, ...]) -> None:
    whole = tiny(name, vocab_size=VOCAB)
    expected = asked(Bench(whole, Sparse.of(whole), chain_path))
    group = group_of(tiny(name, vocab_size=VOCAB), *cuts)
    bench = Bench(group.model, sparse_of(group.model), chain_path)
    assert asked(bench) == expected
    assert bench.of("p0", Accepted)[-1].kept >= len(KEPT[0])


def test_as_much_is_left_out_as_by_the_whole_model() -> None:
    for name in ("llama", "gemma3_text"):
        whole = tiny(name, vocab_size=VOCAB)
        assert sparse_of(group_of(whole, 2).model).tail == Sparse.of(whole).tail


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_model_that_reads_every_token_says_so(name: str) -> None:
    whole = tiny(name)
    with pytest.raises(ModelUnsupported) as alone:
        Sparse.of(whole)
    with pytest.raises(ModelUnsupported) as over_machines:
        sparse_of(group_of(whole, 1).model)
    assert over_machines.value.message == alone.value.message


@pytest.fixture
def pair() -> Group:
    return group_of(tiny("llama", vocab_size=VOCAB), 2)


def test_positions_of_tokens_that_follow_each_other_are_refused(pair: Group) -> None:
    cache = pair.model.make_cache()
    pair.model.read(_tokens(4), cache)
    rows = SparseRemote(cache[-1])
    rows.expect([4, 9])
    cache[-1] = rows
    with pytest.raises(MemberLost, match="have none of their own"):
        pair.model(_tokens(2), cache)


def test_an_answer_behind_nothing_is_refused(pair: Group) -> None:
    cache = pair.model.make_cache()
    cache[-1].there.tell(GoOn(77, 5))
    with pytest.raises(MemberLost, match="kept here"):
        pair.model(_tokens(1), cache)


def test_what_is_thrown_away_is_forgotten_there(pair: Group) -> None:
    prefiller = SparsePrefiller.begin(pair.model, PROMPTS[0], [*KEPT[0], len(PROMPTS[0]) - 1])
    prefiller.step(1000)
    del prefiller
    sparse = sparse_cache(pair.model.make_cache()[-1])
    del sparse
    pair.model.read(_tokens(1), pair.model.make_cache())
    pair.model.settle()
    assert len(pair.members[0].rows) == 1


def _tokens(count: int) -> mx.array:
    return mx.array([list(range(1, count + 1))])
