"""The two sides of a pairing: how unknown machines establish trust with a code that a person carries.

Sans-IO. After the four bytes that select pairing at the peer port, frames of ``u16 length (big endian) |
body`` go both ways over plain TCP. A body is a MessagePack array whose first item is the number of its kind;
from Proof on it is sealed.

    joiner                           inviter
    Hello            ──►◄──          Hello        certificates, names; at once
    Share            ──►                          SPAKE2, over the code and both certificates
                     ◄──             Share        costs the window one of its three tries
    Confirm          ──►                          the joiner proves first that it has the key
                     ◄──   Confirm, Proof         the code is used up
    Proof            ──►                          signatures over all of the above: CodeAccepted on both sides
                                                  people compare the phrase, and say yes at the inviter
                     ◄──           Records        with the joiner in them: Admitted
    saved; Records   ──►                          with the inviter in them: Joined
                     ◄──   saved; Finished        Done on both sides
    Refuse           ──►◄──          Refuse       at any time, by either

Each side writes the pairing to disk before it tells the other. So a machine that is killed at any point
leaves at worst a pairing that one side has on disk and that neither side has reported as successful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetd import limits
from fleetd.errors import PairingClosed
from fleetd.p2p.membership.roster import Signer
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.pairing.code import PairingCode, PairingWindow
from fleetd.p2p.pairing.key_agreement import Pake
from fleetd.p2p.pairing.messages import Confirm, Message, PairingFinished, PakeShare
from fleetd.p2p.pairing.side import (
    Admitted,
    CodeAccepted,
    Event,
    Joined,
    PairingBroke,
    PairingDone,
    Side,
    of_kind,
    wrong_code,
)

__all__ = [
    "Admitted",
    "CodeAccepted",
    "Event",
    "Inviter",
    "Joined",
    "Joiner",
    "PairingBroke",
    "PairingCode",
    "PairingDone",
    "PairingWindow",
]


class Joiner(Side):
    """The joiner's side of a pairing, at the machine where the code is typed.

    ``receive`` until CodeAccepted and Admitted; take the records into the roster, save it, ``saved``; Done.
    """

    role = "joiner"

    def __init__(
        self,
        me: Signer,
        name: str,
        code: PairingCode,
        now: float,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        super().__init__(me, name, now, random_bytes)
        self._secret = code.secret
        self._run: Pake

    def saved(self, records: Iterable[RosterRecord], now: float) -> list[Event]:
        """The inviter is in the roster on disk. ``records``: this machine's, for the inviter."""
        if self._end("saving"):
            self._send_records(records)
            self._await(Joiner._on_finished, now)
        return []

    def _met(self, now: float) -> list[Event]:
        self._run = self._pake(self._secret)
        self._send(PakeShare(self._run.message))
        self._await(Joiner._on_share, now)
        return []

    def _on_share(self, message: Message, now: float) -> list[Event]:
        self._agree(self._run.finish(of_kind(message, PakeShare).message))
        self._send(Confirm(self._keys.confirmation))
        self._await(Joiner._on_confirm, now)
        return []

    def _on_confirm(self, message: Message, now: float) -> list[Event]:
        if not self._keys.confirms(of_kind(message, Confirm).mac):
            return self._fail(wrong_code(), "wrong_code")
        self._prove()
        self._await(Joiner._on_proof, now)
        return []

    def _on_proof(self, message: Message, now: float) -> list[Event]:
        accepted = self._proven(message)
        # A person at the other machine answers first.
        self._await(Joiner._on_records, now, limits.PAIRING_ANSWER_S + limits.PAIRING_STEP_S)
        return [accepted]

    def _on_records(self, message: Message, now: float) -> list[Event]:
        records = self._all_records(message, now)
        return [] if records is None else [Admitted(records)]

    def _on_finished(self, message: Message, now: float) -> list[Event]:
        of_kind(message, PairingFinished)
        self.done = True
        self.deadline = None
        return [PairingDone()]


class Inviter(Side):
    """The inviter's side, at the machine that shows the code: one for each connection, all with one window.

    ``receive`` until CodeAccepted; ask the person; ``approve`` or ``cancel``; ``receive`` until Joined; take
    the records into the roster, save it, ``saved``, which returns Done.
    """

    role = "inviter"

    def __init__(
        self,
        window: PairingWindow,
        me: Signer,
        name: str,
        now: float,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        super().__init__(me, name, now, random_bytes)
        #: True once this connection has cost the window a try.
        self.tried = False
        #: True once it has used up the code.
        self.used = False
        self._window = window

    def approve(self, records: Iterable[RosterRecord], now: float) -> list[Event]:
        """The person says yes. ``records``: this machine's roster, with the joiner in it.

        It need not be saved yet, nor be the roster in use: a joiner that breaks off now has no effect.
        """
        if self._end("asking"):
            self._send_records(records)
            self._await(Inviter._on_records, now)
        return []

    def saved(self) -> list[Event]:
        """The joiner is in the roster on disk."""
        if not self._end("saving"):
            return []
        self._send(PairingFinished())
        self.done = True
        return [PairingDone()]

    def _met(self, now: float) -> list[Event]:
        self._await(Inviter._on_share, now)
        return []

    def _on_share(self, message: Message, now: float) -> list[Event]:
        share = of_kind(message, PakeShare).message
        try:
            # Before the answer, so that parallel connections get no more guesses; and not earlier, so that
            # a connection without a guess costs no try.
            self._window.take_try(now)
            self.tried = True
        except PairingClosed as error:
            return self._fail(error, "closed")
        run = self._pake(self._window.code.secret)
        key = run.finish(share)
        self._send(PakeShare(run.message))
        self._agree(key)
        self._await(Inviter._on_confirm, now)
        return []

    def _on_confirm(self, message: Message, now: float) -> list[Event]:
        if not self._keys.confirms(of_kind(message, Confirm).mac):
            return self._fail(wrong_code(), "wrong_code")
        try:
            self._window.use(now)
            self.used = True
        except PairingClosed as error:
            return self._fail(error, "closed")
        self._send(Confirm(self._keys.confirmation))
        self._prove()
        self._await(Inviter._on_proof, now)
        return []

    def _on_proof(self, message: Message, now: float) -> list[Event]:
        accepted = self._proven(message)
        self._begin("asking", now + limits.PAIRING_ANSWER_S)
        return [accepted]

    def _on_records(self, message: Message, now: float) -> list[Event]:
        records = self._all_records(message, now)
        return [] if records is None else [Joined(records)]
