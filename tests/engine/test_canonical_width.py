"""A device that multiplies one row by another kernel than several: its steps are two rows wide, also where
several such devices have a model together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
import speculating
import tiny_architectures
from group_machines import group_of, lazy, rows_held
from mirrored_ranks import ranks_of
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import Run, Scripted, guessing, patchy, perfect, right_for

from fleetd.engine.protocol import Sampling, Speculate
from fleetd.engine.sequence_state import rollback
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.sequence_state.parts import kept_from
from fleetd.engine.speculation.canonical_width import WideSteps
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict, ProbePlan, most_context, probe
from fleetd.engine.speculation.speculation import WorkerSpeculation

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
PLAN = ProbePlan((31, 100), tuple(range(2, 17)), 4, every=False)
# Rows from which on products go by a third kernel.
LIMIT = 10


class Device:
    """Products of one row, of some rows and of many rows differ in their last bits, and in what they take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.one_row_s, self.some_rows_s = 1e-6, 1.01e-6

    def clock(self) -> float:
        return self.now

    def product(self, rows: int, out: mx.array) -> mx.array:
        self.now += self.one_row_s if rows == 1 else self.some_rows_s
        flipped = 1 if rows == 1 else 2 if rows >= LIMIT else 0
        return (out.view(mx.uint32) ^ mx.array(flipped, dtype=mx.uint32)).view(mx.float32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, cpu_installed: None) -> Device:
    device, exact = Device(), nn.Linear.__call__
    monkeypatch.setattr(
        nn.Linear, "__call__", lambda self, x: device.product(x.size // x.shape[-1], exact(self, x))
    )
    return device


@pytest.fixture
def llama() -> Any:
    return tiny_architectures.tiny("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer(chain_path: Any) -> Any:
    return load_tokenizer(chain_path)


def ask(model: Any, device: Device, plan: ProbePlan = PLAN) -> ExactnessVerdict:
    return probe(model, vocab_size=VOCAB, context_tokens=2048, plan=plan, clock=device.clock)


def test_steps_are_widened_where_that_is_what_makes_blocks_exact(llama: Any, device: Device) -> None:
    verdict = ask(llama, device)
    assert (verdict.rows, verdict.width, verdict.context) == (2, LIMIT - 1, 104)
    assert verdict.text.startswith(
        "exact: blocks of up to 9 tokens, contexts of up to 100; single tokens are computed as 2 rows, "
        "1.01 times as long as one; blocks of 10 tokens give other"
    )


def test_a_device_that_needs_no_second_row_gets_none(llama: Any) -> None:
    verdict = ask(llama, Device())
    assert (verdict.rows, verdict.width) == (1, 16)


def test_steps_that_would_cost_too_much_stay_one_row_wide(llama: Any, device: Device) -> None:
    device.some_rows_s = 1.2e-6
    verdict = ask(llama, device)
    assert (verdict.rows, verdict.width) == (1, 1)
    assert verdict.text.startswith("declined: blocks of 2 tokens give other")
    assert verdict.text.endswith(
        "two rows wide, a step takes 1.20 times as long as one row at 31 tokens of context"
    )


def test_a_few_widths_do_not_stand_for_all_if_single_rows_are_not_exact(llama: Any, device: Device) -> None:
    verdict = ask(llama, device, ProbePlan((31,), (2, 4), 4, every=True))
    assert not verdict.exact
    assert "two rows" not in verdict.text


def test_a_window_cannot_take_the_second_row_back(device: Device) -> None:
    verdict = ask(tiny_architectures.tiny("gemma3_text"), device, ProbePlan((10,), (2, 4), 4, every=False))
    assert not verdict.exact
    assert "two rows" not in verdict.text


class CompilingDevice(Device):
    """One that takes a minute over the first product of each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[int] = set()

    def product(self, rows: int, out: mx.array) -> mx.array:
        self.now += 0 if rows in self.compiled else 60
        self.compiled.add(rows)
        return super().product(rows, out)


@pytest.mark.parametrize("compiles", [True, False])
def test_kernels_that_are_compiled_at_their_first_use_are_no_price_and_take_no_context(
    llama: Any, monkeypatch: pytest.MonkeyPatch, *, compiles: bool
) -> None:
    device, exact = CompilingDevice(), nn.Linear.__call__
    monkeypatch.setattr(
        nn.Linear, "__call__", lambda self, x: device.product(x.size // x.shape[-1], exact(self, x))
    )
    # One pass of the greatest width at each context: the second context is not reached if the first one's
    # kernels count as time.
    plan = ProbePlan((31, 100), (2, 4), 4, every=False, compiles=compiles)
    verdict = ask(llama, device, plan)
    assert verdict.width == 4
    assert (verdict.context == 104) == compiles
    assert (max(verdict.seconds.values()) < 1) == compiles


SAMPLINGS = speculating.GREEDY, Sampling(temperature=0.8, seed=3, top_p=0.9)
# Steps are two rows wide until there are 90 tokens of text.
VERDICT = ExactnessVerdict(LIMIT - 1, len(PROMPT) + 50, "exact: for the test", {1: 1.0, 9: 1.5}, 2)


@pytest.mark.parametrize(("sampling", "ahead"), [(SAMPLINGS[0], False), (SAMPLINGS[1], True)])
@pytest.mark.usefixtures("device")
def test_answers_have_the_same_bytes_with_and_without_drafts(
    llama: Any, tokenizer: Any, sampling: Sampling, *, ahead: bool
) -> None:
    """Alone, drafted for, in and out of a batch, and past the context that the verdict holds for."""
    verdict = VERDICT

    def answered(verdict: ExactnessVerdict, kind: str) -> Run:
        run = Run(llama, tokenizer, WorkerSpeculation(verdict, VOCAB, "on", computes_ahead=ahead))
        sources = {"perfect": perfect(whole), "wrong": right_for(whole, 2)}
        source = [sources[kind]] if kind in sources else []
        refused = Speculate(enabled=kind in sources)
        run.submit("r", PROMPT, *source, sampling=sampling, max_tokens=70, top_logprobs=1, speculate=refused)
        for _ in range(8):
            run.turn()
        if kind == "joined":
            run.submit("b", PROMPT[:9], max_tokens=20, speculate=refused)
        run.finish()
        return run

    whole: list[int] = []
    plain = answered(verdict, "plain")
    whole = plain.tokens["r"]
    for kind in ("perfect", "wrong", "joined"):
        run = answered(verdict, kind)
        # A source that is right ends sooner: only the figures of the answer's end may differ.
        assert run.said("r") == plain.said("r"), kind
        assert (run.finished("r").speculation is not None) == (kind != "joined")
    narrow = msgspec.structs.replace(verdict, rows=1)
    whole = answered(narrow, "plain").tokens["r"]
    assert answered(narrow, "wrong").said("r") != answered(narrow, "plain").said("r")


# ---- over several machines -------------------------------------------------------------------------------


@pytest.fixture
def long_llama() -> Any:
    return tiny_architectures.tiny("llama", num_hidden_layers=4)


@pytest.mark.parametrize(("cuts", "direct"), [((1, 3), True), ((2,), False)])
def test_steps_of_a_group_are_widened_as_those_of_one_machine(
    long_llama: Any, device: Device, cuts: tuple[int, ...], *, direct: bool
) -> None:
    """Behind contexts that nobody computes, too: each machine makes its rows up."""
    plan = ProbePlan((31, 300), (2, LIMIT - 1, LIMIT), 4, every=False)
    group = group_of(long_llama, *cuts, direct=direct)
    verdict = ask(group.model, device, plan)
    assert (verdict.rows, verdict.width, verdict.context) == (2, LIMIT - 1, 304)
    assert verdict.text == ask(long_llama, device, plan).text
    # What was tried is gone.
    group.model.read(mx.array([[1]]), group.model.make_cache())
    group.model.settle()
    assert rows_held(group) == [1] * len(cuts)


SOURCES: dict[str, Callable[[list[int]], list[Scripted]]] = {
    "plain": lambda whole: [],
    "perfect": lambda whole: [perfect(whole)],
    "wrong": lambda whole: [right_for(whole, 2)],
    "patchy": lambda whole: [patchy(whole, 5, 0.8, VOCAB)],
    "random": lambda whole: [guessing(VOCAB, 3)],
    "joined": lambda whole: [],
}


def answered(model: Any, tokenizer: Any, kind: str, whole: list[int], sampling: Sampling) -> Run:
    """With drafts of a kind; ``whole``: the answer without."""
    run = Run(model, tokenizer, WorkerSpeculation(VERDICT, VOCAB, "on"))
    sources = SOURCES[kind](whole)
    refused = Speculate(enabled=bool(sources))
    run.submit("r", PROMPT, *sources, sampling=sampling, max_tokens=70, top_logprobs=1, speculate=refused)
    for _ in range(8):
        run.turn()
    if kind == "joined":
        run.submit("b", PROMPT[:9], max_tokens=20, speculate=refused)
    run.finish()
    return run


@pytest.mark.parametrize(
    ("cuts", "direct", "sampling", "kinds"),
    [
        ((2,), True, SAMPLINGS[0], ("plain", "perfect")),
        ((1, 3), True, SAMPLINGS[1], ("patchy", "joined")),
        ((1, 2, 3), False, SAMPLINGS[0], ("wrong",)),
        pytest.param((1, 3), False, SAMPLINGS[1], tuple(SOURCES), marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("device")
def test_answers_of_a_group_have_the_bytes_of_one_machine(
    long_llama: Any,
    tokenizer: Any,
    cuts: tuple[int, ...],
    sampling: Sampling,
    kinds: tuple[str, ...],
    *,
    direct: bool,
) -> None:
    """Blocks of a single token that go ahead, and those past the context that the verdict holds for, too."""

    alone = answered(long_llama, tokenizer, "plain", [], sampling)
    for number, kind in enumerate(kinds):
        group = lazy(group_of(long_llama, *cuts, direct=direct), number)
        told = answered(group.model, tokenizer, kind, alone.tokens["r"], sampling)
        assert told.said("r") == alone.said("r"), kind


# ---- ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [1, 3])
def test_steps_of_ranks_are_widened_as_those_of_one_machine(
    long_llama: Any, device: Device, others: int
) -> None:
    plan = ProbePlan((31, 300), (2, LIMIT - 1, LIMIT), 4, every=False)
    model, mirrors = ranks_of(long_llama, others)
    verdict = ask(model, device, plan)
    assert (verdict.rows, verdict.width, verdict.context) == (2, LIMIT - 1, 304)
    assert verdict.text == ask(long_llama, device, plan).text
    # What was tried is gone.
    cache = model.make_cache()
    model(mx.array([[1]]), cache)
    assert [len(mirror.rows) for mirror in mirrors] == [1] * others


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.usefixtures("device")
def test_every_rank_takes_the_second_row_back(long_llama: Any, others: int) -> None:
    """Between blocks that drafts make wider, of which some rows are taken back, too."""
    model, mirrors = ranks_of(long_llama, others)
    steps, cache = WideSteps(model, ANY), model.make_cache()
    single = make_prompt_cache(long_llama)
    alone = WideSteps(long_llama, ANY)
    for tokens in ([PROMPT], [[3]], [[5]], [[7, 9, 11]], [[13]], [[2]]):
        ours, right = steps(mx.array(tokens), cache), alone(mx.array(tokens), single)
        assert bool(mx.all(ours == right))
        if len(tokens[0]) == 3:
            rollback.take_back(cache, 2)
            rollback.take_back(single, 2)
    # What was taken back last is told with the next pass.
    steps(mx.array([[4]]), cache)
    rollback.take_back(cache, 1)
    steps(mx.array([[4, 6]]), cache)
    layers = len(single)
    own, there = cache[:layers], cache[layers:]
    assert [each.tokens for each in there] == [own[0].offset] * others
    for rows, mirror in zip(there, mirrors, strict=True):
        kept = mirror.rows.caches(rows.number)
        assert [each.offset for each in kept] == [each.offset for each in own]
        assert all(map(mx.array_equal, kept_from(kept, 0), kept_from(own, 0)))


@pytest.mark.parametrize("kind", ["perfect", "wrong", "joined"])
@pytest.mark.usefixtures("device")
def test_answers_of_ranks_have_the_same_bytes_with_and_without_drafts(
    long_llama: Any, tokenizer: Any, kind: str
) -> None:
    alone = answered(long_llama, tokenizer, "plain", [], SAMPLINGS[0])
    whole = alone.tokens["r"]
    model, _ = ranks_of(long_llama, 2)
    assert answered(model, tokenizer, kind, whole, SAMPLINGS[0]).said("r") == alone.said("r")


def test_what_other_machines_keep_is_compared_too(long_llama: Any) -> None:
    """A row that differs where no later token of the probe looks at it."""
    group = group_of(long_llama, 2)
    (member,) = group.members
    run, last = member._run, PLAN.contexts[0] + PLAN.steps

    def other(command: Any, data: memoryview, caches: list[Any]) -> Any:
        found = run(command, data, caches)
        if command.tokens > 1 and command.start + command.tokens >= last:
            caches[-1].keys[..., caches[-1].offset - 1, :] += 1
        return found

    member._run = other  # type: ignore[method-assign]
    verdict = ask(group.model, Device(), ProbePlan(PLAN.contexts[:1], (2, 4), PLAN.steps, every=False))
    assert verdict.text.startswith("declined: blocks of 2 tokens give other keys, values or states at 31 ")


@pytest.mark.parametrize("promised", [1024, 2048, pytest.param(5000, marks=pytest.mark.long)])
def test_a_probe_takes_no_more_of_other_machines_than_they_promised(
    long_llama: Any, device: Device, promised: int
) -> None:
    sample = group_of(long_llama, 2)
    sample.model(mx.array([[1]]), sample.model.make_cache())
    row_bytes = sample.members[0].rows.nbytes // 256
    group = group_of(long_llama, 2, most_bytes=promised * row_bytes)
    most = most_context(promised)
    plan = ProbePlan((31, most - 4), (2, 4), 16, every=False)
    verdict = probe(group.model, vocab_size=VOCAB, context_tokens=most, plan=plan, clock=device.clock)
    assert (verdict.rows, verdict.width, verdict.context) == (2, 4, most + 12)
