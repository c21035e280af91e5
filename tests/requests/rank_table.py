"""Every step of a model whose layers are divided, every fault, every machine that it may strike: a case, or
why it is none.

Pure: what is done is ``ranked_machines``' matter. Home answers and has rank 0; ``helper0`` has rank 1.
"""

from __future__ import annotations

from typing import Literal

from group_table import (
    AS_STOPPED,
    DAEMON_MEMORY,
    HOME,
    LOADS_ALONE,
    MEMBER,
    NO_WORKER,
    NOTHING_ASKED,
    ROLES,
    GroupRole,
)
from msgspec import Struct

# As ``RankedMachines.point`` is told of them. The two streams of the ring are dialled side by side.
STEPS = {
    "asked": f"{MEMBER}: asked",
    "promised": f"{MEMBER}: promised",
    "to the next rank": f"{HOME}: dialled",
    "to the first rank": f"{MEMBER}: dialled",
    "loading": f"{MEMBER}: loading",
    "ready": f"{MEMBER}: ready",
    "given to the member": f"{MEMBER}: given",
    "given to home": f"{HOME}: given",
    "reading": "read 64",
    "writing": "token 2",
    # After the answer: home unloads the model.
    "ending": "ending",
}
RING = ("asked", "promised", "to the next rank", "to the first rank")
FORMING = (*RING, "loading", "ready", "given to the member", "given to home")
SERVING = ("reading", "writing")

RankFault = Literal["killed", "stopped", "stalled", "reset", "out of memory", "disk full", "adding wrongly"]
FAULTS: tuple[RankFault, ...] = (
    *("killed", "stopped", "stalled", "reset"),
    *("out of memory", "disk full", "adding wrongly"),
)
# "again": it is known that a rank is lost, the model is loaded or the answer goes on another way, and the
# answer is the same. "same": nothing is lost, and the answer is the same. "either": a race of these two.
# Otherwise the codes of the errors that the load or the request may end with, besides "again".
RankOutcome = str


class RankCase(Struct, frozen=True):
    step: str
    fault: RankFault
    role: GroupRole
    outcome: RankOutcome

    def __str__(self) -> str:
        return f"{self.step}, {self.role} {self.fault}"


# ---- combinations without a meaning ----------------------------------------------------------------------

NO_FILES = "A rank writes no files: its log goes through the daemon, and no prompt is kept on a disk."
NO_STREAM = "No stream is open between the machines."
NO_PASS = "No pass is made at this moment."
NOT_THE_DAEMON = "A daemon adds nothing."
BOTH_ENDS = "Each machine has both ends of the ring: see the member's worker."
MAYBE_NO_WORKER = "Its worker may be started at this moment, or not."


def verdict(step: str, fault: RankFault, role: GroupRole) -> RankCase | str:
    """What is to be done and to be expected, or why that makes no sense."""
    found = (_worker if role.part == "worker" else _daemon)(step, fault, role.machine == HOME)
    return found if found.endswith(".") else RankCase(step, fault, role, found)


def _worker(step: str, fault: RankFault, home: bool) -> str:
    if fault == "disk full":
        return NO_FILES
    if fault in ("stalled", "reset"):
        return _streams(step, home)
    if step in RING:
        return NO_WORKER
    if step == "loading" and home:
        return MAYBE_NO_WORKER
    if fault == "adding wrongly":
        if step == "ending":
            return NOTHING_ASKED
        return NO_PASS if step in FORMING else "again"
    if step == "ending":
        return NOTHING_ASKED if fault == "out of memory" else "same"
    if (step, fault) == ("loading", "stopped"):
        return LOADS_ALONE
    if fault == "out of memory":
        # Home has no memory for the whole model then.
        return "again or out_of_memory" if home else "again"
    # Rank 0 is the worker that answers: that it is gone is no loss of a member. One that is stopped is late.
    return "again or engine_died" if home and fault == "killed" else "again"


def _streams(step: str, home: bool) -> str:
    if home:
        return BOTH_ENDS
    if step in ("asked", "promised"):
        return NO_STREAM
    return "same" if step == "ending" else "again"


def _daemon(step: str, fault: RankFault, home: bool) -> str:
    if fault == "out of memory":
        return DAEMON_MEMORY
    if fault == "adding wrongly":
        return NOT_THE_DAEMON
    if fault == "stalled":
        return AS_STOPPED
    if fault == "disk full" or step == "ending":
        return "same"
    if home and fault == "killed":
        # All its sessions are lost, and with them the ranks of other machines.
        return "again or engine_died"
    if home and fault == "stopped":
        return "same"  # it goes on after a while
    # Ranks that have met need no session of their daemons, whose end may be noticed after the answer.
    return "again" if fault == "killed" or step in RING[:2] else "either"


def table() -> list[RankCase | str]:
    """The whole of it."""
    return [verdict(step, fault, role) for step in STEPS for fault in FAULTS for role in ROLES]
