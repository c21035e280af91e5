"""Rosters end up alike, in whatever order, cut and company their records arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import machine
from rosters import A, B, C, D, exchange, said

from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import RosterRecord

# ---- Merging in any order -------------------------------------------------------------------------------


people = st.sampled_from((A, B, C, D))
any_record = st.builds(
    said,
    people,
    people,
    st.integers(1, 4),
    removed=st.booleans(),
    sees_prompts=st.booleans(),
    name=st.sampled_from(("x", "y")),
)


def batches(records: Sequence[RosterRecord], cuts: Iterable[int]) -> list[Sequence[RosterRecord]]:
    edges = [0, *sorted(cut % (len(records) + 1) for cut in cuts), len(records)]
    return [records[start:end] for start, end in itertools.pairwise(edges)]


@examples(150)
@given(st.lists(any_record, max_size=14), st.data())
def test_any_order_repetition_and_batching_ends_in_the_same_records(
    records: list[RosterRecord], data: st.DataObject
) -> None:
    """What is refused because its signer is not known yet comes again with the next gossip.

    No tombstones: those make a machine say something itself, which depends on what it had heard before.
    """
    entries = [said(A, B)] + [record for record in records if not record.removed]
    straight = Roster(A)
    straight.merge(entries)
    other = Roster(A)
    jumbled = data.draw(st.permutations(entries + data.draw(st.lists(st.sampled_from(entries)))))
    parts = batches(jumbled, data.draw(st.lists(st.integers(0, 30), max_size=4)))
    while any(other.merge(part).changed for part in parts):
        pass
    assert other.records() == straight.records()
    assert other.digest() == straight.digest()
    assert other.members == straight.members
    assert Roster(A, reversed(straight.records())).members == straight.members


@examples(150)
@given(st.lists(any_record, max_size=14), st.data())
def test_machines_that_tell_each_other_everything_hold_the_same_records(
    records: list[RosterRecord], data: st.DataObject
) -> None:
    """With tombstones, and with what the machines say themselves when they lose somebody to one."""
    first, second = Roster(A), Roster(A)
    first.merge([said(A, B), *records])
    jumbled = data.draw(st.permutations([said(A, B), *records]))
    for part in batches(jumbled, data.draw(st.lists(st.integers(0, 30), max_size=4))):
        second.merge(part)
    exchange(first, second)
    assert first.records() == second.records()
    assert first.digest() == second.digest()
    assert first.members == second.members
    assert first.removed_by == second.removed_by


# ---- A fleet at work ------------------------------------------------------------------------------------


class TogetherMachine(RuleBasedStateMachine):
    """Everybody hears everything at once, and people confirm whom others add: the fleets must then be exactly
    those that people made, whoever is removed."""

    @initialize(count=st.integers(3, 6))
    def start(self, count: int) -> None:
        self.who = [machine(number) for number in range(count)]
        self.rosters = [Roster(who) for who in self.who]
        self.fleets = [{number} for number in range(count)]
        # Whom each of these fleets has removed.
        self.banned: list[set[int]] = [set() for _ in range(count)]

    def fleet_of(self, number: int) -> int:
        return next(at for at, fleet in enumerate(self.fleets) if number in fleet)

    def gossip(self) -> None:
        self.tell()
        for roster in self.rosters:
            for node_id in list(roster.members):
                roster.confirm(node_id)
        self.tell()

    def tell(self) -> None:
        """Sessions exist between machines that both take the other for a member."""
        while any(
            self.rosters[i].merge(self.rosters[j].records()).changed
            for i, j in itertools.permutations(range(len(self.who)), 2)
            if self.who[i].node_id in self.rosters[j].members
            and self.who[j].node_id in self.rosters[i].members
        ):
            pass

    @rule(i=st.integers(0, 5), j=st.integers(0, 5))
    def pair(self, i: int, j: int) -> None:
        i, j = i % len(self.who), j % len(self.who)
        one, other = self.fleet_of(i), self.fleet_of(j)
        # Fleets of which one removed a machine of the other: a test of its own says what happens.
        torn = (self.banned[one] & self.fleets[other]) | (self.banned[other] & self.fleets[one])
        if i == j or torn - {i, j}:
            return
        if self.rosters[i].removed_by is not None:
            self.rosters[i].reset()
        offered = Roster(self.who[i], self.rosters[i].records())
        offered.admit(self.who[j].certificate, "n", True)
        self.rosters[j].join(self.who[i].certificate, "n", True, offered.records())
        back = [*offered.records(), *self.rosters[j].records()]
        self.rosters[i].join(self.who[j].certificate, "n", True, back)
        if one != other:
            self.fleets[one] |= self.fleets[other]
            self.banned[one] |= self.banned[other]
            del self.fleets[other], self.banned[other]
        self.banned[self.fleet_of(i)] -= {i, j}
        self.gossip()

    @rule(i=st.integers(0, 5), j=st.integers(0, 5), told=st.booleans())
    def remove(self, i: int, j: int, told: bool) -> None:
        i, j = i % len(self.who), j % len(self.who)
        if self.who[j].node_id not in self.rosters[i].members:
            return
        self.rosters[i].remove(self.who[j].node_id)
        fleet = self.fleet_of(i)
        self.fleets[fleet].discard(j)
        self.banned[fleet].add(j)
        self.fleets.append({j})
        self.banned.append(set())
        # Told before its session is closed; else it is away, and somebody resets it when it is back.
        if told:
            self.rosters[j].merge(self.rosters[i].records())
            assert self.rosters[j].removed_by == self.who[i].node_id
        else:
            self.rosters[j].reset()
        self.gossip()

    @invariant()
    def the_fleets_are_those_that_people_made(self) -> None:
        for number, roster in enumerate(getattr(self, "rosters", ())):
            expected = {self.who[other].node_id for other in self.fleets[self.fleet_of(number)] - {number}}
            assert set(roster.members) == expected


@examples(100)
@given(st.data())
def test_a_fleet_is_what_its_pairings_connect_whoever_is_removed(data: st.DataObject) -> None:
    """What nobody confirms hangs by those who were paired: a removal leaves the parts that it leaves."""
    who = [machine(number) for number in range(data.draw(st.integers(3, 7)))]
    rosters = [Roster(each) for each in who]
    paired = {(data.draw(st.integers(0, number - 1)), number) for number in range(1, len(who))}
    for inviter, joiner in sorted(paired):
        offered = Roster(who[inviter], rosters[inviter].records())
        offered.admit(who[joiner].certificate, "n", True)
        rosters[joiner].join(who[inviter].certificate, "n", True, offered.records())
        back = [*offered.records(), *rosters[joiner].records()]
        rosters[inviter].join(who[joiner].certificate, "n", True, back)
    exchange(*rosters)
    by, removed = data.draw(st.permutations(range(len(who))))[:2]
    named = rosters[by].only_through(who[removed].node_id)
    before = set(rosters[by].members)
    assert rosters[by].remove(who[removed].node_id) == named
    exchange(*rosters)
    for number, roster in enumerate(rosters):
        if number != removed:
            part = {number}
            while more := {n for pair in paired for n in pair if part & {*pair}} - part - {removed}:
                part |= more
            assert set(roster.members) == {who[other].node_id for other in part - {number}}
        if number == by:
            gone = {who[removed].node_id, *(member.node_id for member in named)}
            assert set(roster.members) == before - gone


class ApartMachine(RuleBasedStateMachine):
    """Any two hear of each other now and then: whoever takes each other for members agrees in the end."""

    @initialize(count=st.integers(3, 6))
    def start(self, count: int) -> None:
        self.who = [machine(number) for number in range(count)]
        self.rosters = [Roster(who) for who in self.who]

    def mutual(self) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i, j in itertools.permutations(range(len(self.who)), 2)
            if self.who[i].node_id in self.rosters[j].members
            and self.who[j].node_id in self.rosters[i].members
        ]

    @rule(i=st.integers(0, 5), j=st.integers(0, 5), sees_prompts=st.booleans())
    def admit(self, i: int, j: int, sees_prompts: bool) -> None:
        i, j = i % len(self.who), j % len(self.who)
        if i != j:
            for one, other in ((i, j), (j, i)):
                said_of = self.rosters[other].records()
                self.rosters[one].join(self.who[other].certificate, "n", sees_prompts, said_of)

    @rule(i=st.integers(0, 5), j=st.integers(0, 5))
    def confirm(self, i: int, j: int) -> None:
        i, j = i % len(self.who), j % len(self.who)
        if self.who[j].node_id in self.rosters[i].members:
            self.rosters[i].confirm(self.who[j].node_id)
            assert self.rosters[i].members[self.who[j].node_id].confirmed

    @rule(i=st.integers(0, 5), j=st.integers(0, 5))
    def remove(self, i: int, j: int) -> None:
        i, j = i % len(self.who), j % len(self.who)
        if self.who[j].node_id in self.rosters[i].members:
            self.rosters[i].remove(self.who[j].node_id)
            assert self.who[j].node_id not in self.rosters[i].members

    @rule(pick=st.integers(0, 100))
    def meet(self, pick: int) -> None:
        if mutual := self.mutual():
            i, j = mutual[pick % len(mutual)]
            self.rosters[i].merge(self.rosters[j].records())

    @rule()
    def meet_all(self) -> None:
        while any(self.rosters[i].merge(self.rosters[j].records()).changed for i, j in self.mutual()):
            pass
        for i, j in self.mutual():
            assert self.rosters[i].records() == self.rosters[j].records()
            both = {self.who[i].node_id, self.who[j].node_id}
            assert set(self.rosters[i].members) | both == set(self.rosters[j].members) | both

    @invariant()
    def what_is_held_leads_back_to_oneself(self) -> None:
        for who, roster in zip(getattr(self, "who", ()), getattr(self, "rosters", ()), strict=True):
            again = Roster(who, roster.records())
            assert again.records() == roster.records()
            assert again.members == roster.members


TestTogether = TogetherMachine.TestCase
TestTogether.settings = settings(examples(40), stateful_step_count=20)
TestApart = ApartMachine.TestCase
TestApart.settings = settings(examples(40), stateful_step_count=20)
