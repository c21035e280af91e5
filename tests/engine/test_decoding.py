"""Answers that are drafted for are, bit for bit, those of plain decoding: text, usage, reasons, logprobs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from family_params import in_turn
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run, Scripted, guessing, lying, perfect, right_for

from fleetd.engine.loop import decoding, sequence
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Cancel, Failed, Sampling, Speculate
from fleetd.engine.sampling import sampler as sampling_module
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.rounds import Promise, Rounds
from fleetd.engine.speculation.verify_row import Chosen, VerifyRow
from fleetd.models.folder import ModelFolder

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(50)]
SAMPLED = Sampling(temperature=0.7, seed=11, top_p=0.9, top_k=50)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={9: 1.5})


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture(scope="module")
def make_llama() -> Callable[[], Any]:
    """One model for all; answers leave nothing in it."""
    return functools.cache(lambda: tiny_architectures.tiny("llama", num_hidden_layers=2))


@pytest.fixture
def llama(make_llama: Callable[[], Any]) -> Any:
    return make_llama()


@pytest.fixture
def chain(chain_path: Path) -> Any:
    return load_model(chain_path)[0]


def spec(mode: Any = "on", **changes: Any) -> Any:
    return speculating.speculation(VOCAB, mode, **changes)


def one(model: Any, tokenizer: Any, speculation: Any, *sources: Any, **fields: Any) -> Run:
    run = Run(model, tokenizer, speculation)
    run.submit("r", PROMPT, *sources, **{"max_tokens": 60, **fields})
    run.finish()
    return run


@pytest.fixture(scope="module")
def plainly(make_llama: Callable[[], Any], tokenizer: Any) -> Callable[..., Run]:
    """Its answers without drafts, by what is asked for besides the prompt."""
    runs: dict[str, Run] = {}

    def of(**fields: Any) -> Run:
        key = repr(sorted(fields.items()))
        if key not in runs:
            runs[key] = one(make_llama(), tokenizer, None, **fields)
        return runs[key]

    return of


SOURCES: dict[str, Callable[[list[int]], list[Scripted]]] = {
    "perfect": lambda whole: [perfect(whole)],
    "one right": lambda whole: [right_for(whole, 1)],
    "all but the last right": lambda whole: [right_for(whole, 14)],
    "always wrong": lambda whole: [right_for(whole, 0)],
    "random": lambda whole: [guessing(VOCAB, 3)],
    "lying": lambda whole: [lying(VOCAB, 3)],
    "lookup and suffix": lambda whole: [],
    "all at once": lambda whole: [right_for(whole, 2), guessing(VOCAB, 5), lying(VOCAB, 6)],
}


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, id=f"{kind}-{name}", marks=() if kind in quick else pytest.mark.long)
        for name, sampling, quick in (
            ("greedy", GREEDY, SOURCES),
            ("sampled", SAMPLED, ("one right", "all at once")),
            ("penalised", PENALISED, ("perfect", "lying")),
        )
        for kind in SOURCES
    ],
)
def test_any_source_gives_the_plain_answer(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run], kind: str, sampling: Sampling
) -> None:
    plain = plainly(sampling=sampling, top_logprobs=2)
    sources = SOURCES[kind](plain.tokens["r"])
    run = one(llama, tokenizer, spec(), *sources, sampling=sampling, top_logprobs=2)
    assert run.said("r") == plain.said("r")
    assert all(source.closed for source in sources)
    report = run.finished("r").speculation
    if kind == "perfect":
        assert report is not None
        assert report.accepted == report.drafted
        assert report.tokens / report.passes > 5
        # All of the plain answer but the token of its last turn, which is not seen between turns.
        known = plain.tokens["r"][len(PROMPT) :]
        assert sources[0].told[: len(known)] == known
        assert len(sources[0].told) == run.finished("r").usage.completion_tokens == 60
    if kind in ("always wrong", "random", "lying"):
        # Drafts were verified, many of them: the plain answer is not plain because nothing was drafted.
        assert report is not None
        scripted = report.sources["scripted"]
        assert scripted.drafted > 200
        assert scripted.accepted <= (0 if kind == "always wrong" else 5)


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_every_mode_gives_the_plain_answer(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run], mode: str
) -> None:
    plain = plainly(max_tokens=120)
    run = one(llama, tokenizer, spec(mode), max_tokens=120)
    assert run.said("r") == plain.said("r")
    drafted = run.finished("r").speculation
    if mode == "auto":
        return
    assert (drafted is not None) == (mode == "on")


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 15, 16, 17, 18, 33])
def test_max_tokens_anywhere_in_a_block(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run], limit: int
) -> None:
    plain = plainly(max_tokens=60).tokens["r"]
    run = one(llama, tokenizer, spec(), perfect(plain), max_tokens=limit)
    assert run.said("r") == one(llama, tokenizer, None, max_tokens=limit).said("r")
    assert run.finished("r").usage.completion_tokens == limit


def test_no_draft_goes_past_the_answers_end(llama: Any, tokenizer: Any, plainly: Callable[..., Run]) -> None:
    widths: list[int] = []
    plain = plainly(max_tokens=60).tokens["r"]
    run = Run(llama, tokenizer, spec())
    run.submit("r", PROMPT, perfect(plain), max_tokens=20)
    while not run.decoding.apart:
        run.turn()
    (running,) = run.decoding.apart
    row = running.row
    assert row is not None
    while run.decoding.apart:
        widths.append(len(row.tokens))
        run.turn()
        assert len(row.tokens) <= len(PROMPT) + 20
    run.finish()


def text(tokenizer: Any, marker: str) -> list[int]:
    return list(tokenizer.encode("xyz" + marker))


@pytest.mark.parametrize(
    ("marker", "stop"),
    in_turn(
        ["<hello>", "<utf8>", "<cutoff>", "<ponder>", "<weather>"], [[], ["STOP"], ["o"], ["par", "rld"]]
    ),
)
def test_ends_and_stop_strings_inside_a_block(
    chain: Any, tokenizer: Any, marker: str, stop: list[str]
) -> None:
    prompt = text(tokenizer, marker)
    plain = Run(chain, tokenizer)
    plain.submit("r", prompt, stop=stop, top_logprobs=1)
    plain.finish()
    whole = plain.tokens.get("r", prompt)  # not seen where the first token ends it
    for source in (perfect(whole + [0] * 20), right_for(whole, 2)):
        run = Run(chain, tokenizer, speculating.speculation(512))
        run.submit("r", prompt, source, stop=stop, top_logprobs=1)
        run.finish()
        assert run.said("r") == plain.said("r")


def test_what_an_answer_computed_serves_the_next_prompt(llama: Any, tokenizer: Any) -> None:
    plain, run = Run(llama, tokenizer), Run(llama, tokenizer, spec())
    plain.submit("a", PROMPT, max_tokens=40)
    plain.finish()
    whole = plain.tokens["a"]
    run.submit("a", PROMPT, right_for(whole, 3), max_tokens=40)
    run.finish()
    for side in (plain, run):
        side.submit("b", [*whole[:80], 5, 6], max_tokens=20)
        side.finish()
    assert run.finished("b").usage.cached_tokens == plain.finished("b").usage.cached_tokens == 80
    assert run.said("b") == plain.said("b")


class DiceRounds(Rounds):
    """Moves several answers at once in and out of the batch by chance."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice
        self.rounds = 0

    def worth(self, promises: Sequence[Promise]) -> bool:
        return self.dice.random() < 0.7

    def add_round(self, emitted: Mapping[str, int], seconds: float) -> None:
        self.rounds += 1
        super().add_round(emitted, seconds)

    @property
    def losing(self) -> bool:
        return self.dice.random() < 0.2


