"""Pairing, and everybody who would like to be one of the two: codes tried, bytes changed, frames made up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import MachineKeys, machine
from pairs import NOW, WRONG, A, B, M, Pair, inviter, joiner, kinds, pair, split, window

from fleetd import limits
from fleetd.errors import PairingClosed, PairingFailed
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.pairing import key_agreement
from fleetd.p2p.pairing import messages as pairing_wire
from fleetd.p2p.pairing.messages import (
    Confirm,
    PairingFinished,
    PairingHello,
    PakeShare,
    Proof,
    Records,
    Refuse,
)
from fleetd.p2p.pairing.roles import Admitted, CodeAccepted, Event, Inviter, Joined, PairingBroke, PairingCode
from fleetd.p2p.pairing.side import Side

# ---- Attacks on the code --------------------------------------------------------------------------------


def test_wrong_code_fails_on_both_sides_and_costs_a_try() -> None:
    opened = window()
    met = pair(opened, WRONG)
    assert kinds(met.at_inviter) == kinds(met.at_joiner) == [PairingBroke]
    assert all("code is not the one" in str(error) for error in met.errors())
    assert opened.tries_left == limits.PAIRING_TRIES - 1
    assert opened.state(NOW) == "open"
    said_by_inviter = [pairing_wire.decode(frame[2:]) for sender, frame in met.wire if sender == "inviter"]
    assert [type(message) for message in said_by_inviter] == [
        PairingHello,
        PakeShare,
        Refuse,
    ]  # not that it has the key
    assert pair(opened).joining.done  # the right one still works


def test_brute_force_in_parallel_gets_three_guesses_in_all() -> None:
    """All connections reach the point of guessing before the first guess is judged."""
    opened = window()
    runs = [
        (inviter(opened, seed=f"i{n}"), joiner(PairingCode("42", bytes([n] * 4)), seed=f"j{n}"))
        for n in range(10)
    ]
    for invite, guess in runs:
        guess.receive(invite.data_to_send(), NOW)
    for invite, guess in runs:
        invite.receive(guess.data_to_send(), NOW)
    answers = [invite.data_to_send() for invite, _ in runs]
    assert sum(len(answer) > 30 for answer in answers) == limits.PAIRING_TRIES
    for (invite, guess), answer in zip(runs, answers, strict=True):
        guess.receive(answer, NOW)
        invite.receive(guess.data_to_send(), NOW)
        assert invite.failed is not None


def test_looking_at_the_port_costs_no_try() -> None:
    opened = window()
    for said in (b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", joiner().data_to_send()):
        visited = inviter(opened)
        visited.receive(said, NOW)
        visited.disconnected()
    assert opened.tries_left == limits.PAIRING_TRIES


def test_code_used_twice_is_refused() -> None:
    opened = window()
    assert pair(opened).joining.done
    met = pair(opened)
    assert "has been used" in str(met.inviting.failed)
    assert "no longer takes" in str(met.joining.failed)


def test_code_used_twice_at_the_same_time_is_refused() -> None:
    """Both joiners have the right code and an answer before either has shown it."""
    opened = window()
    first, second = (Pair(inviter(opened, seed=s), joiner(seed=s)) for s in "ab")
    for met in (first, second):
        met.joining.receive(met.inviting.data_to_send(), NOW)
        met.inviting.receive(met.joining.data_to_send(), NOW)
    assert first.run().joining.done
    second.run()
    assert isinstance(second.inviting.failed, PairingClosed)
    assert isinstance(second.joining.failed, PairingClosed)


def test_window_expired_in_mid_exchange_is_refused() -> None:
    opened = window()
    met = Pair(inviter(opened), joiner())
    met.joining.receive(met.inviting.data_to_send(), NOW)
    met.inviting.receive(met.joining.data_to_send(), NOW)
    met.run(now=opened.expires)
    assert "expired" in str(met.inviting.failed)
    assert isinstance(met.joining.failed, PairingClosed)


def test_window_closed_in_mid_exchange_is_refused() -> None:
    opened = window()
    met = Pair(inviter(opened), joiner())
    met.joining.receive(met.inviting.data_to_send(), NOW)
    met.inviting.receive(met.joining.data_to_send(), NOW)
    opened.close()
    met.run()
    assert isinstance(met.inviting.failed, PairingClosed)


# ---- Attacks on the way ---------------------------------------------------------------------------------


def hello_of(who: MachineKeys, frame: bytes) -> bytes:
    """The same hello with another machine's certificate."""
    body = pairing_wire.decode(frame[2:])
    assert isinstance(body, PairingHello)
    return pairing_wire.frame(pairing_wire.encode(msgspec.structs.replace(body, certificate=who.certificate)))


