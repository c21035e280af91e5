"""The members of the fleet: a set of signed records, which merges to the same set in any order.

A record is a statement of one machine about another: an entry (it is a member) or a tombstone (it was
removed). Of several statements by one machine about another the newest is kept. A record is accepted only
from a signer whose key is in an earlier accepted record, so that a chain of signatures leads from every
record back to this machine. ``roster_view`` computes the members from the set.

Sequence numbers count per subject. A new statement is one higher than all that its signer has, so that it
replaces them. Two simultaneous statements by different signers tie; then a tombstone beats an entry, and "may
not see prompts" beats "may".

This machine signs only what a person here says. So a machine that only a removed one had vouched for goes
with it, on every machine that knew it in no other way. Who removes a machine may keep such a one, by an entry
of the person's own machine.

How many machines the word of one member adds in a day is bounded (``additions``). What is over the bound is
not refused: it waits, and the sets are alike once it was taken.
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
from fleetd.p2p.membership.additions import Additions
from fleetd.p2p.membership.keys import short_id
from fleetd.p2p.membership.roster_record import SEQUENCE_MAX, RosterRecord, is_name, subject_of
from fleetd.p2p.membership.roster_view import RosterMember, RosterView, rank

__all__ = ["Merged", "Roster", "RosterMember", "RosterRecord", "Signer", "rank"]

_DIGEST_BYTES = 16


class Signer(Protocol):
    """The part of this machine's identity that the roster needs."""

    @property
    def node_id(self) -> str: ...
    @property
    def certificate(self) -> bytes: ...
    def sign(self, data: bytes) -> bytes: ...


class Merged(msgspec.Struct, frozen=True):
    """``changed``: there are new records to save and to send on. ``late``: those to merge again later."""

    changed: bool
    refused: tuple[RosterRefused, ...]
    late: tuple[RosterRecord, ...] = ()


_Key = tuple[str, str]  # subject, signer


