"""The roster: who is in the fleet, on whose word, and who may see prompts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from rosters import A, B, C, D, E, exchange, names, pair, said

from fleetd import limits
from fleetd.errors import IdentityRefused, NotFound, Overloaded, RosterRefused
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import SEQUENCE_MAX, RosterRecord, clean_name, is_name

# ---- One machine's word ---------------------------------------------------------------------------------


def test_who_is_admitted_is_a_member() -> None:
    roster = Roster(A)
    record = roster.admit(B.certificate, "b", True)
    assert (record.subject, record.signer, record.sequence) == (B.node_id, A.node_id, 1)
    member = roster.members[B.node_id]
    assert (member.name, member.sees_prompts, member.added_by) == ("b", True, A.node_id)
    assert member.certificate == B.certificate
    assert Roster(A, roster.records()).members == roster.members


def test_who_is_removed_is_not_until_admitted_again() -> None:
    roster = Roster(A)
    roster.admit(B.certificate, "b", True)
    roster.remove(B.node_id)
    assert names(roster) == ""
    again = roster.admit(B.certificate, "b2", False)
    assert again.sequence == 3
    assert roster.members[B.node_id].name == "b2"
    assert not roster.members[B.node_id].sees_prompts


def test_members_is_always_current() -> None:
    """A handshake that began before the removal looks at the members after it."""
    roster = Roster(A)
    roster.admit(B.certificate, "b", True)
    seen = roster.members
    roster.remove(B.node_id)
    assert B.node_id not in seen


def test_a_stranger_can_be_neither_removed_nor_allowed_anything() -> None:
    roster = Roster(A)
    with pytest.raises(NotFound):
        roster.remove(B.node_id)
    with pytest.raises(NotFound):
        roster.allow_prompts(B.node_id, True)
    assert roster.records() == ()


def test_a_machine_cannot_be_paired_with_itself() -> None:
    with pytest.raises(RosterRefused, match="own certificate"):
        Roster(A).admit(A.certificate, "a", True)


def test_garbage_is_not_admitted() -> None:
    with pytest.raises(IdentityRefused):
        Roster(A).admit(b"garbage", "x", True)


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("Ada's Mac", True),
        ("x" * limits.MEMBER_NAME_CHARS, True),
        ("x" * (limits.MEMBER_NAME_CHARS + 1), False),
        ("", False),
        (" x", False),
        ("a\nb", False),
        ("\x1b[2J", False),
        ("a\u202eb", False),  # right-to-left override: shows another name than it is
        ("\ud800", False),
    ],
)
def test_names_can_be_shown_as_they_are(name: str, fine: bool) -> None:
    assert is_name(name) == fine
    roster = Roster(A)
    if fine:
        roster.admit(B.certificate, name, True)
    else:
        with pytest.raises(RosterRefused, match="name"):
            roster.admit(B.certificate, name, True)
        assert roster.records() == ()


@given(st.text(st.characters(), max_size=100))
def test_any_host_name_becomes_a_name(text: str) -> None:
    found = clean_name(text, "abcdefg")
    assert is_name(found)
    if is_name(text):
        assert found == text


# ---- A fleet --------------------------------------------------------------------------------------------


def test_a_fleet_knows_whom_any_of_its_machines_admits() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    assert (names(a), names(b), names(c)) == ("bc", "ac", "ab")
    assert a.members[C.node_id].added_by == B.node_id
    assert len({roster.digest() for roster in (a, b, c)}) == 1
    assert len(a.digest()) == 16


def test_a_machine_in_the_middle_goes_with_those_that_it_alone_vouched_for() -> None:
    """a - b - c: c was only ever known by way of b, on both sides."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    assert [member.node_id for member in a.remove(B.node_id)] == [C.node_id]
    assert names(a) == ""
    c.merge(a.records())
    assert (names(c), c.removed_by) == ("", None)


def test_a_machine_in_the_middle_goes_and_those_who_confirmed_each_other_stay() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    assert not a.members[C.node_id].confirmed
    a.confirm(C.node_id)
    c.confirm(A.node_id)
    assert a.members[C.node_id].confirmed
    exchange(a, b, c)
    assert a.only_through(B.node_id) == []
    assert a.remove(B.node_id) == []
    exchange(a, c)
    assert (names(a), names(c)) == ("c", "a")
    assert c.members[A.node_id].sees_prompts


