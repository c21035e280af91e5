"""Every step of a model over several machines, every fault, every role: the answer is the same, or its error
says what is wrong; it is known in time; and nothing is left of it in any process.

``group_table`` has the cases and the reasons for those that are none; ``grouped_machines`` the machines.
``make test`` runs one case for each fault and role, ``make test-long`` all of them.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from group_strikes import ANSWERED_S, GroupStrike, kept_groups
from group_table import FAULTS, FORMING, HOME, MEMBER, SERVING, STEPS, GroupCase, table
from grouped_machines import BUSY_S, HELPERS, NOTICED_S, STALL_S, began_again, machines
from kept_machines import FormedMachines, KeptMachines
from msgspec.structs import replace
from request_events import RequestEvents
from wire import Effect, Link

from fleetd import limits
from fleetd.engine.daemon_side.group_front import GroupFront
from fleetd.engine.protocol import Delta, Loading, Speculate
from fleetd.requests.groups import server

_CASES = [case for case in table() if isinstance(case, GroupCase)]
# By which this process may grow: allocators keep what they had once.
_LEAST_BYTES, _GROUP_BYTES = 16 << 20, 64 << 10


def _chosen() -> set[str]:
    """One case for each fault and role, each at another step."""
    groups: dict[tuple[str, str], list[GroupCase]] = {}
    for case in _CASES:
        groups.setdefault((case.fault, str(case.role)), []).append(case)
    return {str(group[number * 5 % len(group)]) for number, group in enumerate(groups.values())}


def _parameters() -> list[Any]:
    chosen = _chosen()
    return [
        pytest.param(case, id=str(case), marks=() if str(case) in chosen else pytest.mark.long)
        for case in _CASES
    ]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FormedMachines]:
    return lambda: kept_groups(machines(tmp_path_factory.mktemp("machines")))


@pytest.mark.parametrize("case", _parameters())
def test_a_fault_costs_time_and_nothing_else(kept: KeptMachines, case: GroupCase) -> None:
    kept.runner.run(_strike(kept, case))


async def _strike(kept: KeptMachines, case: GroupCase) -> None:
    fleet, told = kept.machines, RequestEvents()
    strike = fleet.point = GroupStrike(fleet, case, STEPS)
    try:
        async with asyncio.timeout(ANSWERED_S):
            await fleet.ask(fleet.prompt(f"case.{_CASES.index(case)}"), told, strike.seen)
        if case.step == "ending":
            strike(STEPS["ending"])
    finally:
        await fleet.unload()
        fleet.mend()
    assert strike.struck_s, "it never came so far"
    await fleet.together()
    await fleet.quiet()
    await fleet.unchanged(kept.before)
    _check(case, strike, told, kept.expected)


def _check(case: GroupCase, strike: GroupStrike, told: RequestEvents, expected: Any) -> None:
    """What the request came to."""
    # Home's worker may have said all of the answer, of which its daemon had read the beginning.
    all_said = case.step in SERVING and case.role.machine == HOME and told.error is None
    if case.outcome in ("again", "same", "either") or all_said:
        assert told.error is None, told.error
        assert told.answer == expected
        drafts = told.finished.speculation
        assert drafts is not None
        assert drafts.drafted > drafts.accepted > 0
    else:
        assert told.error is not None
        assert told.error.code in case.outcome.split(" or "), told.error
        assert told.error.message
    if case.outcome == "again" and not all_said:
        assert strike.noticed_s, "nothing was lost"
    if strike.noticed_s:
        # A worker of this machine that stands still is no member: it is ended as any other.
        own_s = STALL_S if case.outcome == "engine_stalled" else 0.0
        assert strike.noticed_s - strike.struck_s < NOTICED_S + own_s + BUSY_S


# ---- what is no single fault of a process ----------------------------------------------------------------


async def _asked(
    kept: KeptMachines,
    step: str,
    strike: Callable[[], object],
    seen: Callable[[Any], None] = lambda _: None,
    **fields: Any,
) -> RequestEvents:
    """One prompt, during which something happens at a step; then its group ends, and nothing is left.

    Without drafts: with them, all that is left of the answer may have come before a loss is noticed. ``seen``
    is told of each event.
    """
    fleet, told = kept.machines, RequestEvents()
    fields = {"speculate": Speculate(enabled=False), **fields}
    left = [strike]

    def point(name: str) -> Effect:
        if name == step and left:
            left.pop()()
        return Effect.PASS

    fleet.point = point
    try:
        async with asyncio.timeout(ANSWERED_S):
            await fleet.ask(fleet.prompt(f"asked.{step}", **fields), told, seen)
        assert not left, "it never came so far"
    finally:
        await fleet.unload()
        fleet.mend()
    return told


def test_a_member_that_falls_asleep_is_replaced_and_free_when_it_wakes(kept: KeptMachines) -> None:
    async def run() -> None:
        fleet = kept.machines

        def sleep() -> None:
            fleet.signal(MEMBER, signal.SIGSTOP)
            fleet.wire.freeze(MEMBER)
            for link in fleet.streams(MEMBER):
                link.hold()

        told = await _asked(kept, STEPS["writing"], sleep)
        assert told.answer == kept.expected
        assert any(began_again(event) for event in told.events)
        await fleet.together()
        await fleet.quiet()
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


def test_while_an_answer_goes_on_the_status_says_which_machine_was_lost(kept: KeptMachines) -> None:
    async def run() -> None:
        fleet, why = kept.machines, set[str]()

        def seen(event: Any) -> None:
            if isinstance(event, Loading):
                why.update(engine.again for engine in fleet.home.pool.status())

        told = await _asked(kept, STEPS["writing"], lambda: fleet.signal(MEMBER, signal.SIGKILL), seen)
        assert told.answer == kept.expected
        assert any(MEMBER in reason for reason in why), why
        assert not any(engine.again for engine in fleet.home.pool.status())
        await fleet.together()
        await fleet.quiet()
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


def test_a_member_that_is_unpaired_in_the_middle_of_an_answer_is_replaced(kept: KeptMachines) -> None:
    async def run() -> None:
        fleet = kept.machines
        node, member = fleet.home.node, fleet.all[MEMBER].node
        tasks = []

        def unpair() -> None:
            node.roster.remove(member.node_id)
            tasks.append(asyncio.create_task(node.roster_changed()))

        told = await _asked(kept, STEPS["writing"], unpair)
        assert any(began_again(event) for event in told.events)
        assert told.answer == kept.expected
        await asyncio.gather(*tasks)
        await fleet.quiet()
        await fleet.pair_again(MEMBER)
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


def test_a_member_with_another_version_is_in_a_group_that_is_labelled_so(
    kept: KeptMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was updated, and its layers may round otherwise."""

    async def run() -> None:
        fleet = kept.machines
        labels = []

        def label() -> None:
            front = fleet.home.pool.engine(fleet.home.folder)
            assert isinstance(front, GroupFront)
            labels.append(front.exact)

        await _asked(kept, "token 1", label)
        told = server._joined

        def later(engine: Any, expected: Any) -> Any:
            return replace(told(engine, expected), arithmetic="as a later version computes")

        monkeypatch.setattr(server, "_joined", later)
        await _asked(kept, "token 1", label)
        assert labels == [True, False]
        await fleet.quiet()

    kept.runner.run(run())


