"""Smart prefill of one request: what reaches the engine, what is told and billed; and that it fails none."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeFolder
from msgspec.structs import replace
from smart_fakes import (
    NEEDLE,
    QUESTION,
    SCORER,
    ScoringPool,
    chat,
    completion,
    folders,
    haystack,
    messages,
)
from smart_home import ASKED, WITHIN_S, SmartHome, maker, target, text_of

from fleetd import limits
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.compression.selection import Selection
from fleetd.compression.words import estimate_tokens
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_plan import OptionView, PlanView
from fleetd.engine.protocol import (
    IMAGES,
    Accepted,
    ChatPrompt,
    Delta,
    Generate,
    Loading,
    Tokenized,
    TokenPrompt,
)
from fleetd.errors import EngineDied, EngineStalled, OutOfMemory, Overloaded
from fleetd.plan.beginnings import KeptBeginning
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import LOCAL, Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement.placement import Placement, PromptPlaces
from fleetd.requests.smart_prefill import compression_job
from fleetd.requests.smart_prefill.compression_job import (
    USUAL_RATIO,
    kept_share,
)
from fleetd.storage.store import Store


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Callable[..., SmartHome]:
    return maker(store, ledger, metrics)


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
    (trace,) = this.traces
    assert (trace.outcome, trace.chosen.kind, trace.exactness) == ("local", "local", "exact")
    assert {"scored", "prefilled"}.isdisjoint(step.name for step in trace.steps)


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


async def test_the_same_prompt_has_the_same_tokens_when_it_comes_again(home: Any) -> None:
    """The second time it is not scored: what was decided is remembered, and what was counted with it."""
    this = home()
    first, second = await this.told(chat()), await this.told(chat(request_id="r2"))
    assert len(this.pool.scores) == 1
    assert first.used
    assert (second.original_tokens, second.compressed_tokens) == (
        first.original_tokens,
        first.compressed_tokens,
    )


async def test_where_it_runs_is_told_before_the_prompt_is_scored(home: Any) -> None:
    """The headers of a stream do not wait for scores, and promise only what will stand after them."""
    this, scoring = home(), asyncio.Event()
    this.pool.trouble = [scoring]
    async with (
        asyncio.timeout(WITHIN_S),
        aclosing(this.runner.run(Job("m", chat(), "socket", "chat", smart=ASKED))) as events,
    ):
        assert await anext(events) == replace(LOCAL, exactness="lossy")
        assert isinstance(await anext(events), Loading)
        scoring.set()
        rest = [event async for event in events]
    (told,) = [event for event in rest if isinstance(event, Planned)]
    assert (str(told), told.smart.used) == (str(LOCAL), True)
    # What was expected is no plan that ran.
    assert this.shown('fleetd_plan_total{kind="local",reason="only"} 1.0')


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


async def test_a_turn_after_a_sparse_one_leaves_out_the_same_tokens(home: Any) -> None:
    """So it finds the keys of the first turn, and is not scored again."""
    this = home(sparse="", kept=20)
    assert (await this.told(chat())).form == "sparse"
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    following = Generate("r2", ChatPrompt([*messages(), *answered]))
    assert (await this.told(following)).form == "sparse"
    first, second = (sent.keep.parts for sent in this.pool.asked)
    assert second == first
    assert len(this.pool.scores) == 1


async def test_a_turn_that_fails_before_its_form_is_known_goes_on_sparsely_afterwards(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = home(sparse="", kept=20)
    assert (await this.told(chat())).form == "sparse"
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    sent = ChatPrompt([*messages(), *answered])

    def loading(*_: Any, **__: Any) -> Any:
        raise OutOfMemory("There is no room.")

    with monkeypatch.context() as patched:
        patched.setattr(this.pool, "loading", loading)
        assert (await this.told(Generate("r2", sent))).code == "out_of_memory"
    assert (await this.told(Generate("r3", sent))).form == "sparse"


async def test_marks_of_what_is_cached_lie_where_the_shortened_text_ends(home: Any) -> None:
    this, sent = home(), messages()
    ends = [(index, len(message["content"])) for index, message in enumerate(sent)]
    marks = [*ends, (1, 200)]
    assert (await this.told(Generate("r1", ChatPrompt(sent, cache_marks=marks)))).form == "text"
    prompt = this.pool.asked[0].prompt
    assert prompt.cache_marks == [ends[0], (1, len(prompt.messages[1]["content"])), ends[2]]


async def test_a_turn_after_one_as_text_is_text(home: Any) -> None:
    this = home()
    assert (await this.told(chat())).form == "text"
    this.pool.sparse = ""
    answered = [{"role": "assistant", "content": "4711"}, {"role": "user", "content": "Say the code again."}]
    following = Generate("r2", ChatPrompt([*messages(), *answered]))
    assert (await this.told(following)).form == "text"
    assert this.pool.asked[1].keep is None
    assert NEEDLE in text_of(this.pool.asked[1])


async def test_no_feature_wraps_the_stream_of_events(home: Any) -> None:
    """Between the pool and the client a token passes the attempts and the request, and nothing else."""
    this = home()
    passed: set[tuple[str, ...]] = set()
    stream = this.pool.stream

    async def watched(folder: Any, request: Generate, *over: Any) -> AsyncGenerator[Any, None]:
        async for event in stream(folder, request, *over):
            if isinstance(event, Delta):
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
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(2000.0, 20.0), now_s=0.0)
    local = OptionView("local", ["this"], 8.0, chosen=True)
    view = PlanView("m", 4000, 0, [local])
    plans = {
        mode: await this.smart.plan(view, 0.2, target(this), replace(ASKED, mode=mode))
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
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(3000.0, 20.0), now_s=0.0)
    assert (await this.told(chat(), replace(ASKED, **bounds))).code == code
    local = OptionView("local", ["this"], 8.0, chosen=True)
    view = await this.smart.plan(PlanView("m", 4000, 0, [local]), 0.2, target(this), replace(ASKED, **bounds))
    (smart,) = [option for option in view.options if option.kind == "smart"]
    assert smart.code == code


@pytest.mark.parametrize(
    ("policy", "pinned", "share"),
    [
        (SmartPrefillPolicy(), 0, USUAL_RATIO),
        (SmartPrefillPolicy(target_ratio=0.2), 0, 0.2),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=500), 0, 0.5),
        (SmartPrefillPolicy(target_ratio=0.2, max_keep_tokens=100), 0, 0.1),
        (SmartPrefillPolicy(target_ratio=0.2, min_keep_tokens=5000), 0, 1.0),
        (SmartPrefillPolicy(target_ratio=0.2), 100, 0.2),
        (SmartPrefillPolicy(target_ratio=0.2, max_keep_tokens=100), 700, 0.7),
    ],
)
def test_the_bounds_of_a_policy_and_what_is_pinned_decide_what_is_kept(
    policy: SmartPrefillPolicy, pinned: int, share: float
) -> None:
    assert kept_share(policy, 1000, pinned) == pytest.approx(share)


async def test_sparse_where_it_cannot_be_done_is_not_done(home: Any) -> None:
    this = home()
    told = await this.told(chat(), replace(ASKED, mode="sparse"))
    assert told.code == "no_form"
    assert this.pool.asked == [chat()]


@pytest.mark.parametrize(("context_tokens", "form"), [(100_000, "sparse"), (1000, "text")])
async def test_a_prompt_over_the_context_is_shortened_as_text(
    home: Any, context_tokens: int, form: str
) -> None:
    """Sparse, its last tokens would keep positions that the model does not have; as text it may fit."""
    this = home(sparse="", kept=20)
    this.models.found = [FakeFolder("m", context_tokens), *folders("smollm2-135m")]
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(3000.0, 20.0), now_s=0.0)
    assert (await this.told(chat())).form == form


@pytest.mark.parametrize(("tools", "form"), [(0, "sparse"), (200, "text")])
async def test_tools_have_a_part_in_the_context(home: Any, tools: int, form: str) -> None:
    this = home(sparse="", kept=20)
    document = estimate_tokens(text_of(chat()))
    this.models.found = [FakeFolder("m", document + 1000), *folders(SCORER)]
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(3000.0, 20.0), now_s=0.0)
    shown = [{"type": "function", "function": {"name": f"tool_{n}"}} for n in range(tools)]
    assert (await this.told(Generate("r1", ChatPrompt(messages(), tools=shown)))).form == form


async def test_a_prompt_that_no_machine_reads_whole_is_shortened_at_any_price(home: Any) -> None:
    this = home()
    this.models.found = [FakeFolder("m", 1000), *folders("smollm2-135m")]
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(60.0, 20.0), now_s=0.0)
    assert (await this.told(chat())).used


def surveyed(this: SmartHome, places: PromptPlaces) -> list[PromptPlaces]:
    """Let a machine find these places of every prompt. Returns those that each choice of a machine knew."""
    known: list[PromptPlaces] = []

    async def of_job(_job: Job, _model: str) -> PromptPlaces:
        return places

    def choose(_job: Job, _model: Any, *, places: PromptPlaces, **_: Any) -> Placement:
        known.append(places)
        return Placement(THIS_NODE, LOCAL)

    this.runner._survey = SimpleNamespace(of_job=of_job)  # type: ignore[assignment]
    this.runner._placer = SimpleNamespace(choose=choose)  # type: ignore[assignment]
    return known


async def test_what_machines_keep_of_a_prompt_is_known_after_it_was_not_shortened(home: Any) -> None:
    this, places = home(), {THIS_NODE: KeptBeginning(disk_tokens=4000)}
    known = surveyed(this, places)
    assert (await this.told(chat("short"))).code == "short"
    assert known == [places, places]


async def test_a_shortened_prompt_is_another_one_than_machines_keep(home: Any) -> None:
    this, places = home(), {THIS_NODE: KeptBeginning(disk_tokens=4000)}
    known = surveyed(this, places)
    assert (await this.told(chat())).used
    assert known == [places, {}]


@pytest.mark.parametrize("local_only", [False, True])
async def test_a_prompt_that_is_on_the_disk_is_read_from_there(home: Any, local_only: bool) -> None:
    this = home()
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
    surveyed(this, {THIS_NODE: KeptBeginning(disk_tokens=9000, n_bytes=10**6, bytes_per_s=1e9)})
    assert (await this.told(chat(), local_only=local_only)).code == "slower"
    assert not this.pool.scores


async def test_a_prompt_that_is_in_memory_is_read_whole(home: Any) -> None:
    """That takes no time, which is not the same as a time that nobody knows."""
    this = home()
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
    await this.ask(chat(), None)
    assert (await this.told(chat(request_id="r2"))).code == "slower"
    assert not this.pool.scores


async def test_as_much_of_a_prompt_is_in_memory_as_of_its_letters(home: Any) -> None:
    this = home(tokens_per_estimated=0.5)
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
    cached: list[float] = []

    def best_s(_target: Any, tokens: int, known: int, *_: Any) -> float:
        cached.append(known / tokens)
        return 0.0

    await this.ask(Generate("r1", ChatPrompt(messages(haystack(300, 90)[: len(haystack(200)) // 2]))), None)
    this.smart._best_s = best_s
    await this.told(chat(haystack(200, 90), request_id="r2"))
    assert 0.4 < cached[0] < 0.6


async def test_what_was_in_memory_before_a_load_is_not_counted_on(home: Any) -> None:
    this = home()
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
    await this.ask(chat(), None)
    assert (await this.told(chat(request_id="r2"))).code == "slower"
    this.pool.loaded.remove("m")
    assert (await this.told(chat(request_id="r3"))).used


@pytest.mark.parametrize("form", ["sparse", "text"])
async def test_what_is_kept_is_priced_with_the_help_of_others(home: Any, form: Any) -> None:
    this = home(sparse="", kept=20)
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(5000.0, 200.0), now_s=0.0)
    asked: list[tuple[int, int]] = []

    def best_s(_folder: Any, tokens: int, _cached: int, kept: int, _places: Any = None) -> float:
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


@pytest.mark.parametrize("form", ["sparse", "text"])
async def test_headers_do_not_leave_before_it_is_known_what_a_sparse_prompt_comes_to(
    home: Any, form: Any
) -> None:
    """A stream's headers leave with the first event, and say how many tokens are kept."""
    this = home(sparse="", kept=20)
    events = await this.ask(chat(), replace(ASKED, mode=form))
    first = next(event for event in events if not isinstance(event, Planned | Loading))
    assert isinstance(first, Accepted if form == "sparse" else Tokenized)


