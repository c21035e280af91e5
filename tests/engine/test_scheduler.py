"""The scheduler in this process: order of turns, cancelling at any moment, nothing kept, nothing mixed up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from fakes import FACTS
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from nested_fields import changed
from turned_scheduler import TurnedScheduler

from fleetd import limits
from fleetd.engine.answer.logprobs import Logprobs
from fleetd.engine.loop import decoding, sequence
from fleetd.engine.loop.scheduler import PATIENCE_TURNS
from fleetd.engine.measure.calibrate import Calibration
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.idle_calibration import IdleCalibration
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, prepare
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    Delta,
    Failed,
    Finished,
    FreeMemory,
    Generate,
    Heartbeat,
    IdleTime,
    MeasuredAgain,
    Prefill,
    Report,
    Sampling,
    ScoringState,
    TakenElsewhere,
    TextPrompt,
    TokenPrompt,
)
from fleetd.engine.scoring import head_profile
from fleetd.errors import InvalidValue

pytestmark = pytest.mark.usefixtures("on_cpu")
GREEDY = Sampling(temperature=0.0)
CONTEXT = 2048


@pytest.fixture(scope="module")
def parts(chain_path: Path) -> tuple[Any, Any]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    model, _ = load_model(chain_path)
    mx.set_default_device(before)
    return model, load_tokenizer(chain_path)


class SchedulerBench(TurnedScheduler):
    """A scheduler of the chain model."""

    def __init__(self, parts: tuple[Any, Any], **options: Any) -> None:
        settings = {"context_tokens": CONTEXT, "chunks": FixedChunks(32, 16), **options}
        super().__init__(*parts, **settings)

    def submit(self, name: str, text: str, **fields: Any) -> None:
        request = Generate(name, TextPrompt(text), **{"sampling": GREEDY, **fields})
        self.scheduler.inbox.put(prepare(request, self.tokenizer, 512))

    def check_clean(self) -> None:
        """Nothing is left of requests that have ended."""
        s = self.scheduler
        assert not s.busy
        s.validate()
        assert s.budget.used_bytes == 0
        generator = s.decoding._generator
        assert len(generator._generation_batch) == len(generator._prompt_batch) == 0
        assert not generator._unprocessed_sequences
        assert not generator._currently_processing


def check_order(events: list[Report]) -> None:
    """Accepted, Prefill*, Delta*, then Finished or Failed, once."""
    names = [type(e).__name__ for e in events]
    assert names[-1] in ("Finished", "Failed"), names
    assert sum(n in ("Finished", "Failed") for n in names) == 1
    if names[0] == "Failed":
        assert len(names) == 1
        return
    rank = {"Accepted": 0, "Prefill": 1, "Delta": 2, "ToolCall": 2, "Finished": 3, "Failed": 3}
    ranks = [rank[n] for n in names]
    assert ranks == sorted(ranks), names
    assert names.count("Accepted") == 1
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    done = [e.done for e in events if isinstance(e, Prefill)]
    assert done == sorted(done)
    assert all(e.total == accepted.prompt_tokens for e in events if isinstance(e, Prefill))
    last = events[-1]
    if isinstance(last, Finished):
        shown = sum(e.tokens for e in events if isinstance(e, Delta))
        assert shown <= last.usage.completion_tokens
        assert last.usage.prompt_tokens == accepted.prompt_tokens
        assert last.timings.queue_s >= 0
        assert last.timings.prefill_s >= 0


def test_events_come_in_order(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("a", "x" * 100 + "<hello>")
    bench.finish()
    check_order(bench.of("a"))
    assert bench.text("a") == "Hello there, world!"
    assert [e.done for e in bench.of("a") if isinstance(e, Prefill)] == [0, 32, 64, 96, 100]
    bench.check_clean()


def test_the_shortest_prompt_goes_first(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    for name, n in (("long", 500), ("middle", 200), ("short", 20)):
        bench.submit(name, "x" * n + "<hello>")
    bench.finish()
    order = [e.id for e in bench.events if isinstance(e, Finished)]
    assert order == ["short", "middle", "long"]


def test_a_long_prompt_is_not_passed_over_for_ever(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("long", "y" * 1000 + "<hello>")
    turns = 0
    while not any(isinstance(e, Prefill) for e in bench.of("long")):
        bench.submit(f"short{turns}", f"{turns}".zfill(20) + "<hello>", max_tokens=1)
        bench.turn()
        turns += 1
        assert turns <= PATIENCE_TURNS + 2
    assert turns > PATIENCE_TURNS / 2


def test_running_answers_get_a_token_in_every_turn_of_a_long_prefill(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("running", "<count>", max_tokens=500)
    while not bench.text("running"):
        bench.turn()
    bench.submit("long", "z" * 900 + "<hello>", max_tokens=1)
    for _ in range(20):
        before = len(bench.of("running"))
        bench.turn()
        assert len(bench.of("running")) == before + 1
    bench.scheduler.tell(Cancel("running"))
    bench.finish()
    bench.check_clean()


def test_a_turn_that_only_decodes_looks_at_nothing_else(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("running", "<count>", max_tokens=60)
    while not bench.scheduler.decoding:
        bench.turn()
    bench.turn()
    others = bench.scheduler._turn_others = Mock(wraps=bench.scheduler._turn_others)
    for _ in range(5):
        bench.turn()
    assert not others.called
    # Whatever comes gets its turn at once.
    bench.submit("next", "y" * 40, max_tokens=3)
    bench.turn()
    assert others.called
    bench.finish()
    bench.check_clean()


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 6, 8])
def test_cancelled_in_any_state(parts: tuple[Any, Any], turns: int) -> None:
    bench = SchedulerBench(parts, max_streams=1)
    bench.submit("first", "x" * 150 + "<count>")  # prefills for five turns, then decodes
    bench.submit("waiting", "<hello>")
    for _ in range(turns):
        bench.turn()
    bench.scheduler.tell(Cancel("waiting"))
    bench.scheduler.tell(Cancel("first"))
    bench.scheduler.tell(Cancel("first"))
    bench.scheduler.tell(Cancel("nobody"))
    bench.finish()
    for name in ("first", "waiting"):
        check_order(bench.of(name))
        last = bench.of(name)[-1]
        assert isinstance(last, Finished)
        assert last.reason == "cancelled"
    bench.check_clean()
    # What was computed is right: the same prompt continues from it.
    bench.submit("again", "x" * 150 + "<count>", max_tokens=3)
    bench.finish()
    assert bench.text("again") == " 1 2 3"


def test_a_prompt_that_is_given_up_keeps_memory_for_what_was_read(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("long", "x" * 1000)
    for _ in range(3):
        bench.turn()
    bench.scheduler.tell(Cancel("long"))
    bench.finish()
    bench.submit("short", "y" * 32)
    bench.finish()
    given_up, read = (entry for entry in bench.scheduler.prefix._entries.values())
    each = read.nbytes / read.cache[0].keys.shape[2]
    assert len(given_up.tokens) == 96
    assert given_up.nbytes == 96 * each


def test_nothing_is_kept_after_any_sequence(parts: tuple[Any, Any]) -> None:
    dice = random.Random(5)
    bench = SchedulerBench(parts, budget=KvBudget.of(1100 * 1024, 1024), prefix=PrefixCache(40_000_000))
    live: dict[str, str] = {}
    texts = {"<hello>": "Hello there, world!", "<utf8>": "aé€😀z", "<cutoff>": "good part STOP bad part"}
    for i in range(60):
        match dice.choice(["submit", "submit", "cancel", "turn", "turn", "turn"]):
            case "submit":
                marker = dice.choice([*texts, "<count>"])
                live[f"r{i}"] = marker
                limit = dice.choice([None, 0, 1, 5]) if marker != "<count>" else dice.choice([1, 30, 90])
                stop = dice.choice([[], ["STOP"], ["e"]])
                prompt = dice.choice("ab") * dice.choice([1, 40, 300]) + marker
                bench.submit(f"r{i}", prompt, max_tokens=limit, stop=stop, echo=dice.random() < 0.1)
            case "cancel" if live:
                bench.scheduler.tell(Cancel(dice.choice(list(live))))
            case _:
                bench.turn()
    bench.finish()
    for name, marker in live.items():
        check_order(bench.of(name))
        if marker in texts and not any(isinstance(e, Delta) and e.tokens == 0 for e in bench.of(name)):
            assert texts[marker].startswith(bench.text(name).rstrip())
    bench.check_clean()


def test_an_answer_that_cannot_grow_fails_alone(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoding, sequence):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 32)
    bench = SchedulerBench(parts, budget=KvBudget.of(240 * 1024, 1024))
    for name in ("a", "b"):
        bench.submit(name, f"{name}<count>", max_tokens=200)
    bench.finish()
    ends = [bench.of(name)[-1] for name in ("a", "b")]
    assert sorted(type(e).__name__ for e in ends) == ["Failed", "Finished"]
    (failed,) = (e for e in ends if isinstance(e, Failed))
    assert failed.code == "out_of_memory"
    assert "KV cache is full" in failed.message
    bench.check_clean()


class FailingTokenizer:
    """A tokenizer one of whose methods fails for one request's tokens."""

    def __init__(self, real: Any, where: str) -> None:
        self._real, self._where = real, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def decode(self, tokens: Any, *args: Any) -> str:
        if self._where == "echo":
            raise RuntimeError("decode")
        text: str = self._real.decode(tokens, *args)
        return text

    @property
    def detokenizer(self) -> Any:
        where, inner = self._where, self._real.detokenizer
        if where == "start":
            raise RuntimeError("detokenizer")
        if where in ("push", "finish"):

            def fail(*_: Any) -> None:
                raise RuntimeError(where)

            setattr(inner, "add_token" if where == "push" else "finalize", fail)
        return inner


