"""Which worker may use idle time, and when: only while nothing at all runs on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from asking import folder_of
from fakes import FACTS
from nested_fields import changed

from fleetd import limits
from fleetd.engine.daemon_side.loaded_model import LoadedModel
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Ready, ScoringState
from fleetd.errors import OutOfMemory

SMALL, LARGE = folder_of(Path("/small"), "small"), folder_of(Path("/large"), "large")
pytestmark = pytest.mark.one_loop


@dataclass
class Engine:
    """A worker as far as idle time is concerned."""

    facts: Ready | None
    scoring: ScoringState = field(default_factory=lambda: ScoringState("unmeasured", 6000))
    state: str = "ready"
    busy: bool = False
    given: list[float] = field(default_factory=list)

    def give_idle_time(self, seconds: float) -> None:
        self.given.append(seconds)

    async def stop(self) -> None:
        pass


@dataclass
class IdleMachine:
    pool: EnginePool
    small: Engine
    large: Engine

    def given(self) -> tuple[list[float], list[float]]:
        """To each since the last call."""
        self.pool.measuring.use_idle_time()
        told = self.small.given[:], self.large.given[:]
        self.small.given.clear()
        self.large.given.clear()
        return told


@pytest.fixture
async def machine() -> IdleMachine:
    pool = EnginePool()
    small, large = Engine(FACTS), Engine(changed(FACTS, weights_bytes=limits.IDLE_MODEL_BYTES + 1))
    engines: dict[str, Any] = {"large": large, "small": small}
    pool.table.models = {name: LoadedModel([engine], pool.table.exited) for name, engine in engines.items()}
    return IdleMachine(pool, small, large)


GIVEN = [limits.IDLE_TIME_S]


async def test_a_small_model_is_measured_and_a_large_one_only_on_demand(machine: IdleMachine) -> None:
    assert machine.given() == (GIVEN, [])
    # What a prompt has wanted goes first.
    machine.pool.measuring.want(LARGE)
    assert machine.given() == ([], GIVEN)
    machine.pool.measuring._wanted.clear()
    machine.small.scoring = ScoringState("ready")
    assert machine.given() == ([], [])
    machine.pool.measuring.want(LARGE)
    assert machine.given() == ([], GIVEN)
    machine.large.scoring = ScoringState("unable")
    assert machine.given() == ([], [])


async def test_nothing_is_measured_beside_a_request_or_a_load(machine: IdleMachine) -> None:
    machine.large.busy = True
    assert machine.given() == ([], [])
    machine.large.busy, machine.large.state = False, "loading"
    assert machine.given() == ([], [])
    machine.large.state = "ready"
    with machine.pool.table.claim("large"):
        assert machine.given() == ([], [])
    assert machine.given() == (GIVEN, [])


async def test_time_is_taken_back_when_any_worker_is_to_do_something(machine: IdleMachine) -> None:
    machine.pool.table.end_idle_time()
    assert (machine.small.given, machine.large.given) == ([0.0], [0.0])


async def test_a_model_is_loaded_to_be_measured_once_and_only_beside_others(
    machine: IdleMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    async def load_beside(wanted: Any) -> None:
        loads.append(wanted.name)
        raise OutOfMemory("No room.")

    monkeypatch.setattr(machine.pool.loader, "load_beside", load_beside)
    del machine.pool.table.models["large"]
    machine.pool.measuring.want(LARGE)
    machine.small.busy = True
    assert machine.given() == ([], [])
    assert loads == []
    machine.small.busy = False
    for _ in range(3):
        machine.pool.measuring.use_idle_time()
        if machine.pool.measuring.task is not None:
            await machine.pool.measuring.task
    assert loads == ["large"]