def test_a_member_whose_memory_is_needed_elsewhere_keeps_its_promise_and_makes_no_other(
    kept: KeptMachines,
) -> None:
    async def run() -> None:
        fleet = kept.machines
        pool = fleet.all[MEMBER].pool

        def shrink() -> None:
            pool.maker.options = replace(pool.maker.options, max_memory_bytes=1 << 20)
            for worker in pool.table.workers():
                worker.taken_elsewhere(1 << 30)

        running = await _asked(kept, STEPS["reading"], shrink)
        assert running.answer == kept.expected
        assert not any(began_again(event) for event in running.events)
        await fleet.quiet()
        asked = []
        pool.maker.options = replace(pool.maker.options, max_memory_bytes=1 << 20)
        later = await _asked(kept, "helper1: asked", lambda: asked.append("the other one"))
        assert later.answer == kept.expected
        assert asked
        await fleet.quiet()

    kept.runner.run(run())


# ---- three machines --------------------------------------------------------------------------------------


def test_a_broken_stream_between_two_members_costs_time_and_nothing_else(kept: KeptMachines) -> None:
    """It ends the group; the next one of the same machines has no such stream."""

    async def run() -> None:
        fleet, told = kept.machines, RequestEvents()
        relayed: list[list[bool]] = []
        between = [pair for pair in fleet.wire.fronts if HOME not in pair]

        def hops() -> list[Link]:
            return [
                link for pair in between for link in fleet.wire.fronts[pair].links if link.kind == "stream"
            ]

        def strike(event: Any) -> None:
            if isinstance(event, Delta) and len(told.of(Delta)) in (3, 30):
                (front,) = fleet.workers(HOME)
                relayed.append([held.relayed for held in front.status.members])
                for link in hops():
                    link.reset()

        async with asyncio.timeout(ANSWERED_S):
            await fleet.ask(fleet.prompt("hop", speculate=Speculate(enabled=False)), told, strike, HELPERS)
        assert told.answer == kept.expected
        assert relayed == [[False, False], [False, True]]
        assert len([event for event in told.events if began_again(event)]) == 1
        assert not hops()
        await fleet.unload()
        await fleet.together()
        await fleet.quiet()
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


# ---- leaks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_groups_that_formed_and_ended_leave_nothing(kept: KeptMachines, count: int) -> None:
    """Processes, tasks, descriptors, reservations, memory: whatever one group leaves, many would add up."""

    async def run() -> None:
        fleet, process = kept.machines, psutil.Process()
        resident = 0
        for number in range(count):
            told = RequestEvents()
            await fleet.ask(fleet.prompt(f"group.{number}"), told, lambda _: None)
            assert told.answer == kept.expected
            await fleet.unload()
            await fleet.quiet()
            resident = resident or process.memory_info().rss
        await fleet.unchanged(kept.before)
        assert process.memory_info().rss - resident < _LEAST_BYTES + count * _GROUP_BYTES

    kept.runner.run(run())


def test_the_table_is_whole() -> None:
    """Nothing is left out without a reason, and the figures that are reported are these."""
    whole = table()
    cases, reasons = [c for c in whole if isinstance(c, GroupCase)], [r for r in whole if isinstance(r, str)]
    assert len({str(case) for case in cases}) == len(cases)
    by_fault = Counter(case.fault for case in cases)
    assert set(by_fault) == set(FAULTS)
    assert {case.step for case in cases} == set(STEPS)
    print(len(whole), "combinations,", len(cases), "cases:", dict(by_fault), Counter(reasons))  # noqa: T201


def test_a_member_is_missed_in_time() -> None:
    """The tests above have a shorter silence; this is the one that counts."""
    assert limits.GROUP_SILENT_S + limits.GROUP_BEAT_S <= NOTICED_S
    assert set(FORMING) < set(STEPS)
