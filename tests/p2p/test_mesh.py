"""What a mesh decides: one rule per test, without a network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from machines import machine
from tried_mesh import OTHER, Tried, at

from fleetd import limits
from fleetd.errors import FleetError, IdentityRefused, NotPaired, PeerLost, ProtocolError, VersionMismatch
from fleetd.p2p.actions import Dial, Drop, Retire
from fleetd.p2p.links import Address
from fleetd.p2p.membership import gossip
from fleetd.p2p.membership.gossip import ADDRESSES, AddressHint

# Between a call that comes to nothing and the next one.
WAITS = [0.5, 1, 2, 4, 8, 10, 10]
assert (limits.DIAL_AGAIN_S, limits.DIAL_AGAIN_MOST_S) == (0.5, 10)


# ---- Which of two sessions -------------------------------------------------------------------------------

SMALL, LARGE = sorted((machine(0), machine(1)), key=lambda m: m.node_id)
BY_ID = {machine(n).node_id: n for n in (0, 1)}


def both_ends(
    orders: tuple[tuple[int, int], tuple[int, int]], by_small: dict[int, bool], quiet: Iterable[int] = ()
) -> tuple[int | None, int | None]:
    """Which of two wires each end uses. ``by_small``: whether the smaller id has called on it."""
    used = []
    for me, other, order in ((SMALL, LARGE, orders[0]), (LARGE, SMALL, orders[1])):
        end = Tried([BY_ID[other.node_id]], me)
        wire_of = {}
        for wire in order:
            outbound = by_small[wire] == (me is SMALL)
            wire_of[end.opens(BY_ID[other.node_id], outbound=outbound)] = wire
        for number, wire in wire_of.items():
            if wire in quiet:
                end.mesh.quiet(number, 0.0)
        found = end.used(BY_ID[other.node_id])
        used.append(wire_of[found] if found is not None else None)
    return used[0], used[1]


@pytest.mark.parametrize("small", list(itertools.permutations((1, 2))))
@pytest.mark.parametrize("large", list(itertools.permutations((1, 2))))
def test_when_both_have_called_both_use_the_call_of_the_smaller_id(
    small: tuple[int, int], large: tuple[int, int]
) -> None:
    """In whatever order the two sessions open at either end."""
    assert both_ends((small, large), {1: True, 2: False}) == (1, 1)
    assert both_ends((small, large), {1: False, 2: True}) == (2, 2)


@pytest.mark.parametrize("by_small", [True, False])
def test_of_two_calls_by_one_side_both_use_the_later_one(by_small: bool) -> None:
    assert both_ends(((1, 2), (1, 2)), {1: by_small, 2: by_small}) == (2, 2)


@pytest.mark.parametrize("quiet", [1, 2])
@pytest.mark.parametrize("callers", list(itertools.product([True, False], repeat=2)))
def test_a_session_that_is_heard_is_used_before_one_that_is_quiet(
    quiet: int, callers: tuple[bool, bool]
) -> None:
    heard = 3 - quiet
    assert both_ends(((1, 2), (2, 1)), dict(zip((1, 2), callers, strict=True)), [quiet]) == (heard, heard)


@pytest.mark.parametrize("outbound", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_restarted_machine_replaces_its_former_self(
    outbound: tuple[bool, bool], order: tuple[int, int]
) -> None:
    """Also if a session of its former self, long under way, opens after the new one."""
    end = Tried()
    numbers = {epoch: end.opens(epoch=epoch, outbound=outbound[epoch - 1]) for epoch in order}
    assert end.used() == numbers[2]


def test_of_two_machines_with_one_identity_the_one_that_began_first_is_told() -> None:
    """A home was copied to another machine, and both run. Neither is left to guess why it has no peers."""
    end = Tried()
    later = end.opens(epoch=2)
    earlier = end.opens(epoch=1)
    (drop,) = [action for action in end.asked() if isinstance(action, Drop)]
    assert drop.link == earlier
    assert isinstance(drop.error, IdentityRefused)
    assert "copy of its home" in drop.error.message
    assert end.used() == later
    # One that is about to be given up keeps nobody out.
    end.mesh.quiet(later, 0.0)
    assert end.opens(epoch=1) == end.used()


def test_a_quiet_machine_is_not_usable_until_it_is_heard() -> None:
    end = Tried()
    link = end.opens()
    assert end.usable()
    end.mesh.quiet(link, 3.0)
    assert not end.usable()
    end.mesh.resumed(link, 4.0)
    assert end.usable()


def test_another_session_takes_over_at_once_when_the_used_one_goes_quiet_or_ends() -> None:
    end = Tried()
    first, second = end.opens(outbound=True), end.opens(outbound=False)
    used = end.used()
    other = first if used == second else second
    end.mesh.quiet(used, 3.0)  # type: ignore[arg-type]
    assert (end.used(), end.usable()) == (other, True)
    end.mesh.resumed(used, 4.0)  # type: ignore[arg-type]
    assert end.used() == used
    end.mesh.closed(used, PeerLost("It broke."), 5.0)  # type: ignore[arg-type]
    assert (end.used(), end.usable()) == (other, True)


def retired(end: Tried, now: float) -> list[int]:
    end.mesh.tick(now)
    return [action.link for action in end.asked() if isinstance(action, Retire)]


def test_a_replaced_session_is_closed_after_a_while_and_again_until_it_is() -> None:
    end = Tried()
    old = end.opens(epoch=1)
    end.opens(epoch=2, now=10.0)
    assert retired(end, 10.0 + limits.RETIRE_S - 0.01) == []
    assert retired(end, 10.0 + limits.RETIRE_S) == [old]
    assert retired(end, 11.0 + limits.RETIRE_S) == [old]
    end.mesh.closed(old, None, 12.0)
    assert retired(end, 20.0) == []
    assert end.usable()


def test_a_session_that_is_used_again_is_not_closed() -> None:
    end = Tried()
    first, second = end.opens(epoch=1), end.opens(epoch=2)
    end.mesh.quiet(second, 0.5)
    assert end.used() == first
    assert retired(end, 5.0) == [second]


def test_of_two_calls_by_the_other_side_it_closes_the_one_that_it_gave_up_itself() -> None:
    end = Tried()
    end.opens(outbound=False)
    end.opens(outbound=False)
    assert retired(end, 100.0) == []


def test_a_machine_that_is_no_member_is_dropped() -> None:
    end = Tried()
    number = end.opens(2)
    (drop,) = end.asked()
    assert isinstance(drop, Drop)
    assert drop.link == number
    assert isinstance(drop.error, NotPaired)
    assert end.mesh.links == {}


# ---- Whom to call ----------------------------------------------------------------------------------------


def test_claims_about_strangers_are_not_followed() -> None:
    end = Tried()
    end.sights(2, at(2))
    end.mesh.notified(
        end.opens(1), ADDRESSES, gossip.write_hints([AddressHint(machine(2).node_id, *at(2))]), 0.0
    )
    end.mesh.tick(100.0)
    assert end.dials() == []


def test_two_addresses_of_a_machine_are_called_at_a_time() -> None:
    end = Tried()
    end.sights(1, *(at(1, i) for i in range(5)))
    first = end.dials()
    assert len(first) == limits.DIALS_PER_PEER
    end.mesh.tick(0.1)
    assert end.dials() == []
    end.fails(first[0], 1.0)
    assert len(end.dials()) == 1


def test_calls_are_bounded_and_those_to_mere_claims_more_so() -> None:
    members = range(1, 2 * limits.DIALS_AT_ONCE)
    end = Tried(members)
    for number in members:
        end.sights(number, at(number))
    assert len(end.dials()) == limits.DIALS_TO_HINTS
    for number in members:
        end.mesh.address_seen(machine(number).node_id, [at(number, 1)], "remembered", 0.0)
    assert len(end.dials()) == limits.DIALS_AT_ONCE - limits.DIALS_TO_HINTS
    end.mesh.tick(1.0)
    assert end.dials() == []


def test_claims_do_not_take_the_place_of_an_address_that_has_worked() -> None:
    end = Tried()
    link = end.opens(reached=at(1))
    end.sights(1, *(at(1, i) for i in range(1, 6)), now=1.0)
    end.mesh.closed(link, PeerLost("It broke."), 1.0)
    found = [dial.address for dial in end.dials()]
    assert len(found) == 2
    assert at(1) in found
    # However often it has failed, and however many new claims there are.
    for now in (2.0, 4.0, 8.0, 16.0, 32.0):
        end.fails(Dial(at(1), machine(1).node_id), now)
        end.sights(1, *(at(int(now), i) for i in range(6)), now=now + 0.1)
        end.dials()
        end.mesh.tick(now + limits.DIAL_AGAIN_MOST_S)
        assert [dial.address for dial in end.dials()] == [at(1)]


def test_whoever_waits_longest_is_called_first() -> None:
    """Not whoever comes first in the roster: those would be called for ever while they are switched off."""
    members = list(range(1, 30))
    end = Tried(members)
    for number in members:
        end.mesh.address_seen(machine(number).node_id, [at(number)], "remembered", 0.0)
    under_way, called, now = end.dials(), set[str](), 0.0
    for _ in range(4):
        called |= {dial.expected for dial in under_way}
        now += limits.PEER_CONNECT_S
        for dial in under_way:
            end.fails(dial, now)
        under_way = end.dials()
        assert len(under_way) == limits.DIALS_AT_ONCE
    assert called == {machine(number).node_id for number in members}


def test_a_call_that_failed_is_made_again_after_longer_and_longer() -> None:
    end = Tried()
    end.sights(1, at(1))
    now, waits = 0.0, []
    (dial,) = end.dials()
    for _ in WAITS:
        end.fails(dial, now)
        failed = now
        while not (again := end.dials()):
            now += 0.25
            end.mesh.tick(now)
        assert again == [dial]
        waits.append(now - failed)
    assert waits == WAITS


def test_a_call_that_was_given_up_is_free_again() -> None:
    end = Tried()
    end.sights(1, at(1))
    (dial,) = end.dials()
    end.mesh.dial_cancelled(dial)
    end.mesh.tick(0.1)
    assert end.dials() == [dial]


def test_a_lost_machine_is_called_at_once_but_not_in_a_circle() -> None:
    end = Tried()
    (lived,) = [end.opens(now=0.0)]
    end.mesh.closed(lived, PeerLost("It broke."), 10.0)
    (dial,) = end.dials()
    brief = end.opens(dial=dial, now=10.1)
    end.mesh.closed(brief, PeerLost("It broke."), 10.2)
    assert end.dials() == []
    end.mesh.tick(10.1 + limits.DIAL_AGAIN_S)
    assert end.dials() == [dial]


def test_a_machine_that_said_goodbye_is_not_called_at_once() -> None:
    end = Tried()
    end.mesh.closed(end.opens(now=0.0), None, 10.0)
    assert end.dials() == []
    end.mesh.tick(10.0 + limits.DIAL_AGAIN_S)
    assert len(end.dials()) == 1


@pytest.mark.parametrize(
    "error",
    [ProtocolError("Nonsense."), VersionMismatch("Old."), NotPaired("No."), IdentityRefused("Copied.")],
)
def test_a_machine_that_makes_no_sense_is_called_less_and_less(error: FleetError) -> None:
    end = Tried()
    now, waits = 0.0, []
    link = end.opens(now=now)
    for _ in WAITS:
        end.mesh.closed(link, error, now)
        assert end.mesh.peers[machine(1).node_id].trouble is error
        closed = now
        while not (dials := end.dials()):
            now += 0.25
            end.mesh.tick(now)
        waits.append(now - closed)
        link = end.opens(dial=dials[0], now=now)
    assert waits == WAITS
    # One good session, and all is forgotten.
    end.mesh.closed(link, PeerLost("It broke."), now + 60)
    assert len(end.dials()) == 1


def test_an_address_is_not_called_unanswered_once_its_machine_is_connected() -> None:
    """It was dialled before the machine was up, or paired; then the machine dialled this one."""
    end = Tried(static=[at(1)])
    end.mesh.tick(0.0)
    end.fails(end.dials()[0], 0.0)
    assert list(end.mesh.unanswered()) == [at(1)]
    link = end.opens(reached=at(1), now=0.1)
    assert end.mesh.unanswered() == {}
    end.mesh.closed(link, PeerLost("It broke."), 5.0)
    assert list(end.mesh.unanswered()) == [at(1)]


def test_a_name_in_the_settings_is_dialled_again_when_a_machine_has_come() -> None:
    """Sessions show addresses, so only a dial tells that this name is the machine's."""
    name = ("studio.local", 8115)
    end = Tried(static=[name])
    now = 0.0
    for _ in range(9):
        end.mesh.tick(now)
        (dial,) = end.dials()
        end.fails(dial, now)
        now += limits.DIAL_AGAIN_MOST_S
    now -= limits.DIAL_AGAIN_MOST_S
    end.opens(now=now)
    end.mesh.tick(now + limits.DIAL_AGAIN_S)
    assert end.dials() == [Dial(name, "")]
    end.opens(dial=Dial(name, ""), now=now + limits.DIAL_AGAIN_S)
    assert end.mesh.unanswered() == {}


