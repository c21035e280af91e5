"""Every step of a model over several machines, every fault, every machine that it may strike: a case, or why
it is none.

Pure: what is done is ``grouped_machines``' matter. Home answers, and ``helper0`` is the member; ``helper1``
could hold the same layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HOME, MEMBER = "home", "helper0"
# As ``GroupedMachines.point`` is told of them, in their order.
STEPS = {
    "asked": f"{MEMBER}: asked",
    "loading": f"{MEMBER}: loading",
    "ready": f"{MEMBER}: ready",
    "dialled": f"{MEMBER}: dialled",
    "given to the member": f"{MEMBER}: given",
    "given to home": f"{HOME}: given",
    "reading": "read 64",
    "writing": "token 2",
    # After the answer: home unloads the model.
    "ending": "ending",
}
FORMING = ("asked", "loading", "ready", "dialled", "given to the member", "given to home")
SERVING = ("reading", "writing")

Fault = Literal["killed", "stopped", "stalled", "reset", "out of memory", "disk full"]
FAULTS: tuple[Fault, ...] = ("killed", "stopped", "stalled", "reset", "out of memory", "disk full")
# "again": it is known within ``NOTICED_S`` that the member is lost, and the answer is the same.
# "same": nothing is lost, and the answer is the same. "either": a race of these two.
# Otherwise the code of the error that the request ends with, or two of them.
Outcome = str


@dataclass(frozen=True)
class GroupRole:
    """``part``: "worker" or "daemon"."""

    machine: str
    part: str

    def __str__(self) -> str:
        return f"{'member' if self.machine == MEMBER else HOME} {self.part}"


ROLES = tuple(GroupRole(machine, part) for machine in (HOME, MEMBER) for part in ("worker", "daemon"))


@dataclass(frozen=True)
class GroupCase:
    step: str
    fault: Fault
    role: GroupRole
    outcome: Outcome

    def __str__(self) -> str:
        return f"{self.step}, {self.role} {self.fault}"


# ---- combinations without a meaning ----------------------------------------------------------------------

NO_WORKER = "Its worker does not run yet."
NO_STREAM = "No stream is open between the workers."
NO_FILES = "A worker of a group writes no files: its log goes through the daemon."
DAEMON_MEMORY = (
    "A daemon holds a few kilobytes of a group: if even these lack, the system kills it, see there."
)
SAME_STREAM = "The stream has two ends and stands still for both: see the member's worker."
AS_STOPPED = "A daemon whose sessions stand still looks like one that is stopped, see there."
LOADS_ALONE = "A load that stands still is ended as that of a whole model (tests/engine/test_load_watch.py)."
NOTHING_ASKED = "It computes nothing then."


def verdict(step: str, fault: Fault, role: GroupRole) -> GroupCase | str:
    """What is to be done and to be expected, or why that makes no sense."""
    found = (_worker if role.part == "worker" else _daemon)(step, fault, role.machine == HOME)
    return found if found.endswith(".") else GroupCase(step, fault, role, found)


def _worker(step: str, fault: Fault, home: bool) -> str:
    forming = step in FORMING
    if fault == "disk full":
        return NO_FILES
    # Home's worker is started once all members have their layers.
    runs = step not in (FORMING[:-1] if home else ("asked",))
    if not runs:
        # A member's memory is looked at before its worker starts to load.
        return "again" if fault == "out of memory" and not home else NO_WORKER
    if (step, fault) == ("loading", "stopped"):
        return LOADS_ALONE
    streams = step in (*SERVING, "ending", "given to home")
    if fault in ("stalled", "reset") and not streams:
        return NO_STREAM
    if step == "ending":
        return NOTHING_ASKED if fault == "out of memory" else "same"
    if fault == "stalled" and home:
        return SAME_STREAM
    if fault == "out of memory" and forming:
        return "out_of_memory" if home else "again"
    if fault in ("stalled", "reset") or not home:
        return "again"
    if fault == "stopped":
        return LOADS_ALONE if forming else "engine_stalled"
    # If memory lacks at home, the request fails, or the worker with it in the middle of a batch.
    return "engine_died" if fault == "killed" else "out_of_memory or engine_died"


def _daemon(step: str, fault: Fault, home: bool) -> str:
    if fault == "out of memory":
        return DAEMON_MEMORY
    if fault == "stalled":
        return AS_STOPPED
    if fault == "disk full" or step == "ending":
        return "same"
    if home and fault == "killed":
        # Before its worker runs, what was asked of others is lost like any other session.
        return "again" if step in FORMING[:-1] else "engine_died"
    if home and fault == "stopped":
        return "same"  # it goes on after a while
    # Workers that are connected do not need their daemons to finish an answer.
    connected = step in (*SERVING, "dialled", "given to the member", "given to home")
    return "either" if connected and fault != "killed" else "again"


def table() -> list[GroupCase | str]:
    """The whole of it."""
    return [verdict(step, fault, role) for step in STEPS for fault in FAULTS for role in ROLES]