class Roster:
    """``me``: this machine, where every chain of trust begins. ``records``: as saved before."""

    def __init__(self, me: Signer, records: Iterable[RosterRecord] = ()) -> None:
        self._me = me
        self._members: dict[str, RosterMember] = {}
        self._forget()
        self._take(records, None)
        self._compute()

    def _forget(self) -> None:
        self._records: dict[_Key, RosterRecord] = {}
        # Keys of the known signers. While the roster has room it only grows, or merging would depend on the
        # order.
        self._keys = {self._me.node_id: keys.key_within(self._me.certificate)}
        # The subjects of entries.
        self._named: set[str] = set()
        self._additions = Additions()
        self._digest = b""

    # ---- the state ---------------------------------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, RosterMember]:
        """All members but this machine, by node id, nearest first; a live view."""
        return MappingProxyType(self._members)

    @property
    def removed_by(self) -> str | None:
        """Node id of the machine that removed this one, which then has no members until ``reset``."""
        return self._view.removed_by

    def only_through(self, node_id: str) -> list[RosterMember]:
        """The machines that this machine knows by way of this member alone."""
        return [self._view.member(subject) for subject in self._view.only_through(node_id)]

    def records(self) -> tuple[RosterRecord, ...]:
        return tuple(self._records[key] for key in sorted(self._records))

    def digest(self) -> bytes:
        """A hash of the records, 16 bytes."""
        if not self._digest:
            encoded = msgspec.msgpack.encode(self.records())
            self._digest = hashlib.sha256(encoded).digest()[:_DIGEST_BYTES]
        return self._digest

    # ---- records of others -------------------------------------------------------------------------------

    def merge(self, records: Iterable[RosterRecord], now: float = 0.0) -> Merged:
        """Accept the records of known signers, in any order and any number of times.

        ``now``: monotonic seconds, for the number of machines that one member may add in a day.
        """
        merged = self._take(records, now)
        if merged.changed:
            self._compute()
        return merged

    def _take(self, records: Iterable[RosterRecord], now: float | None) -> Merged:
        """Add records; without ``now``, those of this machine's own file, which no bound refuses."""
        refused: list[RosterRefused] = []
        late: list[RosterRecord] = []
        changed = False
        waiting = list(records)
        while waiting:
            unknown: list[RosterRecord] = []
            for record in waiting:
                if record.signer not in self._keys:
                    unknown.append(record)
                    continue
                try:
                    if self._is_news(record):
                        if now is not None and not self._may_add(record, now):
                            late.append(record)
                            continue
                        self._add(record, bounded=now is not None)
                        changed = True
                except RosterRefused as error:
                    refused.append(error)
            if len(unknown) == len(waiting):
                break
            waiting = unknown
        if late:
            # One of the late ones may be about their signer.
            return Merged(changed, tuple(refused), (*late, *waiting))
        refused += [
            RosterRefused(
                f"A record is signed by {short_id(record.signer)!r}, whom no known machine vouches for."
            )
            for record in waiting
        ]
        return Merged(changed, tuple(refused))

    def _is_news(self, record: RosterRecord) -> bool:
        """True for a valid record that is newer than what is held. Raises RosterRefused."""
        try:
            subject = subject_of(record.certificate)[0]
        except IdentityRefused as error:
            raise RosterRefused(f"A record is about no machine: {error.message}") from None
        held = self._records.get((subject, record.signer))
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
        return held is None or rank(held) < rank(record)

    def _may_add(self, record: RosterRecord, now: float) -> bool:
        """False for an entry that adds a machine, if its signer has added as many as it may for now."""
        subject, signer = record.subject, record.signer
        if record.removed or subject in self._named or self._me.node_id in (subject, signer):
            return True
        branch = self._branches.get(signer, "")
        if not self._additions.take(branch, now, direct=signer == branch):
            return False
        self._branches.setdefault(subject, branch)
        return True

    def _add(self, record: RosterRecord, *, bounded: bool) -> None:
        """Add a record. Raises RosterRefused if the roster is full."""
        subject, key = subject_of(record.certificate)
        place = (subject, record.signer)
        full = bounded and place not in self._records and len(self._records) >= limits.ROSTER_RECORDS
        # A full roster must still accept the removal of a member.
        if full and not (record.removed and subject in self._members) and not self._make_room(record.signer):
            raise RosterRefused(
                f"The record about {short_id(subject)} by {short_id(record.signer)} is one more than the "
                f"{limits.ROSTER_RECORDS} that a roster holds."
            )
        self._put(subject, key, record)

    def _put(self, subject: str, key: bytes, record: RosterRecord) -> None:
        self._records[subject, record.signer] = record
        self._keys[subject] = key
        if not record.removed:
            self._named.add(subject)
        self._digest = b""

    def _make_room(self, signer: str) -> bool:
        """Drop a record for one by ``signer``, if one counts for less: another machine's tombstone about one
        that no entry names, and for a confirmed signer an entry of a machine that is not confirmed."""
        me = self._me.node_id
        confirmed = {me, *(member.node_id for member in self._members.values() if member.confirmed)}
        self._named = {subject for (subject, _), record in self._records.items() if not record.removed}
        for (subject, by), record in reversed(self._records.items()):
            lesser = signer in confirmed and by not in confirmed and not record.removed
            if lesser or (record.removed and by != me and subject not in self._named):
                break
        else:
            return False
        del self._records[subject, by]
        if all(other != subject for other, _ in self._records):
            self._keys.pop(subject, None)
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
        self._check_room(subject)
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

    def _check_room(self, subject: str) -> None:
        """Raise Overloaded if no other machine can be confirmed here. Those that others added give way."""
        confirmed = [member.node_id for member in self._members.values() if member.confirmed]
        if subject not in confirmed and len(confirmed) >= limits.ROSTER_MEMBERS:
            raise Overloaded(
                f"The fleet already has {len(confirmed)} other machines, as many as it can have.",
                hint="Take one out with fleetctl unpair.",
            )

    def confirm(self, node_id: str) -> None:
        """Vouch for a member that others added, at a person's word. Raises NotFound or Overloaded.

        The entry has the number of the newest one, so that it does not override a removal on its way.
        """
        member = self._member(node_id)
        self._check_room(node_id)
        if not member.confirmed:
            self._sign(
                member.certificate,
                member.name,
                member.sequence,
                removed=False,
                sees_prompts=member.sees_prompts,
            )
            self._compute()

    def join(
        self,
        certificate: bytes,
        name: str,
        sees_prompts: bool | None,
        records: Iterable[RosterRecord],
        now: float = 0.0,
    ) -> tuple[RosterRecord, ...]:
        """Pair with a machine and merge its roster; returns this machine's own records.

        A removed machine begins with an empty roster. ``sees_prompts``: None leaves it at what the records
        say, and allows it if they say nothing. Raises as ``admit``.
        """
        if self.removed_by is not None:
            self.reset()
        subject = subject_of(certificate)[0]
        self.admit(certificate, name, self._allowed(subject) if sees_prompts is None else sees_prompts)
        self.merge(records, now)
        if subject not in self._members and self.removed_by is None:
            # It was removed and readmitted in a fleet that this machine did not know.
            self.admit(certificate, name, self._allowed(subject) if sees_prompts is None else sees_prompts)
        return tuple(record for record in self.records() if record.signer == self._me.node_id)

    def remove(self, node_id: str, keep: Iterable[str] = ()) -> list[RosterMember]:
        """Remove a member; returns those that go with it, because this machine knows them through it alone.

        ``keep``: those of them that stay, with what they vouch for. Raises NotFound or Overloaded.
        """
        member = self._member(node_id)
        dependent = {each.node_id for each in self.only_through(node_id)}
        for kept in keep:
            if kept in dependent and kept in self._members:
                self.confirm(kept)
        gone = self.only_through(node_id)
        sequence = min(self._highest(node_id) + 1, SEQUENCE_MAX)
        self._sign(member.certificate, member.name, sequence, removed=True, sees_prompts=False)
        self._compute()
        return gone

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
        self._put(*subject_of(certificate), record)
        return record

    def _compute(self) -> None:
        """Compute the members from the records."""
        self._view = RosterView(self._me.node_id, self._records)
        # While records are merged, those that they add are in the branch of their signer.
        self._branches = dict(self._view.branches)
        self._members.clear()
        self._members.update((member.node_id, member) for member in self._view.members())
