"""Every step of a shared prefill, every fault, every machine that it may strike: a case, or why it is none.

Pure: what is done is ``fault_machines``' matter. A role is a machine and which of its processes the fault
concerns; home's are one: what hits its daemon hits the answer's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scarce_memory import Short
from sharing import LAYERS
from wire import END, GONE

from fleetd.engine.shared_prefill import frame_schedule
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.plan.prefill.split import Split

HOME, HELPERS = "home", ("helper0", "helper1")
CHUNK = 160

Fault = Literal["killed", "stalled", "reset", "corrupted", "disk full", "out of memory"]
FAULTS: tuple[Fault, ...] = ("killed", "stalled", "reset", "corrupted", "disk full", "out of memory")
# What an answer must have been: the helpers' work, this machine's own, or either where that is a race.
# "none": the machine that answers died itself.
Outcome = Literal["shared", "alone", "either", "none"]


@dataclass(frozen=True)
class Scenario:
    """How the prompts of a group are shared: in a chain of ``cuts``, by layers or by chunks of tokens."""

    name: str
    kind: Any
    cuts: tuple[int, ...]
    chunks: int

    @property
    def split(self) -> Split:
        cuts = self.cuts if self.kind == "layers" else (*(CHUNK * cut for cut in self.cuts[:-1]), self.tokens)
        return Split(self.kind, cuts, LAYERS, 0, self.tokens, CHUNK)

    @property
    def tokens(self) -> int:
        """Prefilled ones; the last chunk is shorter."""
        return CHUNK * self.chunks - 20

    @property
    def helpers(self) -> int:
        return len(self.cuts) - 2


SCENARIOS = (
    Scenario("layers", "layers", (0, 2, 4), 2),
    Scenario("whole", "layers", (0, 4, 4), 2),
    Scenario("tokens", "tokens", (0, 1, 2), 2),
    Scenario("chain of layers", "layers", (0, 1, 2, 4), 2),
    Scenario("chain of tokens", "tokens", (0, 1, 2, 3), 3),
)


@dataclass(frozen=True)
class Role:
    """``part``: "daemon" or "worker"; "" of home, whose two are one."""

    machine: str
    part: str

    def __str__(self) -> str:
        return f"{self.machine} {self.part}".strip()


@dataclass(frozen=True)
class Step:
    """``name``: as ``FaultMachines.point`` is told of it.

    kind: a "message" of the agreement, a stream that is dialled ("dial") or "given" to a worker, the word to
    "share", or a "frame" of a stream.
    sender, receiver: the machines between which it passes; of "given" and "share" the receiver is whose
    worker gets it, and the sender is at the stream's other end.
    ``stream``: as the sender's and the receiver's workers call it. ``frame``: its number.
    ``needed``: without it there is no shared prefill. ``agreed``: it comes after the word to share.
    ``last``: the end of a stream. Nobody waits for it: who has all that is needed may leave before. Home's
    may be a socket that closes, and the step does not have to come (``sure``).
    """

    name: str
    kind: str
    sender: str = ""
    receiver: str = ""
    stream: tuple[str, str] = ("", "")
    frame: int = 0
    needed: bool = True
    agreed: bool = False
    last: bool = False
    sure: bool = True

    def leaves(self, machine: str) -> str:
        """The step at which one of the two machines of a stream leaves it."""
        other = self.sender if machine == self.receiver else self.receiver
        return f"{self.name.partition(':')[0]}: to {other} {GONE}"


@dataclass(frozen=True)
class Case:
    scenario: Scenario
    step: Step
    fault: Fault
    role: Role
    outcome: Outcome
    short: Short | None = None

    def __str__(self) -> str:
        return f"{self.scenario.name}, {self.step.name}, {self.role} {self.fault}"


# ---- steps -----------------------------------------------------------------------------------------------


class _RowSizes:
    """Of a model; here only how many frames there are matters."""

    in_rows = True
    state_sizes = None

    def parts(self, layer: int) -> list[_RowSizes]:
        return [self]

    def sizes(self, rows: int) -> tuple[int, int]:
        return rows, rows

    def hidden_bytes(self, tokens: int) -> int:
        return tokens


def steps(scenario: Scenario) -> Iterator[Step]:
    """All of a prompt that is shared so; of a chain only what a single helper does not have."""
    split, chain = scenario.split, HELPERS[: scenario.helpers]
    alone = len(chain) == 1
    if alone and scenario.name == "layers":
        (name,) = chain
        for what, sender, receiver in (
            ("ask", HOME, name),
            ("offer made", name, HOME),
            ("offer taken", name, HOME),
            ("go sent", HOME, name),
            ("go taken", HOME, name),
        ):
            yield Step(f"{name}: {what}", "message", sender, receiver)
        yield from _opening(name, f"{name}'s home", HOME, name, "helper0", "home")
        yield from _opening(name, f"{name}'s out", name, HOME, "out", "in")
        yield Step("share", "share", "", HOME)
    if not alone:
        first, second = chain
        yield from _opening(first, f"{first}'s out", first, second, "out", "in")
    for rank, name in enumerate(chain):
        if alone:
            sent = frame_schedule.to_helper(split, rank, _RowSizes())
            yield from _frames(f"{name}'s home", HOME, name, (f"helper{rank}", "home"), sent)
            kept = frame_schedule.to_home(split, rank, _RowSizes())
            yield from _frames(f"{name}'s home", name, HOME, ("home", f"helper{rank}"), kept)
        if (alone and split.has_next(rank)) or (not alone and rank == 0):
            receiver = HOME if alone else chain[1]
            handed = frame_schedule.to_next(split, rank, _RowSizes())
            yield from _frames(f"{name}'s out", name, receiver, ("out", "in"), handed)
    if alone and scenario.name == "layers":
        for what in ("done sent", "done taken"):
            yield Step(f"{chain[0]}: {what}", "message", chain[0], HOME, needed=False, agreed=True)


def _opening(name: str, stream: str, dialler: str, listener: str, theirs: str, ours: str) -> Iterator[Step]:
    yield Step(f"{stream}: dial", "dial", dialler, listener)
    yield Step(f"{dialler}: given {theirs}", "given", listener, dialler, ("", theirs))
    yield Step(f"{listener}: given {ours}", "given", dialler, listener, ("", ours))


def _frames(
    stream: str, sender: str, receiver: str, names: tuple[str, str], heads: Iterator[FrameHeader]
) -> Iterator[Step]:
    for number, head in enumerate(heads):
        needed = head.kind is not Kind.DONE
        yield Step(
            f"{stream}: to {receiver} {number}", "frame", sender, receiver, names, number, needed, agreed=True
        )
    yield Step(
        f"{stream}: to {receiver} {END}",
        "frame",
        sender,
        receiver,
        names,
        needed=False,
        agreed=True,
        last=True,
        sure=sender != HOME,
    )


def roles(scenario: Scenario) -> Iterator[Role]:
    for name in HELPERS[: scenario.helpers]:
        yield Role(name, "daemon")
        yield Role(name, "worker")
    yield Role(HOME, "")


# ---- the table -------------------------------------------------------------------------------------------

# Combinations without a meaning, with the reason.
NO_FILES = "A worker writes no files: its log goes through the daemon."
DAEMON_MEMORY = (
    "A daemon holds a few kilobytes of a share: where even these lack, the system kills it, see there."
)
NOT_BETWEEN = "This does not pass its worker."
NO_STREAM_YET = "No stream is open yet; the session's two ends are reset as the daemon's."
PROMISED = "All memory of this part has been promised before, and none is taken before a stream comes."
NOTHING_TO_MAKE = "It carries nothing that takes memory."
OWN_MACHINE = "A socket between a daemon and its own worker does not change what it carries."


def verdict(scenario: Scenario, step: Step, fault: Fault, role: Role) -> Case | str:
    """What is to be done and to be expected, or why that makes no sense."""
    found = _VERDICTS[fault](step, role)
    if isinstance(found, str) and found not in ("shared", "alone", "either", "none"):
        return found
    outcome, short = found if isinstance(found, tuple) else (found, None)
    return Case(scenario, step, fault, role, outcome, short)  # type: ignore[arg-type]


_Verdict = str | tuple[str, Short]


def _lost(step: Step) -> str:
    """Where a machine, or what comes of it, is gone from this step on."""
    return "alone" if step.needed else "either"


def _killed(step: Step, role: Role) -> _Verdict:
    return "none" if role.machine == HOME else _lost(step)


def _stalled(step: Step, role: Role) -> _Verdict:
    if role.machine == HOME:
        return "shared"  # it goes on after a while, and helpers wait for it
    if role.part == "worker":
        return _lost(step)
    # Once its worker has the streams, nobody waits for its daemon.
    return (
        "alone"
        if step.kind == "message" and not step.agreed and not step.name.endswith("go taken")
        else "either"
    )


def _reset(step: Step, role: Role) -> _Verdict:
    if role.part == "daemon":
        return "alone" if step.kind in ("message", "dial") and step.needed else "either"
    if step.kind == "message" and not step.agreed:
        return NO_STREAM_YET
    if step.kind in ("dial", "given", "frame") and role.machine not in (step.sender, step.receiver):
        return NOT_BETWEEN
    return _lost(step)


def _corrupted(step: Step, role: Role) -> _Verdict:
    mine = role.machine == step.receiver
    if role.part == "worker":
        if step.kind == "given" and mine:
            return OWN_MACHINE
        return _lost(step) if step.kind == "frame" and mine else NOT_BETWEEN
    if step.kind == "dial" and mine:
        return "alone"
    if role.machine == HOME and step.kind == "frame" and mine:
        return _lost(step)
    # Otherwise whatever comes next on its session, which may be after all this.
    waits = {
        HOME: ("ask", "offer made", "offer taken"),
        HELPERS[0]: ("ask", "offer made", "offer taken", "go sent", "go taken"),
    }
    early = step.kind == "message" and step.name.endswith(waits.get(role.machine, ()))
    return "alone" if early else "either"


def _disk_full(_step: Step, role: Role) -> _Verdict:
    return NO_FILES if role.part == "worker" else "shared"


def _out_of_memory(step: Step, role: Role) -> _Verdict:
    if role.part == "daemon":
        return DAEMON_MEMORY
    rank = HOME if role.machine == HOME else str(HELPERS.index(role.machine))
    mine = role.machine == step.receiver
    match step.kind:
        case "message" if step.name.endswith("ask"):
            return "alone"
        case "message":
            return NOTHING_TO_MAKE if step.agreed else PROMISED
        case "given" if mine:
            return "alone", Short(rank, "open", step.stream[1])
        case "share" if mine:
            return "alone", Short(rank, "room")
        case "frame" if step.last:
            return NOTHING_TO_MAKE
        case "frame" if mine:
            return _lost(step), Short(rank, "take", step.stream[1], step.frame)
        case "frame" if role.machine == step.sender:
            return _lost(step), Short(rank, "make", step.stream[0], step.frame)
    return NOT_BETWEEN


_VERDICTS: dict[Fault, Any] = {
    "killed": _killed,
    "stalled": _stalled,
    "reset": _reset,
    "corrupted": _corrupted,
    "disk full": _disk_full,
    "out of memory": _out_of_memory,
}


def table() -> list[Case | str]:
    """The whole of it."""
    return [
        verdict(scenario, step, fault, role)
        for scenario in SCENARIOS
        for fault in FAULTS
        for role in roles(scenario)
        for step in steps(scenario)
    ]