@pytest.mark.parametrize(
    ("seed", "mode"),
    [
        (0, "on"),
        (3, "on"),
        (4, "auto"),
        pytest.param(1, "on", marks=pytest.mark.long),
        pytest.param(2, "auto", marks=pytest.mark.long),
    ],
)
def test_answers_that_come_and_go_are_what_they_are_alone(
    llama: Any, tokenizer: Any, seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In and out of the batch at any moment, with good and bad sources, greedy and sampled."""
    monkeypatch.setattr(decoding, "SETTLED_TOKENS", 2)
    dice = random.Random(seed)
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
    run = Run(llama, tokenizer, spec(mode, computes_ahead=seed % 2 == 0))
    run.decoding.rounds = rounds = DiceRounds(dice)
    for i in range(6):
        prompt = PROMPT[: dice.randint(20, 50)]
        fields = {
            "sampling": dice.choice([GREEDY, PENALISED, Sampling(temperature=0.9, seed=i)]),
            "max_tokens": dice.choice([1, 5, 25, 35]),
            "top_logprobs": dice.choice([None, 1]),
        }
        asked[f"r{i}"] = prompt, fields
        # All have drafts, as they must to be drafted for side by side, or half of them.
        drafted = mode == "on" or dice.random() < 0.5
        sources = [dice.choice([lying(VOCAB, i), guessing(VOCAB, i)])] if drafted else []
        run.submit(f"r{i}", prompt, *sources, **fields)
        for _ in range(dice.randint(0, 15)):
            run.turn()
    run.finish()
    for name, (prompt, fields) in asked.items():
        plain = Run(llama, tokenizer)
        plain.submit(name, prompt, **fields)
        plain.finish()
        # Who came earlier may have left something in the prefix cache: that is all that may differ.
        assert [e[:-1] if hasattr(e[1], "cached_tokens") else e for e in run.said(name)][:-1] == (
            plain.said(name)[:-1]
        )
        assert run.finished(name).reason == plain.finished(name).reason
        assert run.finished(name).usage.completion_tokens == plain.finished(name).usage.completion_tokens
    assert run.moves > 0
    if mode == "on":
        assert rounds.rounds > 0


def test_sampled_answers_of_a_batch_are_drawn_in_one_call(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At other temperatures, beside a greedy one, while one joins and one leaves; each as it is alone."""
    asked = {
        "a": Sampling(temperature=0.9, seed=1),
        "b": Sampling(temperature=1.4, seed=2),
        "c": GREEDY,
        "d": Sampling(temperature=0.9, seed=3),
    }
    lengths = {"a": 30, "b": 12, "c": 30, "d": 20}
    alone = {}
    for name, sampling in asked.items():
        plain = Run(llama, tokenizer)
        plain.submit(name, PROMPT, sampling=sampling, max_tokens=lengths[name])
        plain.finish()
        alone[name] = plain.said(name)
    rows: list[int] = []
    drawn = sampling_module.drawn
    monkeypatch.setattr(
        sampling_module, "drawn", lambda logprobs, each: rows.append(len(each)) or drawn(logprobs, each)
    )
    run = Run(llama, tokenizer)
    for name in ("a", "b", "c"):
        run.submit(name, PROMPT, sampling=asked[name], max_tokens=lengths[name])
    while len(run.decoding.batch) < 3:
        run.turn()
    run.turn()
    run.submit("d", PROMPT, sampling=asked["d"], max_tokens=lengths["d"])
    run.finish()
    assert {name: run.said(name)[:-1] for name in asked} == {name: alone[name][:-1] for name in asked}
    assert {3, 4} <= set(rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_several_at_once_are_drafted_for_where_all_gain(
    llama: Any, tokenizer: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A perfect source, one that is right for a while, and the answer's own text: three at once."""
    prompts = {"a": PROMPT, "b": PROMPT[:30], "c": PROMPT[:40] + PROMPT[:25]}
    plain = Run(llama, tokenizer)
    for name, prompt in prompts.items():
        plain.submit(name, prompt, sampling=sampling, max_tokens=90, top_logprobs=1)
    plain.finish()
    run = Run(llama, tokenizer, spec())
    monkeypatch.setattr(run.decoding.rounds, "step_s", lambda size: 100.0 * size)
    sources = {
        "a": perfect(plain.tokens["a"]),
        "b": right_for(plain.tokens["b"], 5),
        "c": perfect(plain.tokens["c"]),
    }
    for name, prompt in prompts.items():
        run.submit(name, prompt, sources[name], sampling=sampling, max_tokens=90, top_logprobs=1)
    while len(run.decoding.apart) < len(prompts):
        run.turn()
    run.finish()
    for name in prompts:
        assert run.said(name) == plain.said(name)
        report = run.finished(name).speculation
        assert report is not None
        assert report.saved_s > 0


def test_back_out_of_the_batch_once_it_is_alone_and_a_draft_is_good(llama: Any, tokenizer: Any) -> None:
    plain = Run(llama, tokenizer)
    plain.submit("long", PROMPT, max_tokens=100)
    plain.finish()
    run = Run(llama, tokenizer, spec())
    run.submit("long", PROMPT, perfect(plain.tokens["long"]), max_tokens=100)
    while not run.decoding.apart:
        run.turn()
    run.submit("short", PROMPT[:20], max_tokens=3)
    while not run.decoding.batch:
        run.turn()
    assert not run.decoding.apart
    while run.decoding.batch:
        run.turn()
    assert run.decoding.apart
    run.finish()
    assert run.said("long") == plain.said("long")


def test_cancelled_between_blocks_and_what_was_computed_is_right(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run]
) -> None:
    plain = plainly(max_tokens=60)
    for turns in range(1, 6):
        run = Run(llama, tokenizer, spec())
        source = right_for(plain.tokens["r"], 4)
        run.submit("r", PROMPT, source, max_tokens=60)
        for _ in range(turns):
            run.turn()
        run.scheduler.tell(Cancel("r"))
        run.finish()
        assert run.finished("r").reason == "cancelled"
        assert source.closed
        run.submit("again", PROMPT, max_tokens=60)
        run.finish()
        assert [e[:3] for e in run.said("again")[:-1]] == [e[:3] for e in plain.said("r")[:-1]]


def test_a_window_that_fills_up_ends_the_drafts(tokenizer: Any, blocks: list[int]) -> None:
    model = tiny_architectures.tiny("gemma3_text")
    plain, run = Run(model, tokenizer), Run(model, tokenizer, spec())
    plain.submit("r", PROMPT[:10], max_tokens=60)
    plain.finish()
    run.submit("r", PROMPT[:10], perfect(plain.tokens["r"]), max_tokens=60)
    run.finish()
    assert [e[0] for e in run.said("r")] == [e[0] for e in plain.said("r")]
    assert blocks
    assert max(blocks) <= tiny_architectures.WINDOW


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each block with drafts: the tokens before its end."""
    seen: list[int] = []
    advance = VerifyRow.advance

    def noted(row: VerifyRow, drafts: Sequence[int]) -> list[Chosen]:
        seen.append(len(row.tokens) + len(drafts))
        return advance(row, drafts)

    monkeypatch.setattr(VerifyRow, "advance", noted)
    return seen


def test_no_further_than_the_probe_went(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run], blocks: list[int]
) -> None:
    plain = plainly(max_tokens=60).tokens["r"]
    verdict = ExactnessVerdict(8, len(PROMPT) + 20, "exact: for the test", {1: 1.0})
    run = Run(llama, tokenizer, spec(verdict=verdict))
    run.submit("r", PROMPT, perfect(plain), max_tokens=60)
    run.finish()
    assert blocks
    assert max(blocks) <= len(PROMPT) + 20
    report = run.finished("r").speculation
    assert report is not None
    assert report.width == 8


@pytest.mark.parametrize(
    ("sampling", "drafted"),
    [
        pytest.param(
            sampling, drafted, id=f"{name}-{'drafted now and then' if drafted else 'plain'}", marks=marks
        )
        for drafted in (False, True)
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED), ("penalised", PENALISED))
        # Who draws begins ahead by itself in the quick run, the others with drafts.
        for marks in [() if drafted is (name != "sampled") else pytest.mark.long]
    ],
)
def test_a_step_that_is_begun_ahead_changes_nothing(
    llama: Any, tokenizer: Any, sampling: Sampling, *, drafted: bool
) -> None:
    """Alone, cancelled, joined by another answer, and with drafts that come while a step is under way."""
    batch = Run(llama, tokenizer)
    for name in ("r", "beside"):
        batch.submit(name, PROMPT, sampling=sampling, max_tokens=60, top_logprobs=1)
    batch.finish()
    whole = batch.tokens["r"]
    some = Scripted(lambda text, width: whole[len(text) : len(text) + width] if len(text) % 7 < 3 else [])
    for joined in (0, 9):
        run = Run(llama, tokenizer, spec(computes_ahead=True) if drafted else None)
        run.submit(
            "r", PROMPT, *([some] if drafted else []), sampling=sampling, max_tokens=60, top_logprobs=1
        )
        ahead = 0
        for turn in range(100):
            run.turn()
            ahead += any(one.row is not None and one.row.under_way for one in run.decoding.apart)
            if joined and turn == joined:
                run.submit("b", PROMPT[:30], sampling=sampling, max_tokens=20)
        run.finish()
        assert ahead > 5
        assert run.said("r")[:-1] == batch.said("r")[:-1]
        report = run.finished("r").speculation
        assert (report is not None and report.accepted > 0) == drafted
    run = Run(llama, tokenizer, spec(computes_ahead=True) if drafted else None)
    run.submit("r", PROMPT, sampling=sampling, max_tokens=60)
    while not any(one.row is not None and one.row.under_way for one in run.decoding.apart):
        run.turn()
    run.scheduler.tell(Cancel("r"))
    run.finish()
    run.submit("again", PROMPT, sampling=sampling, max_tokens=60, top_logprobs=1)
    run.finish()
    assert run.said("again")[:-1] == batch.said("r")[:-1]


def test_steps_that_were_computed_while_a_prompt_was_read_are_not_timed(llama: Any, tokenizer: Any) -> None:
    """The device had them ready: they would seem to take no time, and passes with drafts too much."""
    run = Run(llama, tokenizer, spec("auto", computes_ahead=True))
    timed: list[str] = []
    for owner, name in ((run.scheduler.speculation.costs, "add_pass"), (run.decoding.rounds, "add_step")):
        setattr(owner, name, lambda *_, name=name: timed.append(name))
    for others in ([], ["b"]):
        for name in ("a", *others):
            run.submit(name, PROMPT, max_tokens=60, speculate=Speculate(sources=["drafter"]))
        while run.decoding.steps < 10 or len(run.decoding) <= len(others):
            run.turn()
        assert timed
        run.submit("long", [(11 + len(others)) * i % 64 for i in range(600)], max_tokens=1)
        while not run.scheduler._prefilling:
            run.turn()
        beside = 0
        while run.scheduler._prefilling:
            del timed[:]
            run.turn()
            if run.scheduler._prefilling:
                beside += 1
                assert not timed
        assert beside > 5
        run.finish()


def test_an_answer_that_cannot_grow_fails_where_the_plain_one_does(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoding, sequence):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 32)
    ends = []
    for speculation in (None, spec()):
        run = Run(llama, tokenizer, speculation, budget=KvBudget.of(110 * 1024, 1024))
        run.submit("r", PROMPT, max_tokens=70)
        run.finish()
        ends.append(run.said("r"))
    assert ends[0] == ends[1]
    for speculation in (None, spec()):
        run = Run(llama, tokenizer, speculation, budget=KvBudget.of(240 * 1024, 1024))
        for name in ("a", "b"):
            run.submit(name, PROMPT, max_tokens=180)
        run.finish()
        ends.append([run.said(name) for name in ("a", "b")])
        assert sum(isinstance(e, Failed) for name in ("a", "b") for e in run.said(name)) == 1
    assert [len(x) for x in ends[2]] == [len(x) for x in ends[3]]


def test_a_request_may_choose_or_refuse(llama: Any, tokenizer: Any) -> None:
    plain = one(llama, tokenizer, None, max_tokens=100)
    refused = one(llama, tokenizer, spec(), max_tokens=100, speculate=Speculate(enabled=False))
    assert refused.finished("r").speculation is None
    only = one(llama, tokenizer, spec(), max_tokens=100, speculate=Speculate(sources=["lookup"], width=3))
    report = only.finished("r").speculation
    assert report is not None
    assert report.width == 3
    assert set(report.sources) == {"lookup"}
    assert refused.said("r") == only.said("r") == plain.said("r")


def test_a_source_may_come_while_the_answer_runs(
    llama: Any, tokenizer: Any, plainly: Callable[..., Run]
) -> None:
    whole = plainly(max_tokens=60).tokens["r"]
    run = Run(llama, tokenizer, spec())
    run.submit("r", PROMPT, max_tokens=60, speculate=Speculate(sources=["scripted"]))
    while "r" not in run.tokens:
        run.turn()
    before = run.tokens["r"]
    source = perfect(whole)
    run.decoding.attach("r", source)
    run.finish()
    assert len(source.told) == 60 - (len(before) - len(PROMPT))
    assert source.closed
    report = run.finished("r").speculation
    assert report is not None
    assert report.accepted > 40


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_two_hundred_real_prompts(part: int, embedded_model: ModelFolder) -> None:
    """The embedded model, texts of this repository cut anywhere, 128 tokens each: plain in one batch, each
    alone with drafts, and, of one part in five, several at once with drafts."""
    from fleetd.engine.cpu import products

    path = embedded_model.path
    model, tokenizer = load_model(path)[0], load_tokenizer(path)
    products.to_float32(model)
    mx.eval(model.parameters())
    dice = random.Random(part)
    root = Path(__file__).parents[2]
    files = [f for folder in ("docs", "fleetd", "bench") for f in sorted((root / folder).rglob("*.[mp][dy]"))]
    vocab = model.args.vocab_size
    asked: dict[str, tuple[list[int], Sampling]] = {}
    for i in range(10):
        source = dice.choice(files).read_text(encoding="utf-8")
        at = dice.randrange(max(1, len(source) - 1200))
        prompt = list(tokenizer.encode(source[at : at + dice.randint(40, 1200)])) or [1]
        asked[f"r{i}"] = prompt, Sampling(temperature=0.7, seed=3) if i % 5 == 4 else GREEDY

    def answered(names: Iterable[str], speculation: Any, *, drafted: bool) -> Run:
        run = Run(model, tokenizer, speculation, max_streams=10, prefix=PrefixCache(0))
        run.decoding.rounds = DiceRounds(dice)
        for i, name in enumerate(names):
            whole = plain.tokens[name] if drafted else []
            source = dice.choice([right_for(whole, 3), guessing(vocab, i), lying(vocab, i)])
            prompt, sampling = asked[name]
            run.submit(name, prompt, *([source] if drafted else []), max_tokens=128, sampling=sampling)
        run.finish()
        return run

    plain = answered(asked, None, drafted=False)
    for i, name in enumerate(asked):
        speculation = speculating.speculation(vocab, dice.choice(["on", "auto"]))
        assert answered([name], speculation, drafted=i % 2 == 1).said(name) == plain.said(name), name
    if part % 5 == 0:
        together = answered(asked, speculating.speculation(vocab), drafted=True)
        assert {name: together.said(name) for name in asked} == {name: plain.said(name) for name in asked}
        assert together.decoding.rounds.rounds > 0
