"""Rosters and machines that lie: no record makes a member, or keeps one out, that should not."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import MachineKeys, machine
from rosters import A, B, C, D, E, exchange, names, pair, said

from fleetd import limits
from fleetd.errors import RosterRefused
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import SEQUENCE_MAX, RosterRecord


def test_entry_by_a_stranger_is_refused() -> None:
    roster = Roster(A, [said(A, B)])
    merged = roster.merge([said(D, E), said(D, A), said(E, D)])
    assert (merged.changed, len(merged.refused)) == (False, 3)
    assert "no known machine vouches" in str(merged.refused[0])
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
    draft = RosterRecord(stolen, "b", C.node_id, 9, False, True, b"")
    merged = roster.merge([msgspec.structs.replace(draft, signature=C.sign(draft.signed_bytes()))])
    assert (merged.changed, len(merged.refused)) == (False, 1)
    assert roster.members[B.node_id].certificate == B.certificate


def test_old_tombstone_replayed_after_readmission_changes_nothing() -> None:
    roster = Roster(A)
    roster.admit(B.certificate, "b", True)
    roster.remove(B.node_id)
    (tombstone,) = roster.records()
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


def test_removed_machines_friend_does_not_stay_with_others() -> None:
    """The removal and the friend arrive together: there was never a time when the friend belonged."""
    a = Roster(A, [said(A, B), said(A, C)])
    a.merge([said(B, D, 7), said(C, B, 2, removed=True)])
    assert names(a) == "c"


def test_confirming_does_not_outrun_a_removal() -> None:
    """e confirms c, while d, which has not heard of it, removes it."""
    everything = [said(one, other) for one, other in itertools.permutations((A, B, D, E), 2)]
    everything += [said(B, C), said(C, B)]
    d, e = Roster(D, everything), Roster(E, everything)
    e.confirm(C.node_id)
    d.remove(C.node_id)
    exchange(d, e)
    assert (names(d), names(e)) == ("abe", "abd")


INVENTED = [machine(number) for number in range(20, 23)]


def invented(*chain: MachineKeys) -> list[RosterRecord]:
    """Each adds the next one and is added by it, with numbers as high as it likes."""
    return [
        record
        for one, next_ in itertools.pairwise(chain)
        for record in (said(one, next_, 7, name="printer"), said(next_, one, 7))
    ]


def test_attack_a_chain_of_three_inventions_goes_with_the_machine_that_invented_them() -> None:
    """The person at a removes b. Nothing that b invented stays or comes back, here or with the others."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(a, c, A, C)
    exchange(a, b, c)
    lies = invented(B, *INVENTED)
    for roster in (a, b, c):
        roster.merge(lies)
    ghosts = {ghost.node_id for ghost in INVENTED}
    assert ghosts < set(a.members)
    assert not any(a.members[ghost].confirmed for ghost in ghosts)
    assert {a.members[ghost].through for ghost in ghosts} == {B.node_id}
    assert {member.node_id for member in a.remove(B.node_id)} == ghosts
    exchange(a, c)
    for again in (lies, invented(*INVENTED, machine(23)), [said(ghost, A, 99) for ghost in INVENTED]):
        a.merge(again)
        c.merge(again)
    exchange(a, c)
    assert (names(a), names(c)) == ("c", "a")
    assert Roster(A, a.records()).members == a.members


def test_attack_an_invention_that_only_another_machine_had_heard_of_goes_there_too() -> None:
    """c heard of the printer, and a, where b is removed, had not."""
    a, b, c = Roster(A), Roster(B), Roster(C)
    pair(a, b, A, B)
    pair(a, c, A, C)
    exchange(a, b, c)
    lies = invented(B, *INVENTED)
    c.merge(lies)
    a.remove(B.node_id)
    c.merge(a.records())
    exchange(a, c)
    assert (names(a), names(c)) == ("c", "a")


def test_attack_an_invention_that_removes_its_inventor_does_not_stay_in_its_place() -> None:
    a, b = Roster(A), Roster(B)
    pair(a, b, A, B)
    a.merge([*invented(B, *INVENTED), said(INVENTED[0], B, 9, removed=True)])
    assert names(a) == ""


def test_attack_a_machine_that_was_removed_and_added_again_by_another_is_not_confirmed_any_more() -> None:
    """c was paired here. d removed it, and b has it back."""
    roster = Roster(A, [said(A, B), said(A, C), said(A, D), said(D, B)])
    roster.merge([said(D, C, 2, removed=True)])
    assert names(roster) == "bd"
    roster.merge([said(B, C, 3)])
    assert names(roster) == "bcd"
    assert not roster.members[C.node_id].confirmed
    roster.confirm(C.node_id)
    assert roster.members[C.node_id].confirmed


def test_attack_a_roster_filled_with_records_takes_those_of_confirmed_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """b's inventions sign about each other, and b removes machines that never were, until nothing fits."""
    monkeypatch.setattr(limits, "ROSTER_RECORDS", 300)
    ghosts = [machine(number) for number in range(20, 20 + limits.ROSTER_ADDED_PER_DAY)]
    lies = [said(B, ghost) for ghost in ghosts]
    lies += [said(one, other) for one, other in itertools.permutations(ghosts, 2)]
    noise = [said(B, machine(1000 + i), removed=True) for i in range(limits.ROSTER_RECORDS - len(lies))]
    for flood in (lies + noise, noise + lies):
        roster = Roster(A, [said(A, B), said(A, C)])
        roster.merge(flood)
        assert len(roster.records()) == limits.ROSTER_RECORDS
        assert roster.merge([said(C, D), said(D, C), said(C, E)]).refused == ()
        assert {D.node_id, E.node_id} < set(roster.members)
        assert len(roster.records()) == limits.ROSTER_RECORDS


def test_attack_a_roster_filled_with_records_forgets_no_removal_of_this_machines_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """a removed c, which only b had added, and b takes its entry back, so that none names c."""
    monkeypatch.setattr(limits, "ROSTER_RECORDS", 20)
    roster = Roster(A, [said(A, B)])
    roster.merge([said(B, C, 1)])
    roster.merge([said(B, machine(1000 + i), removed=True) for i in range(20)])
    roster.remove(C.node_id)
    roster.merge([said(B, C, 2, removed=True)])
    roster.merge([said(B, machine(2000 + i), removed=True) for i in range(20)])
    assert any(record.subject == C.node_id and record.signer == A.node_id for record in roster.records())
    roster.merge([said(B, C, 1)])
    assert names(roster) == "b"


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
@pytest.mark.parametrize("field", RosterRecord.__struct_fields__)
@examples(30)
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
