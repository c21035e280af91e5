"""The members that follow from a set of roster records, as one machine sees them. Pure.

A machine belongs if entries lead to it, where the signer of each entry is itself a member and the entry is
newer than every tombstone for its subject. So a removed machine cannot add members. A tombstone counts
whether or not its signer is still a member, or two machines that remove each other would both come back; it
does not count once its own signer, by the same rule, has the machine back as a member.

What is not an entry of this machine's own is another machine's word. Nothing turns that word into this
machine's: a machine that only a removed one had vouched for goes with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from fleetd import limits
from fleetd.p2p.membership.roster_record import RosterRecord

Reached = dict[str, list[RosterRecord]]


class RosterMember(msgspec.Struct, frozen=True):
    """A member of the fleet.

    ``added_by``: node id of the signer of its first entry. ``through``: of the machine on whose word it is
    here; its own if it is confirmed. ``sees_prompts``: the fleet's word.
    """

    node_id: str
    name: str
    certificate: bytes
    sees_prompts: bool
    added_by: str
    through: str
    sequence: int

    @property
    def confirmed(self) -> bool:
        """True if a person at this machine has paired it, let it see prompts or kept it; until then it is
        here on the word of others."""
        return self.through == self.node_id


class RosterView:
    """What ``records`` (by subject and signer) say to the machine ``me``.

    ``removed_by``: node id of the machine that removed this one, which then reaches none. ``buried``: by
    subject the sequence of the newest tombstone that counts. ``reached``: the entries that count, by subject:
    first those that this machine's own entries name, then those that theirs name, and so on.
    """

    def __init__(self, me: str, records: Mapping[tuple[str, str], RosterRecord]) -> None:
        self._me = me
        self._entries: dict[str, list[tuple[str, RosterRecord]]] = defaultdict(list)
        self.buried: dict[str, int] = {}
        self.removed_by: str | None = None
        tombstones: dict[str, list[RosterRecord]] = defaultdict(list)
        newest: dict[str, int] = {}
        for (subject, signer), record in sorted(records.items()):
            if record.removed:
                tombstones[subject].append(record)
            else:
                self._entries[signer].append((subject, record))
                newest[subject] = max(newest.get(subject, 0), record.sequence)
        self._said = {subject: max(r.sequence for r in found) for subject, found in tombstones.items()}
        self._bury(tombstones, newest)
        self.reached = {} if self.removed_by is not None else self._reach(me, self.buried)
        self._only_through: dict[str, list[str]] = {}
        #: Node id → the machine that an entry of this one names and through which it is known; maybe itself.
        self.branches: dict[str, str] = {}
        for subject, valid in self.reached.items():
            signer = valid[0].signer
            self.branches[subject] = subject if signer == me else self.branches[signer]

    def _bury(self, tombstones: Mapping[str, list[RosterRecord]], newest: Mapping[str, int]) -> None:
        said = self._said
        views: dict[str, Reached] = {}
        for subject, found in tombstones.items():
            for record in sorted(found, key=rank):
                if newest.get(subject, 0) > record.sequence:
                    if record.signer not in views:
                        views[record.signer] = self._reach(record.signer, said)
                    if subject in views[record.signer]:
                        continue
                elif subject == self._me:
                    self.removed_by = record.signer
                self.buried[subject] = record.sequence

    def _reach(self, root: str, buried: Mapping[str, int], without: str = "") -> Reached:
        """The machines that ``root`` reaches, not by way of ``without``, each with the entries that count.

        Breadth first: the subjects of its own entries come before those of their entries.
        """
        found: Reached = {}
        queue = [root]
        for signer in queue:
            for subject, record in self._entries.get(signer, ()):
                if subject in (root, without) or record.sequence <= buried.get(subject, 0):
                    continue
                if subject not in found:
                    found[subject] = []
                    queue.append(subject)
                found[subject].append(record)
        return found

    def members(self) -> Iterator[RosterMember]:
        """The members, at most ``limits.ROSTER_MEMBERS``: the confirmed ones, then one of each branch in
        turn, the nearest first, so that no branch keeps out another."""
        turns: dict[str, int] = defaultdict(int)
        ranked: list[tuple[int, int, str]] = []
        for position, (subject, branch) in enumerate(self.branches.items()):
            turns[branch] += subject != branch
            ranked.append((turns[branch] if subject != branch else 0, position, subject))
        for _, _, subject in sorted(ranked)[: limits.ROSTER_MEMBERS]:
            yield self.member(subject)

    def member(self, subject: str) -> RosterMember:
        """What the entries that count say of a machine that is reached."""
        entries = self.reached[subject]
        newest = max(entries, key=lambda record: (record.sequence, record.signer))
        first = min(entries, key=lambda record: (record.sequence, record.signer))
        # This machine's own entry holds for its prompts, whatever others sign later.
        asked = [r for r in entries if r.sequence == newest.sequence or r.signer == self._me]
        # A removal ends what a person here said of a machine, whoever has it back.
        ended = any(r.signer == self._me and r.sequence <= self._said.get(subject, 0) for r in entries)
        return RosterMember(
            node_id=subject,
            name=newest.name,
            certificate=newest.certificate,
            sees_prompts=all(record.sees_prompts for record in asked),
            added_by=first.signer,
            through=newest.signer if ended else self.branches[subject],
            sequence=newest.sequence,
        )

    def only_through(self, node_id: str) -> list[str]:
        """The machines that are reached by way of this one alone."""
        if node_id not in self._only_through:
            without = self._reach(self._me, self.buried, node_id)
            found = [subject for subject in self.reached if subject != node_id and subject not in without]
            self._only_through[node_id] = found
        return self._only_through[node_id]


def rank(record: RosterRecord) -> tuple[int, bool, bytes]:
    """Orders records by one signer about one subject; the highest counts."""
    return record.sequence, record.removed, record.signature
