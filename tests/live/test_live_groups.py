"""A model that fits no machine: two real daemons hold it together, each within a budget below its size."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

from fleetd.models.memory_need import WORKING_BYTES

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

DEEP = "deep"
NAMES = ("alpha", "beta")
#: Its weights take 19 MB in int8.
BUDGET_BYTES = WORKING_BYTES + 17_000_000
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}
STORY = "Write a long story about a fox."
QUESTIONS = ("What is 2+2?", "Name three colours.", "Say hello.", STORY)


@pytest.fixture(scope="module")
def pair(deep_model: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    settings = {name: {**COMMON, "FLEETD_ENGINE_MAX_MEMORY_BYTES": str(BUDGET_BYTES)} for name in NAMES}
    models = {name: [deep_model] for name in NAMES}
    with LiveFleet(short_dir / "groups", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", DEEP)
        # Before a machine knows what its own files are, it asks nobody to hold a part.
        fleet.until_has("beta", "alpha", DEEP)
        yield fleet


@pytest.fixture(scope="module")
def expected(deep_model: Path, short_dir: Path, programs: Programs) -> dict[str, str]:
    """What one machine says that holds the whole model."""
    with LiveFleet(
        short_dir / "whole", {"whole": [deep_model]}, settings={"whole": COMMON}, programs=programs
    ) as fleet:
        return {question: answer(fleet["whole"], question) for question in QUESTIONS}


def answer(
    daemon: LiveDaemon, question: str, *, after: tuple[int, Callable[[], None]] | None = None, **fields: Any
) -> str:
    """``after``: what is done once so many pieces of the answer came."""
    text, pieces = "", 0
    with daemon.stream(DEEP, question, max_tokens=40, **{"temperature": 0, **fields}) as events:
        for event in events:
            assert "error" not in event, event
            text += text_of(event)
            pieces += bool(text_of(event))
            if after is not None and pieces == after[0]:
                after[1]()
    return text


def engines(daemon: LiveDaemon) -> list[dict[str, Any]]:
    return list(daemon.status()["engines"])


def member_pid(fleet: LiveFleet) -> int:
    """The worker of beta's layers."""
    (found,) = [engine for engine in engines(fleet["beta"]) if engine["part_of"] == DEEP]
    return int(found["pid"])


def test_a_model_that_fits_neither_answers_as_one_that_fits(
    pair: LiveFleet, expected: dict[str, str]
) -> None:
    assert {question: answer(pair["alpha"], question) for question in QUESTIONS} == expected
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        together = list(threads.map(lambda question: answer(pair["alpha"], question), QUESTIONS))
    assert together == list(expected.values())
    seeded = [answer(pair["alpha"], STORY, temperature=1.0, seed=7) for _ in range(2)]
    assert seeded[0] == seeded[1] != expected[STORY]


def test_who_holds_which_layers_is_told(pair: LiveFleet) -> None:
    answer(pair["alpha"], QUESTIONS[0])
    (front,) = engines(pair["alpha"])
    (held,) = front["members"]
    (part,) = [engine for engine in engines(pair["beta"]) if engine["part_of"] == DEEP]
    assert (held["name"], held["first"], held["last"]) == ("beta", part["first_layer"], part["last_layer"])
    for engine in (front, part):
        assert engine["memory_bytes"] < BUDGET_BYTES / 2
    asked = {"model": DEEP, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    status, headers, _ = request(pair["alpha"], asked)
    assert status == 200
    assert headers["X-Fleet-Plan"] == "group; nodes=this,beta"
    assert headers["X-Fleet-Exactness"] == "exact"


def test_an_answer_goes_on_when_a_member_falls_silent(pair: LiveFleet, expected: dict[str, str]) -> None:
    answer(pair["alpha"], QUESTIONS[0])
    lost = member_pid(pair)
    # Soon and without drafts: the answer is not over before that, however late this is noticed here.
    after = 2, lambda: os.kill(lost, signal.SIGSTOP)
    assert answer(pair["alpha"], STORY, after=after, speculate={"enabled": False}) == expected[STORY]
    assert member_pid(pair) != lost


def test_without_the_other_machine_it_says_what_is_missing(pair: LiveFleet) -> None:
    answer(pair["alpha"], QUESTIONS[0])
    pair["beta"].stop()
    asked = {"model": DEEP, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}

    def refused() -> bool:
        status, _, body = request(pair["alpha"], asked)
        return status >= 500 and json.loads(body)["error"]["code"] == "out_of_memory"

    until(refused, 60)
    assert engines(pair["alpha"])[0]["state"] == "failed"
    pair.revive()
    pair.until_usable()
    pair.until_has("alpha", "beta", DEEP)
    until(lambda: request(pair["alpha"], asked)[0] == 200, 60)


def request(daemon: LiveDaemon, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    import http.client

    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"},
    )
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found