def test_addresses_of_the_settings_are_called_for_ever_until_somebody_answers() -> None:
    address = at(1)
    end = Tried(static=[address])
    end.mesh.tick(0.0)
    (dial,) = end.dials()
    assert dial == Dial(address, "")
    now = 0.0
    for _ in range(50):
        end.fails(dial, now)
        assert str(end.mesh.static[address].trouble) == "Nobody answers."
        now += limits.DIAL_AGAIN_MOST_S
        end.mesh.tick(now)
        assert end.dials() == [dial]
    assert not end.mesh.settled
    link = end.opens(dial=dial, now=now)
    assert all(static.trouble is None for static in end.mesh.static.values())
    assert end.mesh.settled
    end.mesh.tick(now + 100)
    assert end.dials() == []
    end.mesh.closed(link, PeerLost("It broke."), now + 200)
    end.mesh.tick(now + 201)
    assert address in [dial.address for dial in end.dials()]


def test_an_address_of_the_settings_where_a_session_already_goes_is_not_called() -> None:
    end = Tried(static=[at(1)])
    end.opens(outbound=False, reached=at(1))
    end.mesh.tick(0.0)
    assert end.dials() == []


def test_one_address_is_called_once_at_a_time() -> None:
    end = Tried([1, 2], static=[at(1)])
    for number in (1, 2):
        end.mesh.address_seen(machine(number).node_id, [at(1)], "remembered", 0.0)
    assert len(end.dials()) == 1


