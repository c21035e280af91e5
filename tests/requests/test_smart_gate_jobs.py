"""When a prompt stays whole: decided before anything is loaded or scored, and told at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace
from smart_fakes import (
    QUESTION,
    SCORER,
    chat,
    haystack,
    messages,
)
from smart_home import ASKED, SmartHome, maker, text_of
from timelines import check_steps

from fleetd.compression.document import Document
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.engine.protocol import (
    ChatPrompt,
    Generate,
    Loading,
)
from fleetd.errors import EngineDied, OutOfMemory
from fleetd.requests.job import Job, Planned
from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.requests.smart_prefill.compression_job import (
    CompressionJob,
)
from fleetd.storage.store import Store


@pytest.fixture
def home(store: Store, ledger: Ledger, metrics: Metrics) -> Callable[..., SmartHome]:
    return maker(store, ledger, metrics)


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
    # The plan is what a stream's headers say, which leave with the first progress.
    assert [type(event) for event in events[:2]] == [Planned, Loading]
    # The scorer too, before it is priced.
    assert (this.pool.loads, len(this.pool.scores)) == (["m", SCORER], 1)


async def test_a_text_that_is_always_kept_is_not_scored(home: Any) -> None:
    """A document in the system prompt: scoring it would be for nothing, and it is said at once."""
    this = home(loaded=[])
    asked = [{"role": "system", "content": haystack()}, {"role": "user", "content": QUESTION}]
    events = await this.ask(Generate("r1", ChatPrompt(asked)))
    assert isinstance(events[0], Planned)
    assert events[0].smart is not None
    assert events[0].smart.code == "declined"
    assert events[0].smart.reason.endswith("tokens are always kept")
    assert (this.pool.loads, this.pool.scores) == ([], [])
    assert text_of(this.pool.asked[0]) == f"{haystack()}\n{QUESTION}"


@pytest.mark.parametrize(("role", "code"), [("user", ""), ("system", "slower")])
async def test_what_is_always_kept_is_priced(home: Any, role: str, code: str) -> None:
    """Three fifths of the text are kept as a system prompt, a fifth of them as a user's."""
    this = home()
    this.speeds.seed("m", MeasuredSpeed(500.0, 20.0), now_s=0.0)
    this.speeds.seed(SCORER, MeasuredSpeed(500.0, 20.0), now_s=0.0)
    asked = [
        {"role": role, "content": haystack(120)},
        {"role": "user", "content": haystack(80)},
        {"role": "user", "content": QUESTION},
    ]
    assert (await this.told(Generate("r1", ChatPrompt(asked)))).code == code
    assert bool(this.pool.scores) == (not code)


async def test_a_later_turn_that_is_always_kept_is_not_scored_either(home: Any) -> None:
    this = home()
    assert (await this.told(chat())).used
    said = {"role": "assistant", "content": "4711"}
    told = {"role": "developer", "content": haystack(180)}
    later = [*messages(), said, told, {"role": "user", "content": QUESTION}]
    assert (await this.told(Generate("r2", ChatPrompt(later)))).used
    assert len(this.pool.scores) == 1
    assert haystack(180) in text_of(this.pool.asked[1])
    assert len(text_of(this.pool.asked[1])) < 1.5 * len(haystack(180))


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
    this.speeds.seed("m", MeasuredSpeed(10_000.0, 100.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(100.0, 100.0), now_s=0.0)
    told = await this.told(chat())
    assert told.code == "slower"
    assert " s; all of it takes " in told.reason
    assert not this.pool.scores


async def test_who_leaves_ends_the_scoring(home: Any) -> None:
    this = home(trouble=[asyncio.Event()])
    job = Job("m", chat(), "socket", "chat", smart=ASKED)
    events = this.runner.run(job)
    while not this.pool.scores:
        await anext(events)
    await events.aclose()
    assert this.pool.cancelled_scores == 1
    assert not this.pool.asked
    assert {row[2:4] for row in this.rows() if row[0] == "score"} == {("refunded", "cancelled")}


async def test_dense_and_shortened_prompts_do_not_disturb_each_other(home: Any) -> None:
    this = home(sparse="", kept=20)
    this.speeds.seed("m", MeasuredSpeed(100.0, 100.0), now_s=0.0)
    this.speeds.seed("smollm2-135m", MeasuredSpeed(10_000.0, 100.0), now_s=0.0)
    # What was read whole is in memory, and would be read whole again.
    prompts = [chat(f"Log {n % 2}.\n\n{haystack()}", request_id=f"r{n}") for n in range(6)]
    asked = [this.ask(prompt, ASKED if n % 2 else None) for n, prompt in enumerate(prompts)]
    for n, events in enumerate(await asyncio.gather(*asked)):
        planned = [event for event in events if isinstance(event, Planned)][-1]
        assert (planned.smart is not None and planned.smart.used) == bool(n % 2)
    for sent in this.pool.asked:
        assert (sent.keep is not None) == bool(int(sent.id[1:]) % 2)


async def test_what_was_done_is_written_down(home: Any) -> None:
    this = home()
    await this.told(chat())
    (trace,) = this.traces
    assert (trace.chosen.kind, trace.outcome, trace.exactness) == ("smart", "smart", "lossy")
    parents = {step.name: trace.steps[step.parent].name for step in trace.steps if step.parent is not None}
    assert parents["scored"] == "reading"
    assert {"prefilled", "decoded"} <= parents.keys()
    check_steps(trace)
    assert trace.ttft_s is not None


async def test_where_there_was_no_room_it_is_not_tried_again_at_once(home: Any) -> None:
    this = home(trouble=[OutOfMemory("No room.")], loaded=["m"], room=False)
    assert (await this.told(chat())).code == "out_of_memory"
    assert (await this.told(chat())).code == "no_compressor"
    assert len(this.pool.scores) == 1


PASTED = haystack()


async def test_a_chat_that_asks_nothing_stays_whole_unless_that_is_asked_for(home: Any) -> None:
    this = home()
    request = Generate("r1", ChatPrompt([{"role": "user", "content": PASTED}]))
    assert (await this.told(request)).code == "declined"
    assert not this.pool.scores
    this = home()
    told = await this.told(request, replace(ASKED, without_question=True))
    assert (told.form, told.scored) == ("text", "without question")
    (score,) = this.pool.scores
    assert (score.without_question, score.questions) == (True, [])
    assert len(text_of(this.pool.asked[-1])) < 0.5 * len(PASTED)


async def test_a_task_beside_a_text_that_is_scored_without_it_is_kept(home: Any) -> None:
    this = home()
    request = Generate("r1", ChatPrompt([{"role": "user", "content": f"{PASTED}\n\nSum it all up, please."}]))
    assert (await this.told(request)).code == "declined"
    this = home()
    told = await this.told(request, replace(ASKED, without_question=True))
    assert told.scored == "without question"
    assert text_of(this.pool.asked[-1]).endswith("Sum it all up, please.")
    assert (await home().told(chat())).scored == "by question"