def test_relay_in_the_middle_that_swaps_certificates_fails_on_both_sides() -> None:
    """It passes everything on, except that each side sees its certificate instead of the other's."""
    met = pair(meddle=lambda number, frame: hello_of(M, frame) if number < 2 else frame)
    assert kinds(met.at_inviter) == kinds(met.at_joiner) == [PairingBroke]
    assert all("code is not the one" in str(error) for error in met.errors())


@pytest.mark.parametrize("swapped", [0, 1])
def test_relay_in_the_middle_that_swaps_one_certificate_fails_on_both_sides(swapped: int) -> None:
    met = pair(meddle=lambda number, frame: hello_of(M, frame) if number == swapped else frame)
    assert kinds(met.at_inviter) == kinds(met.at_joiner) == [PairingBroke]


def test_relay_with_its_own_exchanges_fails_on_both_sides() -> None:
    """It runs the protocol itself with each side, without the code."""
    opened = window()
    victim_inviter, victim_joiner = inviter(opened), joiner()
    fake_joiner, fake_inviter = joiner(WRONG, me=M), inviter(window(WRONG), me=M)
    Pair(victim_inviter, fake_joiner).run()
    Pair(fake_inviter, victim_joiner).run()
    assert victim_inviter.failed is not None
    assert victim_joiner.failed is not None


def test_certificate_without_its_key_is_refused() -> None:
    """Somebody who has the code shows a member's certificate, and cannot sign for it."""

    @dataclass(frozen=True)
    class Impostor:
        node_id: str
        certificate: bytes

        def sign(self, data: bytes) -> bytes:
            return M.sign(data)

    fake: Any = Impostor(B.node_id, B.certificate)
    met = Pair(inviter(window()), joiner(me=fake)).run()
    assert kinds(met.at_inviter) == [PairingBroke]
    assert "does not have the key" in str(met.inviting.failed)
    fake = Impostor(A.node_id, A.certificate)
    met = Pair(inviter(window(), me=fake), joiner()).run()
    assert kinds(met.at_joiner) == [PairingBroke]


def test_proof_of_the_other_side_sent_back_is_refused() -> None:
    keys = [key_agreement.Keys(role, b"k" * 32, b"t" * 32) for role in ("joiner", "inviter")]  # type: ignore[arg-type]
    assert keys[0].to_sign == keys[1].to_verify
    assert keys[1].to_sign == keys[0].to_verify
    assert keys[0].to_sign != keys[1].to_sign
    assert not keys[0].confirms(keys[0].confirmation)
    assert keys[0].confirms(keys[1].confirmation)


def test_replayed_exchange_is_refused() -> None:
    recorded = pair()
    for victim, sender in ((inviter(window(), seed="new"), "joiner"), (joiner(seed="new"), "inviter")):
        events: list[Event] = []
        for who, frame in recorded.wire:
            if who == sender:
                events += victim.receive(frame, NOW)
        assert kinds(events) == [PairingBroke]


def test_sealed_message_repeated_or_left_out_is_refused() -> None:
    """One part of a long roster twice, or not at all."""
    fleet = Roster(A)
    for number in range(10, 60):
        fleet.admit(machine(number).certificate, "n", True)
    whole = pair(inviter_roster=Roster(A, fleet.records()))
    first, second = (
        number for number, (who, frame) in enumerate(whole.wire) if who == "inviter" and len(frame) > 5_000
    )
    for replaced, by in ((second, first), (first, second)):
        met = Pair(inviter(window()), joiner(), inviter_roster=Roster(A, fleet.records()))
        met.meddle = lambda number, frame, replaced=replaced, by=by: (
            whole.wire[by][1] if number == replaced else frame
        )
        met.run()
        assert "changed on the way" in str(met.joining.failed)


def test_reflected_exchange_is_refused() -> None:
    for side in (inviter(window()), joiner()):
        assert kinds(side.receive(side.data_to_send(), NOW)) == [PairingBroke]
        assert "this machine's own" in str(side.failed)


def test_reflected_share_is_refused() -> None:
    """With a hello of its own, and then everything of the victim's."""
    victim, other = joiner(), inviter(window())
    victim.data_to_send()
    victim.receive(other.data_to_send(), NOW)
    share = victim.data_to_send()
    assert kinds(victim.receive(share, NOW)) == [PairingBroke]


def test_pairing_with_oneself_is_refused() -> None:
    met = Pair(inviter(window()), joiner(me=A)).run()
    for error in met.errors():
        assert str(error) == "This code is this machine's own: pairing needs two machines."


def test_hello_with_a_name_that_takes_over_a_terminal_is_refused() -> None:
    frame = pairing_wire.encode(PairingHello((1, 1), M.certificate, "\x1b]0;owned\x07", bytes(16)))
    side = inviter(window())
    assert kinds(side.receive(pairing_wire.frame(frame), NOW)) == [PairingBroke]
    assert "cannot be shown" in str(side.failed)


