"""A group of machines without the model: each fetches its own layers from the hub, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hub_files import Hub, serving
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

from fleetd.models import layer_files

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(400)]

SMOL, HUB_ID = "smollm2-135m", "org/smol"
#: Its weights take 166 MB in int8, beside 537 MB to work with.
COMMON = {"FLEETD_ENGINE_CPU_ARITHMETIC": "int8", "FLEETD_ENGINE_THREADS": "1"}
SETTINGS = {**COMMON, "FLEETD_ENGINE_MAX_MEMORY_BYTES": "695000000"}
TOGETHER = {"model": HUB_ID, "placement": ["this", "beta"], "stream": True}


@pytest.fixture(scope="module")
def hub(live_models: Path) -> Iterator[Hub]:
    with serving() as server:
        server.models[HUB_ID] = {
            file.name: file.read_bytes()
            for file in (live_models / SMOL).iterdir()
            if file.name != "fleetd-manifest.json"
        }
        yield server


@pytest.fixture
def pair(hub: Hub, make_fleet: Callable[..., LiveFleet], tmp_path: Path) -> LiveFleet:
    settings = {
        name: {
            **SETTINGS,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / name),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }
        for name in ("alpha", "beta")
    }
    fleet = make_fleet({"alpha": [], "beta": []}, settings=settings)
    fleet.until_usable()
    return fleet


def answer(daemon: LiveDaemon, model: str) -> str:
    with daemon.stream(model, "Tell me of a fox.", max_tokens=24, temperature=0) as events:
        return "".join(text_of(event) for event in checked(events))


def checked(events: Any) -> Iterator[Any]:
    for event in events:
        assert "error" not in event, event
        yield event


def part_of(fleet: LiveFleet, name: str) -> Path:
    (place,) = (fleet.models_dir(name) / layer_files.PARTS).iterdir()
    return place


def weights(place: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in place.glob("*.safetensors")}


def test_each_machine_fetches_its_share_from_the_hub_and_the_answer_is_that_of_the_whole(
    pair: LiveFleet, hub: Hub, live_models: Path, make_fleet: Callable[..., LiveFleet]
) -> None:
    whole = make_fleet({"whole": [live_models / SMOL]}, settings={"whole": COMMON})["whole"]
    expected = answer(whole, SMOL)
    whole.stop()
    alpha, room = pair["alpha"], pair.peers("alpha")["beta"]["usable_bytes"]
    stages: set[str] = set()
    # One machine waits in the middle of its layers until that was told: of steps that follow each other at
    # once the last one is told.
    weights_file = "model.safetensors"
    hub.faults_from, hub.stall_after = len(hub.models[HUB_ID][weights_file]) // 4, {weights_file: 1000}
    with alpha.control_events("/fleet/v1/models/load", TOGETHER) as events:
        for event in checked(events):
            stages |= {member["stage"] for member in event.get("members", [])}
            if "downloading" in stages:
                hub.stall.set()
    hub.stall.clear()
    hub.stalled.clear()
    assert "downloading" in stages
    (front,) = [engine for engine in alpha.status()["engines"] if engine["members"]]
    first = front["members"][0]["first"]
    total = front["members"][-1]["last"]
    here, there = weights(part_of(pair, "alpha")), weights(part_of(pair, "beta"))
    assert set(here) == {layer_files.ENDS_NAME, *map(layer_files.name_of, range(first))}
    assert set(there) == set(map(layer_files.name_of, range(first, total)))
    # No byte of a weight is on two machines, and none was asked for twice: what lies between two that are
    # wanted comes along, and the headers.
    n_bytes = sum(file.stat().st_size for file in (live_models / SMOL).glob("*.safetensors"))
    assert sum([*here.values(), *there.values()]) == pytest.approx(n_bytes, rel=0.001)
    assert answer(alpha, HUB_ID) == expected
    # It is no model of either machine.
    assert not pair.peers("alpha")["beta"]["models"]
    listing = alpha.control("GET", "/fleet/v1/models")
    assert listing["installed"] == []
    (listed,) = listing["in_part"]
    assert (listed["name"], listed["layers"], listed["of_layers"]) == (HUB_ID, first, total)
    assert listed["own"]
    assert listed["loaded"]
    (held,) = pair["beta"].control("GET", "/fleet/v1/models")["in_part"]
    assert (held["layers"], held["own"], held["from_hub"]) == (total - first, False, True)
    assert "IN PART" in alpha.fleetctl("models").stdout
    # Loaded again, nothing is fetched.
    alpha.control("POST", "/fleet/v1/models/unload", {"model": HUB_ID})
    until(lambda: pair.peers("alpha")["beta"]["usable_bytes"] >= room)
    hub.asked.clear()
    assert answer(alpha, HUB_ID) == expected
    assert hub.asked == []


def downloads(fleet: LiveFleet) -> list[psutil.Process]:
    """The processes that fetch layers now."""
    found = []
    for daemon in fleet:
        for process in daemon.processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "fleetd.models.pull.part_process" in process.cmdline():
                    found.append(process)
    return found


def test_a_load_that_is_ended_goes_on_with_the_layers_that_have_come(pair: LiveFleet, hub: Hub) -> None:
    alpha, weights_file = pair["alpha"], "model.safetensors"
    size = len(hub.models[HUB_ID][weights_file])
    # One machine waits in the middle of its layers.
    hub.faults_from, hub.stall_after = size // 4, {weights_file: 1000}
    with alpha.control_events("/fleet/v1/models/load", TOGETHER) as events:
        assert next(events)
        assert hub.stalled.wait(60)
        alpha.control("POST", "/fleet/v1/models/unload", {"model": HUB_ID})
    until(lambda: not downloads(pair))
    # The other one may not have begun.
    kept = {
        name: weights(part_of(pair, name)) if (pair.models_dir(name) / layer_files.PARTS).exists() else {}
        for name in ("alpha", "beta")
    }
    hub.stall.set()
    hub.given.clear()
    alpha.control("POST", "/fleet/v1/models/load", {**TOGETHER, "stream": False})
    assert answer(alpha, HUB_ID)
    n_bytes = sum(sum(weights(part_of(pair, name)).values()) for name in kept)
    assert hub.given[weights_file] < 1.05 * (n_bytes - sum(sum(each.values()) for each in kept.values()))


def test_a_machine_without_the_hub_gets_its_layers_through_the_one_that_asks(
    pair: LiveFleet, hub: Hub
) -> None:
    pair["beta"].restart(HF_HUB_OFFLINE="1")
    pair.until_usable()
    alpha = pair["alpha"]
    hub.whole_only = True
    with alpha.control_events("/fleet/v1/models/load", TOGETHER) as events:
        error = next(event["error"] for event in events if "error" in event)
    assert error["code"] == "download_failed"
    assert "HF_ENDPOINT" in error["hint"]
    hub.whole_only = False
    assert alpha.control("POST", "/fleet/v1/models/load", {**TOGETHER, "stream": False}) == {"ok": True}
    assert answer(alpha, HUB_ID)
    (held,) = pair["beta"].control("GET", "/fleet/v1/models")["in_part"]
    assert not held["from_hub"]
    assert "group.fetched_here" in alpha.log.read_text()


# Three blocks: home's queue for its disk takes no more, with so little memory.
STORY = " ".join(f"In week {n} the fox saw {n + 3} geese by the old mill." for n in range(24))


def read(daemon: LiveDaemon) -> tuple[str, dict[str, Any]]:
    """The answer to a long prompt, and how it was read."""
    text, timings = "", {}
    with daemon.stream(HUB_ID, STORY, max_tokens=16, temperature=0) as events:
        for event in checked(events):
            text += text_of(event)
            timings = event.get("timings") or timings
    return text, timings


def test_a_prompt_comes_back_from_both_disks_when_both_machines_were_restarted(pair: LiveFleet) -> None:
    alpha = pair["alpha"]
    assert alpha.control("POST", "/fleet/v1/models/load", {**TOGETHER, "stream": False}) == {"ok": True}
    text, timings = read(alpha)
    assert timings.get("restored_n", 0) == 0
    assert timings["prompt_n"] > 384
    alpha.control("POST", "/fleet/v1/models/unload", {"model": HUB_ID})
    until(lambda: not pair["beta"].status()["engines"], 60)
    for daemon in pair:
        daemon.restart()
    pair.until_usable()
    # Its first card says nothing of its disk yet.
    until(lambda: alpha.control("POST", "/fleet/v1/models/load", {**TOGETHER, "stream": False}).get("ok"))
    again, timings = read(alpha)
    assert again == text
    assert timings["restored_n"] >= 256
