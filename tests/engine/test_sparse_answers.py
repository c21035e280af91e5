"""Sparse answers through the scheduler: what is told and kept for others, and that nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import speculation
from tiny_architectures import tiny
from turned_scheduler import TurnedScheduler

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import DENSE
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    Delta,
    Failed,
    Finished,
    Generate,
    Keep,
    Prefill,
    Sampling,
    TokenPrompt,
)
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import TAIL_TOKENS, Sparse

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = 512


def prompt(n: int, key: int = 1) -> list[int]:
    tokens: list[int] = mx.random.randint(0, 256, (n,), key=mx.random.key(key)).tolist()
    return tokens


class SparseBench(TurnedScheduler):
    """A scheduler of a random llama."""

    def __init__(self, chain_path: Path, **options: Any) -> None:
        model = tiny("llama", vocab_size=VOCAB)
        settings = {
            "context_tokens": 1024,
            "chunks": FixedChunks(48, 16),
            "sparse": Sparse.of(model),
            "sharable": Sharable.of(Stage.of(model), "cpu", {}),
            **options,
        }
        super().__init__(model, load_tokenizer(chain_path), **settings)

    def submit(self, name: str, tokens: list[int], kept: list[int] | None = None, **fields: Any) -> None:
        """``kept`` stands for what was found of a Keep."""
        request = Generate(
            name,
            TokenPrompt(tokens),
            sampling=Sampling(temperature=0.0),
            top_logprobs=2,
            **{"max_tokens": 8, "keep": None if kept is None else Keep({}), **fields},
        )
        self.scheduler.inbox.put(PreparedPrompt(request, tokens, kept=kept))

    def finish_all(self, *names: str) -> None:
        ended: set[str] = set()
        for _ in range(500):
            self.turn()
            ended = {e.id for e in self.events if isinstance(e, Finished | Failed)}
            if ended.issuperset(names):
                return
        pytest.fail(f"only {ended} ended")

    def one(self, name: str, kind: Any) -> Any:
        (event,) = self.of(name, kind)
        return event

    def said(self, name: str) -> list[Any]:
        """Its tokens and their probabilities, to the bit."""
        return [entry for delta in self.of(name, Delta) for entry in delta.logprobs or []]


@pytest.fixture
def bench(chain_path: Path) -> SparseBench:
    return SparseBench(chain_path)


LONG = prompt(300)
KEPT = [*range(40), *range(100, 160), *range(280, 300)]


def test_what_is_told(bench: SparseBench) -> None:
    bench.submit("a", LONG, KEPT)
    bench.finish_all("a")
    accepted = bench.one("a", Accepted)
    assert (accepted.prompt_tokens, accepted.kept, accepted.dense_reason) == (300, len(KEPT), "")
    progress = bench.of("a", Prefill)
    assert [p.total for p in progress] == [len(KEPT)] * len(progress)
    # The last token is computed by the first step of decoding.
    assert progress[-1].done == len(KEPT) - 1
    usage = bench.one("a", Finished).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (300, 8)


def test_dense_and_sparse_ones_at_once_say_what_they_say_alone(chain_path: Path) -> None:
    asked: dict[str, tuple[list[int], list[int] | None]] = {
        "dense": (prompt(90, 2), None),
        "sparse": (LONG, KEPT),
        "same but dense": (LONG, None),
        "other": (prompt(200, 3), [*range(10), *range(150, 200)]),
    }
    together = SparseBench(chain_path)
    for name, (tokens, kept) in asked.items():
        together.submit(name, tokens, kept)
        together.turn(2)
    together.finish_all(*asked)
    for name, (tokens, kept) in asked.items():
        alone = SparseBench(chain_path)
        alone.submit(name, tokens, kept)
        alone.finish_all(name)
        # One of them says its end before its limit.
        assert len(alone.said(name)) > 4
        assert together.said(name) == alone.said(name)
    assert together.said("sparse") != together.said("same but dense")
    assert together.scheduler.budget.used_bytes == 0


# ---- The prefix cache ------------------------------------------------------------------------------------


def test_a_dense_beginning_serves_a_sparse_prompt_and_none_of_it_is_lost(chain_path: Path) -> None:
    """A hit that is longer than what is kept without a gap counts only up to the gap."""
    cold = SparseBench(chain_path)
    cold.submit("a", LONG, KEPT)
    cold.finish_all("a")
    warm = SparseBench(chain_path)
    warm.submit("before", LONG)
    warm.finish_all("before")
    warm.submit("a", LONG, KEPT)
    warm.finish_all("a")
    assert warm.one("a", Finished).usage.cached_tokens == 40
    assert warm.of("a", Prefill)[0].cached == 40
    assert warm.said("a") == cold.said("a")


def test_nothing_sparse_is_found_by_anybody(bench: SparseBench, chain_path: Path) -> None:
    bench.submit("a", LONG, KEPT)
    bench.submit("cancelled", prompt(299, 9), [*range(5), *range(90, 299)])
    bench.turn(6)
    bench.scheduler.inbox.put(Cancel("cancelled"))
    bench.finish_all("a", "cancelled")
    # What has no gap before it is as dense as any: that alone is kept.
    entries = bench.scheduler.prefix._entries.values()
    assert [len(entry.tokens) for entry in entries if entry.namespace == DENSE] == [40]
    cold = SparseBench(chain_path)
    for one in (bench, cold):
        one.submit("again", LONG)
        one.finish_all("again")
    assert bench.one("again", Finished).usage.cached_tokens == 40
    assert bench.said("again") == cold.said("again")


@pytest.mark.parametrize("dense", [True, False])
def test_a_second_turn_after_a_sparse_first_is_right(
    bench: SparseBench, chain_path: Path, dense: bool
) -> None:
    bench.submit("first", LONG, KEPT)
    bench.finish_all("first")
    turn = [*LONG, *prompt(60, 5)]
    kept = None if dense else [*KEPT, *range(300, 360)]
    cold = SparseBench(chain_path)
    for one in (bench, cold):
        one.submit("second", turn, kept)
        one.finish_all("second")
    # One that leaves out the same tokens goes on behind them; a dense one from the first gap.
    cached = 40 if dense else len(KEPT) - 1
    assert bench.one("second", Finished).usage.cached_tokens == cached
    assert bench.said("second") == cold.said("second")


# ---- Bounds ----------------------------------------------------------------------------------------------


def test_memory_is_promised_for_what_is_kept(chain_path: Path) -> None:
    bench = SparseBench(chain_path, budget=KvBudget.of(200 * 1024, 1024))
    bench.submit("dense", LONG)
    bench.submit("sparse", LONG, KEPT)
    bench.turn()
    assert bench.one("dense", Failed).code == "out_of_memory"
    assert bench.scheduler.budget.used_bytes == (len(KEPT) + 8) * 1024
    bench.finish_all("sparse")
    assert bench.one("sparse", Finished).reason == "length"


def test_the_context_holds_all_of_a_prompt(bench: SparseBench) -> None:
    """Positions go on from its true length, and the model knows no position beyond its context."""
    bench.submit("long", prompt(1024), list(range(20)))
    bench.submit("nearly", prompt(1021), list(range(20)), max_tokens=None)
    bench.finish_all("long", "nearly")
    assert bench.one("long", Failed).code == "context_length_exceeded"
    assert bench.one("nearly", Finished).usage.completion_tokens == 3


def test_the_end_of_a_prompt_is_always_kept(bench: SparseBench) -> None:
    bench.submit("a", LONG, [])
    bench.finish_all("a")
    assert bench.one("a", Accepted).kept == 1 + TAIL_TOKENS
    assert len(bench.said("a")) == 8


def test_what_is_prefilled_whole_says_why(chain_path: Path) -> None:
    bench = SparseBench(chain_path)
    bench.submit("echo", LONG, KEPT, echo=True)
    bench.submit("all", prompt(20), list(range(19)))
    none = SparseBench(chain_path, sparse=None)
    none.submit("none", LONG, KEPT)
    for one, name, why in ((bench, "echo", "echoed"), (bench, "all", "Nothing"), (none, "none", "whole")):
        one.finish_all(name)
        accepted = one.one(name, Accepted)
        assert accepted.kept == 0
        assert why in accepted.dense_reason
        assert one.one(name, Finished).reason == "length"


def test_a_sparse_prompt_does_not_wait_for_helpers(
    bench: SparseBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE_LEAST_TOKENS", 32)
    bench.submit("a", LONG, KEPT, shared=True)
    bench.finish_all("a")
    assert not bench.one("a", Accepted).waits
    bench.submit("whole", prompt(200)[::-1], shared=True)
    bench.turn()
    assert bench.one("whole", Accepted).waits


def test_positions_are_the_true_ones(bench: SparseBench) -> None:
    """The same kept tokens as a prompt of their own, without the gaps, give something else."""
    bench.submit("sparse", LONG, KEPT)
    bench.submit("short", [LONG[i] for i in KEPT])
    bench.finish_all("sparse", "short")
    mine, theirs = ([entry.logprob for entry in bench.said(name)[:1]] for name in ("sparse", "short"))
    assert not np.allclose(mine, theirs, rtol=1e-6)


# ---- Drafts ----------------------------------------------------------------------------------------------


class DraftedBench(SparseBench):
    def __init__(self, chain_path: Path, **options: Any) -> None:
        super().__init__(chain_path, speculation=speculation(VOCAB), **options)


def test_a_sparse_answer_is_drafted_for_and_stays_what_it_was(chain_path: Path) -> None:
    """A random model soon repeats itself, which drafts from its own answer foretell."""
    plain, drafted = SparseBench(chain_path), DraftedBench(chain_path)
    for one in (plain, drafted):
        one.submit("a", LONG, KEPT, max_tokens=96)
        one.finish_all("a")
    assert drafted.said("a") == plain.said("a")
    told = drafted.one("a", Finished).speculation
    assert told is not None
    assert told.accepted > 0
    assert drafted.scheduler.budget.used_bytes == 0


def test_drafted_sparse_and_dense_answers_come_together_and_part_again(chain_path: Path) -> None:
    """Whatever moves into the batch and out of it, positions stay ahead of slots."""
    apart = DraftedBench(chain_path)
    said = {}
    for name, tokens, kept in (
        ("s", LONG, KEPT),
        ("d", prompt(120, 3), None),
        ("t", prompt(200, 4), [*range(90)]),
    ):
        apart.submit(name, tokens, kept, max_tokens=72)
        apart.finish_all(name)
        said[name] = apart.said(name)
    together = DraftedBench(chain_path)
    together.submit("s", LONG, KEPT, max_tokens=72)
    together.turn(8)
    together.submit("d", prompt(120, 3), max_tokens=72)
    together.turn(5)
    together.submit("t", prompt(200, 4), [*range(90)], max_tokens=72)
    together.submit("gone", prompt(150, 8), [*range(50)], max_tokens=72)
    together.turn(9)
    together.scheduler.inbox.put(Cancel("gone"))
    together.finish_all("s", "d", "t")
    assert {name: together.said(name) for name in said} == said
    assert together.scheduler.budget.used_bytes == 0


def test_answers_to_one_sparse_prompt_share_its_prefill(bench: SparseBench) -> None:
    """The choices of one request come at the same time: the second waits for what the first computes."""
    for name in ("a", "b"):
        bench.submit(name, LONG, KEPT)
    bench.finish_all("a", "b")
    assert bench.said("a") == bench.said("b")
    cached = [bench.one(name, Finished).usage.cached_tokens for name in ("a", "b")]
    assert cached == [0, len(KEPT) - 1]


def test_a_sparse_prompt_goes_on_from_a_kept_dense_beginning_and_so_does_its_like(bench: SparseBench) -> None:
    """As an agent's tools and system prompt are, which every request begins with."""
    bench.submit("tools", LONG[:40])
    bench.finish_all("tools")
    for name in ("a", "b"):
        bench.submit(name, LONG, KEPT)
        bench.finish_all(name)
    assert [bench.one(name, Finished).usage.cached_tokens for name in ("a", "b")] == [40, len(KEPT) - 1]
