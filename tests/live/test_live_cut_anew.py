"""A model over two real daemons: how far its load is, and that it is cut anew if one turns out slow, with an
idle machine in its place if there is one."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import set_speeds
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

from fleetd.models.memory_need import WORKING_BYTES

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

DEEP = "deep"
#: Room for most layers beside keys and values: it is shared as it is asked for, and may be shared otherwise.
BUDGET_BYTES = 1_000_000_000
SETTINGS = {
    "FLEETD_ENGINE_CPU_ARITHMETIC": "int8",
    "FLEETD_ENGINE_THREADS": "1",
    "FLEETD_ENGINE_MAX_MEMORY_BYTES": str(BUDGET_BYTES),
    # Only plain steps are timed.
    "FLEETD_SPECULATION_MODE": "off",
}
STORY = "Write a long story about a fox."
# So many plain steps are enough for a machine to be measured by (``plan.measured_cut``).
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def steps(short_dir: Path) -> Path:
    """Where the seconds of a layer are set, by machine."""
    folder = short_dir / "steps"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def pair(deep_model: Path, short_dir: Path, steps: Path, programs: Programs) -> Iterator[LiveFleet]:
    settings = {name: {**SETTINGS, set_speeds.STEPS: str(steps)} for name in ("alpha", "beta")}
    models = {name: [deep_model] for name in settings}
    with LiveFleet(short_dir / "anew", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", DEEP)
        fleet.until_has("beta", "alpha", DEEP)
        yield fleet


OVER = ["this", "beta"]


def answer(daemon: LiveDaemon) -> str:
    with daemon.stream(DEEP, STORY, placement=OVER, max_tokens=ANSWER_TOKENS, temperature=0) as events:
        return "".join(text_of(event) for event in events)


def front(fleet: LiveFleet) -> dict[str, Any]:
    (found,) = fleet["alpha"].status()["engines"]
    return dict(found)


def cut(engine: dict[str, Any]) -> int:
    return int(engine["members"][0]["first"])


def unload(fleet: LiveFleet) -> None:
    """Until the memory of beta is known to be free again."""
    assert fleet["alpha"].control("POST", "/fleet/v1/models/unload", {"model": DEEP}) == {"ok": True}
    until(lambda: fleet.peers("alpha")["beta"]["usable_bytes"] > 0.9 * BUDGET_BYTES, 60)


def asked(daemon: LiveDaemon, *, stream: bool) -> tuple[dict[str, str], str]:
    """The headers and the body."""
    body: dict[str, Any] = {"model": DEEP, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"Authorization": f"Bearer {daemon.key}", "Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(*daemon.address, timeout=120)) as connection:
        wanted = json.dumps({**body, "max_tokens": 1, "placement": OVER})
        connection.request("POST", "/v1/chat/completions", wanted, headers)
        with connection.getresponse() as response:
            text = response.read().decode()
            assert response.status == 200, text
            return dict(response.getheaders()), text


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_that_loads_a_model_names_its_machines_as_later_ones_do(
    pair: LiveFleet, stream: bool
) -> None:
    loading, body = asked(pair["alpha"], stream=stream)
    later, _ = asked(pair["alpha"], stream=stream)
    unload(pair)
    assert later["X-Fleet-Plan"] == "group; nodes=this,beta"
    assert later["X-Fleet-Exactness"] == "exact"
    if stream and loading["X-Fleet-Plan"].startswith("undecided"):
        # They leave after HEADERS_GRACE_S, in which a busy machine has not come to the group.
        assert "X-Fleet-Exactness" not in loading
    else:
        assert loading["X-Fleet-Plan"] == later["X-Fleet-Plan"]
        # The headers of a stream leave before beta has said how it computes.
        assert loading["X-Fleet-Exactness"] == ("equivalent" if stream else "exact")
    assert (": loading " in body) is stream


def test_a_load_says_how_far_each_machine_is(pair: LiveFleet) -> None:
    told: list[dict[str, Any]] = []
    body = {"model": DEEP, "placement": OVER, "stream": True}
    with pair["alpha"].control_events("/fleet/v1/models/load", body) as events:
        told += events
    done = told[-1]
    assert (done["done"], done["name"], done["split"]) == (True, DEEP, "layers")
    assert "9 attention heads cannot be divided" in done["why"]
    of_beta = [step["members"][0] for step in told if step.get("members")]
    engine = front(pair)
    share = of_beta[-1]["total_bytes"]
    assert {step["name"] for step in of_beta} == {"beta"}
    assert {step["total_bytes"] for step in of_beta} == {share}
    # About the weights of its layers, as they are planned to be in memory.
    (part,) = pair["beta"].status()["engines"]
    assert 0.5 < share / part["shape"]["weights_bytes"] < 2
    done = [step["done_bytes"] for step in of_beta]
    assert done == sorted(done)
    assert (of_beta[-1]["stage"], done[-1]) == ("loaded", share)
    # Once it is loaded that is no news any more.
    assert engine["members"][0]["stage"] == ""
    unload(pair)


def test_a_slow_machine_gives_layers_away_once_nobody_asks(pair: LiveFleet, steps: Path) -> None:
    text = answer(pair["alpha"])
    before = front(pair)
    (steps / "beta").write_text(str(4 * set_speeds.LAYER_S))
    assert answer(pair["alpha"]) == text
    until(lambda: front(pair)["pid"] != before["pid"], 60)
    # It loads now, or has loaded: a request that comes meanwhile waits for it.
    assert answer(pair["alpha"]) == text
    after = front(pair)
    assert cut(after) > cut(before)
    assert "4.0 times as long on beta as on this" in after["cut_anew"]
    assert before["cut_anew"] == ""
    # What the other cut had is gone.
    (part,) = pair["beta"].status()["engines"]
    assert (part["first_layer"], part["last_layer"]) == (cut(after), after["shape"]["layers"])
    told = pair["alpha"].fleetctl("plan", "-m", DEEP, "--json")
    assert "Cut anew" in json.loads(told.stdout)["group"]["why"]
    assert "cut anew" in pair["alpha"].fleetctl("status").stdout
    # The next load begins with what was measured.
    unload(pair)
    assert answer(pair["alpha"]) == text
    assert cut(front(pair)) == cut(after)


#: The model's weights take 19 MB in int8: it fits none, and most of it fits two.
SMALL_BYTES = WORKING_BYTES + 17_000_000
TRIO = ("alpha", "beta", "gamma")


@pytest.fixture
def trio(deep_model: Path, short_dir: Path, steps: Path, programs: Programs) -> Iterator[LiveFleet]:
    small = {**SETTINGS, "FLEETD_ENGINE_MAX_MEMORY_BYTES": str(SMALL_BYTES), set_speeds.STEPS: str(steps)}
    models = {name: [deep_model] for name in TRIO}
    with LiveFleet(
        short_dir / "trio", models, settings=dict.fromkeys(TRIO, small), programs=programs
    ) as fleet:
        fleet.until_usable()
        for name in TRIO[1:]:
            fleet.until_has("alpha", name, DEEP)
            fleet.until_has(name, "alpha", DEEP)
        yield fleet


def placed_freely(daemon: LiveDaemon) -> str:
    with daemon.stream(DEEP, STORY, max_tokens=ANSWER_TOKENS, temperature=0) as events:
        return "".join(text_of(event) for event in events)


def planned(daemon: LiveDaemon) -> list[str]:
    """The machines that would hold the model, or do; none while it knows of no other machine for that."""
    told = json.loads(daemon.fleetctl("plan", "-m", DEEP, "--json").stdout)["group"]
    return [] if told is None else [part["machine"] for part in told["parts"]]


def test_an_idle_machine_takes_the_place_of_a_slow_one(trio: LiveFleet, steps: Path) -> None:
    for name in TRIO:
        (steps / name).unlink(missing_ok=True)
    alpha = trio["alpha"]
    text = placed_freely(alpha)
    (held,) = front(trio)["members"]
    slow = held["name"]
    (idle,) = {*TRIO[1:]} - {slow}
    assert not trio[idle].status()["engines"]
    (steps / slow).write_text(str(20 * set_speeds.LAYER_S))
    assert placed_freely(alpha) == text
    # Its layers are there before those of the slow machine go.
    until(lambda: [member["name"] for member in front(trio)["members"]] == [idle], 120)
    assert placed_freely(alpha) == text
    assert f"with {idle} in the place of {slow}" in front(trio)["cut_anew"]
    until(lambda: not trio[slow].status()["engines"], 60)
    assert planned(alpha) == ["this", idle]
    # The next load begins with what was measured.
    assert alpha.control("POST", "/fleet/v1/models/unload", {"model": DEEP}) == {"ok": True}
    # It hears from both that their memory is free.
    until(lambda: planned(alpha) == ["this", idle], 60)
    assert placed_freely(alpha) == text
    assert [member["name"] for member in front(trio)["members"]] == [idle]