@pytest.mark.parametrize("where", ["start", "echo", "push", "finish"])
@pytest.mark.parametrize("limit", [None, 1])
def test_what_breaks_one_request_breaks_no_other(
    parts: tuple[Any, Any], where: str, limit: int | None
) -> None:
    bench = SchedulerBench(parts)
    bench.submit("good", "<count>", max_tokens=20)
    while not bench.text("good"):
        bench.turn()
    bench.scheduler.tokenizer = FailingTokenizer(parts[1], where)
    bench.submit("bad", "<hello>", echo=where == "echo", max_tokens=limit)
    bench.turn()
    bench.scheduler.tokenizer = bench.tokenizer
    bench.finish()
    check_order(bench.of("bad"))
    last = bench.of("bad")[-1]
    assert isinstance(last, Failed)
    assert last.code == "engine_error"
    assert bench.text("good") == "".join(f" {i}" for i in range(1, 21))
    bench.check_clean()


def test_a_logit_bias_outside_the_vocabulary_is_refused(parts: tuple[Any, Any]) -> None:
    request = Generate("r", TokenPrompt([1]), Sampling(logit_bias={3: 1.0, 512: 1.0}))
    with pytest.raises(InvalidValue, match="512") as caught:
        prepare(request, parts[1], 512)
    assert caught.value.param == "logit_bias"


