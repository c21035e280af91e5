"""A model over two real daemons, one of which turns out to be slow: it is cut anew while nobody asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import set_speeds
from forked_programs import Programs
from live_daemon import LiveDaemon, text_of, until
from live_fleet import LiveFleet

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL = "smollm2-135m"
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


@pytest.fixture
def steps(short_dir: Path) -> Path:
    """Where the seconds of a layer are set, by machine."""
    folder = short_dir / "steps"
    folder.mkdir()
    return folder


@pytest.fixture
def pair(live_models: Path, short_dir: Path, steps: Path, programs: Programs) -> Iterator[LiveFleet]:
    settings = {name: {**SETTINGS, set_speeds.STEPS: str(steps)} for name in ("alpha", "beta")}
    models = {name: [live_models / SMOL] for name in settings}
    with LiveFleet(short_dir / "anew", models, settings=settings, programs=programs) as fleet:
        fleet.until_usable()
        fleet.until_has("alpha", "beta", SMOL)
        fleet.until_has("beta", "alpha", SMOL)
        yield fleet


def answer(daemon: LiveDaemon) -> str:
    asked: dict[str, Any] = {"placement": ["this", "beta"], "max_tokens": 64, "temperature": 0}
    with daemon.stream(SMOL, STORY, **asked) as events:
        return "".join(text_of(event) for event in events)


def front(fleet: LiveFleet) -> dict[str, Any]:
    (found,) = fleet["alpha"].status()["engines"]
    return dict(found)


def cut(engine: dict[str, Any]) -> int:
    return int(engine["members"][0]["first"])


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
    told = pair["alpha"].fleetctl("plan", "-m", SMOL, "--json")
    assert "Cut anew" in json.loads(told.stdout)["group"]["why"]
    assert "cut anew" in pair["alpha"].fleetctl("status").stdout
