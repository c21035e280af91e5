"""The roster: merging in any order, who belongs, and everybody who would like to belong."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import Machine, machine

from fleetd import limits
from fleetd.errors import IdentityRefused, NotFound, Overloaded, RosterRefused
from fleetd.p2p.record import SEQUENCE_MAX, Record, clean_name, is_name
from fleetd.p2p.roster import Roster

A, B, C, D, E = (machine(number) for number in range(5))
NAMES = {who.node_id: name for who, name in zip((A, B, C, D, E), "abcde", strict=True)}


def said(
    signer: Machine,
    about: Machine,
    sequence: int = 1,
    *,
    removed: bool = False,
    sees_prompts: bool = True,
    name: str = "n",
) -> Record:
    """A record as its signer's own, possibly malicious, program could make it."""
    draft = Record(about.certificate, name, signer.node_id, sequence, removed, sees_prompts, b"")
    return msgspec.structs.replace(draft, signature=signer.sign(draft.signed_bytes()))


def names(roster: Roster) -> str:
    return "".join(sorted(NAMES[node_id] for node_id in roster.members))


def pair(inviter: Roster, joiner: Roster, first: Machine, second: Machine) -> None:
    """What pairing does, without its cryptography."""
    offered = Roster(first, inviter.records())
    offered.admit(second.certificate, NAMES[second.node_id], True)
    joiner.join(first.certificate, NAMES[first.node_id], True, offered.records())
    inviter.join(second.certificate, NAMES[second.node_id], True, [*offered.records(), *joiner.records()])


def exchange(*rosters: Roster) -> None:
    """Until nobody has news for anybody, tell everything to everybody."""
    while any(one.merge(other.records()).changed for one, other in itertools.permutations(rosters, 2)):
        pass


# ---- One machine's word ----------------------------------------------------------------------------------


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


# ---- A fleet ---------------------------------------------------------------------------------------------


def test_a_fleet_knows_whom_any_of_its_machines_admits() -> None:
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    assert (names(a), names(b), names(c)) == ("bc", "ac", "ab")
    assert a.members[C.node_id].added_by == B.node_id
    assert len({roster.digest() for roster in (a, b, c)}) == 1
    assert len(a.digest()) == 16