def test_a_token_of_the_embeddings_padding_is_no_text(parts: tuple[Any, Any]) -> None:
    assert len(parts[1]) < 512
    bench = SchedulerBench(parts)
    bench.submit("r", "<hello>", sampling=Sampling(temperature=0.0, logit_bias={511: 100.0}), max_tokens=3)
    bench.finish()
    check_order(bench.of("r"))
    assert isinstance(bench.of("r")[-1], Finished)


def test_more_alternatives_than_the_vocabulary_has(parts: tuple[Any, Any]) -> None:
    assert len(Logprobs(parts[1], 600).of(5, mx.zeros(512), 0).top) == 512


def test_echo_scores_every_prompt_token_whatever_the_chunks(parts: tuple[Any, Any]) -> None:
    scores = []
    for chunk in (1, 7, 1000):
        bench = SchedulerBench(parts, chunks=FixedChunks(chunk, chunk))
        bench.submit("r", "abc<hello>Hel", echo=True, max_tokens=0, top_logprobs=2)
        bench.finish()
        (delta,) = [e for e in bench.of("r") if isinstance(e, Delta)]
        assert delta.text == "abc<hello>Hel"
        scores.append([(p.token, round(p.logprob, 4), p.text_offset) for p in delta.logprobs or []])
    assert scores[0] == scores[1] == scores[2]
    assert [s[0] for s in scores[0]] == ["a", "b", "c", "<hello>", "Hel"]
    assert [s[2] for s in scores[0]] == [0, 1, 2, 3, 10]


def test_an_echoed_prompt_of_one_token(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    bench.submit("r", "a", echo=True, max_tokens=0, top_logprobs=0)
    bench.finish()
    (delta,) = [e for e in bench.of("r") if isinstance(e, Delta)]
    assert [p.token for p in delta.logprobs or []] == ["a"]


def test_prompts_at_the_context_and_one_past_it(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts, context_tokens=20)
    for n in (18, 19, 20):
        bench.scheduler.inbox.put(PreparedPrompt(Generate(f"n{n}", TokenPrompt([65] * n), GREEDY), [65] * n))
    bench.finish()
    kinds = {n: type(bench.of(f"n{n}")[-1]).__name__ for n in (18, 19, 20)}
    assert kinds == {18: "Finished", 19: "Finished", 20: "Failed"}
    failed = bench.of("n20")[-1]
    assert isinstance(failed, Failed)
    assert "20 tokens > 20 maximum" in failed.message
    last = bench.of("n18")[-1]
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens <= 2


# ---- Idle time -------------------------------------------------------------------------------------------


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_profile, "NEEDLES", 2)
    monkeypatch.setattr(head_profile, "SENTENCES", 6)


