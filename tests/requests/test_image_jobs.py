"""Jobs with images in the daemon: which machines are asked, what is estimated, and what is left to one."""

from __future__ import annotations

import time

import pytest
from fakes import FakeModels, FakePool, answer
from member_cards import OWN, collect, machine, spoken
from msgspec.structs import replace
from peer_streams import FakeOthers
from runners import runner_over

from fleetd.engine.protocol import IMAGES, ChatPrompt, Generate
from fleetd.errors import NotFound, UnsupportedParameter
from fleetd.models.model_names import ModelNames
from fleetd.requests.job import CHARS_PER_TOKEN, IMAGE_TOKENS, Job
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


def runner(others: FakeOthers, store: Store) -> RequestRunner:
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
        monotonic=time.monotonic,
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


def test_an_image_counts_as_tokens_and_not_as_bytes() -> None:
    small, large = job(file=b"x"), job(file=b"x" * 10**6)
    assert len(small.prompt_text) == len(large.prompt_text)
    text = Job(
        "big", Generate("r1", ChatPrompt([{"role": "user", "content": "What is this?"}])), "http", "chat"
    )
    more = len(small.prompt_text) - len(text.prompt_text)
    assert more == IMAGE_TOKENS * CHARS_PER_TOKEN


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
