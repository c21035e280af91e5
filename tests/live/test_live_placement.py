"""Machines that are named for a model: two real daemons hold one that would fit on either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(300)]

DEEP = "deep"
NAMES = ("alpha", "beta")
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}


@pytest.fixture(scope="module")
def pair(deep_model: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    models = {name: [deep_model] for name in NAMES}
    settings = dict.fromkeys(NAMES, COMMON)
    with LiveFleet(short_dir / "placed", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", DEEP)
        # Before a machine knows what its own files are, it asks nobody to hold a part.
        fleet.until_has("beta", "alpha", DEEP)
        yield fleet


def answer(daemon: LiveDaemon, **fields: Any) -> str:
    with daemon.stream(DEEP, "Name three colours.", max_tokens=16, temperature=0, **fields) as events:
        told = list(events)
    assert not [event for event in told if "error" in event], told
    return "".join(map(text_of, told))


def held_elsewhere(daemon: LiveDaemon) -> list[tuple[str, int, int]]:
    """What others hold of its models, by its own status."""
    return [
        (held["name"], held["first"], held["last"])
        for engine in daemon.status()["engines"]
        for held in engine["members"]
    ]


def parts(daemon: LiveDaemon) -> list[dict[str, Any]]:
    """Its workers that have some layers only."""
    return [engine for engine in daemon.status()["engines"] if engine["part_of"]]


def fleetctl(daemon: LiveDaemon, *arguments: str) -> str:
    done = daemon.fleetctl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_request_may_name_the_machines_and_is_answered_the_same(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    whole = answer(alpha, placement=["this"])
    assert not held_elsewhere(alpha)
    assert answer(alpha, placement=["this", "beta"]) == whole
    ((name, first, last),) = held_elsewhere(alpha)
    (part,) = parts(beta)
    assert (name, first, last) == ("beta", part["first_layer"], part["last_layer"])
    # It stays so for whoever leaves it open, and another placement loads it anew.
    assert answer(alpha) == whole
    assert held_elsewhere(alpha)
    assert answer(alpha, placement=["this"]) == whole
    assert not held_elsewhere(alpha)
    until(lambda: not parts(beta), 30)


def test_a_plan_says_who_would_hold_what_and_loading_does_it(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    alpha.control("POST", "/fleet/v1/models/unload", {"model": DEEP})
    page = fleetctl(alpha, "plan", "-m", DEEP, "--on", "this,beta")
    assert "2 machines would hold its 12 layers" in page
    assert "These 2 machines were named. Each has about the same number of layers." in page
    assert not parts(beta)
    fleetctl(alpha, "models", "load", DEEP, "--on", "this,beta")
    ((_, first, last),) = held_elsewhere(alpha)
    view = json.loads(fleetctl(alpha, "plan", "-m", DEEP, "--json"))
    assert view["group"]["loaded"]
    assert [(part["machine"], part["first"], part["last"]) for part in view["group"]["parts"]] == [
        ("this", 0, first),
        ("beta", first, last),
    ]
    assert view["options"][0]["kind"] == "group"
    assert f"{DEEP}: layers 0-{first - 1} here, layers {first}-{last - 1} on beta" in fleetctl(
        alpha, "status"
    )
    until(lambda: "asked by alpha" in fleetctl(beta, "status"), 30)
    held = f"layers {first}-{last - 1} of 12"
    assert f"{DEEP}: {held}, asked by alpha" in fleetctl(beta, "status")
    until(lambda: f"({held}, for alpha)" in fleetctl(alpha, "peers"), 30)
    answer(alpha)
    (trace,) = alpha.control("GET", "/fleet/v1/traces?last=1")["traces"]
    assert (trace["chosen"]["kind"], trace["chosen"]["cuts"]) == ("group", [0, first, last])
    fleetctl(alpha, "models", "unload", DEEP)
    until(lambda: not parts(beta), 30)
