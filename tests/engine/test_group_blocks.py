"""Blocks of an answer that are sent ahead over several machines, and those of several answers beside each
other: every answer is, bit for bit, that of the whole model."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import speculating
import tiny_architectures
from family_params import few, in_turn
from group_machines import group_of, lazy, rows_held
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import GREEDY, Run, Scripted, guessing, lying, patchy, perfect, right_for

from fleetd.engine.failures import MemberLost
from fleetd.engine.loop import decoding
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Cancel, Sampling
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.speculation.ahead import GainEvidence, GroupFlights
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.rounds import Rounds

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(50)]
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(temperature=0.7, seed=11, top_p=0.9, top_k=50),
    "penalised": Sampling(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={9: 1.5}
    ),
}
ASKED: dict[str, Any] = {"max_tokens": 40, "top_logprobs": 2}


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@functools.cache
def model(name: str = "llama") -> Any:
    return tiny_architectures.tiny(name)


def spec(mode: Any = "on", **changes: Any) -> Any:
    return speculating.speculation(VOCAB, mode, **changes)


@functools.cache
def whole(name: str, tokenizer: Any, sampling: str = "greedy") -> Run:
    """The whole model's answer without drafts."""
    run = Run(model(name), tokenizer)
    run.submit("r", PROMPT, sampling=SAMPLINGS[sampling], **ASKED)
    run.finish()
    return run


SOURCES: dict[str, Callable[[list[int]], list[Scripted]]] = {
    "perfect": lambda text: [perfect(text)],
    **{
        f"right for {count}": functools.partial(lambda count, text: [right_for(text, count)], count)
        for count in (0, 1, 2, 3, 7, 20)
    },
    "random": lambda text: [guessing(VOCAB, 3)],
    "lying": lambda text: [lying(VOCAB, 3)],
    "lookup and suffix": lambda text: [],
}


@pytest.mark.parametrize(("case", "kind"), in_turn([((2,), 4), ((1, 3), 1), ((1, 3), 4)], list(SOURCES)))
def test_any_source_gives_the_answer_of_the_whole_model(
    tokenizer: Any, kind: str, case: tuple[tuple[int, ...], int]
) -> None:
    cuts, width = case
    plain = whole("llama", tokenizer)
    group = group_of(model(), *cuts)
    verdict = ExactnessVerdict(1 + width, ANY, "exact: for the test", {1: 1.0, 16: 1.5})
    run = Run(group.model, tokenizer, spec(verdict=verdict))
    run.submit("r", PROMPT, *SOURCES[kind](plain.tokens["r"]), **ASKED)
    run.finish()
    assert run.said("r") == plain.said("r")


@pytest.mark.parametrize(
    ("seed", "sampling"),
    [
        pytest.param(seed, name, marks=() if seed < 6 and seed % 3 == number else pytest.mark.long)
        for seed in range(40)
        for number, name in enumerate(SAMPLINGS)
    ],
)
def test_any_pattern_of_right_and_wrong_drafts_gives_the_answer_of_the_whole_model(
    tokenizer: Any, seed: int, sampling: str
) -> None:
    """While members lag behind, so that they find out in time what need not be computed."""
    plain = whole("llama", tokenizer, sampling)
    dice = random.Random(seed)
    cuts, direct = dice.choice([(1,), (2,), (1, 3), (1, 2, 3)]), dice.choice([True, False])
    group = lazy(group_of(model(), *cuts, direct=direct), seed)
    verdict = ExactnessVerdict(dice.choice([2, 3, 5, 16]), ANY, "exact: for the test", {1: 1.0, 16: 1.5})
    run = Run(group.model, tokenizer, spec(verdict=verdict))
    source = patchy(plain.tokens["r"], seed, dice.choice([0.3, 0.7, 0.9]), VOCAB)
    run.submit("r", PROMPT, source, sampling=SAMPLINGS[sampling], **ASKED)
    run.finish()
    assert run.said("r") == plain.said("r")