def test_a_machine_that_a_person_keeps_stays_with_those_that_it_vouches_for() -> None:
    """a - b - c - d, and b - e: with b go c, d and e, unless c is kept."""
    a, b, c, d, e = (Roster(who) for who in (A, B, C, D, E))
    pair(a, b, A, B)
    pair(b, c, B, C)
    pair(c, d, C, D)
    pair(b, e, B, E)
    exchange(a, b, c, d, e)
    assert {member.node_id for member in a.only_through(B.node_id)} == {C.node_id, D.node_id, E.node_id}
    assert [member.node_id for member in a.only_through(C.node_id)] == [D.node_id]
    assert a.only_through(D.node_id) == []
    gone = a.remove(B.node_id, keep=[C.node_id, "unknown"])
    assert [member.node_id for member in gone] == [E.node_id]
    assert names(a) == "cd"
    assert (a.members[C.node_id].confirmed, a.members[D.node_id].confirmed) == (True, False)
    d.merge(a.records())
    assert names(d) == "c", "a was known there through b"


def test_everybody_who_came_through_one_machine_stays_where_they_confirmed_each_other() -> None:
    """A star of which the centre is taken out."""
    others = [machine(number) for number in range(1, 11)]
    rosters = [Roster(other) for other in others]
    centre = Roster(A)
    for roster, other in zip(rosters, others, strict=True):
        offered = Roster(A, centre.records())
        offered.admit(other.certificate, "n", True)
        roster.join(A.certificate, "a", True, offered.records())
        centre.join(other.certificate, "n", True, [*offered.records(), *roster.records()])
    exchange(centre, *rosters)
    for roster in rosters:
        for node_id in list(roster.members):
            roster.confirm(node_id)
    exchange(centre, *rosters)
    assert rosters[0].remove(A.node_id) == []
    exchange(*rosters)
    assert {len(roster.members) for roster in rosters} == {9}
    assert len(rosters[0].records()) == 11 * 10


def test_whoever_is_removed_is_told_by_whom_and_can_begin_anew() -> None:
    a, b = Roster(A), Roster(B)
    pair(a, b, A, B)
    a.remove(B.node_id)
    assert b.removed_by is None
    b.merge(a.records())
    assert b.removed_by == A.node_id
    assert b.members == {}
    b.reset()
    assert (b.removed_by, b.records()) == (None, ())
    pair(a, b, A, B)
    exchange(a, b)
    assert (names(a), names(b)) == ("b", "a")


def test_machines_that_remove_each_other_stay_apart() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(a, c, A, C)
    exchange(a, b, c)
    a.remove(B.node_id)
    b.remove(A.node_id)
    exchange(a, b, c)
    assert (names(a), names(b), names(c)) == ("", "", "")
    assert (a.removed_by, b.removed_by, c.removed_by) == (B.node_id, A.node_id, None)


def test_a_machine_removed_long_ago_elsewhere_can_be_joined() -> None:
    """The newcomer has not heard of the removal and the return when it first vouches for its inviter."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    a.remove(B.node_id)
    b.merge(a.records())
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    assert (names(a), names(b), names(c)) == ("bc", "ac", "ab")


def test_a_removed_machine_joins_without_a_word_from_before() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    a.remove(B.node_id)
    b.merge(a.records())
    pair(c, b, C, B)
    assert (names(b), names(c)) == ("c", "b")
    assert A.node_id not in {record.signer for record in b.records()}


def test_whoever_is_joined_is_a_member_whatever_was_said_about_it_before() -> None:
    """a removed b, and also c, who had taken b back: a's word about b still holds, and d hears of it."""
    a, b, c, d = Roster(A), Roster(B), Roster(C), Roster(D)
    pair(a, b, A, B)
    pair(a, c, A, C)
    exchange(a, b, c)
    a.remove(B.node_id)
    c.merge(a.records())
    b.reset()
    pair(c, b, C, B)
    a.remove(C.node_id)
    b.merge(a.records())
    pair(b, d, B, D)
    assert B.node_id in d.members
    assert D.node_id in b.members


def test_two_fleets_become_one() -> None:
    a, b, c, d = Roster(A), Roster(B), Roster(C), Roster(D)
    pair(a, b, A, B)
    pair(c, d, C, D)
    pair(a, c, A, C)
    exchange(a, b, c, d)
    assert [names(roster) for roster in (a, b, c, d)] == ["bcd", "acd", "abd", "abc"]