@pytest.mark.usefixtures("short_search")
def test_idle_time_goes_to_the_search_for_a_profile_and_requests_before_it(parts: tuple[Any, Any]) -> None:
    bench = SchedulerBench(parts)
    scoring = bench.scheduler._scores.search
    left = scoring.state.left
    # Nothing is searched where the daemon has given no time: other workers of the machine may be busy.
    bench.scheduler.tell(Cancel("nothing"))
    bench.turn()
    assert scoring.state.left == left
    bench.scheduler.tell(IdleTime(1000.0))
    for _ in range(3):
        bench.turn()
    begun = scoring.state.left
    assert begun < left
    # A request is computed first, all of it, and the search goes on where it was.
    bench.submit("a", "<hello>")
    while not any(isinstance(event, Finished) for event in bench.of("a")):
        assert scoring.state.left == begun
        bench.turn()
    assert bench.text("a") == "Hello there, world!"
    # Nor is anything searched once the time is taken back.
    bench.scheduler.tell(IdleTime(0.0))
    bench.turn()
    assert begun - scoring.state.left <= 16
    begun = scoring.state.left
    bench.scheduler.tell(Cancel("nothing"))
    bench.turn()
    assert scoring.state.left == begun
    bench.scheduler.tell(IdleTime(1000.0))
    bench.events.clear()
    while scoring.state.left:
        bench.turn()
        bench.scheduler.heartbeat()
    # The daemon hears of the end at once.
    beat = bench.events[-1]
    assert isinstance(beat, Heartbeat)
    assert beat.scoring == scoring.state == ScoringState("unable")
    bench.check_clean()


# ---- Measuring in idle time --------------------------------------------------------------------------------


def test_a_request_in_the_middle_of_a_measurement_is_answered_as_without_it(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALIBRATE_AGAIN_S", 0.0)
    begun: list[Calibration] = []

    def begin() -> Calibration:
        begun.append(Calibration(parts[0], 512, 256, 0.5))
        return begun[-1]

    def answer(bench: SchedulerBench) -> str:
        bench.submit("r", "<hello>", max_tokens=20)
        bench.finish()
        return "".join(event.text for event in bench.of("r") if isinstance(event, Delta))

    told: list[Report] = []
    measuring = IdleCalibration(
        begin, changed(FACTS, prefill_tok_s=1e-3, doubt="another program"), told.append
    )
    bench = SchedulerBench(parts, idle=measuring)
    while not begun:
        bench.turn()
    bench.turn()
    assert answer(bench) == answer(SchedulerBench(parts)) != ""
    assert not told
    while not told:
        bench.turn()
    assert len(begun) > 1, "the first measurement was given up"
    (found,) = told
    assert isinstance(found, MeasuredAgain)
    assert found.speed.prefill_tok_s > 1


def test_what_other_workers_take_is_taken_from_old_prompts_first_and_given_back(
    parts: tuple[Any, Any],
) -> None:
    bench = SchedulerBench(parts)
    scheduler = bench.scheduler
    most, budget = scheduler.prefix.max_bytes, scheduler.budget
    bench.submit("a", "<hello>")
    bench.finish()
    kept = scheduler.prefix.nbytes
    for taken, prefix, others in ((most - kept, kept, 0), (most + 7, 0, 7), (0, most, 0)):
        scheduler.tell(TakenElsewhere(taken))
        bench.turn()
        assert (scheduler.prefix.max_bytes, budget.taken_elsewhere_bytes) == (prefix, others)
        assert len(scheduler.prefix) == (taken == most - kept)
        scheduler.prefix.validate()
    bench.submit("b", "<hello>")
    bench.finish()
    assert len(scheduler.prefix) == 1


@pytest.mark.parametrize(("prompts", "kept"), [(False, 1), (True, 0)])
def test_kept_prompts_are_given_back_only_where_memory_is_critically_short(
    parts: tuple[Any, Any], prompts: bool, kept: int
) -> None:
    bench = SchedulerBench(parts)
    bench.submit("a", "<hello>")
    bench.finish()
    assert len(bench.scheduler.prefix) == 1
    bench.scheduler.tell(FreeMemory(prompts))
    bench.turn()
    assert len(bench.scheduler.prefix) == kept


def test_a_stop_string_that_only_the_end_completes_ends_the_answer_by_it(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detokenizer may hold back the last token's text, as that of a single space."""
    kind = type(parts[1].detokenizer)
    add, finalize, held = kind.add_token, kind.finalize, list[int]()

    def add_later(self: Any, token: int) -> None:
        for before in held:
            add(self, before)
        held[:] = [token]

    def finalize_all(self: Any) -> None:
        for token in held:
            add(self, token)
        held.clear()
        finalize(self)

    monkeypatch.setattr(kind, "add_token", add_later)
    monkeypatch.setattr(kind, "finalize", finalize_all)
    bench = SchedulerBench(parts)
    bench.submit("r", "<hello>", max_tokens=2, stop=["lo"])
    bench.finish()
    (last,) = bench.of("r", Finished)
    assert (bench.text("r"), last.reason, last.stop) == ("Hel", "stop", "lo")
    assert sum(delta.tokens for delta in bench.of("r", Delta)) == last.usage.completion_tokens == 2
