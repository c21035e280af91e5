"""Jobs with images in the daemon: which machines are asked, what is estimated, and what is left to one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import FakeFolder, FakeModels, FakePool, answer
from member_cards import OWN, collect, machine, spoken
from msgspec.structs import replace
from peer_streams import FakeOthers, FakeStream
from runners import runner_over
from virtual_loop import VirtualLoop

from fleetd.engine.protocol import (
    IMAGES,
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Prefill,
    Timings,
    Usage,
)
from fleetd.errors import NotFound, UnsupportedParameter
from fleetd.models.model_names import ModelNames
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.answering_machines import AnsweringMachines
from fleetd.requests.job import CHARS_PER_TOKEN, IMAGE_TOKENS, Job, prompt_text
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.placement.placement import Placer
from fleetd.requests.remote import messages
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill.shortened_prompts import plain
from fleetd.storage.store import Store

WHOLE = spoken(*answer())


def job(content: str = "What is this?", at: int = 0, file: bytes = b"a file" * 5000) -> Job:
    prompt = ChatPrompt([{"role": "user", "content": content, IMAGES: [(at, file)]}])
    return Job("big", Generate("r1", prompt, max_tokens=10), "http", "chat")


def text_job() -> Job:
    prompt = ChatPrompt([{"role": "user", "content": "x" * 4000}])
    return Job("big", Generate("r1", prompt, max_tokens=10), "http", "chat")


class SlowStream(FakeStream):
    """Each event takes half a second."""

    async def receive(self) -> bytes | None:
        await asyncio.sleep(0.5)
        return await super().receive()


class SlowOthers(FakeOthers):
    def request(self, node_id: str, method: str, body: bytes) -> FakeStream:
        return SlowStream(super().request(node_id, method, body).script)


def runner(
    others: FakeOthers, store: Store, monotonic: Callable[[], float] = time.monotonic
) -> RequestRunner:
    members = Members(others.machines, lambda: OWN)
    return runner_over(
        FakePool(answer()),
        FakeModels(names=[]),
        Ledger(store),
        Metrics("0"),
        names=ModelNames("big"),
        placer=Placer(members, others.request, wake=others.wake),
        members=members,
        record=lambda trace: None,
        monotonic=monotonic,
    )


async def test_only_machines_whose_version_knows_images_are_asked(store: Store) -> None:
    others = FakeOthers(
        machine("old", images=True),
        machine("studio", images=True),
        old=[[NotFound("unknown")]],
        studio=[WHOLE],
    )
    await collect(runner(others, store).run(job()))
    assert (others.order, others.methods) == (["old", "studio"], ["job.run_seen"] * 2)


async def test_a_model_for_text_elsewhere_is_not_sent_images(store: Store) -> None:
    others = FakeOthers(machine("studio"))
    with pytest.raises(UnsupportedParameter, match=r"big reads text only.* studio says so"):
        await collect(runner(others, store).run(job()))
    assert others.order == []


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("unaided", [False, True])
def test_methods_name_all_that_a_machine_has_to_know(held: bool, unaided: bool) -> None:
    request = job().request
    if held:
        request = replace(request, prompt=replace(request.prompt, strict_tools={"look": ""}))
    name = messages.method(request, unaided=unaided)
    assert name == "job.run_seen" + "_held" * held + "_unaided" * unaided
    assert messages.METHODS[name] is unaided


@pytest.mark.parametrize("images", [True, False])
async def test_the_time_that_an_image_takes_teaches_no_speed(store: Store, images: bool) -> None:
    usage, timings = Usage(prompt_tokens=1000, completion_tokens=101), Timings(prefill_s=9.0, decode_s=1.0)
    speeds, folder = ModelSpeeds(), FakeFolder("big", images=True)
    here = runner_over(
        FakePool([Accepted("r1", 1000), Finished("r1", "stop", usage, timings)]),
        FakeModels(names=["big"], found=[folder]),
        Ledger(store),
        Metrics("0"),
        names=ModelNames("big"),
        speeds=speeds,
    )
    await collect(here.run(job() if images else text_job()))
    assert (speeds.of("big").prefill_tok_s == 0) is images
    assert speeds.of("big").decode_tok_s == pytest.approx(100)


@pytest.mark.parametrize("images", [True, False])
def test_the_time_that_an_image_takes_elsewhere_makes_no_machine_seem_slow(
    store: Store, images: bool
) -> None:
    read = [Prefill("r1", done, 1000) for done in range(0, 1000, 20)]
    ended = Finished("r1", "stop", Usage(1000, 0, 1), Timings())
    told = [Accepted("r1", 1000), *read, Delta("r1", "a"), ended]
    there = machine("studio", images=True)
    idle = replace(there, card=replace(there.card, max_streams=16))
    others = SlowOthers(idle, studio=[spoken(*told)])

    async def ask() -> float:
        asked = runner(others, store, asyncio.get_running_loop().time)
        await collect(asked.run(job() if images else text_job()))
        return asked._members.correction("studio", "d", PrefillSpeed(0.01), "prefill")

    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        factor = loop.run(ask())
    assert (factor > 1) is not images


@pytest.mark.parametrize("images", [True, False])
def test_who_leaves_while_an_image_is_read_says_nothing_of_the_machine(images: bool) -> None:
    late = list[str]()
    answering = AnsweringMachines(
        cast("Any", SimpleNamespace(late=lambda node_id, work: late.append(node_id))), monotonic=lambda: 100.0
    )
    request = SimpleNamespace(
        answering=False,
        job=job() if images else text_job(),
        placement=SimpleNamespace(node_id="studio", asleep=False),
        attempt=SimpleNamespace(began_s=0.0),
    )
    answering._given_up(cast("Any", request), cast("Any", SimpleNamespace(busy=False, prefill_s=1.0)))
    assert late == ([] if images else ["studio"])


def test_an_image_counts_as_tokens_and_not_as_bytes() -> None:
    small, large = job(file=b"x"), job(file=b"x" * 10**6)
    assert len(small.prompt_text) == len(large.prompt_text)
    text = Job(
        "big", Generate("r1", ChatPrompt([{"role": "user", "content": "What is this?"}])), "http", "chat"
    )
    more = len(small.prompt_text) - len(text.prompt_text)
    assert more == IMAGE_TOKENS * CHARS_PER_TOKEN


def test_what_was_read_of_one_image_is_nothing_of_another() -> None:
    """Machines are known to have what they were asked before, by the text."""

    def asked(file: bytes, *more: dict[str, object]) -> str:
        first = {"role": "user", "content": "Look: what?", IMAGES: [(5, file)]}
        return prompt_text(Generate("r", ChatPrompt([first, *more])))

    def common(a: str, b: str) -> str:
        return a[: next(at for at, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1)]

    one, other = asked(b"a file" * 5000), asked(b"b file" * 5000)
    assert len(one) == len(other)
    assert common(one, other).endswith("Look:")
    later = asked(b"a file" * 5000, {"role": "assistant", "content": "A cat."})
    assert common(one, later).endswith(" what?'}")


def test_images_in_another_form_are_left_to_the_worker() -> None:
    for content, images in (("Look", "no list"), (["Look"], [(0, b"a file")])):
        message = {"role": "user", "content": content, IMAGES: images}
        assert "Look" in prompt_text(Generate("r", ChatPrompt([message])))


def test_marks_that_only_selection_understands_move_no_image() -> None:
    content = "Look: <fleet:keep>closely</fleet:keep> at this"
    request = plain(job(content, at=content.index(" at")).request)
    assert isinstance(request.prompt, ChatPrompt)
    (message,) = request.prompt.messages
    ((at, _),) = message[IMAGES]
    assert message["content"][at:] == " at this"


def test_images_reach_another_machine_as_they_are() -> None:
    sent = messages.RunJob("big", job().request, "chat")
    again = messages.decode_run(messages.encode(sent))
    assert isinstance(again.request.prompt, ChatPrompt)
    assert again.request.prompt.messages[0][IMAGES] == [[0, b"a file" * 5000]]
