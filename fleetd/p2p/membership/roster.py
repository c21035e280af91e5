"""Who belongs to the fleet: a set of signed records, which merges to the same set in any order.

A record is one machine's word about another: an entry ("it belongs to us") or a tombstone ("no longer"). Of
one machine's words about another the newest is kept. A record is taken only from a signer whose key an
earlier record vouches for, so that everything held leads back, signature by signature, to this machine.

Who belongs is computed from the set, seen from this machine: whoever can be reached through entries, each by
a signer who itself belongs, and each newer than every tombstone for its subject. So a machine that was
removed can bring nobody in any more. Tombstones count whoever signed them, or two machines that remove each
other would both come back; but not when their own signer, by the same rule, has the machine back.

Sequence numbers count per subject. A new word is one higher than all that its signer has seen, so that it
replaces those; a word said at the same time by somebody else who had seen as much ties with it, and then a
removal beats an entry and "may not see prompts" beats "may".

Whoever belonged only by way of a machine that is removed is not lost: each machine that misses such a member
vouches for it itself, with the sequence number that the member had, so that no removal which it has not heard
of yet is outrun.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import msgspec

from fleetd import limits
from fleetd.errors import IdentityRefused, NotFound, Overloaded, RosterRefused
from fleetd.p2p.membership import keys
from fleetd.p2p.membership.keys import short_id
from fleetd.p2p.membership.roster_record import SEQUENCE_MAX, RosterRecord, is_name, subject_of

__all__ = ["Merged", "Roster", "RosterMember", "RosterRecord", "Signer"]

_DIGEST_BYTES = 16


class Signer(Protocol):
    """This machine's identity, as far as the roster needs it."""

    @property
    def node_id(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    def sign(self, data: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RosterMember:
    """A machine that belongs to the fleet. ``added_by``: node id of who vouched for it first."""

    node_id: str
    name: str
    certificate: bytes
    sees_prompts: bool
    added_by: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Merged:
    """``changed``: there is something to save and to pass on."""

    changed: bool
    refused: tuple[RosterRefused, ...]


_Key = tuple[str, str]  # subject, signer
_Entries = dict[str, list[tuple[str, RosterRecord]]]  # signer → whom it vouches for
_View = dict[str, list[RosterRecord]]


class Roster:
    """``me`` is where all trust begins. ``records``: as saved before."""

    def __init__(self, me: Signer, records: Iterable[RosterRecord] = ()) -> None:
        self._me = me
        self._members: dict[str, RosterMember] = {}
        self._forget()
        self._take(records, bounded=False)
        self._look()

    def _forget(self) -> None:
        self._records: dict[_Key, RosterRecord] = {}
        # Everybody whose signature counts. Only grows, or merging would depend on the order.
        self._keys = {self._me.node_id: subject_of(self._me.certificate)[1]}
        self._removed_by: str | None = None
        self._digest = b""

    # ---- what it says ------------------------------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, RosterMember]:
        """All but this machine, by node id, nearest first; always the current ones."""
        return MappingProxyType(self._members)

    @property
    def removed_by(self) -> str | None:
        """Node id of whoever removed this machine; it then has no members until ``reset``."""
        return self._removed_by

    def records(self) -> tuple[RosterRecord, ...]:
        return tuple(self._records[key] for key in sorted(self._records))

    def digest(self) -> bytes:
        """16 bytes that are the same for the same records."""
        if not self._digest:
            encoded = msgspec.msgpack.encode(self.records())
            self._digest = hashlib.sha256(encoded).digest()[:_DIGEST_BYTES]
        return self._digest

    # ---- what others say ---------------------------------------------------------------------------------

    def merge(self, records: Iterable[RosterRecord]) -> Merged:
        """Take what is signed by somebody known; ``records`` may come in any order and more than once."""
        merged = self._take(records, bounded=True)
        if merged.changed:
            before = dict(self._members)
            self._look()
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
            RosterRefused(f"A record is signed by {short_id(record.signer)!r}, whom nobody vouches for.")
            for record in waiting
        ]
        return Merged(changed, tuple(refused))

    def _take_one(self, record: RosterRecord, bounded: bool) -> bool:
        """Whether it is news. Raises RosterRefused."""
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
            # Or a machine could say of itself that it may see prompts.
            raise RosterRefused(f"{who} is its word about itself, which counts for nothing.")
        if not keys.verify(self._keys[record.signer], record.signature, record.signed_bytes()):
            raise RosterRefused(f"{who} does not bear its signature.")
        if held is not None and _rank(held) >= _rank(record):
            return False
        full = bounded and held is None and len(self._records) >= limits.ROSTER_RECORDS
        # A roster that somebody filled up must not keep a removal out.
        if full and not (record.removed and subject in self._members):
            raise RosterRefused(f"{who} is one more than the {limits.ROSTER_RECORDS} that a roster holds.")
        self._records[place] = record
        self._keys[subject] = key
        self._digest = b""
        return True

    # ---- what this machine says --------------------------------------------------------------------------

    def admit(self, certificate: bytes, name: str, sees_prompts: bool) -> RosterRecord:
        """Vouch for a machine; also for one that was removed.

        Raises:
            Overloaded: the fleet has as many members as it can have.
            IdentityRefused, RosterRefused: no certificate, this machine's own, or no name.
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
        record = self._say(certificate, name, highest + 1, removed=False, sees_prompts=sees_prompts)
        self._look()
        return record

    def join(
        self, certificate: bytes, name: str, sees_prompts: bool, records: Iterable[RosterRecord]
    ) -> tuple[RosterRecord, ...]:
        """Pair with a machine and take over the roster that it sent: this machine's own records then.

        A removal is over: whoever was removed begins anew. Raises as ``admit``.
        """
        if self._removed_by is not None:
            self.reset()
        subject = self.admit(certificate, name, sees_prompts).subject
        self.merge(records)
        if subject not in self._members and self._removed_by is None:
            # It was removed and readmitted before, in a fleet that this machine had not heard of.
            self.admit(certificate, name, sees_prompts)
        return tuple(record for record in self.records() if record.signer == self._me.node_id)

    def remove(self, node_id: str) -> list[RosterRecord]:
        """Take a member out, and vouch for those who belonged only through it. Raises NotFound."""
        member = self._member(node_id)
        sequence = min(self._highest(node_id) + 1, SEQUENCE_MAX)
        before = dict(self._members)
        said = [self._say(member.certificate, member.name, sequence, removed=True, sees_prompts=False)]
        self._look()
        return said + self._adopt(before)

    def allow_prompts(self, node_id: str, allowed: bool) -> RosterRecord:
        """Say whether a member may see prompts. Raises NotFound."""
        member = self._member(node_id)
        return self.admit(member.certificate, member.name, allowed)

    def reset(self) -> None:
        """Forget everybody: this machine is a fleet of one again."""
        self._forget()
        self._look()

    def _member(self, node_id: str) -> RosterMember:
        member = self._members.get(node_id)
        if member is None:
            raise NotFound(f"No machine {short_id(node_id)} is paired with this one.")
        return member

    def _highest(self, subject: str) -> int:
        """The highest sequence number heard of for a machine, 0 for none."""
        return max((r.sequence for key, r in self._records.items() if key[0] == subject), default=0)

    def _say(
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
        """Vouch for those of ``before`` who are out of reach although nobody removed them."""
        if self._removed_by is not None:
            return []
        removers = {record.signer for record in self._records.values() if record.removed}
        said: list[RosterRecord] = []
        # A remover has vouched for the others, so reaching it is mostly enough.
        for node_id in sorted(before, key=lambda node_id: (node_id not in removers, node_id)):
            member = before[node_id]
            if node_id in self._reached or member.sequence <= self._buried.get(node_id, 0):
                continue
            said.append(
                self._say(
                    member.certificate,
                    member.name,
                    member.sequence,
                    removed=False,
                    sees_prompts=member.sees_prompts,
                )
            )
            self._look()
        return said

    # ---- the view ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Compute who belongs, from the records alone."""
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
            for record in sorted(found, key=_rank):
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


def _rank(record: RosterRecord) -> tuple[int, bool, bytes]:
    """Of two words by one signer about one subject the higher one counts."""
    return record.sequence, record.removed, record.signature


def _view(root: str, entries: _Entries, buried: Mapping[str, int]) -> _View:
    """Everybody whom ``root`` reaches, each with the entries that count for it.

    Breadth first, so that those whom it vouches for itself come before all whom those brought.
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
    """What the valid entries about a machine come to."""
    newest = max(entries, key=lambda record: (record.sequence, record.signer))
    first = min(entries, key=lambda record: (record.sequence, record.signer))
    # What was said at this machine holds for its own prompts, whatever is said elsewhere later.
    asked = [r for r in entries if r.sequence == newest.sequence or r.signer == me]
    return RosterMember(
        node_id=subject,
        name=newest.name,
        certificate=newest.certificate,
        sees_prompts=all(record.sees_prompts for record in asked),
        added_by=first.signer,
        sequence=newest.sequence,
    )
