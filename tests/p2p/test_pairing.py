"""Pairing: two machines, a code, and what both of them know afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from pairs import CODE, NOW, A, B, Pair, chance, inviter, joiner, kinds, pair, window

from fleetd import limits
from fleetd.errors import PairingClosed, PairingFailed
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.pairing import proquint
from fleetd.p2p.pairing.roles import (
    Admitted,
    CodeAccepted,
    Event,
    Joined,
    Joiner,
    PairingBroke,
    PairingCode,
    PairingDone,
)

# ---- As it should go ------------------------------------------------------------------------------------


def test_two_machines_with_one_code_are_paired() -> None:
    opened = window()
    met = pair(opened)
    assert kinds(met.at_inviter) == [CodeAccepted, Joined, PairingDone]
    assert kinds(met.at_joiner) == [CodeAccepted, Admitted, PairingDone]
    assert (met.inviting.done, met.joining.done) == (True, True)
    seen_by_inviter, seen_by_joiner = met.met(met.at_inviter), met.met(met.at_joiner)
    assert (seen_by_inviter.node_id, seen_by_inviter.name) == (B.node_id, "ben")
    assert (seen_by_joiner.node_id, seen_by_joiner.name) == (A.node_id, "ada")
    assert seen_by_inviter.certificate == B.certificate
    assert seen_by_inviter.phrase == seen_by_joiner.phrase
    assert len(proquint.decode(seen_by_joiner.phrase)) == 4
    assert set(met.inviter_roster.members) == {B.node_id}
    assert set(met.joiner_roster.members) == {A.node_id}
    assert met.inviter_roster.records() == met.joiner_roster.records()
    assert opened.state(NOW) == "used"


def test_the_newcomer_meets_the_whole_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """More machines than one member may add at once are met later: ``test_roster`` has that."""
    monkeypatch.setattr(limits, "ROSTER_ADDED_PER_DAY", 50)
    fleet = Roster(A)
    for number in range(10, 60):
        fleet.admit(machine(number).certificate, f"machine {number}", True)
    met = pair(inviter_roster=fleet)
    assert len(met.joiner_roster.members) == 51
    assert met.joiner_roster.records() == fleet.records()
    # More than one message holds, each within its bound.
    assert sum(map(len, (frame for _, frame in met.wire))) > 2 * limits.PAIRING_FRAME_BYTES
    assert max(len(frame) for _, frame in met.wire) <= limits.PAIRING_FRAME_BYTES + 2


def test_bytes_may_come_in_any_pieces() -> None:
    whole = pair()
    pieces = Pair(inviter(window()), joiner())
    receive_at_joiner, receive_at_inviter = pieces.joining.receive, pieces.inviting.receive

    def slowly(receive: Callable[[bytes, float], list[Event]]) -> Callable[[bytes, float], list[Event]]:
        return lambda data, now: [e for i in range(len(data)) for e in receive(data[i : i + 1], now)]

    pieces.joining.receive = slowly(receive_at_joiner)  # type: ignore[method-assign]
    pieces.inviting.receive = slowly(receive_at_inviter)  # type: ignore[method-assign]
    assert pieces.run().wire == whole.wire
    assert kinds(pieces.at_joiner) == kinds(whole.at_joiner)


def test_phrases_differ_from_one_pairing_to_the_next() -> None:
    phrases = set()
    for seed in "abc":
        met = Pair(inviter(window(), seed=seed), joiner()).run()
        phrases.add(met.met(met.at_joiner).phrase)
    assert len(phrases) == 3


def test_a_no_at_the_inviter_is_told() -> None:
    met = pair(approves=False)
    assert kinds(met.at_inviter) == [CodeAccepted, PairingBroke]
    assert kinds(met.at_joiner) == [CodeAccepted, PairingBroke]
    assert str(met.joining.failed) == "ada declined."
    assert met.joiner_roster.members == {}


def test_going_away_at_the_joiner_is_told() -> None:
    met = Pair(inviter(window()), joiner())
    met.joining.cancel()
    met.run()
    assert "declined" in str(met.inviting.failed)
    assert met.joining.cancel() == []


def test_a_name_that_cannot_be_shown_is_mended_by_its_own_machine() -> None:
    met = Pair(inviter(window()), Joiner(B, "\x1b[2J" + "x" * 300, CODE, NOW, chance("j"))).run()
    assert met.met(met.at_inviter).name == "[2J" + "x" * (limits.MEMBER_NAME_CHARS - 3)


# ---- The order of saving and telling --------------------------------------------------------------------


def steps() -> Iterator[tuple[int, Pair]]:
    """The exchange, broken off after each of its frames in turn."""
    for cut in range(len(pair().wire)):
        met = Pair(inviter(window()), joiner())

        def meddle(number: int, frame: bytes, cut: int = cut) -> bytes:
            return frame if number < cut else b""

        met.meddle = meddle
        met.run()
        met.at_inviter += met.inviting.disconnected()
        met.at_joiner += met.joining.disconnected()
        yield cut, met


def test_nobody_is_told_of_a_pairing_that_the_other_has_not_saved() -> None:
    """Connections that break after any frame: who says Done has the other in its roster, and is in its."""
    outcomes = set()
    for _, met in steps():
        both = met.inviter_roster.members and met.joiner_roster.members
        for side, events in ((met.inviting, met.at_inviter), (met.joining, met.at_joiner)):
            assert side.done != (side.failed is not None)
            assert kinds(events).count(PairingDone) == side.done
            assert kinds(events).count(PairingBroke) == (not side.done)
            if side.done:
                assert both
        if not met.inviting.done:
            assert met.inviter_roster.members == {}
        outcomes.add((met.inviting.done, met.joining.done))
    assert outcomes == {(False, False), (True, False)}


def test_saying_saved_before_there_is_anything_to_save_is_a_bug() -> None:
    with pytest.raises(RuntimeError):
        inviter(window()).saved()
    with pytest.raises(RuntimeError):
        inviter(window()).approve([], NOW)
    with pytest.raises(RuntimeError):
        joiner().saved([], NOW)


def test_saying_saved_after_the_other_has_left_is_not() -> None:
    met = Pair(inviter(window()), joiner())
    met.joining.disconnected()
    met.inviting.disconnected()
    assert (met.joining.saved([], NOW), met.inviting.saved(), met.inviting.approve([], NOW)) == ([], [], [])


# ---- Codes ----------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.binary(min_size=4, max_size=4))
def test_codes_survive_being_typed(number: int, secret: bytes) -> None:
    code = PairingCode(f"{number:02}", secret)
    shown = str(code)
    for typed in (shown, shown.upper(), shown.replace("-", " "), shown.replace("-", ""), f" {shown} \n"):
        assert PairingCode.parse(typed) == code


@pytest.mark.parametrize(
    "text", ["", "42", "42-lusab", "lusab-babad", "4-lusab-babad", "42-lusab-babad-x", "٤٢-lusab-babad", "\0"]
)
def test_what_is_no_code_is_refused(text: str) -> None:
    with pytest.raises(PairingFailed, match="42-lusab-babad"):
        PairingCode.parse(text)


def test_a_mistyped_word_is_named() -> None:
    with pytest.raises(PairingFailed, match="'lusaa'"):
        PairingCode.parse("42-lusaa-babad")


def test_codes_are_random_and_secret() -> None:
    random_bytes = chance("codes")
    codes = [PairingCode.new(random_bytes) for _ in range(300)]
    assert len({code.secret for code in codes}) == 300
    assert len({code.nameplate for code in codes}) > 80
    assert all(len(code.nameplate) == 2 for code in codes)
    assert "secret" not in repr(codes[0])


# ---- Windows --------------------------------------------------------------------------------------------


def test_a_window_takes_three_tries_and_not_one_more() -> None:
    opened = window()
    for left in range(limits.PAIRING_TRIES - 1, -1, -1):
        opened.take_try(NOW)
        assert opened.tries_left == left
    assert opened.state(NOW) == "exhausted"
    with pytest.raises(PairingClosed, match="3 times"):
        opened.take_try(NOW)
    opened.use(NOW)  # the third may have been right
    assert opened.state(NOW) == "used"


def test_a_window_expires_after_five_minutes() -> None:
    opened = window()
    last = NOW + limits.PAIRING_WINDOW_S
    assert opened.expires == last
    opened.take_try(last - 0.001)
    assert opened.state(last) == "expired"
    with pytest.raises(PairingClosed, match="5 minutes"):
        opened.take_try(last)
    with pytest.raises(PairingClosed):
        opened.use(last)


def test_a_window_that_was_closed_stays_closed() -> None:
    opened = window()
    opened.close()
    for take in (opened.take_try, opened.use):
        with pytest.raises(PairingClosed, match="was closed"):
            take(NOW)