def test_a_nearer_address_is_called_and_replaces_the_first_when_it_answers() -> None:
    end = Tried()
    end.sights(1, at(1), at(1, 1))
    far, near = end.dials()
    first = end.opens(dial=far)
    end.mesh.dial_cancelled(near)
    peer = end.mesh.peers[machine(1).node_id]
    peer.paths.succeeded(near.address, 1.0)
    for _ in range(5):
        peer.paths.round_trip(far.address, 0.02, 1.0)
        peer.paths.round_trip(near.address, 0.001, 1.0)
    end.asked()
    end.mesh.prefer_best_path(machine(1).node_id, 2.0)
    end.mesh.prefer_best_path(machine(1).node_id, 2.0)
    assert end.asked() == [near]
    assert end.used() == first
    end.fails(near, 3.0)
    assert end.used() == first
    end.mesh.prefer_best_path(machine(1).node_id, 3.0)
    assert end.dials() == []  # it does not work, so it is not better
    peer.paths.succeeded(near.address, 4.0)
    end.mesh.prefer_best_path(machine(1).node_id, 4.0)
    second = end.opens(dial=end.dials()[0], now=4.0)
    assert end.used() == second
    assert retired(end, 5.0) == [first]


def test_only_who_called_looks_for_a_nearer_address() -> None:
    end = Tried()
    end.opens(outbound=False, reached=at(1))
    peer = end.mesh.peers[machine(1).node_id]
    peer.paths.add(at(1, 1), "remembered", 0.0)
    peer.paths.succeeded(at(1, 1), 0.0)
    peer.paths.round_trip(at(1), 1.0, 0.0)
    peer.paths.round_trip(at(1, 1), 0.001, 0.0)
    end.asked()
    end.mesh.prefer_best_path(machine(1).node_id, 1.0)
    assert end.asked() == []