def test_blocks_behind_a_wrong_draft_are_not_computed(tokenizer: Any) -> None:
    plain = whole("llama", tokenizer)
    group = lazy(group_of(model(), 1, 2, 3), 5)
    run = Run(group.model, tokenizer, spec())
    run.submit("r", PROMPT, right_for(plain.tokens["r"], 0), **ASKED)
    run.finish()
    answers = [frame for pipe in group.pipes for frame in pipe.other.sent]
    # The last machine answers a prompt's chunk without hidden states; a block is answered so if skipped.
    chunks = -(-len(PROMPT) // 32)
    assert len([frame for frame in answers if frame.count and not frame.sizes[1]]) > chunks + 10


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_an_automatic_choice_sends_ahead_what_has_paid(
    tokenizer: Any, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The verdict's seconds are none of these machines'.
    monkeypatch.setattr(decoding, "slowest_part", lambda times, step_s: 0.5)
    plain = whole("llama", tokenizer)
    group = group_of(model(), 2)
    dear = ExactnessVerdict(16, ANY, "exact: for the test", {1: 1.0, 16: 4.0})
    known = spec("auto", verdict=dear)
    # What the group's answers before this one have left.
    known.flights = GroupFlights(GainEvidence(alone=factor, promised=1.0), rest=1000)
    run = Run(group.model, tokenizer, known)
    run.submit("r", PROMPT, perfect(plain.tokens["r"]), **ASKED)
    most = 0
    while run.busy:
        run.turn()
        most = max([most, *(running.row.blocks for running in run.decoding.apart if running.row)])
    assert run.said("r") == plain.said("r")
    # Between turns; another is under way while one is taken.
    assert most == (1 if factor > 1 else 0)


# ---- several answers -------------------------------------------------------------------------------------


class Apart(Rounds):
    """A batch is taken apart whenever it may be."""

    def worth(self, promises: Sequence[Any]) -> bool:
        return True

    @property
    def losing(self) -> bool:
        return False


PROMPTS = {f"r{n}": [(7 * i + 5 * n + 3) % 64 for i in range(40 + 9 * n)] for n in range(5)}


@functools.cache
def each_alone(tokenizer: Any, sampling: str) -> Run:
    run = Run(model(), tokenizer)
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        run.submit(name, prompt, sampling=SAMPLINGS[sampling], max_tokens=24 + 4 * number, top_logprobs=2)
        run.finish()
    return run


@pytest.mark.parametrize(
    ("cuts", "sampling", "drafted"),
    [
        pytest.param((2,), "greedy", False, marks=pytest.mark.long),
        ((2,), "sampled", True),
        ((1, 3), "greedy", True),
        pytest.param((1, 3), "sampled", False, marks=pytest.mark.long),
    ],
)
def test_several_answers_beside_each_other_are_those_of_the_whole_model(
    tokenizer: Any, sampling: str, cuts: tuple[int, ...], *, drafted: bool
) -> None:
    """They join and leave at their own times, one is cancelled."""
    alone = each_alone(tokenizer, sampling)
    group = group_of(model(), *cuts)
    run = Run(group.model, tokenizer, spec())
    run.decoding.rounds = Apart()
    beside = 0
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        sources = [patchy(alone.tokens[name], number, 0.7, VOCAB)] if drafted else []
        run.submit(
            name, prompt, *sources, sampling=SAMPLINGS[sampling], max_tokens=24 + 4 * number, top_logprobs=2
        )
        for _ in range(12):
            run.turn()
            under_way = [running.row.blocks for running in run.decoding.apart if running.row is not None]
            beside = max(beside, len([blocks for blocks in under_way if blocks]))
        if number == 1:
            run.submit("cancelled", prompt, sampling=SAMPLINGS[sampling], max_tokens=500)
            while not run.said("cancelled"):
                run.turn()
            run.scheduler.tell(Cancel("cancelled"))
    run.finish()
    for name in PROMPTS:
        assert run.said(name) == alone.said(name)
    assert beside > 1


def test_an_answer_that_is_cancelled_leaves_what_it_computed(tokenizer: Any) -> None:
    plain = whole("llama", tokenizer)
    group = lazy(group_of(model(), 1, 3), 3)
    run = Run(group.model, tokenizer, spec())
    run.submit("gone", PROMPT, perfect(plain.tokens["r"]), max_tokens=500)
    while not any(running.row.blocks for running in run.decoding.apart if running.row is not None):
        run.turn()
    run.scheduler.tell(Cancel("gone"))
    run.turn()
    run.submit("r", PROMPT, **ASKED)
    run.finish()
    assert run.said("r")[:-1] == plain.said("r")[:-1]
    assert run.finished("r").usage.cached_tokens >= len(PROMPT) - 1


def test_a_member_that_is_lost_while_blocks_are_under_way_is_named(tokenizer: Any) -> None:
    plain = whole("llama", tokenizer)
    group = group_of(model(), 2)
    run = Run(group.model, tokenizer, spec())
    run.submit("r", PROMPT, perfect(plain.tokens["r"]), **ASKED)
    while not any(running.row.blocks for running in run.decoding.apart if running.row is not None):
        run.turn()
    group.pipes[0].fail()
    with pytest.raises(MemberLost, match="machine 1 left the group"):
        run.turn()


@pytest.mark.parametrize(
    "name", few(["qwen3_5", "gpt_oss", "mixtral", "qwen3", "gemma3_text", "lfm2"], ["gpt_oss", "lfm2"])
)
def test_other_families_answer_as_whole_models(tokenizer: Any, name: str) -> None:
    """Running states, windows and experts among them."""
    plain = whole(name, tokenizer)
    group = lazy(group_of(model(name), 1), 2)
    run = Run(group.model, tokenizer, spec())
    run.submit("r", PROMPT, patchy(plain.tokens["r"], 4, 0.8, VOCAB), **ASKED)
    run.finish()
    assert run.said("r") == plain.said("r")


# ---- while blocks are under way ----------------------------------------------------------------------------


def until_ahead(run: Run) -> None:
    """Until a block is under way behind one that was taken."""
    while not any(running.row.blocks for running in run.decoding.apart if running.row is not None):
        run.turn()


def ahead_of(run: Run, name: str) -> int:
    """Blocks of an answer that are under way between turns."""
    rows = [running.row for running in run.decoding.apart if running.sequence.id == name]
    return sum(row.blocks for row in rows if row is not None)


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_string_ends_the_answer_and_what_is_ahead_of_it(tokenizer: Any, seed: int) -> None:
    plain = whole("llama", tokenizer)
    said = "".join(piece[0] for piece in plain.said("r")[:-1])
    stop = said[len(said) // 2 :][:3]
    assert stop
    once = Run(model(), tokenizer)
    group = lazy(group_of(model(), 1, 3), seed)
    ahead = Run(group.model, tokenizer, spec())
    sources: tuple[list[Scripted], ...] = ([], [patchy(plain.tokens["r"], seed, 0.9, VOCAB)])
    for run, source in zip((once, ahead), sources, strict=True):
        run.submit("r", PROMPT, *source, stop=[stop], **ASKED)
        run.finish()
    assert ahead.said("r") == once.said("r")
    assert ahead.finished("r").stop == stop


def test_a_next_turn_begins_with_what_was_kept_of_an_answer_with_blocks_ahead(tokenizer: Any) -> None:
    plain = whole("llama", tokenizer)
    group = lazy(group_of(model(), 1, 3), 6)
    ahead, once = Run(group.model, tokenizer, spec()), Run(model(), tokenizer)
    sources: tuple[list[Scripted], ...] = ([patchy(plain.tokens["r"], 6, 0.8, VOCAB)], [])
    for run, source in zip((ahead, once), sources, strict=True):
        run.submit("r", PROMPT, *source, **ASKED)
        run.finish()
        run.submit("next", [*plain.tokens["r"], 5, 6, 7], **ASKED)
        run.finish()
    assert ahead.said("next") == once.said("next")
    assert ahead.finished("next").usage.cached_tokens >= len(PROMPT) + 30


def test_members_keep_nothing_of_blocks_that_were_dropped(tokenizer: Any) -> None:
    """However answers end: as many sequences are held as without drafts."""
    plain = whole("llama", tokenizer)
    held = []
    for drafted in (False, True):
        group = lazy(group_of(model(), 1, 3), 8)
        run = Run(group.model, tokenizer, spec(), prefix=PrefixCache(0))
        for number in range(4):
            source = [patchy(plain.tokens["r"], number, 0.8, VOCAB)] if drafted else []
            run.submit("cancelled", PROMPT, *source, max_tokens=500)
            while not run.said("cancelled"):
                run.turn()
            run.scheduler.tell(Cancel("cancelled"))
            run.turn()
            run.submit(f"r{number}", PROMPT, *source, **ASKED)
            run.finish()
        gc.collect()
        group.model.members.tell()
        group.model.settle()
        for pipe in group.pipes:
            while pipe.member is not None and pipe.member.ready:
                pipe.member.step()
        held.append(rows_held(group))
    assert held[0] == held[1]


# ---- whose turn it is --------------------------------------------------------------------------------------


def test_no_block_is_ahead_while_a_prompt_is_read(tokenizer: Any) -> None:
    """The machines read, instead of computing guesses."""
    plain = whole("llama", tokenizer)
    run = Run(group_of(model(), 2).model, tokenizer, spec())
    run.submit("r", PROMPT, perfect(plain.tokens["r"]), **ASKED)
    until_ahead(run)
    run.submit("long", [(5 * i + 1) % 64 for i in range(200)], max_tokens=1)
    while not run.scheduler._prefilling:
        run.turn()
    # What was sent before is taken first.
    run.turn()
    seen = 0
    while run.scheduler._prefilling:
        assert ahead_of(run, "r") == 0
        seen += 1
        run.turn()
    assert seen
    run.finish()
    assert run.said("r") == plain.said("r")


@pytest.mark.parametrize(("cuts", "answers", "most"), [((2,), 2, 1), ((1, 2, 3), 2, 2), ((1, 3), 3, 1)])
def test_answers_beside_each_other_share_the_machines(
    tokenizer: Any, cuts: tuple[int, ...], answers: int, most: int
) -> None:
    """No guess of one answer takes a machine that another answer's next token could have."""
    alone = each_alone(tokenizer, "greedy")
    run = Run(group_of(model(), *cuts).model, tokenizer, spec())
    run.decoding.rounds = Apart()
    names = list(PROMPTS)[:answers]
    for name in names:
        run.submit(name, PROMPTS[name], right_for(alone.tokens[name], 1), max_tokens=24)
    found = 0
    while run.busy:
        before = len(run.decoding.apart)
        run.turn()
        if before == len(run.decoding.apart) == answers and not run.scheduler._prefilling:
            found = max([found, *(ahead_of(run, name) for name in names)])
    assert found == most
