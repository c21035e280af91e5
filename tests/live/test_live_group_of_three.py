"""A model over three real daemons: hidden states go from member to member, and whichever of them is lost, the
answer is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

DEEP = "deep"
NAMES = ("alpha", "beta", "gamma")
ALL = ["this", "beta", "gamma"]
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}
STORY = "Write a long story about a fox."
QUESTIONS = ("What is 2+2?", "Name three colours.", STORY)


@pytest.fixture(scope="module")
def three(deep_model: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    models = {name: [deep_model] for name in NAMES}
    settings = dict.fromkeys(NAMES, COMMON)
    with LiveFleet(short_dir / "hops", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        for name in NAMES[1:]:
            fleet.until_has("alpha", name, DEEP)
        # Before a machine knows what its own files are, it asks nobody to hold a part.
        fleet.until_has("beta", "alpha", DEEP)
        yield fleet


@pytest.fixture(scope="module")
def expected(three: LiveFleet) -> dict[str, str]:
    """What alpha says with the whole model."""
    return {question: answer(three["alpha"], question, over=["this"]) for question in QUESTIONS}


def answer(
    daemon: LiveDaemon,
    question: str,
    *,
    over: list[str] | None = None,
    after: tuple[int, Callable[[], None]] | None = None,
    **fields: Any,
) -> str:
    """``after``: what is done once so many pieces of the answer came."""
    text, pieces = "", 0
    fixed = {"max_tokens": 40, "temperature": 0, "placement": ALL if over is None else over}
    with daemon.stream(DEEP, question, **{**fixed, **fields}) as events:
        for event in events:
            assert "error" not in event, event
            text += text_of(event)
            pieces += bool(text_of(event))
            if after is not None and pieces == after[0]:
                after[1]()
    return text


def worker(daemon: LiveDaemon) -> int:
    """The process that has its layers of the model."""
    (found,) = [engine for engine in daemon.status()["engines"] if engine["part_of"] == DEEP]
    return int(found["pid"])


def linked(one: int, other: int) -> bool:
    """True if a connection has its ends in these two processes."""
    ends = {(each.laddr, each.raddr) for each in psutil.Process(one).net_connections("tcp") if each.raddr}
    others = psutil.Process(other).net_connections("tcp")
    return any((each.raddr, each.laddr) in ends for each in others)


def test_three_machines_answer_as_one_and_send_to_each_other(
    three: LiveFleet, expected: dict[str, str]
) -> None:
    alpha, beta, gamma = three
    assert {question: answer(alpha, question) for question in QUESTIONS} == expected
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        together = list(threads.map(lambda question: answer(alpha, question), QUESTIONS))
    assert together == list(expected.values())
    (front,) = alpha.status()["engines"]
    # Which of two equal machines comes first is by their ids.
    names = [held["name"] for held in front["members"]]
    assert sorted(names) == ["beta", "gamma"]
    assert not any(held["relayed"] for held in front["members"])
    assert linked(worker(beta), worker(gamma))
    assert linked(front["pid"], worker({"beta": beta, "gamma": gamma}[names[-1]]))
    trace = alpha.control("GET", "/fleet/v1/traces?last=1")["traces"][0]
    stages = trace["stages"]
    assert [stage.get("name", "") for stage in stages] == ["", *names]
    assert all(stage["steps"] for stage in stages)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", NAMES[1:])
def test_an_answer_goes_on_whichever_member_is_lost(
    three: LiveFleet, expected: dict[str, str], name: str, number: int
) -> None:
    alpha = three["alpha"]
    answer(alpha, QUESTIONS[0])
    lost = worker(three[name])
    # Soon and without drafts: the answer is not over before that, however late this is noticed here.
    text = answer(alpha, STORY, after=(2, lambda: os.kill(lost, number)), speculate={"enabled": False})
    assert text == expected[STORY]
    assert worker(three[name]) != lost


def test_nothing_is_left_of_a_group_of_three(three: LiveFleet) -> None:
    alpha, beta, gamma = three
    answer(alpha, QUESTIONS[0])
    alpha.control("POST", "/fleet/v1/models/unload", {"model": DEEP})
    for daemon in (beta, gamma):
        until(lambda daemon=daemon: not daemon.status()["engines"], 30)
