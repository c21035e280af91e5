"""Machines that answer in groups for all tests of a module, and a fault that strikes them at one step."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import short_stages
import wrong_sums
from group_table import HOME
from grouped_machines import GroupedMachines, began_again
from kept_machines import FormedMachines, kept_machines
from msgspec.structs import replace
from request_events import RequestEvents
from sharing import workers
from wire import Effect

from fleetd.errors import FleetError

# Within this a request is over, whatever strikes: beside other programs a load and an answer of machines that
# all share the processors take minutes. What has to be known in time is asserted by itself.
ANSWERED_S = 240.0
# A daemon that answers and stands still goes on after this.
_PAUSE_S = 0.3


def kept_groups(entered: contextlib.AbstractAsyncContextManager[Any]) -> FormedMachines:
    """Machines that answer in groups."""
    return kept_machines(entered, _warmed)


async def _warmed(fleet: GroupedMachines) -> Any:
    """The answer of one worker that has the whole model, after one of a group."""
    await fleet.ask(fleet.prompt("first"), RequestEvents(), lambda _: None)
    await fleet.unload()
    fleet.mend()
    await fleet.quiet()
    async with workers(Path(fleet.home.folder.path), 1) as (whole,):
        told = RequestEvents()
        await told.read(whole.stream(fleet.prompt("whole")))
        return told.answer


class GroupStrike:
    """One fault of a case, at its step."""

    def __init__(self, fleet: GroupedMachines, case: Any, steps: Mapping[str, str]) -> None:
        self.fleet, self.case, self._steps = fleet, case, steps
        self._clock = asyncio.get_running_loop().time
        self.struck_s = self.noticed_s = 0.0

    def __call__(self, step: str) -> Effect:
        if not self.struck_s and step == self._steps[self.case.step]:
            self.struck_s = self._clock()
            getattr(self, f"_{self.case.fault.replace(' ', '_')}")(self.case.role.machine)
        return Effect.PASS

    def seen(self, event: Any) -> None:
        """Notes when the fault is known."""
        if self.struck_s and not self.noticed_s and (began_again(event) or isinstance(event, FleetError)):
            self.noticed_s = self._clock()

    def _killed(self, name: str) -> None:
        self.fleet.signal(name, signal.SIGKILL)
        if self.case.role.part == "daemon":
            self.fleet.wire.cut_off(name)

    def _stopped(self, name: str) -> None:
        if self.case.role.part == "worker":
            self.fleet.signal(name, signal.SIGSTOP)
            return
        self.fleet.wire.freeze(name)
        if name == HOME:
            asyncio.get_running_loop().call_later(_PAUSE_S, self.fleet.wire.mend)

    def _stalled(self, name: str) -> None:
        for link in self.fleet.streams(name):
            link.hold()

    def _reset(self, name: str) -> None:
        kind = "session" if self.case.role.part == "daemon" else "stream"
        # Home dials its members.
        end = Effect.RESET_DIALLER if name == HOME else Effect.RESET_LISTENER
        for link in self.fleet.wire.links(name, kind):
            link.reset(Effect.RESET if kind == "session" else end)

    def _out_of_memory(self, name: str) -> None:
        for pid in self.fleet.pids(name):
            short_stages.path(pid).touch()
        pool = self.fleet.all[name].pool
        pool.maker.options = replace(pool.maker.options, max_memory_bytes=1 << 20)

    def _disk_full(self, _name: str) -> None:
        self.fleet.fill_disk()

    def _adding_wrongly(self, name: str) -> None:
        """Every sum is wrong from now on, by less than changes an answer."""
        for pid in self.fleet.pids(name):
            wrong_sums.wrong(pid).write_text(str(1 + 2**-12))
