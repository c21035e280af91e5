"""An idle machine takes the place of a slow one in a group of real workers: whatever it fails with, the group
that is held goes on, and nothing is left of the other one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fault_seams import settled
from group_strikes import ANSWERED_S, kept_groups
from grouped_machines import HELPERS, GroupedMachines, machines
from kept_machines import FormedMachines, KeptMachines
from msgspec.structs import replace
from request_events import RequestEvents
from wire import Effect

from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.daemon_side.group_front import GroupFront, NewCut
from fleetd.plan.measured_cut import LEAST_STEPS
from fleetd.requests.groups.planning import FleetGroups

SLOW, IDLE = HELPERS
FAST_S, SLOW_S = 0.001, 0.05


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FormedMachines]:
    def formed() -> FormedMachines:
        folder = tmp_path_factory.mktemp("machines")
        # Nothing here is about silence, and a machine that is busy must not lose its place by it.
        return kept_groups(machines(folder, GROUP_RECUT_IDLE_S=0.0, GROUP_SILENT_S=10.0))

    return formed


def front(fleet: GroupedMachines) -> GroupFront:
    found = fleet.home.pool.engine(fleet.home.folder)
    assert isinstance(found, GroupFront)
    return found


def holders(fleet: GroupedMachines) -> list[str]:
    return [member.name for member in front(fleet).settings.group]


def slow_from_now_on(fleet: GroupedMachines) -> None:
    """Layers are measured to take long on the machine that holds them, once."""
    groups = fleet.home.pool.maker.groups
    assert isinstance(groups, FleetGroups)
    left = [groups]

    def anew(name: str, stages: Sequence[GroupStage], tokens: int) -> NewCut | None:
        if not left or not tokens:
            return None
        seconds = [
            replace(
                stage, steps=LEAST_STEPS, computed_s=(SLOW_S if n else FAST_S) * (stage.last - stage.first)
            )
            for n, stage in enumerate(stages)
        ]
        return left.pop().anew(name, seconds, 10**9)

    fleet.home.pool.recut.cut_anew = anew


async def asked(fleet: GroupedMachines, name: str) -> RequestEvents:
    told = RequestEvents()
    await fleet.ask(fleet.prompt(name), told, lambda _: None)
    return told


async def exchanged(
    kept: KeptMachines, strike: Callable[[str], object], after: Callable[[GroupFront], None]
) -> None:
    """A group that has answered is cut anew, and answers again.

    Args:
        strike: told of each step of that.
        after: told of the worker that answered before, once the next cut stands or was given up.
    """
    fleet = kept.machines
    try:
        async with asyncio.timeout(ANSWERED_S):
            assert (await asked(fleet, "exchange.before")).answer == kept.expected
            assert holders(fleet) == [SLOW]
            before = front(fleet)

            def point(step: str) -> Effect:
                strike(step)
                return Effect.PASS

            fleet.point = point
            slow_from_now_on(fleet)
            # The last of what was asked may have been looked at before it was slow.
            assert (await asked(fleet, "exchange.again")).answer == kept.expected
            await settled(lambda: fleet.home.pool.recut.task is not None, "it is cut anew")
            cutting = fleet.home.pool.recut.task
            assert cutting is not None
            await cutting
            after(before)
            fleet.mend()
            await fleet.together()
            told = await asked(fleet, "exchange.after")
            assert told.error is None
            assert told.answer == kept.expected
    finally:
        await fleet.unload()
        fleet.mend()
        pool = fleet.home.pool
        pool.recut.task = None
        pool.recut.cut_anew = lambda *_: None
        groups: Any = pool.maker.groups
        groups._anew_from.clear()
        groups._layer_times.forget("d" if not groups._formed else fleet_digest(groups))
    await fleet.quiet()
    await fleet.unchanged(kept.before)


def fleet_digest(groups: Any) -> str:
    (formed,) = groups._formed.values()
    return str(formed.plan.digest)


def test_an_idle_machine_takes_the_place_of_a_slow_one(kept: KeptMachines) -> None:
    fleet, steps = kept.machines, list[str]()

    def after(before: GroupFront) -> None:
        assert front(fleet) is not before
        assert holders(fleet) == [IDLE]
        assert f"with {IDLE} in the place of {SLOW}" in front(fleet).cut_anew
        # It has its layers and a stream before the worker here gives way to another one.
        assert steps.index(f"{IDLE}: given") < steps.index("home: given")
        assert f"{SLOW}: asked" not in steps

    kept.runner.run(exchanged(kept, steps.append, after))


FAULTS: dict[str, Callable[[GroupedMachines], object]] = {
    "killed": lambda fleet: fleet.signal(IDLE, signal.SIGKILL),
    "stopped": lambda fleet: fleet.signal(IDLE, signal.SIGSTOP),
    "switched off": lambda fleet: fleet.wire.cut_off(IDLE),
    "out of memory": lambda fleet: _short(fleet, IDLE),
}
STEPS = {"asked": f"{IDLE}: asked", "loading": f"{IDLE}: loading", "ready": f"{IDLE}: ready"}
# A worker has to be there for a signal; memory is looked at when it starts.
_CASES = [
    ("killed", "loading"),
    ("out of memory", "asked"),
    *(
        pytest.param(fault, step, marks=pytest.mark.long)
        for fault, step in (
            ("killed", "ready"),
            ("stopped", "loading"),
            ("stopped", "ready"),
            *(("switched off", step) for step in STEPS),
        )
    ),
]


def _short(fleet: GroupedMachines, name: str) -> None:
    pool = fleet.all[name].pool
    pool.maker.options = replace(pool.maker.options, max_memory_bytes=1 << 20)


@pytest.mark.parametrize(("fault", "step"), _CASES)
def test_the_group_goes_on_if_the_other_machine_fails_before_it_has_its_layers(
    kept: KeptMachines, fault: str, step: str
) -> None:
    fleet, struck = kept.machines, list[str]()

    def strike(name: str) -> None:
        if name == STEPS[step] and not struck:
            struck.append(name)
            FAULTS[fault](fleet)

    def after(before: GroupFront) -> None:
        assert struck
        assert front(fleet).state == "ready"
        assert holders(fleet) == [SLOW]
        if step != "ready":
            # Not one process of it was loaded again. At the very last moment it may have given way.
            assert front(fleet) is before

    kept.runner.run(exchanged(kept, strike, after))


@pytest.mark.parametrize("name", [pytest.param("home", marks=pytest.mark.long), IDLE])
def test_the_model_is_loaded_again_if_the_other_cut_fails_at_last(kept: KeptMachines, name: str) -> None:
    fleet, struck = kept.machines, list[str]()

    def strike(step: str) -> None:
        if step == "home: given" and not struck:
            struck.append(step)
            fleet.signal(name, signal.SIGKILL)

    def after(before: GroupFront) -> None:
        assert struck
        # Nobody had to ask for it.
        assert front(fleet).state == "ready"
        if name == IDLE:
            assert holders(fleet) == [SLOW]

    kept.runner.run(exchanged(kept, strike, after))


@pytest.mark.long
def test_a_request_that_comes_while_the_other_machine_loads_is_answered_as_before(kept: KeptMachines) -> None:
    fleet, asking = kept.machines, list[asyncio.Task[RequestEvents]]()

    def strike(step: str) -> None:
        if step == f"{IDLE}: asked" and not asking:
            asking.append(asyncio.get_running_loop().create_task(asked(fleet, "exchange.meanwhile")))

    def after(_before: GroupFront) -> None:
        assert holders(fleet) == [IDLE]
        told = asking[0].result()
        assert told.error is None
        assert told.answer == kept.expected

    kept.runner.run(exchanged(kept, strike, after))