def test_a_machine_in_the_middle_goes_and_takes_nobody_with_it() -> None:
    """a - b - c: c was only ever known by way of b, on both sides."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(b, c, B, C)
    exchange(a, b, c)
    a.remove(B.node_id)
    assert names(a) == "c"
    c.merge(a.records())
    assert names(c) == "a"
    exchange(a, c)
    assert (names(a), names(c)) == ("c", "a")
    assert c.members[A.node_id].sees_prompts


def test_everybody_who_came_through_one_machine_stays_with_few_records() -> None:
    """A star of which the centre is taken out: not everybody has to vouch for everybody."""
    others = [machine(number) for number in range(1, 21)]
    rosters = [Roster(other) for other in others]
    centre = Roster(A)
    for roster, other in zip(rosters, others, strict=True):
        offered = Roster(A, centre.records())
        offered.admit(other.certificate, "n", True)
        roster.join(A.certificate, "a", True, offered.records())
        centre.join(other.certificate, "n", True, [*offered.records(), *roster.records()])
    exchange(centre, *rosters)
    rosters[0].remove(A.node_id)
    exchange(*rosters)
    assert {len(roster.members) for roster in rosters} == {19}
    assert len(rosters[0].records()) == 2 * 20 + 2 * 19


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


# ---- Who may see prompts ---------------------------------------------------------------------------------


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
        "its word about itself, which counts for nothing."
    ]
    assert not roster.members[B.node_id].sees_prompts


# ---- Attacks ---------------------------------------------------------------------------------------------


def test_entry_by_a_stranger_is_refused() -> None:
    roster = Roster(A, [said(A, B)])
    merged = roster.merge([said(D, E), said(D, A), said(E, D)])
    assert (merged.changed, len(merged.refused)) == (False, 3)
    assert "nobody vouches" in str(merged.refused[0])
    assert names(roster) == "b"
    assert len(roster.records()) == 1


def test_tombstone_by_a_stranger_is_refused() -> None:
    roster = Roster(A, [said(A, B)])
    merged = roster.merge([said(D, B, 9, removed=True), said(D, A, 9, removed=True)])
    assert (merged.changed, len(merged.refused)) == (False, 2)
    assert names(roster) == "b"
    assert roster.removed_by is None


def test_stranger_naming_a_member_as_signer_is_refused() -> None:
    """Two keys on one id: the id is the signer's, the signature another key's."""
    roster = Roster(A, [said(A, B)])
    forged = msgspec.structs.replace(said(D, E), signer=B.node_id)
    resigned = msgspec.structs.replace(forged, signature=D.sign(forged.signed_bytes()))
    merged = roster.merge([forged, resigned])
    assert (merged.changed, len(merged.refused)) == (False, 2)
    assert "does not bear its signature" in str(merged.refused[1])


def test_two_keys_on_one_id_are_refused() -> None:
    """A certificate with a member's name and key, signed by another key, cannot stand in for the member's."""
    stolen = D.certificate.replace(
        D.key.public_key().public_bytes_raw(), B.key.public_key().public_bytes_raw()
    )
    assert stolen != D.certificate
    roster = Roster(A, [said(A, B), said(A, C)])
    draft = Record(stolen, "b", C.node_id, 9, False, True, b"")
    merged = roster.merge([msgspec.structs.replace(draft, signature=C.sign(draft.signed_bytes()))])
    assert (merged.changed, len(merged.refused)) == (False, 1)
    assert roster.members[B.node_id].certificate == B.certificate


def test_old_tombstone_replayed_after_readmission_changes_nothing() -> None:
    roster = Roster(A)
    roster.admit(B.certificate, "b", True)
    (tombstone,) = roster.remove(B.node_id)
    roster.admit(B.certificate, "b", True)
    kept = roster.records()
    assert roster.merge([tombstone]).changed is False
    assert names(roster) == "b"
    assert roster.records() == kept


def test_old_entry_replayed_after_removal_changes_nothing() -> None:
    a, b = Roster(A), Roster(B)
    entry = a.admit(B.certificate, "b", True)
    b.join(A.certificate, "a", True, a.records())
    a.remove(B.node_id)
    a.merge([entry, *b.records()])
    assert names(a) == ""


def test_two_words_with_one_number_are_a_removal() -> None:
    for name in "abcdefgh":  # not whichever signature happens to be greater
        words = [said(B, C, 5, name=name), said(B, C, 5, removed=True)]
        for order in (words, words[::-1]):
            roster = Roster(A, [said(A, B)])
            for word in order:
                roster.merge([word])
            assert names(roster) == "b"


def test_name_that_takes_over_a_terminal_is_refused() -> None:
    roster = Roster(A, [said(A, B)])
    merged = roster.merge([said(B, C, name="\x1b]0;owned\x07")])
    assert (merged.changed, len(merged.refused)) == (False, 1)
    assert "\x1b" not in str(merged.refused[0])


def test_removed_machine_cannot_add_a_friend() -> None:
    a = Roster(A, [said(A, B), said(A, C)])
    a.remove(B.node_id)
    a.merge([said(B, D, 7), said(B, B, 99), said(D, B, 99), said(D, E, 99), said(B, A, 99)])
    assert names(a) == "c"
    assert a.removed_by is None


def test_removed_machines_friend_is_not_adopted_by_others() -> None:
    """The removal and the friend arrive together: there was never a time when the friend belonged."""
    a = Roster(A, [said(A, B), said(A, C)])
    a.merge([said(B, D, 7), said(C, B, 2, removed=True)])
    assert names(a) == "c"


def test_adopting_does_not_outrun_a_removal() -> None:
    """c is adopted by a and then by e, while d, who has heard of neither, removes it."""
    everything = [said(one, other) for one, other in itertools.permutations((A, B, D, E), 2)]
    everything += [said(B, C), said(C, B)]
    a, d, e = Roster(A, everything), Roster(D, everything), Roster(E, everything)
    a.remove(B.node_id)
    e.merge(a.records())
    e.remove(A.node_id)
    assert names(e) == "cd"
    d.remove(C.node_id)
    exchange(d, e)
    assert (names(d), names(e)) == ("e", "d")


def test_jump_to_the_last_number_does_not_make_anybody_unremovable() -> None:
    roster = Roster(A, [said(A, B), said(A, C)])
    roster.merge([said(B, C, SEQUENCE_MAX)])
    with pytest.raises(RosterRefused, match="last sequence number"):
        roster.allow_prompts(C.node_id, False)
    roster.remove(C.node_id)
    assert names(roster) == "b"
    with pytest.raises(RosterRefused, match="last sequence number"):
        roster.admit(C.certificate, "c", True)


# A flipped bit may make a certificate's serial number negative, which its parser remarks on first.
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.parametrize("field", Record.__struct_fields__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_flipped_bit_in_each_field_is_refused(field: str, data: st.DataObject) -> None:
    roster = Roster(A, [said(A, B)])
    right = said(B, C, 5, name="name")
    value = getattr(right, field)
    wrong: object
    match value:
        case bool():
            wrong = not value
        case int():
            wrong = value ^ 1 << data.draw(st.integers(0, 62))
        case str():
            at = data.draw(st.integers(0, len(value) - 1))
            wrong = value[:at] + chr(ord(value[at]) ^ 1 << data.draw(st.integers(0, 4))) + value[at + 1 :]
        case bytes():
            bit = data.draw(st.integers(0, len(value) * 8 - 1))
            flipped = bytearray(value)
            flipped[bit // 8] ^= 1 << bit % 8
            wrong = bytes(flipped)
    merged = roster.merge([msgspec.structs.replace(right, **{field: wrong})])
    assert (merged.changed, len(merged.refused)) == (False, 1)
    assert roster.merge([right]).changed


def test_a_signature_for_another_purpose_is_not_a_record() -> None:
    roster = Roster(A, [said(A, B)])
    draft = said(B, C)
    bare = msgspec.msgpack.encode(
        (draft.certificate, draft.name, draft.signer, draft.sequence, draft.removed, draft.sees_prompts)
    )
    assert roster.merge([msgspec.structs.replace(draft, signature=B.sign(bare))]).refused


# ---- Bounds ----------------------------------------------------------------------------------------------


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


def test_crowd_brought_by_one_member_does_not_displace_ones_own() -> None:
    roster = Roster(A, [said(A, B)])
    crowd = sorted(
        (machine(number) for number in range(5, 5 + limits.ROSTER_MEMBERS)), key=attrgetter("node_id")
    )
    roster.merge([said(B, other) for other in crowd[1:]] + [said(A, C)])
    assert len(roster.members) == limits.ROSTER_MEMBERS
    assert {B.node_id, C.node_id} <= set(roster.members)
    held = len(roster.records())
    roster.merge([said(B, crowd[0])])
    assert crowd[0].node_id in roster.members
    assert {B.node_id, C.node_id} <= set(roster.members)
    assert (
        len(roster.records()) == held + 1
    )  # whoever is over the bound now is not taken for lost, and adopted


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
    assert msgspec.msgpack.decode(encoded, type=Record) == right
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
            msgspec.msgpack.decode(wrong, type=Record)


# ---- Merging in any order --------------------------------------------------------------------------------

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


def batches(records: Sequence[Record], cuts: Iterable[int]) -> list[Sequence[Record]]:
    edges = [0, *sorted(cut % (len(records) + 1) for cut in cuts), len(records)]
    return [records[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(st.lists(any_record, max_size=14), st.data())
def test_any_order_repetition_and_batching_ends_in_the_same_records(
    records: list[Record], data: st.DataObject
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


@settings(max_examples=150, deadline=None)
@given(st.lists(any_record, max_size=14), st.data())
def test_machines_that_tell_each_other_everything_hold_the_same_records(
    records: list[Record], data: st.DataObject
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


# ---- A fleet at work -------------------------------------------------------------------------------------


class TogetherMachine(RuleBasedStateMachine):
    """Everybody hears everything at once: the fleets must then be exactly those that people made."""

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
TestTogether.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestApart = ApartMachine.TestCase
TestApart.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
