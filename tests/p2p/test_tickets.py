"""Tickets for bulk connections: used twice, too late, guessed, too many."""

from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.errors import Overloaded
from fleetd.p2p.tickets import KEY_BYTES, TICKET_BYTES, Tickets, preface


def test_a_ticket_leads_to_what_it_was_issued_for() -> None:
    tickets = Tickets[str]()
    first, first_key = tickets.issue("weights", 0.0, os.urandom)
    second, second_key = tickets.issue("rows", 1.0, os.urandom)
    assert {len(first), len(second)} == {TICKET_BYTES}
    assert {len(first_key), len(second_key)} == {KEY_BYTES}
    assert len({first, second, first_key, second_key}) == 4
    assert tickets.take(second, 2.0) == "rows"
    assert tickets.take(first, 2.0) == "weights"
    assert len(tickets) == 0


def test_ticket_and_key_are_two_draws() -> None:
    """Who sees the ticket on the wire must not see the key in it."""
    draws: list[int] = []

    def random(count: int) -> bytes:
        draws.append(count)
        return hashlib.sha256(bytes([len(draws)])).digest()[:count]

    ticket, key = Tickets[str]().issue("weights", 0.0, random)
    assert draws == [TICKET_BYTES, KEY_BYTES]
    assert ticket != key


def test_attack_replayed_ticket() -> None:
    tickets = Tickets[str]()
    ticket, _ = tickets.issue("weights", 0.0, os.urandom)
    assert tickets.take(ticket, 0.1) == "weights"
    assert tickets.take(ticket, 0.1) is None


def test_attack_ticket_kept_for_later() -> None:
    for late_s, expected in ((limits.TICKET_S - 0.001, "weights"), (limits.TICKET_S, None)):
        tickets = Tickets[str]()
        ticket, _ = tickets.issue("weights", 5.0, os.urandom)
        assert tickets.take(ticket, 5.0 + late_s) == expected
        assert len(tickets) == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(-1e6, 1e6)), max_size=40))
def test_attack_a_clock_that_jumps_makes_no_ticket_last_longer(steps: list[tuple[bool, float]]) -> None:
    """Each is good at most once, and only within its seconds of the time at which it was issued."""
    tickets = Tickets[int]()
    issued: dict[int, tuple[bytes, float]] = {}
    for number, (issues, now) in enumerate(steps):
        if issues:
            issued[number] = tickets.issue(number, now, os.urandom)[0], now
        else:
            for which, (ticket, began) in list(issued.items()):
                if tickets.take(ticket, now) is not None:
                    assert -1e-6 <= now - began <= limits.TICKET_S
                    del issued[which]
        assert len(tickets) <= limits.TICKETS


def test_attack_guessed_ticket() -> None:
    tickets = Tickets[str]()
    ticket, _ = tickets.issue("weights", 0.0, os.urandom)
    one_bit_off = bytes([ticket[0] ^ 1]) + ticket[1:]
    for guess in (b"", bytes(TICKET_BYTES), ticket[:-1], ticket + b"\0", one_bit_off, preface(ticket)):
        assert tickets.take(guess, 0.0) is None
    assert tickets.take(ticket, 0.0) == "weights"


def test_open_tickets_are_bounded_and_expired_ones_make_room() -> None:
    tickets = Tickets[str]()
    for number in range(limits.TICKETS):
        tickets.issue(str(number), 0.0, os.urandom)
    with pytest.raises(Overloaded) as refused:
        tickets.issue("one more", limits.TICKET_S - 0.001, os.urandom)
    assert refused.value.retry_after_s
    ticket, _ = tickets.issue("one more", limits.TICKET_S, os.urandom)
    assert len(tickets) == 1
    assert tickets.take(ticket, limits.TICKET_S) == "one more"


def test_the_preface_is_what_the_port_looks_for() -> None:
    ticket = bytes(range(TICKET_BYTES))
    assert preface(ticket) == b"FLT1" + ticket