def test_fleet_that_becomes_part_of_another_brings_its_removals() -> None:
    """b was removed by a and is in another fleet now. Of two who do not agree, the careful one is right."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    a.remove(B.node_id)
    b.merge(a.records())
    pair(c, b, C, B)
    pair(a, c, A, C)
    exchange(a, c)
    assert (names(a), names(c)) == ("c", "a")
    pair(c, b, C, B)  # and whoever wants it back says so
    exchange(a, b, c)
    assert (names(a), names(b), names(c)) == ("bc", "ac", "ab")


def test_machine_that_comes_back_brings_those_it_met_meanwhile() -> None:
    """b was removed by a and by d, met c, and is back with a: for c, too, the removals are over."""
    a, b, c, d = Roster(A), Roster(B), Roster(C), Roster(D)
    pair(a, d, A, D)
    for remover, who in ((d, D), (a, A)):
        pair(remover, b, who, B)
        exchange(a, b, d)
        remover.remove(B.node_id)
        exchange(a, d)
        b.reset()
    pair(c, b, C, B)
    pair(a, b, A, B)
    exchange(a, b, c, d)
    assert [names(roster) for roster in (a, b, c, d)] == ["bcd", "acd", "abd", "abc"]


# ---- Who may see prompts --------------------------------------------------------------------------------


def test_the_newest_word_about_prompts_holds_everywhere() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    a.allow_prompts(C.node_id, False)
    exchange(a, b, c)
    assert [roster.members[C.node_id].sees_prompts for roster in (a, b)] == [False, False]
    b.allow_prompts(C.node_id, True)
    exchange(a, b, c)
    assert b.members[C.node_id].sees_prompts


def test_a_no_said_here_holds_here_whatever_is_said_elsewhere() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(a, c, A, C)
    exchange(a, b, c)
    a.allow_prompts(C.node_id, False)
    exchange(a, b, c)
    b.allow_prompts(C.node_id, True)
    exchange(a, b, c)
    assert not a.members[C.node_id].sees_prompts
    a.allow_prompts(C.node_id, True)
    assert a.members[C.node_id].sees_prompts


def test_joining_a_machine_leaves_open_what_its_fleet_says_of_it() -> None:
    """c took b, whom a had removed, back on its own terms; d joins b and knows neither."""
    for allowed in (True, False):
        a, b, c, d = Roster(A), Roster(B), Roster(C), Roster(D)
        pair(a, b, A, B)
        pair(a, c, A, C)
        exchange(a, b, c)
        a.remove(B.node_id)
        c.merge(a.records())
        c.admit(B.certificate, "b", allowed)
        d.join(B.certificate, "b", None, c.records())
        assert d.members[B.node_id].sees_prompts is allowed
        d.admit(B.certificate, "b", not allowed)
        d.join(B.certificate, "b", None, ())
        assert d.members[B.node_id].sees_prompts is not allowed
    new = Roster(D)
    new.join(B.certificate, "b", None, ())
    assert new.members[B.node_id].sees_prompts, "where nobody has said anything"


def test_of_two_words_at_the_same_time_the_no_counts() -> None:
    roster = Roster(A, [said(A, B), said(A, C)])
    for no in (True, False):
        roster.merge([said(B, D, 5, sees_prompts=no), said(C, D, 5, sees_prompts=not no)])
        assert not roster.members[D.node_id].sees_prompts
        roster = Roster(A, [said(A, B), said(A, C)])


def test_machine_granting_itself_prompts_is_refused() -> None:
    roster = Roster(A)
    roster.admit(B.certificate, "b", False)
    merged = roster.merge([said(B, B, 9, sees_prompts=True)])
    assert [error.message.partition(" is ")[2] for error in merged.refused] == [
        "its statement about itself, which does not count."
    ]
    assert not roster.members[B.node_id].sees_prompts


# ---- Bounds ---------------------------------------------------------------------------------------------


def test_the_members_of_a_fleet_are_bounded() -> None:
    roster = Roster(A)
    for number in range(1, limits.ROSTER_MEMBERS + 1):
        roster.admit(machine(number).certificate, "n", True)
    assert len(roster.members) == limits.ROSTER_MEMBERS
    with pytest.raises(Overloaded, match=str(limits.ROSTER_MEMBERS)):
        roster.admit(machine(limits.ROSTER_MEMBERS + 1).certificate, "n", True)
    roster.allow_prompts(machine(1).node_id, False)  # about a member there is always something to say
    roster.remove(machine(1).node_id)
    roster.admit(machine(limits.ROSTER_MEMBERS + 1).certificate, "n", True)


def test_the_places_of_a_fleet_cannot_be_filled_by_what_one_member_adds() -> None:
    """b adds as many as a fleet may have; they give way to those that a person here pairs, and leave places
    to those that another member adds."""
    crowd = [machine(number) for number in range(5, 5 + limits.ROSTER_MEMBERS)]
    roster = Roster(A, [said(A, B), said(A, C), *(said(B, other) for other in crowd)])
    assert len(roster.members) == limits.ROSTER_MEMBERS
    roster.merge([said(C, D)])
    assert {B.node_id, C.node_id, D.node_id} <= set(roster.members)
    # Whichever of the two comes first in the order of ids.
    other = Roster(A, [said(A, B), said(A, C), *(said(C, each) for each in crowd), said(B, D)])
    assert {B.node_id, C.node_id, D.node_id} <= set(other.members)
    held = len(roster.records())
    for number in range(200, 200 + limits.ROSTER_MEMBERS - 2):
        roster.admit(machine(number).certificate, "n", True)
    assert len(roster.records()) == held + limits.ROSTER_MEMBERS - 2, "those over the bound are not lost"
    assert all(member.confirmed for member in roster.members.values())
    with pytest.raises(Overloaded, match=str(limits.ROSTER_MEMBERS)):
        roster.admit(machine(1000).certificate, "n", True)


def test_what_one_member_adds_in_a_day_is_bounded() -> None:
    """A burst is taken at once; what is more comes later, whatever the wall clock says."""
    crowd = [machine(number) for number in range(5, 65)]
    entries = [said(B, other) for other in crowd]
    roster, now = Roster(A, [said(A, B), said(A, C)]), 1e6
    merged = roster.merge(entries, now)
    most = limits.ROSTER_ADDED_PER_DAY
    assert (len(roster.members), len(merged.late), merged.refused) == (2 + most, 60 - most, ())
    assert not roster.merge(merged.late, now).changed
    assert not roster.merge(entries[:most] * 3, now).changed, "nor does what is known already"
    assert roster.merge([said(C, D)], now).changed, "others may"
    assert roster.merge([said(B, E)], now).late == (said(B, E),)
    assert len(roster.merge(merged.late, now + 86400).late) == 60 - 2 * most
    assert len(roster.members) == 3 + 2 * most


def test_a_member_that_adds_machines_and_removes_them_again_may_add_no_more_of_them() -> None:
    crowd = [machine(number) for number in range(5, 65)]
    roster = Roster(A, [said(A, B)])
    seen = set()
    for other in crowd:
        roster.merge([said(B, other)], 1e6)
        seen |= set(roster.members)
        roster.merge([said(B, other, 2, removed=True)], 1e6)
    assert len(seen) == 1 + limits.ROSTER_ADDED_PER_DAY


def test_machines_that_a_member_invents_share_one_bound() -> None:
    """Each of those that b adds adds as many again, in one message and in many."""
    first = [machine(number) for number in range(5, 5 + limits.ROSTER_ADDED_PER_DAY)]
    chain = [said(B, other) for other in first]
    chain += [said(first[i % len(first)], machine(100 + i)) for i in range(60)]
    chain += [said(machine(100 + i), machine(200 + i)) for i in range(60)]
    at_once, piecemeal = Roster(A, [said(A, B)]), Roster(A, [said(A, B)])
    at_once.merge(chain, 1e6)
    for record in chain:
        piecemeal.merge([record], 1e6)
    for roster in (at_once, piecemeal):
        assert len(roster.members) == 1 + 2 * limits.ROSTER_ADDED_PER_DAY
        assert roster.merge([said(B, E)], 1e6 + 86400 / limits.ROSTER_ADDED_PER_DAY + 1).changed, (
            "b may again"
        )


def test_who_joins_a_fleet_of_a_dozen_hears_of_all_at_once() -> None:
    centre, joiner = Roster(A), Roster(B)
    for number in range(5, 17):
        centre.admit(machine(number).certificate, "n", True)
    pair(centre, joiner, A, B)
    assert len(joiner.members) == 13
    assert [member.node_id for member in joiner.members.values() if member.confirmed] == [A.node_id]


def test_full_roster_takes_removals_and_its_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROSTER_RECORDS", 4)
    roster = Roster(A, [said(A, B), said(A, C)])
    assert roster.merge([said(B, D), said(B, A)]).changed
    merged = roster.merge([said(B, E), said(C, D)])
    assert (merged.changed, len(merged.refused)) == (False, 2)
    assert "4" in str(merged.refused[0])
    assert roster.merge([said(B, D, 2)]).changed  # takes the place of an older one
    assert roster.merge([said(B, E, removed=True)]).refused  # removes nobody
    assert roster.merge([said(B, C, 2, removed=True)]).changed
    assert names(roster) == "bd"
    roster.remove(D.node_id)
    roster.admit(E.certificate, "e", True)
    assert names(roster) == "be"
    assert Roster(A, roster.records()).records() == roster.records()  # whatever was saved is loaded


def test_records_on_the_wire_are_bounded() -> None:
    right = said(A, B, name="x" * limits.MEMBER_NAME_CHARS)
    encoded = msgspec.msgpack.encode(right)
    assert msgspec.msgpack.decode(encoded, type=RosterRecord) == right
    for changes in (
        {"name": "x" * (limits.MEMBER_NAME_CHARS + 1)},
        {"certificate": bytes(limits.CERTIFICATE_BYTES + 1)},
        {"signer": A.node_id + "a"},
        {"sequence": 0},
        {"sequence": SEQUENCE_MAX + 1},
        {"signature": bytes(65)},
    ):
        wrong = msgspec.msgpack.encode(msgspec.structs.replace(right, **changes))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(wrong, type=RosterRecord)