FRAMES = len(pair().wire)


@pytest.mark.parametrize("number", range(FRAMES))
@settings(max_examples=8)
@given(where=st.floats(0, 1, exclude_max=True))
def test_flipped_bit_in_any_message_ends_the_pairing(number: int, where: float) -> None:
    flipped_at(number, where)


def flipped_at(number: int, where: float) -> None:
    """Change one bit of one frame; its receiver must fail, and with nothing but PairingFailed."""

    def meddle(this: int, frame: bytes) -> bytes:
        if this != number:
            return frame
        bit = int(where * len(frame) * 8)
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    met = Pair(inviter(window()), joiner(), meddle=meddle)
    met.run()
    later = NOW + limits.PAIRING_ANSWER_S + limits.PAIRING_STEP_S
    met.inviting.tick(later)  # a length that was made greater makes it wait
    met.joining.tick(later)
    receiver: Side = met.joining if met.wire[number][0] == "inviter" else met.inviting
    assert isinstance(receiver.failed, PairingFailed)
    assert not met.joining.done


@pytest.mark.long
def test_every_flipped_bit_in_every_message_ends_the_pairing() -> None:
    for number, (_, frame) in enumerate(pair().wire):
        bits = len(frame) * 8
        for bit in range(0, bits, max(1, bits // 150)):
            flipped_at(number, bit / bits)


def test_messages_out_of_turn_are_refused() -> None:
    """Each message in each state that does not wait for it: refused, never an exception."""
    record = Roster(A).admit(B.certificate, "b", True)
    messages: list[Any] = [
        PairingHello((1, 1), M.certificate, "m", bytes(16)),
        PakeShare(b"A" + bytes(32)),
        Confirm(bytes(32)),
        Proof(bytes(64)),
        Records([record], more=False),
        PairingFinished(),
    ]
    frames = [pairing_wire.frame(pairing_wire.encode(message)) for message in messages]
    for start in (lambda: inviter(window()), joiner):
        for first, then in itertools.product([None, frames[0]], frames[1:]):
            side: Side = start()
            if first is not None:
                side.receive(first, NOW)
                if then == frames[1] and isinstance(side, Inviter):
                    continue
            assert kinds(side.receive(then, NOW)) == [PairingBroke]
    # While people think, and while the roster is being saved, there is nothing to say.
    for busy in (CodeAccepted, Joined):
        met = pair(ignored=(busy,))
        sealed = met.joining._keys.seal(pairing_wire.encode(PairingFinished()))
        assert kinds(met.inviting.receive(pairing_wire.frame(sealed), NOW)) == [PairingBroke]
        assert "out of turn" in str(met.inviting.failed)


# ---- Bounds ---------------------------------------------------------------------------------------------


def test_oversized_frame_is_refused_before_it_is_read() -> None:
    for start in (lambda: inviter(window()), joiner):
        side: Side = start()
        largest = limits.PAIRING_FRAME_BYTES.to_bytes(2)
        assert side.receive(largest, NOW) == []
        assert kinds(side.receive(bytes(limits.PAIRING_FRAME_BYTES), NOW)) == [PairingBroke]
        assert "does not speak" in str(side.failed)
        side = start()
        assert kinds(side.receive((limits.PAIRING_FRAME_BYTES + 1).to_bytes(2), NOW)) == [PairingBroke]
        assert str(limits.PAIRING_FRAME_BYTES + 1) in str(side.failed)


def test_records_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROSTER_RECORDS", 3)
    one = Roster(A).admit(B.certificate, "b", True)
    for count, fine in ((6, True), (7, False)):
        met = pair(ignored=(CodeAccepted, Admitted))
        met.inviting.approve([one] * count, NOW)
        met.run()
        assert (Admitted in kinds(met.at_joiner)) == fine
        assert (met.joining.failed is None) == fine


def test_attack_parts_of_records_without_records_do_not_go_on_for_ever() -> None:
    """Each part gives the next one its time, so one without any must end the exchange."""
    met = pair(ignored=(CodeAccepted, Admitted))
    met.inviting._end("asking")
    met.inviting._send(Records([], more=True))
    met.run()
    assert "without any" in str(met.joining.failed)


def test_versions_that_do_not_meet_are_told_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_wire, "VERSIONS", (2, 3))
    newer = inviter(window())
    monkeypatch.undo()
    met = Pair(newer, joiner()).run()
    assert "no common version" in str(met.joining.failed)
    assert "no common version" in str(met.inviting.failed)


def test_versions_that_overlap_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_wire, "VERSIONS", (1, 2))
    newer = inviter(window())
    monkeypatch.undo()
    assert Pair(newer, joiner()).run().joining.done


