"""Every step of a model whose layers are divided, every fault, every machine: the answer is the same, or its
error says what is wrong; it is known in time; and nothing is left of it in any process.

``rank_table`` has the cases and the reasons for those that are none; ``ranked_machines`` the machines.
``make test`` runs one case for each fault and role, ``make test-long`` all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import wrong_sums
from group_strikes import ANSWERED_S, GroupStrike, kept_groups
from group_table import HOME, MEMBER
from grouped_machines import BUSY_S, began_again
from kept_machines import FormedMachines, KeptMachines
from rank_table import FAULTS, FORMING, SERVING, STEPS, RankCase, table
from ranked_machines import SILENT_S, ranked
from request_events import RequestEvents
from wire import Effect

from fleetd import limits
from fleetd.errors import FleetError

_CASES = [case for case in table() if isinstance(case, RankCase)]
# Within what time a fault is to be known.
_NOTICED_S = SILENT_S + 3.0 + BUSY_S
# After this a pass that stands still is late, by the figures of fleetd and not by those of these tests.
_LATEST_S = limits.RANK_STALL_S + limits.RANK_LOOK_S
# How far sums in another order move a log-probability, and sums that are wrong by a little.
_ROUNDING, _WRONG = 1e-4, 0.05
# By which this process may grow: allocators keep what they had once.
_LEAST_BYTES, _GROUP_BYTES = 16 << 20, 64 << 10


def _chosen() -> set[str]:
    """One case for each fault and role, each at another step."""
    groups: dict[tuple[str, str], list[RankCase]] = {}
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
    return lambda: kept_groups(ranked(tmp_path_factory.mktemp("ranks")))


def _assert_same(told: RequestEvents, expected: Any, within: float = _ROUNDING) -> None:
    text, numbers = told.answer
    assert text == expected[0]
    assert [token for token, *_ in numbers] == [token for token, *_ in expected[1]]
    mine, theirs = ([logprob for _, logprob, *_ in each] for each in (numbers, expected[1]))
    assert mine == pytest.approx(theirs, abs=within)


@pytest.mark.parametrize("case", _parameters())
def test_a_fault_costs_time_and_nothing_else(kept: KeptMachines, case: RankCase) -> None:
    kept.runner.run(_strike(kept, case))


async def _strike(kept: KeptMachines, case: RankCase) -> None:
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


def _check(case: RankCase, strike: GroupStrike, told: RequestEvents, expected: Any) -> None:
    """What the request came to."""
    outcomes = case.outcome.split(" or ")
    # A worker may have said all of the answer, of which its daemon had read the beginning.
    all_said = case.step in SERVING and case.role.machine == HOME and told.error is None
    if told.error is not None:
        assert told.error.code in outcomes, told.error
        assert told.error.message
    else:
        _assert_same(told, expected, _WRONG if case.fault == "adding wrongly" else _ROUNDING)
    if outcomes == ["again"] and not all_said:
        assert strike.noticed_s, "nothing was lost"
    if outcomes == ["same"]:
        assert not strike.noticed_s, "something was lost"
    if strike.noticed_s and case.step in SERVING:
        assert strike.noticed_s - strike.struck_s < _NOTICED_S


# ---- wrong sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [HOME, MEMBER])
def test_what_a_rank_that_adds_wrongly_said_is_no_answer(kept: KeptMachines, machine: str) -> None:
    """So wrongly that the tokens are others: the request fails, or one machine gives its own answer."""

    async def run() -> None:
        fleet, told, lost = kept.machines, RequestEvents(), list[Any]()

        def point(step: str) -> Effect:
            if step == STEPS["writing"]:
                for pid in fleet.pids(machine):
                    wrong_sums.wrong(pid).write_text("1e3")
            return Effect.PASS

        def seen(event: Any) -> None:
            if began_again(event):
                lost.append(event)

        fleet.point = point
        try:
            async with asyncio.timeout(ANSWERED_S):
                await fleet.ask(fleet.prompt(f"wrong.{machine}"), told, seen)
        finally:
            await fleet.unload()
            fleet.mend()
        assert "sum over the ranks was wrong" in lost[0].stage
        if told.error is not None:
            assert "do not go on with the same answer" in told.error.message
        else:
            assert told.answer[0] == kept.expected[0]
        await fleet.quiet()
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


# ---- starts that are cancelled ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [MEMBER, HOME])
def test_of_a_rank_whose_start_is_cancelled_no_process_is_left(
    kept: KeptMachines, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is when the group is lost just then: the process is there, and nobody has its id yet."""
    execute, started = asyncio.create_subprocess_exec, list[str]()

    async def cancelled(*command: str, **options: Any) -> Any:
        started.append(machine)
        # The member's rank starts first.
        if len(started) == (1 if machine == MEMBER else 2):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return await execute(*command, **options)

    async def run() -> None:
        fleet, told = kept.machines, RequestEvents()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", cancelled)
        try:
            async with asyncio.timeout(ANSWERED_S):
                await fleet.ask(fleet.prompt(f"start.{machine}"), told, lambda _: None)
        finally:
            await fleet.unload()
            fleet.mend()
        assert len(started) > 1
        if told.error is None:
            _assert_same(told, kept.expected)
        else:
            assert told.error.code == "engine_died"
        await fleet.quiet()
        await fleet.unchanged(kept.before)

    kept.runner.run(run())


# ---- leaks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_ranks_that_formed_and_ended_leave_nothing(kept: KeptMachines, count: int) -> None:
    """Processes, files, threads, tasks, descriptors, reservations: whatever one ring leaves, many add up."""

    async def run() -> None:
        fleet, process = kept.machines, psutil.Process()
        refused = list[FleetError]()
        resident = 0
        for number in range(count):
            told = RequestEvents()

            def seen(event: Any) -> None:
                if isinstance(event, FleetError):
                    refused.append(event)

            await fleet.ask(fleet.prompt(f"ring.{number}", max_tokens=4), told, seen)
            assert not refused, refused[0]
            assert told.finished.usage.completion_tokens == 4
            await fleet.unload()
            await fleet.quiet()
            resident = resident or process.memory_info().rss
        await fleet.unchanged(kept.before)
        assert process.memory_info().rss - resident < _LEAST_BYTES + count * _GROUP_BYTES

    kept.runner.run(run())


def test_the_table_is_whole() -> None:
    """Nothing is left out without a reason, and the figures that are reported are these."""
    whole = table()
    cases, reasons = [c for c in whole if isinstance(c, RankCase)], [r for r in whole if isinstance(r, str)]
    assert len({str(case) for case in cases}) == len(cases)
    by_fault = Counter(case.fault for case in cases)
    assert set(by_fault) == set(FAULTS)
    assert {case.step for case in cases} == set(STEPS)
    assert set(FORMING) < set(STEPS)
    print(len(whole), "combinations,", len(cases), "cases:", dict(by_fault), Counter(reasons))  # noqa: T201


def test_a_rank_that_stands_still_is_missed_in_time() -> None:
    """The tests above have other figures; these are the ones that count."""
    assert _LATEST_S <= 3.0