# ---- Falling through -------------------------------------------------------------------------------------


TROUBLE = {
    "crash": (EngineDied("The engine died."), "engine_died"),
    "stall": (EngineStalled("No progress."), "engine_stalled"),
    "memory": (OutOfMemory("No room."), "out_of_memory"),
    "bug": (KeyError("x"), "failed"),
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


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long scoring is waited for, whatever was planned."""
    monkeypatch.setattr(limits, "SMART_LATE", 0.0)
    monkeypatch.setattr(limits, "SMART_GRACE_S", seconds)


def late_scorer(home: Any) -> SmartHome:
    """Its scorer does not answer the first question, and an hour passes once that is asked."""
    pool = ScoringPool(trouble=[asyncio.Event()])
    made: SmartHome = home(None, pool, lambda: time.monotonic() + 3600.0 * bool(pool.scores))
    return made


async def test_scoring_that_takes_too_long_is_given_up(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, WITHIN_S)
    this = late_scorer(home)
    assert (await this.told(chat())).code == "timeout"
    assert this.pool.cancelled_scores == 1
    assert this.pool.asked == [chat()]


async def test_choices_wait_once_for_scoring_that_takes_too_long(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, 2.0)
    this = home(trouble=[asyncio.Event()])
    told = await asyncio.gather(*(this.told(chat(request_id=f"r{n}")) for n in range(4)))
    assert [each.code for each in told] == ["timeout"] * 4
    assert len(this.pool.scores) == this.pool.cancelled_scores == 1
    assert [row[2:4] for row in this.rows() if row[0] == "score"] == [("refunded", "timeout")]


async def test_the_next_request_does_not_lose_the_time_again(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, WITHIN_S)
    this = late_scorer(home)
    assert (await this.told(chat())).code == "timeout"
    assert (await this.told(chat())).code == "no_compressor"
    assert len(this.pool.scores) == 1
    # It is tried anew once that has passed.
    monkeypatch.setattr(limits, "BACKOFF_S", 0.0)
    this = late_scorer(home)
    # So fast that it pays though it is believed to be slower than it measured.
    this.speeds.seed("m", MeasuredSpeed(100.0, 100.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(10_000.0, 100.0), now_s=0.0)
    assert (await this.told(chat())).code == "timeout"
    # The first one was read whole, and is in memory.
    assert (await this.told(chat(f"Another log.\n\n{haystack()}"))).used


async def test_more_prompts_than_can_be_scored_at_once_are_all_answered(home: Any) -> None:
    gate, refuses = asyncio.Event(), asyncio.Event()
    # All of them have been planned before the first one is refused: what goes on then makes others slower.
    busy = [(refuses, Overloaded(f"{limits.SCORES} texts are being scored already."))] * 2
    this = home(trouble=[*[gate] * limits.SCORES, *busy])
    asked = [
        asyncio.create_task(this.told(chat(haystack(200, at=n), request_id=f"r{n}")))
        for n in range(limits.SCORES + len(busy))
    ]
    async with asyncio.timeout(WITHIN_S):
        while len(this.pool.scores) < len(asked):  # noqa: ASYNC110  (a fake's figure)
            await asyncio.sleep(0.01)
    refuses.set()
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
        (
            Generate("r1", ChatPrompt([{"role": "user", "content": "x" * 9000, IMAGES: [(0, b"x")]}])),
            "images",
        ),
    ],
)
async def test_some_prompts_are_not_for_shortening(home: Any, request_: Generate, code: str) -> None:
    this = home()
    this.models.found = [FakeFolder("m", images=True)]
    assert (await this.told(request_)).code == code
    assert this.pool.asked == [request_]
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
    this.speeds.seed("m", MeasuredSpeed(100.0, 10.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(scorer_tok_s, 100.0), now_s=0.0)
    local = OptionView("local", ["this"], tokens / 100, chosen=True)
    view = await this.smart.plan(PlanView("m", tokens, 0, [local]), 0.2, target(this), ASKED)
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
    view = await this.smart.plan(PlanView("m", 8000, 0, []), 0.0, target(this), ASKED)
    (option,) = view.options
    assert (option.code, option.predicted_s) == ("no_compressor", None)
