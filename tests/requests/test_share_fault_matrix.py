"""Every step of a shared prefill, every fault, every role, enumerated: the answer is the one given alone.

``fault_table`` has the cases and the reasons for those that are none; ``fault_machines`` the machines. After
each case nothing is left of it in any process, and the same machines share the next prompt. ``make test``
runs one case for each fault and role, ``make test-long`` all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fault_machines import PATIENT_S, SETUP_S, FaultMachines, machines
from fault_seams import settled
from fault_table import FAULTS, HOME, SCENARIOS, Case, Role, Step, table
from kept_machines import FormedMachines, KeptMachines, kept_machines
from msgspec.structs import replace
from request_events import RequestEvents
from wire import Effect

from fleetd.engine.protocol import Accepted, AssistPrefill, PrefillReport
from fleetd.errors import EngineDied
from fleetd.plan.prefill.split import Split
from fleetd.requests.job import Planned

_CASES = [case for case in table() if isinstance(case, Case)]
# A machine that stands still goes on after this, where it is the one that answers.
_PAUSE_S = 0.3
_HASTY_S = 0.05


def _chosen() -> set[str]:
    """One case for each fault and role, each of another way to split, where most is under way."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in _CASES:
        groups.setdefault((case.fault, str(case.role)), []).append(case)
    found = set()
    for number, group in enumerate(groups.values()):
        ways = list(dict.fromkeys(case.scenario for case in group))
        same = [case for case in group if case.scenario == ways[number % len(ways)] and case.step.needed]
        found.add(str(same[len(same) * (1 + number % 3) // 4]))
    return found


def _parameters() -> list[Any]:
    chosen = _chosen()
    return [
        pytest.param(case, id=str(case), marks=() if str(case) in chosen else pytest.mark.long)
        for case in _CASES
    ]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FormedMachines]:
    return lambda: kept_machines(machines(tmp_path_factory.mktemp("machines")), _warmed)


async def _warmed(fleet: FaultMachines) -> None:
    """What is made once and kept is there after the first prompt."""
    fleet.scenario = SCENARIOS[0]
    await fleet.run(fleet.prompt("first", -2))
    await fleet.quiet()


class Strike:
    """One fault, at its step."""

    def __init__(self, fleet: FaultMachines, case: Case) -> None:
        self.fleet, self.case = fleet, case
        self.struck = False
        # Of the two at the ends of a stream, who left it first.
        self.left = ""

    def __call__(self, step: str) -> Effect:
        here = self.case.step
        for machine in (here.sender, here.receiver):
            if here.last and step == here.leaves(machine):
                self.left = self.left or machine
        if self.struck or step != here.name:
            return Effect.PASS
        self.struck = True
        role, fault = self.case.role, self.case.fault
        return getattr(self, f"_{fault.replace(' ', '_')}")(self.case.step, role)  # type: ignore[no-any-return]

    def _killed(self, _step: Step, role: Role) -> Effect:
        if role.part == "daemon":
            self.fleet.wire.cut_off(role.machine)
        self.fleet.kill(role.machine)
        return Effect.PASS

    def _stalled(self, _step: Step, role: Role) -> Effect:
        if role.part == "daemon":
            self.fleet.wire.freeze(role.machine)
        else:
            self.fleet.stop(role.machine, _PAUSE_S if role.machine == HOME else None)
        return Effect.PASS

    def _reset(self, step: Step, role: Role) -> Effect:
        if role.part == "daemon":
            for link in self.fleet.wire.links(role.machine, "session"):
                link.reset()
            return Effect.PASS
        if step.kind in ("dial", "frame"):
            return self._end_of(role.machine, step.name)
        ends = {step.sender, step.receiver} if step.kind == "given" else {role.machine}
        for link in self.fleet.wire.links(role.machine, "stream"):
            if not ends <= {link.front.dialler, link.front.listener}:
                continue
            mine = link.front.dialler == role.machine
            link.reset(Effect.RESET_DIALLER if mine else Effect.RESET_LISTENER)
        return Effect.PASS

    @property
    def over(self) -> bool:
        """Whether it has struck, or cannot any more: who has all it needs of a stream left before the end."""
        return self.struck or self.left == self.case.step.receiver != ""

    @staticmethod
    def _end_of(machine: str, step: str) -> Effect:
        """Home dials its helpers' own streams, a helper its output."""
        dials = (
            (machine == HOME) == ("'s home" in step)
            if machine == HOME
            else step.startswith(f"{machine}'s out")
        )
        return Effect.RESET_DIALLER if dials else Effect.RESET_LISTENER

    def _corrupted(self, step: Step, role: Role) -> Effect:
        mine = role.machine == step.receiver
        taken = step.name.endswith(("ask", "taken"))
        if mine and (step.kind == "dial" or (step.kind == "message" and taken)):
            return Effect.SPOIL
        if mine and step.kind == "frame" and role.part != "daemon":
            return Effect.SPOIL
        for link in self.fleet.wire.links(role.machine, "session"):
            link.spoil.add("forth" if link.front.listener == role.machine else "back")
        return Effect.PASS

    def _disk_full(self, _step: Step, _role: Role) -> Effect:
        self.fleet.fill_disk()
        return Effect.PASS

    def _out_of_memory(self, _step: Step, _role: Role) -> Effect:
        return Effect.PASS  # it began before, or is the worker's own


@contextlib.asynccontextmanager
async def _full(fleet: FaultMachines, case: Case) -> AsyncIterator[None]:
    """If the case is that of a machine without memory: its memory is promised to others, until it is decided
    who helps."""
    if case.fault != "out of memory" or case.short is not None:
        yield
        return
    engine = fleet.all[case.role.machine].engine
    assert engine is not None
    assert engine.facts is not None
    tokens = engine.facts.kv_budget_bytes // engine.facts.shape.sizes.token_bytes - 100
    split = Split("layers", (0, 4, 4), 4, 0, tokens, 64)
    others = engine.assist(AssistPrefill("others", split, 0))
    assert isinstance(await anext(others), Accepted)
    fleet.accepted.clear()
    # A prompt that does not fit waits until they are done.
    leaving = asyncio.get_running_loop().create_task(_left(others, fleet.accepted))
    try:
        yield
    finally:
        fleet.accepted.set()
        await leaving


async def _left(events: Any, accepted: asyncio.Event) -> None:
    await accepted.wait()
    await events.aclose()


def _check(case: Case, told: RequestEvents, expected: Any) -> None:
    """The answer of one prompt that a fault struck."""
    if case.outcome == "none" and told.error is not None:
        assert isinstance(told.error, EngineDied)
        return
    assert told.answer == expected
    planned, shared = told.of(Planned), told.of(PrefillReport)
    assert shared == [], "that is between the daemon and its worker"
    alone = planned[-1].kind == "local"
    if case.outcome in ("alone", "shared"):
        assert alone == (case.outcome == "alone"), planned
    if alone and len(planned) > 1:
        assert planned[-1].reason
        assert "internal" not in planned[-1].reason.lower(), planned
    assert planned[-1].exactness == "exact"


@pytest.mark.parametrize("case", _parameters())
def test_a_fault_costs_time_and_nothing_else(kept: KeptMachines, case: Case) -> None:
    kept.runner.run(_strike(kept.machines, case, kept.before))


async def _strike(fleet: FaultMachines, case: Case, before: dict[str, int]) -> None:
    number = _CASES.index(case)
    fleet.scenario = case.scenario
    marker = case.short.marker if case.short is not None else ""
    asked = fleet.prompt(f"{marker}case.{number}", 2 * number)
    following = fleet.prompt(f"next.{number}", 2 * number + 1)
    expected = [(await fleet.reference(each)).answer for each in (asked, following)]
    strike = fleet.point = Strike(fleet, case)
    waits = case.fault == "stalled" and case.role.machine != HOME
    fleet.predicted_s = _HASTY_S if waits else PATIENT_S
    fleet.gain_s = 0.0 if waits else PATIENT_S
    try:
        async with _full(fleet, case):
            began_s = fleet.sharing.monotonic()
            told = await fleet.run(asked)
            took_s = fleet.sharing.monotonic() - began_s
        if case.step.agreed and _comes(case):
            # The last steps may come after the answer.
            await settled(lambda: strike.over, f"{case.step.name}")
    finally:
        fleet.mend()
        fleet.point = lambda step: Effect.PASS
        fleet.predicted_s = fleet.gain_s = PATIENT_S
    assert strike.over or not _comes(case), "it never came so far"
    assert took_s < SETUP_S / 2, "somebody waited for what was known to be gone"
    _check(case, told, expected[0])
    await fleet.ready()
    # The same machines share the next prompt, and nothing that is left in a prefix cache changes an answer.
    shared = await fleet.run(following)
    again = await fleet.run(replace(asked, id=f"again.{number}"), local_only=True)
    assert [planned.kind for planned in shared.of(Planned)][-1] != "local", shared.of(Planned)
    assert (shared.answer, again.answer) == (expected[1], expected[0])
    await fleet.quiet()
    await fleet.unchanged(before)
    chain = fleet.helpers[: case.scenario.helpers]
    assert [fleet.sharing.members.left_out(helper.node_id, "prefill") for helper in chain] == [""] * len(
        chain
    )
    assert [trace.outcome for trace in fleet.traces if trace.id == following.id] == ["shared"]


def _comes(case: Case) -> bool:
    """Whether its step has to be reached. Where home has no memory nobody is asked; memory may lack before
    the step that it would be needed for."""
    if not case.step.sure:
        return False
    return case.fault != "out of memory" or (case.short is None and case.role.machine != HOME)


def test_the_table_is_whole() -> None:
    """Nothing is left out without a reason, and the figures that are reported are these."""
    whole = table()
    cases, reasons = [c for c in whole if isinstance(c, Case)], [r for r in whole if isinstance(r, str)]
    assert len({str(case) for case in cases}) == len(cases)
    assert all(reason.endswith(".") or "see there" in reason for reason in reasons)
    by_fault = Counter(case.fault for case in cases)
    assert set(by_fault) == set(FAULTS)
    print(len(whole), "combinations,", len(cases), "cases:", dict(by_fault), Counter(reasons))  # noqa: T201
