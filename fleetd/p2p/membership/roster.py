"""The members of the fleet: a set of signed records, which merges to the same set in any order.

A record is a statement of one machine about another: an entry (it is a member) or a tombstone (it was
removed). Of several statements by one machine about another the newest is kept. A record is accepted only
from a signer whose key is in an earlier accepted record, so that a chain of signatures leads from every
record back to this machine.

The members are computed from the set, as seen from this machine: every machine that entries reach, where the
signer of each entry is itself a member and the entry is newer than every tombstone for its subject. So a
removed machine cannot add members. A tombstone counts whether or not its signer is still a member, or two
machines that remove each other would both come back; it does not count once its own signer, by the same rule,
has the machine back as a member.

Sequence numbers count per subject. A new statement is one higher than all that its signer has, so that it
replaces them. Two simultaneous statements by different signers tie; then a tombstone beats an entry, and "may
not see prompts" beats "may".

A member that only a removed machine had added is not lost: each machine that misses it signs an entry of its
own, with the sequence number of the old one, so that the new entry does not override a removal that is still
on its way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from fleetd import limits
from fleetd.errors import IdentityRefused, NotFound, Overloaded, RosterRefused
from fleetd.p2p.membership import keys
from fleetd.p2p.membership.keys import short_id
from fleetd.p2p.membership.roster_record import SEQUENCE_MAX, RosterRecord, is_name, subject_of

__all__ = ["Merged", "Roster", "RosterMember", "RosterRecord", "Signer", "rank"]

_DIGEST_BYTES = 16


class Signer(Protocol):
    """The part of this machine's identity that the roster needs."""

    @property
    def node_id(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    def sign(self, data: bytes) -> bytes: ...


class RosterMember(msgspec.Struct, frozen=True):
    """A member of the fleet. ``added_by``: node id of the signer of its first entry."""

    node_id: str
    name: str
    certificate: bytes
    sees_prompts: bool
    added_by: str
    sequence: int


class Merged(msgspec.Struct, frozen=True):
    """``changed``: there are new records to save and to send on."""

    changed: bool
    refused: tuple[RosterRefused, ...]


_Key = tuple[str, str]  # subject, signer
_Entries = dict[str, list[tuple[str, RosterRecord]]]  # signer → its entries, with their subjects
_View = dict[str, list[RosterRecord]]


class Roster:
    """``me``: this machine, where every chain of trust begins. ``records``: as saved before."""

    def __init__(self, me: Signer, records: Iterable[RosterRecord] = ()) -> None:
        self._me = me
        self._members: dict[str, RosterMember] = {}
        self._forget()
        self._take(records, bounded=False)
        self._compute()

    def _forget(self) -> None:
        self._records: dict[_Key, RosterRecord] = {}
        # Keys of the known signers. It only grows, or merging would depend on the order.
        self._keys = {self._me.node_id: keys.key_within(self._me.certificate)}
        self._removed_by: str | None = None
        self._digest = b""

    # ---- the state ---------------------------------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, RosterMember]:
        """All members but this machine, by node id, nearest first; a live view."""
        return MappingProxyType(self._members)

    @property
    def removed_by(self) -> str | None:
        """Node id of the machine that removed this one, which then has no members until ``reset``."""
        return self._removed_by

    def records(self) -> tuple[RosterRecord, ...]:
        return tuple(self._records[key] for key in sorted(self._records))

    def digest(self) -> bytes:
        """A hash of the records, 16 bytes."""
        if not self._digest:
            encoded = msgspec.msgpack.encode(self.records())
            self._digest = hashlib.sha256(encoded).digest()[:_DIGEST_BYTES]
        return self._digest

    # ---- records of others -------------------------------------------------------------------------------

    def merge(self, records: Iterable[RosterRecord]) -> Merged:
        """Accept the records of known signers, in any order and any number of times."""
        merged = self._take(records, bounded=True)
        if merged.changed:
            before = dict(self._members)
            self._compute()
            self._adopt(before)
        return merged

    def _take(self, records: Iterable[RosterRecord], *, bounded: bool) -> Merged:
        refused: list[RosterRefused] = []
        changed = False
        waiting = list(records)
        while waiting:
            unknown: list[RosterRecord] = []
            for record in waiting:
                if record.signer not in self._keys:
                    unknown.append(record)
                    continue
                try:
                    changed |= self._take_one(record, bounded)
                except RosterRefused as error:
                    refused.append(error)
            if len(unknown) == len(waiting):
                break
            waiting = unknown
        refused += [
            RosterRefused(
                f"A record is signed by {short_id(record.signer)!r}, whom no known machine vouches for."
            )
            for record in waiting
        ]
        return Merged(changed, tuple(refused))

    def _take_one(self, record: RosterRecord, bounded: bool) -> bool:
        """Add a record; True if it is new. Raises RosterRefused."""
        try:
            subject, key = subject_of(record.certificate)
        except IdentityRefused as error:
            raise RosterRefused(f"A record is about no machine: {error.message}") from None
        place = (subject, record.signer)
        held = self._records.get(place)
        if held == record:
            return False
        who = f"The record about {short_id(subject)} by {short_id(record.signer)}"
        if not is_name(record.name):
            raise RosterRefused(f"{who} has a name that cannot be shown.")
        if subject == record.signer:
            # Or a machine could permit itself to see prompts.
            raise RosterRefused(f"{who} is its statement about itself, which does not count.")
        if not keys.verify(self._keys[record.signer], record.signature, record.signed_bytes()):
            raise RosterRefused(f"{who} does not bear its signature.")
        if held is not None and rank(held) >= rank(record):
            return False
        full = bounded and held is None and len(self._records) >= limits.ROSTER_RECORDS
        # A full roster must still accept the removal of a member.
        if full and not (record.removed and subject in self._members):
            raise RosterRefused(f"{who} is one more than the {limits.ROSTER_RECORDS} that a roster holds.")
        self._records[place] = record
        self._keys[subject] = key
        self._digest = b""
        return True

    # ---- records of this machine -------------------------------------------------------------------------

    def admit(self, certificate: bytes, name: str, sees_prompts: bool) -> RosterRecord:
        """Sign an entry for a machine; also for one that was removed.

        Raises:
            Overloaded: the fleet has as many members as it can have.
            IdentityRefused, RosterRefused: an invalid certificate or name, or this machine's own certificate.
        """
        subject = subject_of(certificate)[0]
        if subject == self._me.node_id:
            raise RosterRefused("This is this machine's own certificate.")
        if not is_name(name):
            raise RosterRefused(
                f"A machine's name has 1 to {limits.MEMBER_NAME_CHARS} printable characters, not {len(name)} "
                f"like {name[: limits.MEMBER_NAME_CHARS]!r}."
            )
        if subject not in self._members and len(self._members) >= limits.ROSTER_MEMBERS:
            raise Overloaded(
                f"The fleet already has {len(self._members)} other machines, as many as it can have.",
                hint="Take one out with fleetctl unpair.",
            )
        highest = self._highest(subject)
        if highest == SEQUENCE_MAX:
            raise RosterRefused(
                f"Nothing more can be said about the machine {short_id(subject)}: its records have reached "
                "the last sequence number.",
                hint="Give it a new identity: delete its identity folder, then pair it again.",
            )
        record = self._sign(certificate, name, highest + 1, removed=False, sees_prompts=sees_prompts)
        self._compute()
        return record

    def join(
        self, certificate: bytes, name: str, sees_prompts: bool | None, records: Iterable[RosterRecord]
    ) -> tuple[RosterRecord, ...]:
        """Pair with a machine and merge its roster; returns this machine's own records.

        A removed machine begins with an empty roster. ``sees_prompts``: None leaves it at what the records
        say, and allows it where they say nothing. Raises as ``admit``.
        """
        if self._removed_by is not None:
            self.reset()
        subject = subject_of(certificate)[0]
        self.admit(certificate, name, self._allowed(subject) if sees_prompts is None else sees_prompts)
        self.merge(records)
        if subject not in self._members and self._removed_by is None:
            # It was removed and readmitted in a fleet that this machine did not know.
            self.admit(certificate, name, self._allowed(subject) if sees_prompts is None else sees_prompts)
        return tuple(record for record in self.records() if record.signer == self._me.node_id)

    def remove(self, node_id: str) -> list[RosterRecord]:
        """Remove a member, and sign entries for members that only it had added. Raises NotFound."""
        member = self._member(node_id)
        sequence = min(self._highest(node_id) + 1, SEQUENCE_MAX)
        before = dict(self._members)
        said = [self._sign(member.certificate, member.name, sequence, removed=True, sees_prompts=False)]
        self._compute()
        return said + self._adopt(before)

    def allow_prompts(self, node_id: str, allowed: bool) -> RosterRecord:
        """Permit or forbid a member to see prompts. Raises NotFound."""
        member = self._member(node_id)
        return self.admit(member.certificate, member.name, allowed)

    def reset(self) -> None:
        """Forget every record: this machine is a fleet of one again."""
        self._forget()
        self._compute()

    def _member(self, node_id: str) -> RosterMember:
        member = self._members.get(node_id)
        if member is None:
            raise NotFound(f"No machine {short_id(node_id)} is paired with this one.")
        return member

    def _allowed(self, subject: str) -> bool:
        """Whether the newest records let a machine, member or not, see prompts; True without any."""
        if subject in self._members:
            return self._members[subject].sees_prompts
        highest = self._highest(subject)
        newest = [r for key, r in self._records.items() if key[0] == subject and r.sequence == highest]
        return all(record.sees_prompts or record.removed for record in newest)

    def _highest(self, subject: str) -> int:
        """The highest known sequence number for a machine, 0 for none."""
        return max((r.sequence for key, r in self._records.items() if key[0] == subject), default=0)

    def _sign(
        self, certificate: bytes, name: str, sequence: int, *, removed: bool, sees_prompts: bool
    ) -> RosterRecord:
        me = self._me.node_id
        draft = RosterRecord(certificate, name, me, sequence, removed, sees_prompts, b"")
        record = msgspec.structs.replace(draft, signature=self._me.sign(draft.signed_bytes()))
        subject, key = subject_of(certificate)
        self._records[subject, me] = record
        self._keys[subject] = key
        self._digest = b""
        return record

    def _adopt(self, before: Mapping[str, RosterMember]) -> list[RosterRecord]:
        """Sign entries for the members ``before`` that became unreachable without being removed."""
        if self._removed_by is not None:
            return []
        removers = {record.signer for record in self._records.values() if record.removed}
        said: list[RosterRecord] = []
        # The signer of the tombstone has entries for the others, so one for it mostly suffices.
        for node_id in sorted(before, key=lambda node_id: (node_id not in removers, node_id)):
            member = before[node_id]
            if node_id in self._reached or member.sequence <= self._buried.get(node_id, 0):
                continue
            said.append(
                self._sign(
                    member.certificate,
                    member.name,
                    member.sequence,
                    removed=False,
                    sees_prompts=member.sees_prompts,
                )
            )
            self._compute()
        return said

    # ---- the view ----------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute the members from the records."""
        me = self._me.node_id
        entries: _Entries = {}
        tombstones: dict[str, list[RosterRecord]] = {}
        newest: dict[str, int] = {}
        for (subject, signer), record in sorted(self._records.items()):
            if record.removed:
                tombstones.setdefault(subject, []).append(record)
            else:
                entries.setdefault(signer, []).append((subject, record))
                newest[subject] = max(newest.get(subject, 0), record.sequence)
        said = {subject: max(r.sequence for r in found) for subject, found in tombstones.items()}
        views: dict[str, _View] = {}
        self._buried: dict[str, int] = {}
        self._removed_by = None
        for subject, found in tombstones.items():
            for record in sorted(found, key=rank):
                if newest.get(subject, 0) > record.sequence:
                    if record.signer not in views:
                        views[record.signer] = _view(record.signer, entries, said)
                    if subject in views[record.signer]:
                        continue
                elif subject == me:
                    self._removed_by = record.signer
                self._buried[subject] = record.sequence
        self._reached = {} if self._removed_by is not None else _view(me, entries, self._buried)
        self._members.clear()
        for subject, valid in list(self._reached.items())[: limits.ROSTER_MEMBERS]:
            self._members[subject] = _member(subject, valid, me)


def rank(record: RosterRecord) -> tuple[int, bool, bytes]:
    """Orders records by one signer about one subject; the highest counts."""
    return record.sequence, record.removed, record.signature


def _view(root: str, entries: _Entries, buried: Mapping[str, int]) -> _View:
    """The machines that ``root`` reaches, each with the entries that count for it.

    Breadth first: the subjects of its own entries come before those of their entries.
    """
    found: _View = {}
    queue = [root]
    for signer in queue:
        for subject, record in entries.get(signer, ()):
            if subject == root or record.sequence <= buried.get(subject, 0):
                continue
            if subject not in found:
                found[subject] = []
                queue.append(subject)
            found[subject].append(record)
    return found


def _member(subject: str, entries: list[RosterRecord], me: str) -> RosterMember:
    """The member that the valid entries about a machine describe."""
    newest = max(entries, key=lambda record: (record.sequence, record.signer))
    first = min(entries, key=lambda record: (record.sequence, record.signer))
    # This machine's own entry holds for its prompts, whatever others sign later.
    asked = [r for r in entries if r.sequence == newest.sequence or r.signer == me]
    return RosterMember(
        node_id=subject,
        name=newest.name,
        certificate=newest.certificate,
        sees_prompts=all(record.sees_prompts for record in asked),
        added_by=first.signer,
        sequence=newest.sequence,
    )