def test_silence_at_any_step_ends_the_pairing() -> None:
    late = limits.PAIRING_STEP_S
    for cut in range(FRAMES):
        met = Pair(inviter(window()), joiner())
        met.meddle = lambda number, frame, cut=cut: frame if number < cut else b""
        met.run()
        for side in (met.inviting, met.joining):
            if side.done:
                continue
            assert side.deadline is not None
            assert side.deadline >= NOW + late
            assert side.tick(side.deadline - 0.001) == []
            assert kinds(side.tick(side.deadline)) == [PairingBroke]
            assert "too long" in str(side.failed)
            assert side.tick(side.deadline or 1e9) == []


def test_people_have_five_minutes_to_answer() -> None:
    met = pair(ignored=(CodeAccepted,))
    assert met.inviting.deadline == NOW + limits.PAIRING_ANSWER_S
    # The joiner's patience outlasts the question, so that it hears how it was answered.
    assert met.joining.deadline == NOW + limits.PAIRING_ANSWER_S + limits.PAIRING_STEP_S


def test_a_trickle_of_bytes_does_not_extend_the_deadline() -> None:
    side = inviter(window())
    hello = joiner().data_to_send()
    for i in range(8):
        assert side.receive(hello[i : i + 1], NOW + i) == []
    assert side.deadline == NOW + limits.PAIRING_STEP_S


# ---- Fuzz -----------------------------------------------------------------------------------------------


def fuzzed(side: Side, data: bytes) -> None:
    """Whatever comes in, what comes out is Failed with a PairingFailed, once, or nothing yet."""
    events = side.receive(data, NOW)
    assert kinds(events) in ([], [PairingBroke])
    assert (side.failed is None) == (events == [])
    assert isinstance(side.failed, PairingFailed | None)
    assert side.receive(data, NOW) == [] or not events
    if side.failed is not None:
        assert side.failed.message.isprintable()
        split(side.data_to_send())


raw = st.binary(max_size=600)
framed = st.lists(st.binary(max_size=300), max_size=4).map(
    lambda bodies: b"".join(map(pairing_wire.frame, bodies))
)
hellos = st.builds(
    PairingHello,
    st.tuples(st.integers(-2, 3), st.integers(-2, 3)),
    st.sampled_from([A.certificate, B.certificate, M.certificate, b"", b"x" * 1024]),
    st.text(max_size=70),
    st.binary(min_size=15, max_size=17),
)
shares = st.builds(PakeShare, st.binary(min_size=32, max_size=34))
others = st.one_of(
    shares,
    st.builds(Confirm, st.binary(max_size=33)),
    st.builds(Refuse, st.sampled_from(["broken", "closed", "wrong_code", "version", "itself", "declined"])),
    st.builds(PairingFinished),
)
messages = st.lists(st.one_of(hellos, others), max_size=4).map(
    lambda found: b"".join(pairing_wire.frame(pairing_wire.encode(message)) for message in found)
)
good_hello = st.just(joiner(me=M).data_to_send())
shapes = st.one_of(raw, framed, messages, st.tuples(good_hello, messages).map(b"".join))


@examples(400)
@given(shapes, st.booleans())
def test_only_pairing_failed_escapes(data: bytes, inviting: bool) -> None:
    fuzzed(inviter(window()) if inviting else joiner(), data)


def asked_for_records() -> Pair:
    """The inviter waits for the joiner's records."""
    met = pair(ignored=(CodeAccepted,))
    met.inviting.approve([], NOW)
    return met


def sealed_by_joiner(met: Pair, body: bytes) -> list[Event]:
    frame = pairing_wire.frame(met.joining._keys.seal(body))
    return met.inviting.receive(frame, NOW)


@examples(60)
@given(st.one_of(st.binary(max_size=120), others.map(pairing_wire.encode), hellos.map(pairing_wire.encode)))
def test_only_pairing_failed_escapes_after_the_code_was_accepted(noise: bytes) -> None:
    """The other side has the code, and is malicious: what it seals is anything."""
    met = asked_for_records()
    assert kinds(sealed_by_joiner(met, noise)) == [PairingBroke]
    assert isinstance(met.inviting.failed, PairingFailed)


@pytest.mark.long
@settings(max_examples=10_000)
@given(shapes, st.booleans())
def test_only_pairing_failed_escapes_for_long(data: bytes, inviting: bool) -> None:
    fuzzed(inviter(window()) if inviting else joiner(), data)


def test_record_by_a_stranger_is_left_to_the_roster() -> None:
    record: RosterRecord = Roster(M).admit(B.certificate, "x", True)
    met = asked_for_records()
    events = sealed_by_joiner(met, pairing_wire.encode(Records([record], more=False)))
    assert events == [Joined((record,))]
    assert Roster(A).merge([record]).refused
