"""Two real daemons divide the layers of a model between them: the ring goes through their sealed tunnels."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet
from sharing import LAYERS, write
from test_live_groups import request

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

MODEL = "divided"
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "float32", "FLEETD_ENGINE_THREADS": "1"}
QUESTIONS = ("one", "two", "three", "a longer question than the others")


@pytest.fixture(scope="module")
def pair(short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    folder = short_dir / MODEL
    folder.mkdir()
    write(folder)
    names = ("alpha", "beta")
    with LiveFleet(
        short_dir / "ranks",
        {name: [folder] for name in names},
        settings=dict.fromkeys(names, COMMON),
        programs=programs,
    ) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", MODEL)
        fleet.until_has("beta", "alpha", MODEL)
        yield fleet


def answer(daemon: LiveDaemon, question: str, *, tokens: int = 12, after: Any = None, **fields: Any) -> str:
    text, pieces = "", 0
    with daemon.stream(MODEL, question, max_tokens=tokens, temperature=0, **fields) as events:
        for event in events:
            assert "error" not in event, event
            text += text_of(event)
            pieces += bool(text_of(event))
            if after is not None and pieces == 3:
                after()
                after = None
    return text


def load(daemon: LiveDaemon, *split: str) -> str:
    """What fleetctl says."""
    done = daemon.fleetctl("models", "load", MODEL, "--on", "this,beta", *split)
    return done.stdout + done.stderr


def ranks(daemon: LiveDaemon) -> list[dict[str, Any]]:
    """The workers that are ranks of another machine's model."""
    return [engine for engine in daemon.status()["engines"] if engine["part_of"] == MODEL]


def test_a_divided_model_answers_as_the_whole_one_and_says_so(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    right = [answer(alpha, question) for question in QUESTIONS]
    assert "is loaded on" in load(alpha, "--split", "tensors")
    assert len(ranks(pair["beta"])) == 1
    assert (
        "divided: part 2 of 2 of every layer, asked by alpha; links sealed"
        in pair["beta"].fleetctl("status").stdout
    )
    assert "a part of every layer here and on beta; links sealed" in alpha.fleetctl("status").stdout
    assert [answer(alpha, question) for question in QUESTIONS] == right
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        assert list(threads.map(lambda question: answer(alpha, question), QUESTIONS)) == right
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    status, headers, _ = request(alpha, asked)
    assert status == 200
    assert headers["X-Fleet-Plan"] == "group; nodes=this,beta"
    assert headers["X-Fleet-Exactness"] == "equivalent"


def test_both_ways_are_priced_and_a_load_that_names_none_takes_the_faster_and_says_why(
    pair: LiveFleet,
) -> None:
    alpha = pair["alpha"]
    assert "is loaded on" in load(alpha, "--split", "tensors")
    # The ring has measured a sum, by which it is priced from now on.
    until(lambda: planned(alpha)["measured"], 30)
    divided = planned(alpha)
    assert divided["sum_s"] > 0
    assert divided["sums"] == 2 * LAYERS
    shown = alpha.fleetctl("plan", "-m", MODEL, "--on", "this,beta").stdout
    assert "tensors" in shown
    assert "(measured)" in " ".join(shown.split())
    said = load(alpha)
    assert "is loaded on" in said
    assert "With a part of every layer each, a token takes" in said
    assert any(each["ranks"] for each in ranks(pair["beta"])) == divided["chosen"]


def planned(daemon: LiveDaemon) -> dict[str, Any]:
    """What it would be like if both machines divided every layer."""
    shown = daemon.fleetctl("plan", "-m", MODEL, "--on", "this,beta", "--json").stdout
    found: dict[str, Any] = json.loads(shown)["group"]["divided"]
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_another_way_when_a_rank_is_gone_or_stopped(pair: LiveFleet, number: int) -> None:
    alpha = pair["alpha"]
    # Without drafts, which could end the answer before the rank is gone.
    asked = {"tokens": 40, "speculate": {"enabled": False}}
    right = answer(alpha, QUESTIONS[0], **asked)
    assert "is loaded on" in load(alpha, "--split", "tensors")
    (rank,) = ranks(pair["beta"])
    pid = int(rank["pid"])
    assert answer(alpha, QUESTIONS[0], after=lambda: os.kill(pid, number), **asked) == right
    until(lambda: not ranks(pair["beta"]), 60)
    # A process that is stopped ends with the second signal, and the daemon does not show it any more by then.
    until(lambda: not psutil.pid_exists(pid), 60)


def test_over_a_link_that_both_owners_call_private_ranks_go_unsealed_and_status_says_so(
    short_dir: Path, programs: Programs, tmp_path: Path
) -> None:
    folder = tmp_path / MODEL
    folder.mkdir()
    write(folder)
    names = ("alpha", "beta")
    private = {**COMMON, "FLEETD_FLEET_PLAIN_LINKS": "127.0.0.0/8"}
    with LiveFleet(
        short_dir / "plain",
        {name: [folder] for name in names},
        settings=dict.fromkeys(names, private),
        programs=programs,
    ) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", MODEL)
        fleet.until_has("beta", "alpha", MODEL)
        alpha = fleet["alpha"]
        right = answer(alpha, QUESTIONS[0])
        assert "is loaded on" in load(alpha, "--split", "tensors")
        assert answer(alpha, QUESTIONS[0]) == right
        for daemon in (alpha, fleet["beta"]):
            assert "; links plain" in daemon.fleetctl("status").stdout
        told = " ".join(alpha.fleetctl("doctor").stdout.split())
        assert re.search(r"divided models may go unsealed to beta .*over 127\.0\.0\.0/8", told), told


def test_machines_that_divide_layers_have_to_be_named(pair: LiveFleet) -> None:
    done = pair["alpha"].fleetctl("models", "load", MODEL, "--split", "tensors")
    assert done.returncode == 2
    assert "--on this,studio --split tensors" in done.stderr
