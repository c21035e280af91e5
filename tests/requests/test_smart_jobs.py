"""Smart prefill of one request: what reaches the engine, what is told and billed; and that it fails none."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import FACTS, FakeFolder, FakeModels
from msgspec.structs import replace
from smart_fakes import (
    DIGEST,
    NEEDLE,
    PROFILE,
    QUESTION,
    SCORER,
    Profiles,
    ScoringPool,
    chat,
    completion,
    folders,
    haystack,
    messages,
    models,
)

from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.selection import Selection
from fleetd.compression.words import estimate_tokens
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.control.prefill_trace import Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import (
    ChatPrompt,
    Finished,
    Generate,
    Loading,
    Profile,
    Score,
    Scored,
    ScoringState,
    TextPrompt,
    TokenPrompt,
)
from fleetd.errors import EngineDied, EngineStalled, OutOfMemory, Overloaded
from fleetd.ledger import Ledger
from fleetd.metrics import Metrics
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.job import Job, Planned
from fleetd.requests.members import Members
from fleetd.requests.runner import Runner
from fleetd.requests.smart_prefill import compression_job
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.requests.smart_prefill.compression_job import (
    USUAL_RATIO,
    CompressionJob,
    CompressionService,
    kept_share,
)
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import SegmentScoring
from fleetd.store import Store

WITHIN_S = 20.0
ASKED = SmartPrefillPolicy(enabled=True, target_ratio=0.2, min_prompt_tokens=500)


@dataclass
class Home:
    runner: Runner
    pool: ScoringPool
    models: FakeModels
    store: Store
    metrics: Metrics
    speeds: ModelSpeeds
    smart: SmartPrefill
    traces: list[Trace] = field(default_factory=list)

    async def ask(
        self, request: Generate, policy: SmartPrefillPolicy | None = ASKED, **fields: Any
    ) -> list[Any]:
        job = Job("m", request, **{"origin": "socket", "route": "chat", "smart": policy, **fields})
        async with asyncio.timeout(WITHIN_S), aclosing(self.runner.run(job)) as events:
            return [event async for event in events]

    async def told(
        self, request: Generate, policy: SmartPrefillPolicy | None = ASKED, **fields: Any
    ) -> SmartPrefillResult:
        events = await self.ask(request, policy, **fields)
        assert isinstance(events[-1], Finished)
        planned = [event for event in events if isinstance(event, Planned)]
        assert planned[-1].smart is not None
        assert planned[-1].exactness == ("lossy" if planned[-1].smart.used else "exact")
        return planned[-1].smart

    def rows(self) -> list[tuple[Any, ...]]:
        return self.store.call(
            lambda db: db.execute(
                "SELECT route, model, state, reason, prompt_tokens > 0 FROM usage ORDER BY route"
            ).fetchall()
        )

    def shown(self, line: str) -> bool:
        return line in self.metrics.render()[0].decode().splitlines()


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Any:
    def make(profiles: Profiles | None = None, pool: ScoringPool | None = None, **fields: Any) -> Home:
        pool, found, speeds = pool or ScoringPool(**fields), models("m", "smollm2-135m"), ModelSpeeds()
        clock = (lambda: pool.clock) if isinstance(pool, CountedPool) else time.monotonic
        traces: list[Trace] = []
        members = Members()
        scoring = SegmentScoring(pool, None, monotonic=clock)
        scorers = Scorers(pool, found, speeds, members, profiles=profiles or Profiles())
        compressing = CompressionService(scoring, scorers, ledger, monotonic=clock)
        smart = SmartPrefill(compressing, members, pool, metrics, monotonic=clock)
        runner = Runner(
            pool=pool,
            models=found,
            ledger=ledger,
            metrics=metrics,
            default_model="m",
            embedded=lambda ref: None,
            smart=smart,
            speeds=speeds,
            members=members,
            record=traces.append,
            monotonic=clock,
        )
        return Home(runner, pool, found, store, metrics, speeds, smart, traces)

    return make


def text_of(request: Generate) -> str:
    match request.prompt:
        case ChatPrompt(messages=sent):
            return "\n".join(str(message["content"]) for message in sent)
        case TextPrompt(text):
            return text
        case TokenPrompt():
            return ""


# ---- Text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [chat(), completion()], ids=["chat", "completions"])
async def test_what_matters_reaches_the_engine_and_little_else(home: Any, request_: Generate) -> None:
    this = home()
    told = await this.told(request_)
    (sent,) = this.pool.asked
    assert NEEDLE in text_of(sent)
    assert QUESTION in text_of(sent)
    assert len(text_of(sent)) < 0.5 * len(text_of(request_))
    assert sent.keep is None
    assert (told.form, told.compressor, told.nodes) == ("text", "smollm2-135m", ("this",))
    assert told.compressed_tokens < 0.5 * told.original_tokens
    assert told.score_s > 0
    assert this.rows() == [
        ("chat", "m", "settled", "stop", 1),
        ("score", "smollm2-135m", "settled", "stop", 1),
    ]
    assert this.shown('fleetd_smart_total{mode="text",outcome="used"} 1.0')
    assert this.shown(f'fleetd_smart_tokens_total{{fate="kept"}} {float(told.compressed_tokens)}')


async def test_lines_that_say_what_is_missing_are_counted(home: Any) -> None:
    this = home()
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": haystack(8, 3).replace(NEEDLE, f"Well {n}.")}
        for n in range(20)
    ]
    request = Generate("r1", ChatPrompt([*turns, *messages()[1:]]))
    told = await this.told(request, replace(ASKED, mode="text"))
    (sent,) = this.pool.asked
    lines = text_of(sent).count("tokens omitted")
    assert lines > 10
    share = told.compressed_tokens / told.original_tokens
    assert share == pytest.approx(estimate_tokens(text_of(sent)) / estimate_tokens(text_of(request)), rel=0.2)


async def test_a_prompt_that_does_not_ask_is_untouched(home: Any) -> None:
    this = home()
    events = await this.ask(chat(), None)
    assert this.pool.asked == [chat()]
    assert not this.pool.scores
    assert all(event.smart is None for event in events if isinstance(event, Planned))
    assert not this.traces


async def test_the_system_prompt_and_the_question_are_kept_whole(home: Any) -> None:
    this = home()
    await this.told(chat())
    (sent,) = this.pool.asked
    assert isinstance(sent.prompt, ChatPrompt)
    assert sent.prompt.messages[0] == messages()[0]
    assert sent.prompt.messages[-1] == messages()[-1]


async def test_tool_results_count_and_calls_stay_as_they_are(home: Any) -> None:
    """Agents send almost everything as tool results: cutting the last user turn alone gains nothing."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": {"path": "log"}}}
    sent = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": haystack()},
    ]
    tools = [{"type": "function", "function": {"name": "read"}}]
    this = home()
    told = await this.told(Generate("r1", ChatPrompt(sent, tools=tools)))
    assert told.used, told
    prompt = this.pool.asked[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == tools
    assert prompt.messages[:2] == sent[:2]
    assert NEEDLE in prompt.messages[2]["content"]
    assert len(prompt.messages[2]["content"]) < 0.5 * len(haystack())
    assert prompt.messages[2]["tool_call_id"] == "c1"


async def test_choices_of_one_request_are_scored_once(home: Any) -> None:
    this = home()
    await asyncio.gather(this.told(chat(request_id="r1")), this.told(chat(request_id="r2")))
    assert len(this.pool.scores) == 1
    assert text_of(this.pool.asked[0]) == text_of(this.pool.asked[1])


async def test_marks_of_a_user_never_reach_a_model(home: Any) -> None:
    this = home()
    await this.told(chat("<fleet:keep>short</fleet:keep>"))
    assert "fleet:keep" not in text_of(this.pool.asked[0])
    assert "short" in text_of(this.pool.asked[0])


async def test_the_next_turn_begins_as_the_one_before_it_did(home: Any) -> None:
    """Or it would find nothing of it in the prefix cache; and it is not scored again."""
    this = home()
    await this.told(chat())
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    told = await this.told(Generate("r2", ChatPrompt([*messages(), *answered])))
    first, second = (sent.prompt.messages for sent in this.pool.asked)
    assert second[: len(first)] == first
    assert second[len(first) :] == answered
    assert len(this.pool.scores) == 1
    assert (told.form, told.compressor) == ("text", "smollm2-135m")
    assert told.compressed_tokens < 0.5 * told.original_tokens


async def test_the_next_turn_is_labelled_with_the_compressor_of_its_conversation(home: Any) -> None:
    this = home()
    await this.told(chat())
    this.models.found = folders(*["m", "qwen3-0.6b"])
    this.pool.loaded.append("qwen3-0.6b")
    assert (await this.told(chat(f"Another log.\n\n{haystack()}"))).compressor == "qwen3-0.6b"
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    told = await this.told(Generate("r2", ChatPrompt([*messages(), *answered])))
    assert told.compressor == "smollm2-135m"


async def test_a_prompt_of_which_nothing_would_be_left_is_read_whole(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Selection(((), (), ()), 4000, 0)
    monkeypatch.setattr(compression_job, "select", lambda *args: empty)
    this = home()
    assert (await this.told(chat())).code == "empty"
    assert this.pool.asked == [chat()]


async def test_a_turn_after_a_sparse_one_is_text(home: Any) -> None:
    this = home(sparse="", kept=20)
    assert (await this.told(chat())).form == "sparse"
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    assert (await this.told(Generate("r2", ChatPrompt([*messages(), *answered])))).form == "text"
    assert this.pool.asked[1].keep is None
    assert NEEDLE in text_of(this.pool.asked[1])


async def test_no_feature_wraps_the_stream_of_events(home: Any) -> None:
    """Between the pool and the client a token passes the attempts and the request, and nothing else."""
    this = home()
    passed: set[tuple[str, ...]] = set()
    stream = this.pool.stream

    async def watched(folder: Any, request: Generate) -> AsyncGenerator[Any, None]:
        async for event in stream(folder, request):
            passed.add(tuple(generators()))
            yield event

    this.pool.stream = watched
    assert (await this.told(chat())).used
    assert passed == {("watched", "_attempts", "run")}


def generators() -> Iterator[str]:
    """Names of the asynchronous generators that wait for what calls this, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            yield frame.f_code.co_name
        frame = frame.f_back


# ---- Sparse ----------------------------------------------------------------------------------------------


async def test_sparse_sends_the_whole_text_and_what_of_it_to_compute(home: Any) -> None:
    this = home(sparse="", kept=20)
    told = await this.told(chat())
    (sent,) = this.pool.asked
    assert told.form == "sparse"
    assert sent.prompt == chat().prompt
    assert sent.keep is not None
    assert 0 not in sent.keep.parts  # the system message is whole
    kept = "".join(haystack()[a:b] for a, b in sent.keep.parts[1])
    assert NEEDLE in kept
    assert len(kept) < 0.5 * len(haystack())


async def test_a_conversation_is_shortened_as_text_which_its_next_turn_finds_cached(home: Any) -> None:
    turns = [*messages()[:2], {"role": "assistant", "content": "Yes?"}, messages()[2]]
    this = home(sparse="", kept=20)
    assert (await this.told(Generate("r1", ChatPrompt(turns)))).form == "text"


async def test_an_engine_that_reads_all_of_it_after_all_is_told_so(home: Any) -> None:
    this = home(sparse="", kept=0)
    told = await this.told(chat())
    assert (told.form, told.code) == ("", "no_form")
    assert this.rows()[1][2:4] == ("refunded", "no_form")


async def test_what_the_engine_keeps_is_what_is_told(home: Any) -> None:
    """It always keeps more than was selected: a sliding window, what the template writes."""
    this = home(sparse="", kept=20)
    told = await this.told(chat())
    assert (told.original_tokens, told.compressed_tokens) == (50, 20)


async def test_a_window_that_is_always_kept_is_priced(home: Any) -> None:
    this = home(sparse="", tail=5000, kept=20)
    this.speeds.seed("m", 500.0, 20.0, now_s=0.0)
    this.speeds.seed("smollm2-135m", 2000.0, 20.0, now_s=0.0)
    local = OptionView("local", ["this"], 8.0, chosen=True)
    view = PlanView("m", 4000, 0, [local])
    plans = {
        mode: await this.smart.plan(view, 0.2, this.models.resolve("m"), replace(ASKED, mode=mode))
        for mode in ("text", "auto")
    }
    assert plans["auto"] == plans["text"]
    # Sparse, it would be all of the prompt.
    assert (await this.told(chat())).form == "text"
    told = await this.told(chat(f"Another log.\n\n{haystack()}"), replace(ASKED, mode="sparse"))
    assert told.code == "slower"


@pytest.mark.parametrize(
    ("bounds", "code"),
    [({}, ""), ({"min_keep_tokens": 100_000}, "slower")],
)
async def test_what_has_to_be_kept_is_priced(home: Any, bounds: dict[str, int], code: str) -> None:
    this = home()
    this.speeds.seed("m", 500.0, 20.0, now_s=0.0)
    this.speeds.seed("smollm2-135m", 3000.0, 20.0, now_s=0.0)
    assert (await this.told(chat(), replace(ASKED, **bounds))).code == code
    local = OptionView("local", ["this"], 8.0, chosen=True)
    view = await this.smart.plan(
        PlanView("m", 4000, 0, [local]), 0.2, this.models.resolve("m"), replace(ASKED, **bounds)
    )
    (smart,) = [option for option in view.options if option.kind == "smart"]
    assert smart.code == code


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        (SmartPrefillPolicy(), USUAL_RATIO),
        (SmartPrefillPolicy(target_ratio=0.2), 0.2),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=500), 0.5),
        (SmartPrefillPolicy(target_ratio=0.2, max_keep_tokens=100), 0.1),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=5000), 1.0),
    ],
)
def test_the_bounds_of_a_policy_decide_what_is_kept(policy: SmartPrefillPolicy, share: float) -> None:
    assert kept_share(policy, 1000) == pytest.approx(share)


async def test_sparse_where_it_cannot_be_done_is_not_done(home: Any) -> None:
    this = home()
    told = await this.told(chat(), replace(ASKED, mode="sparse"))
    assert told.code == "no_form"
    assert this.pool.asked == [chat()]


@pytest.mark.parametrize("form", ["sparse", "text"])
async def test_what_is_kept_is_priced_with_the_help_of_others(home: Any, form: Any) -> None:
    this = home(sparse="", kept=20)
    this.speeds.seed("m", 500.0, 20.0, now_s=0.0)
    this.speeds.seed(SCORER, 5000.0, 200.0, now_s=0.0)
    asked: list[tuple[int, int]] = []

    def best_s(_folder: Any, tokens: int, _cached: int, kept: int) -> float:
        asked.append((tokens, kept))
        return 0.0

    this.smart._best_s = best_s
    assert (await this.told(chat(), replace(ASKED, mode=form))).form == form
    (whole, all_of_it), (tokens, kept) = asked
    assert all_of_it == 0
    if form == "sparse":
        assert tokens == whole > 2 * kept > 0
    else:
        assert kept == 0
        assert whole > 2 * tokens > 0


# ---- Falling through -------------------------------------------------------------------------------------


TROUBLE = {
    "crash": (EngineDied("The engine died."), "engine_died"),
    "stall": (EngineStalled("No progress."), "engine_stalled"),
    "memory": (OutOfMemory("No room."), "out_of_memory"),
    "bug": (KeyError("x"), "failed"),
    "nothing": ("nothing", "engine_died"),
    "garbage": ("garbage", "protocol_error"),
}


@pytest.mark.parametrize("request_", [chat(), completion()], ids=["chat", "completions"])
@pytest.mark.parametrize("trouble", TROUBLE)
async def test_a_scorer_in_trouble_costs_nobody_an_answer(
    home: Any, trouble: str, request_: Generate
) -> None:
    what, code = TROUBLE[trouble]
    this = home(trouble=[what])
    told = await this.told(request_)
    assert (told.form, told.code) == ("", code)
    assert told.reason
    assert this.pool.asked == [request_]
    assert this.rows()[0][2] == "settled"
    assert [row[2:] for row in this.rows() if row[0] == "score"] == [("refunded", code, 0)]
    assert this.shown(f'fleetd_smart_total{{mode="full",outcome="{code}"}} 1.0')


async def test_scoring_that_takes_too_long_is_given_up(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SMART_SCORE_S", 0.1)
    this = home(trouble=[asyncio.Event()])
    assert (await this.told(chat())).code == "timeout"
    assert this.pool.cancelled_scores == 1
    assert this.pool.asked == [chat()]


async def test_choices_wait_once_for_scoring_that_takes_too_long(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMART_SCORE_S", 2.0)
    this = home(trouble=[asyncio.Event()])
    told = await asyncio.gather(*(this.told(chat(request_id=f"r{n}")) for n in range(4)))
    assert [each.code for each in told] == ["timeout"] * 4
    assert len(this.pool.scores) == this.pool.cancelled_scores == 1
    assert [row[2:4] for row in this.rows() if row[0] == "score"] == [("refunded", "timeout")]


async def test_the_next_request_does_not_lose_the_time_again(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMART_SCORE_S", 0.1)
    this = home(trouble=[asyncio.Event()])
    assert (await this.told(chat())).code == "timeout"
    assert (await this.told(chat())).code == "no_compressor"
    assert len(this.pool.scores) == 1
    # It is tried anew once that has passed.
    monkeypatch.setattr(limits, "BACKOFF_S", 0.0)
    this = home(trouble=[asyncio.Event()])
    assert (await this.told(chat())).code == "timeout"
    monkeypatch.setattr(limits, "SMART_SCORE_S", WITHIN_S)
    assert (await this.told(chat())).used


async def test_more_prompts_than_can_be_scored_at_once_are_all_answered(home: Any) -> None:
    gate = asyncio.Event()
    busy = [Overloaded(f"{limits.SCORES} texts are being scored already.")] * 2
    this = home(trouble=[*[gate] * limits.SCORES, *busy])
    asked = [
        asyncio.create_task(this.told(chat(haystack(200, at=n), request_id=f"r{n}")))
        for n in range(limits.SCORES + len(busy))
    ]
    async with asyncio.timeout(WITHIN_S):
        while len(this.pool.scores) < len(asked):  # noqa: ASYNC110  (a fake's figure)
            await asyncio.sleep(0.01)
    gate.set()
    told = await asyncio.gather(*asked)
    assert sorted(each.code for each in told) == [*[""] * limits.SCORES, "overloaded", "overloaded"]
    states = [row[2] for row in this.rows() if row[0] == "score"]
    assert sorted(states) == ["refunded"] * 2 + ["settled"] * limits.SCORES
    # Who was busy did not fail.
    assert (await this.told(chat(haystack(220)))).used


async def test_without_a_compressor_all_of_it_is_read(home: Any) -> None:
    this = home()
    this.models.found = folders(*["m"])
    told = await this.told(chat())
    assert told.code == "no_compressor"
    assert this.rows() == [("chat", "m", "settled", "stop", 1)]


async def test_a_compressor_that_nobody_has_is_named(home: Any) -> None:
    told = await home().told(chat(), replace(ASKED, compressor_model="qwen3-0.6b"))
    assert told.code == "no_compressor"
    assert "qwen3-0.6b" in told.reason


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (chat("Short."), "short"),
        (Generate("r1", TokenPrompt([1] * 9000)), "token_prompt"),
        (chat(echo=True), "echo"),
    ],
)
async def test_some_prompts_are_not_for_shortening(home: Any, request_: Generate, code: str) -> None:
    this = home()
    assert (await this.told(request_)).code == code
    assert this.pool.asked == [request_]
    assert not this.pool.scores


# ---- The gate --------------------------------------------------------------------------------------------


def with_task(task: str, *more: dict[str, str]) -> Generate:
    told, text, _ = messages()
    return Generate("r1", ChatPrompt([told, text, {"role": "user", "content": task}, *more]))


async def test_what_needs_only_the_question_is_told_before_anything_is_loaded(home: Any) -> None:
    """The first event is what a stream's headers are made of."""
    this = home(loaded=[])
    events = await this.ask(with_task("Boil it down for me."))
    assert isinstance(events[0], Planned)
    assert events[0].smart is not None
    assert events[0].smart.code == "declined"
    assert "summarise" in events[0].smart.reason
    assert not this.pool.loads
    assert not this.pool.scores
    assert text_of(this.pool.asked[0]) == text_of(with_task("Boil it down for me."))
    assert this.rows() == [("chat", "m", "settled", "stop", 1)]


async def test_a_question_about_a_part_loads_and_scores(home: Any) -> None:
    this = home(loaded=[])
    events = await this.ask(chat())
    assert isinstance(events[0], Loading)
    # The scorer too, before it is priced.
    assert (this.pool.loads, len(this.pool.scores)) == (["m", SCORER], 1)


async def test_a_conversation_that_was_shortened_is_read_whole_for_a_task_that_plainly_needs_it(
    home: Any,
) -> None:
    this = home()
    assert (await this.told(chat())).used
    said = {"role": "assistant", "content": "4711"}
    summed = [*messages(), said, {"role": "user", "content": "Now summarise all of it."}]
    assert (await this.told(Generate("r2", ChatPrompt(summed)))).code == "declined"
    assert haystack() in text_of(this.pool.asked[1])
    after = [*summed, said, {"role": "user", "content": QUESTION}]
    assert (await this.told(Generate("r3", ChatPrompt(after)))).code == "cached"
    assert len(this.pool.scores) == 1


async def test_compression_needs_no_compressor_for_a_task_that_needs_all_of_the_text(home: Any) -> None:
    this = home()
    this.models.found = []
    document = Document.of_messages([*messages()[:2], {"role": "user", "content": "Put it in German."}])
    service = this.smart.compressing
    compression = CompressionJob("c", document, document.estimated_tokens, ASKED, service.bill("c"))
    async with aclosing(service.run(compression)) as steps:
        assert [step async for step in steps] == []
    assert compression.selection is not None
    assert "translate" in compression.selection.declined


async def test_a_shortened_prompt_that_cannot_be_answered_is_asked_whole(home: Any) -> None:
    this = home(answers=[EngineDied("The engine died.")])
    told = await this.told(chat())
    assert (told.form, told.code) == ("", "engine_died")
    assert [len(text_of(sent)) for sent in this.pool.asked][1] == len(text_of(chat()))
    assert [row[2] for row in this.rows()] == ["settled", "refunded"]


async def test_an_error_of_the_whole_prompt_is_the_clients(home: Any) -> None:
    this = home(answers=[EngineDied("one"), EngineDied("two")])
    with pytest.raises(EngineDied, match="two"):
        await this.ask(chat())


async def test_it_is_not_done_where_it_would_not_pay(home: Any) -> None:
    this = home()
    this.speeds.seed("m", 10_000.0, 100.0, now_s=0.0)
    this.speeds.seed("smollm2-135m", 100.0, 100.0, now_s=0.0)
    told = await this.told(chat())
    assert told.code == "slower"
    assert " s; all of it takes " in told.reason
    assert not this.pool.scores


async def test_who_leaves_ends_the_scoring(home: Any) -> None:
    this = home(trouble=[asyncio.Event()])
    job = Job("m", chat(), "socket", "chat", smart=ASKED)
    events = this.runner.run(job)
    await anext(events)
    await events.aclose()
    assert this.pool.cancelled_scores == 1
    assert not this.pool.asked
    assert {row[2:4] for row in this.rows() if row[0] == "score"} == {("refunded", "cancelled")}


async def test_dense_and_shortened_prompts_do_not_disturb_each_other(home: Any) -> None:
    this = home(sparse="", kept=20)
    asked = [this.ask(chat(request_id=f"r{n}"), ASKED if n % 2 else None) for n in range(6)]
    for n, events in enumerate(await asyncio.gather(*asked)):
        planned = next(event for event in events if isinstance(event, Planned))
        assert (planned.smart is not None and planned.smart.used) == bool(n % 2)
    for sent in this.pool.asked:
        assert (sent.keep is not None) == bool(int(sent.id[1:]) % 2)


async def test_what_was_done_is_written_down(home: Any) -> None:
    this = home()
    await this.told(chat())
    (trace,) = this.traces
    assert (trace.chosen.kind, trace.outcome, trace.exactness) == ("smart", "smart", "lossy")
    assert [step.name for step in trace.steps] == ["scored", "prefilled"]
    assert trace.ttft_s is not None


async def test_where_there_was_no_room_it_is_not_tried_again_at_once(home: Any) -> None:
    this = home(trouble=[OutOfMemory("No room.")], loaded=["m"], room=False)
    assert (await this.told(chat())).code == "out_of_memory"
    assert (await this.told(chat())).code == "no_compressor"
    assert len(this.pool.scores) == 1


# ---- A scorer's first prompt -----------------------------------------------------------------------------

UNMEASURED = ScoringState("unmeasured", 3000)


@pytest.mark.parametrize("loaded", [["m", SCORER], ["m"]], ids=["loaded", "not loaded"])
async def test_no_prompt_waits_for_a_scorer_to_be_measured(home: Any, loaded: list[str]) -> None:
    """It is read whole at once, with the reason; and the scorer is measured once there is time."""
    this = home(Profiles({}), loaded=loaded, scoring=UNMEASURED)
    this.speeds.seed(SCORER, 300.0, 100.0, now_s=0.0)
    told = await this.told(chat())
    assert (told.form, told.code) == ("", "measuring")
    assert f"{SCORER} is not measured for scoring yet" in told.reason
    assert not this.pool.scores
    assert SCORER not in this.pool.loaded or loaded == ["m", SCORER]
    assert this.pool.to_measure == [SCORER]
    if SCORER in loaded:
        assert "in about 10 s." in told.reason
    # And as soon as it is measured, the next prompt is scored.
    this.pool.loaded, this.pool.scoring = ["m", SCORER], ScoringState("ready")
    assert (await this.told(chat())).used


async def test_a_scorer_that_is_measured_goes_before_one_that_is_not(home: Any) -> None:
    """The smaller one of two would score, if both were known."""
    this = home(Profiles({"q": PROFILE}), loaded=["m"])
    this.models.found = [*folders("m"), FakeFolder(SCORER, 100_000, 10), *folders("qwen3-0.6b")]
    this.models.digests["qwen3-0.6b"] = "q"
    assert (await this.told(chat())).compressor == "qwen3-0.6b"
    assert (await this.told(chat(), replace(ASKED, compressor_model=SCORER))).code == "measuring"


async def test_a_plan_says_that_the_scorer_is_not_measured(home: Any) -> None:
    this = home(Profiles({}), scoring=UNMEASURED)
    view = await this.smart.plan(PlanView("m", 8000, 0, []), 0.0, this.models.resolve("m"), ASKED)
    (option,) = view.options
    assert (option.code, option.predicted_s, option.chosen) == ("measuring", None, False)


async def test_a_model_whose_heads_find_nothing_scores_nothing(home: Any) -> None:
    this = home(Profiles({DIGEST: Profile([], 1)}))
    assert (await this.told(chat())).code == "no_compressor"
    this = home(Profiles({}), scoring=ScoringState("unable"))
    assert (await this.told(chat())).code == "no_compressor"
    assert not this.pool.to_measure


class CountedPool(ScoringPool):
    """Costs are counted, not waited for: each step moves ``clock`` by what it takes."""

    clock: float = 100.0
    load_s = 30.0
    scorer, target = PrefillSpeed(1 / 300, 1e-6, 0.05), PrefillSpeed(1 / 40, 2e-6, 0.1)

    async def loading(self, folder: Any, *, evict: bool = True) -> AsyncGenerator[Loading, None]:
        self.clock += 0.0 if folder.name in self.loaded else self.load_s
        async with aclosing(super().loading(folder, evict=evict)) as steps:
            async for step in steps:
                yield step

    async def score(self, folder: Any, score: Score, *, evict: bool) -> AsyncGenerator[Any, None]:
        assert score.profile == LONG_PROFILE
        n = estimate_tokens(score.text)
        self.clock += self.scorer.total(15.4 / 30, range(n), MEASURED_TOKENS)
        async with aclosing(super().score(folder, score, evict=evict)) as steps:
            async for step in steps:
                yield replace(step, profile=score.profile) if isinstance(step, Scored) else step

    async def stream(self, folder: Any, request: Generate) -> AsyncGenerator[Any, None]:
        self.clock += self.target.total(1.0, range(estimate_tokens(text_of(request))), MEASURED_TOKENS)
        async with aclosing(super().stream(folder, request)) as steps:
            async for step in steps:
                yield step


LONG_PROFILE = Profile([(0, 0)], 16, True, 30)


async def test_the_first_prompt_of_a_scorer_takes_what_was_planned(home: Any) -> None:
    """Nothing of the scorer is known but its profile: it is loaded, and priced as its load measured it."""
    this = home(Profiles({DIGEST: LONG_PROFILE}), pool=CountedPool(loaded=["m"]))
    pool = this.pool
    measured = 256 / pool.scorer.total(1.0, range(256), 256), pool.scorer.context_s, pool.scorer.fixed_s
    pool.facts = replace(
        FACTS,
        prefill_tok_s=measured[0],
        prefill_context_s=measured[1],
        prefill_fixed_s=measured[2],
    )
    target = 256 / pool.target.total(1.0, range(256), 256), 10.0, pool.target.context_s, pool.target.fixed_s
    this.speeds.seed("m", *target)
    told = await this.told(chat(haystack(400)))
    assert told.used
    (trace,) = this.traces
    assert trace.chosen.kind == "smart"
    assert trace.prefill_s == pytest.approx(trace.chosen.predicted_s, rel=0.1)
    # Loading came before the plan, and is in what the client waited for.
    assert trace.ttft_s == pytest.approx(pool.load_s + trace.prefill_s)


async def test_a_scorer_that_proves_slow_when_loaded_is_not_asked(home: Any) -> None:
    this = home(loaded=["m"])
    this.speeds.seed("m", 2 * FACTS.prefill_tok_s, 100.0, now_s=0.0)
    assert (await this.told(chat())).code == "slower"
    assert this.pool.loaded == ["m", SCORER]
    assert not this.pool.scores


# ---- For people ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "scorer_tok_s", "code"),
    [(8000, 2000.0, ""), (8000, 20.0, "slower"), (300, 2000.0, "short")],
)
async def test_what_would_be_done_is_told_with_its_price(
    home: Any, tokens: int, scorer_tok_s: float, code: str
) -> None:
    this = home()
    this.speeds.seed("m", 100.0, 10.0, now_s=0.0)
    this.speeds.seed("smollm2-135m", scorer_tok_s, 100.0, now_s=0.0)
    local = OptionView("local", ["this"], tokens / 100, chosen=True)
    view = await this.smart.plan(PlanView("m", tokens, 0, [local]), 0.2, this.models.resolve("m"), ASKED)
    found = {option.kind: option for option in view.options}
    assert found["smart"].code == code
    assert bool(found["smart"].reason) == bool(code)
    assert found["smart"].chosen == (not code)
    assert found["local"].chosen == bool(code)
    if not code:
        assert view.options[0].kind == "smart"
        assert found["smart"].predicted_s == pytest.approx(sum(s.seconds for s in found["smart"].steps))
        assert 3 < local.predicted_s / found["smart"].predicted_s < 5
    assert not this.pool.scores


async def test_without_a_compressor_a_plan_says_so(home: Any) -> None:
    this = home()
    this.models.found = folders(*["m"])
    view = await this.smart.plan(PlanView("m", 8000, 0, []), 0.0, this.models.resolve("m"), ASKED)
    (option,) = view.options
    assert (option.code, option.predicted_s) == ("no_compressor", None)