# ---- Addresses -------------------------------------------------------------------------------------------


def test_a_newcomer_is_told_where_the_others_are_and_they_where_it_is() -> None:
    end = Tried([1, 2, 3])
    links = {number: end.opens(number) for number in (1, 2)}
    end.asked()
    links[3] = end.opens(3)
    told = {link: set(gossip.read_hints(body)) for link, body in end.told(ADDRESSES)}
    place = {number: AddressHint(machine(number).node_id, *at(number)) for number in (1, 2, 3)}
    assert told == {links[1]: {place[3]}, links[2]: {place[3]}, links[3]: {place[1], place[2]}}


LAN, LOOPBACK = at(1), ("127.0.0.1", 5000)


@pytest.mark.parametrize(
    ("host", "way", "believed"),
    [
        ("10.0.0.9", LAN, True),
        ("fd00::9", LAN, True),
        ("127.0.0.1", LAN, False),  # this machine's own services trust whoever calls from here
        ("::1", LAN, False),
        ("::ffff:127.0.0.1", LAN, False),
        ("127.0.0.1", LOOPBACK, True),
        ("fe80::9%en0", LAN, False),  # what en0 leads to differs from machine to machine
        ("224.0.0.251", LAN, False),
        ("0.0.0.0", LAN, False),  # noqa: S104
        ("internal.example", LAN, False),  # would be looked up
        ("a..b", LAN, False),  # not even that
        ("127.0.0.1", None, False),
    ],
)
def test_a_member_cannot_make_others_call_what_is_no_machine_of_the_network(
    host: str, way: Address | None, believed: bool
) -> None:
    end = Tried([1, 2])
    end.mesh.opened(
        1, machine(1).node_id, outbound=False, epoch=1, roster=OTHER, dialled=None, reached=way, now=0
    )
    end.mesh.notified(1, ADDRESSES, msgspec.msgpack.encode([AddressHint(machine(2).node_id, host, 80)]), 0.0)
    assert bool(end.dials()) is believed


def test_names_from_the_settings_are_not_told() -> None:
    """They may mean another machine elsewhere, and the longest would not be understood."""
    long = "x" * 200 + ".example"
    end = Tried([1, 2], static=[(long, 8115)])
    end.opens(1, dial=Dial((long, 8115), ""))
    end.opens(2)
    for _, body in end.told(ADDRESSES):
        assert long not in [told.host for told in gossip.read_hints(body)]


def test_as_many_addresses_are_told_as_are_read() -> None:
    many = [AddressHint(machine(1).node_id, *at(1))] * (limits.ADDRESSES_TOLD + 1)
    assert len(gossip.read_hints(gossip.write_hints(many))) == limits.ADDRESSES_TOLD
    with pytest.raises(ProtocolError):
        gossip.read_hints(msgspec.msgpack.encode(many))


def test_where_members_were_reached_is_remembered() -> None:
    end = Tried([1, 2])
    end.opens(1)
    end.sights(2, at(2))
    assert end.mesh.remembered() == {machine(1).node_id: [at(1)]}
