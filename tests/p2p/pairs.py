"""Two machines that are being paired, and all that passes between them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from machines import MachineKeys, machine

from fleetd.errors import PairingFailed
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.pairing import messages
from fleetd.p2p.pairing.roles import (
    Admitted,
    CodeAccepted,
    Event,
    Inviter,
    Joined,
    Joiner,
    PairingCode,
    PairingWindow,
)

A, B, M = machine(0), machine(1), machine(2)
CODE = PairingCode("42", b"code")
WRONG = PairingCode("42", b"cod!")
NOW = 1000.0


def chance(seed: str) -> Callable[[int], bytes]:
    """Random bytes that are the same in every run."""
    numbers = itertools.count()

    def take(size: int) -> bytes:
        return hashlib.shake_128(f"{seed} {next(numbers)}".encode()).digest(size)

    return take


def window(code: PairingCode = CODE) -> PairingWindow:
    return PairingWindow(code, NOW)


def inviter(opened: PairingWindow, me: MachineKeys = A, seed: str = "inviter", now: float = NOW) -> Inviter:
    return Inviter(opened, me, "ada", now, chance(seed))


def joiner(code: PairingCode = CODE, me: MachineKeys = B, seed: str = "joiner", now: float = NOW) -> Joiner:
    return Joiner(me, "ben", code, now, chance(seed))


def split(data: bytes) -> list[bytes]:
    """Whole frames, each with its length."""
    buffer, found = bytearray(data), []
    while (body := messages.take_frame(buffer)) is not None:
        found.append(messages.frame(body))
    assert not buffer
    return found


@dataclass
class Pair:
    """Both sides with their people and rosters, and everything that was sent."""

    inviting: Inviter
    joining: Joiner
    at_inviter: list[Event] = field(default_factory=list)
    at_joiner: list[Event] = field(default_factory=list)
    wire: list[tuple[str, bytes]] = field(default_factory=list)
    inviter_roster: Roster = field(default_factory=lambda: Roster(A))
    joiner_roster: Roster = field(default_factory=lambda: Roster(B))
    approves: bool = True
    # What happens at neither machine: nobody answers, or the disk is slow.
    ignored: tuple[type[Event], ...] = ()
    meddle: Callable[[int, bytes], bytes] = lambda number, frame: frame

    def run(self, now: float = NOW) -> Pair:
        while True:
            sent = [("inviter", f) for f in split(self.inviting.data_to_send())]
            sent += [("joiner", f) for f in split(self.joining.data_to_send())]
            if not sent:
                return self
            for sender, frame in sent:
                frame = self.meddle(len(self.wire), frame)
                self.wire.append((sender, frame))
                if sender == "inviter":
                    self._joiner(self.joining.receive(frame, now), now)
                else:
                    self._inviter(self.inviting.receive(frame, now), now)

    def _joiner(self, events: list[Event], now: float) -> None:
        self.at_joiner += events
        for event in events:
            if isinstance(event, self.ignored):
                continue
            if isinstance(event, Admitted):
                met = self.met(self.at_joiner)
                self.joiner_roster.join(met.certificate, met.name, True, event.records)
                self.joining.saved(self.joiner_roster.records(), now)

    def _inviter(self, events: list[Event], now: float) -> None:
        self.at_inviter += events
        for event in events:
            if isinstance(event, self.ignored):
                continue
            if isinstance(event, CodeAccepted) and self.approves:
                # A trial: whoever breaks off now was never here.
                trial = Roster(A, self.inviter_roster.records())
                trial.join(event.certificate, event.name, True, ())
                self.inviting.approve(trial.records(), now)
            elif isinstance(event, CodeAccepted):
                self.at_inviter += self.inviting.cancel()
            elif isinstance(event, Joined):
                met = self.met(self.at_inviter)
                self.inviter_roster.join(met.certificate, met.name, True, event.records)
                self.at_inviter += self.inviting.saved()

    @staticmethod
    def met(events: list[Event]) -> CodeAccepted:
        return next(event for event in events if isinstance(event, CodeAccepted))

    def errors(self) -> list[PairingFailed | None]:
        return [self.inviting.failed, self.joining.failed]


def pair(opened: PairingWindow | None = None, code: PairingCode = CODE, **changes: Any) -> Pair:
    return Pair(inviter(opened or window()), joiner(code), **changes).run()


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]
