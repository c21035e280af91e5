"""What a mesh tells the members, and what it believes of their news; without a network."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from machines import machine
from tried_mesh import ME, Tried

from fleetd import limits
from fleetd.errors import NotPaired, ProtocolError
from fleetd.p2p.actions import Dial, Drop, Save, SendNotify
from fleetd.p2p.membership import cards, gossip
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.gossip import ADDRESSES, CARD, ROSTER
from fleetd.p2p.membership.roster import Roster, RosterRecord

# ---- What is told ----------------------------------------------------------------------------------------


def card(number: int, sequence: int = 1) -> Card:
    return Card(machine(number).node_id, 1, sequence)


def test_a_newcomer_is_told_the_card_and_a_different_roster() -> None:
    end = Tried()
    end.mesh.card_changed(card(0))
    end.opens()
    topics = [action.topic for action in end.asked() if isinstance(action, SendNotify)]
    assert topics == [CARD, ROSTER]


def test_the_same_roster_is_not_told_again() -> None:
    end = Tried()
    digest = end.roster.digest()
    end.mesh.opened(
        1, machine(1).node_id, outbound=False, epoch=1, roster=digest, dialled=None, reached=None, now=0
    )
    assert end.told(ROSTER) == []


def test_a_card_leaves_with_the_last_session() -> None:
    end = Tried()
    first = end.opens()
    end.mesh.notified(first, CARD, cards.encode(card(1)), 0.0)
    second = end.opens(epoch=2)
    end.mesh.closed(first, None, 1.0)
    assert end.mesh.cards.get(machine(1).node_id) == card(1)
    end.mesh.closed(second, None, 2.0)
    assert end.mesh.cards.get(machine(1).node_id) is None


@pytest.mark.parametrize("topic", [CARD, ROSTER, ADDRESSES])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 5000, b"\xd9\x02\xff\xff", b"\x91\x90", b"\x80"])
def test_what_cannot_be_understood_ends_the_session(topic: str, body: bytes) -> None:
    end = Tried()
    link = end.opens()
    end.asked()
    end.mesh.notified(link, topic, body, 0.0)
    (drop,) = end.asked()
    assert isinstance(drop, Drop)
    assert drop.link == link
    assert isinstance(drop.error, ProtocolError)


def test_a_card_in_the_name_of_another_machine_ends_the_session() -> None:
    end = Tried([1, 2])
    link = end.opens(1)
    end.asked()
    end.mesh.notified(link, CARD, cards.encode(card(2)), 0.0)
    (drop,) = end.asked()
    assert isinstance(drop, Drop)
    assert end.mesh.cards.get(machine(2).node_id) is None


def test_an_unknown_topic_is_of_a_later_version() -> None:
    end = Tried()
    link = end.opens()
    end.asked()
    end.mesh.notified(link, "weather", b"\xc1", 0.0)
    assert end.asked() == []


def said(by: int, about: int, sequence: int = 1, *, removed: bool = False) -> RosterRecord:
    draft = RosterRecord(
        machine(about).certificate,
        "n" * limits.MEMBER_NAME_CHARS,
        machine(by).node_id,
        sequence,
        removed,
        sees_prompts=not removed,
        signature=b"",
    )
    return msgspec.structs.replace(draft, signature=machine(by).sign(draft.signed_bytes()))


def test_a_full_roster_is_merged_batch_after_batch_and_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 32 machines each vouches for each: 992 records; and 32 that were removed make it 1024."""
    monkeypatch.setattr(limits, "ROSTER_ADDED_PER_DAY", 32)
    everybody = [said(by, about) for by in range(32) for about in range(32) if by != about]
    # Whoever is furthest from the sender says the most first.
    everybody.sort(key=lambda record: record.signer, reverse=True)
    gone = [said(number, 100 + number, 2, removed=True) for number in range(32)]
    records = gone + everybody
    assert len(records) == limits.ROSTER_RECORDS
    bodies = gossip.roster_batches(records, [machine(1).node_id])
    assert max(map(len, bodies)) <= limits.ROSTER_BATCH_BYTES + 3  # and the header of the list
    roster = Roster(machine(200))
    roster.admit(machine(1).certificate, "m1", True)
    # It holds one record of its own, and can hold so many in all.
    for body in bodies[:-1]:
        merged = roster.merge(gossip.read_records(body))
        assert merged.refused == ()
    # One about a machine that no entry names makes room for the last.
    assert roster.merge(gossip.read_records(bodies[-1])).refused == ()
    assert len(roster.records()) == limits.ROSTER_RECORDS


def test_more_records_than_a_roster_holds_are_not_read() -> None:
    one = said(1, 2)
    assert len(gossip.read_records(msgspec.msgpack.encode([one] * limits.ROSTER_RECORDS))) == 1024
    with pytest.raises(ProtocolError):
        gossip.read_records(msgspec.msgpack.encode([one] * (limits.ROSTER_RECORDS + 1)))


def test_only_what_is_new_is_told_and_everybody_can_take_it() -> None:
    end = Tried([1, 2])
    for number in (1, 2):
        end.opens(number)
    end.asked()
    before = end.roster.records()
    end.mesh.notified(1, ROSTER, msgspec.msgpack.encode([said(1, 3)]), 0.0)
    actions = end.asked()
    assert Save() in actions
    news = [action for action in actions if isinstance(action, SendNotify) and action.topic == ROSTER]
    assert {action.link for action in news} == {1, 2}
    for action in news:
        assert gossip.read_records(action.body) == [said(1, 3)]
        assert Roster(machine(2), before).merge(gossip.read_records(action.body)).changed is False
        hearer = Roster(machine(2))
        hearer.admit(ME.certificate, "m0", True)
        hearer.merge(before)
        assert hearer.merge(gossip.read_records(action.body)).refused == ()
        assert machine(3).node_id in hearer.members
    end.mesh.notified(2, ROSTER, msgspec.msgpack.encode([said(1, 3)]), 0.0)
    assert end.asked() == []


def test_a_removed_machine_hears_of_it_and_is_dropped_at_once() -> None:
    end = Tried([1, 2])
    links = [end.opens(1), end.opens(2)]
    end.mesh.notified(links[1], CARD, cards.encode(card(2)), 0.0)
    end.asked()
    end.roster.remove(machine(2).node_id)
    end.mesh.roster_changed(1.0)
    actions = end.asked()
    (drop,) = [action for action in actions if isinstance(action, Drop)]
    assert drop.link == links[1]
    assert isinstance(drop.error, NotPaired)
    told = [a.link for a in actions[: actions.index(drop)] if isinstance(a, SendNotify) and a.topic == ROSTER]
    assert told == links
    assert machine(2).node_id not in end.mesh.peers
    assert end.mesh.cards.get(machine(2).node_id) is None
    # What it still says before it is gone counts for nothing.
    end.mesh.notified(links[1], CARD, cards.encode(card(2)), 1.0)
    assert end.mesh.cards.get(machine(2).node_id) is None
    end.mesh.closed(links[1], drop.error, 1.0)
    end.mesh.tick(100.0)
    assert not [action for action in end.asked() if isinstance(action, Dial)]


def test_a_machine_that_is_removed_itself_drops_everybody() -> None:
    end = Tried([1, 2])
    links = {end.opens(1), end.opens(2)}
    end.asked()
    end.mesh.notified(1, ROSTER, msgspec.msgpack.encode([said(1, 0, 2, removed=True)]), 0.0)
    assert {action.link for action in end.asked() if isinstance(action, Drop)} == links
    assert end.mesh.peers == {}


# ---- News without end ------------------------------------------------------------------------------------


def test_attack_a_flood_of_valid_records_is_merged_once_a_tick() -> None:
    end = Tried()
    link = end.opens()
    merges = 0
    merge = end.roster.merge

    def counted(records: Iterable[RosterRecord], now: float) -> object:
        nonlocal merges
        merges += 1
        return merge(records, now)

    end.roster.merge = counted  # type: ignore[assignment, method-assign]
    last = 3 * limits.ROSTER_MERGES_AT_ONCE
    for sequence in range(1, last + 1):
        record = said(1, 2, sequence)
        end.mesh.notified(link, ROSTER, msgspec.msgpack.encode([record]), 1.0)
    assert merges == limits.ROSTER_MERGES_AT_ONCE
    assert not end.mesh.settled
    end.mesh.tick(1.2)
    # Of all that waited only the newest counts.
    assert merges == limits.ROSTER_MERGES_AT_ONCE + 1
    assert [record.sequence for record in end.roster.records() if record.signer != ME.node_id] == [last]
    end.mesh.tick(1.4)
    assert merges == limits.ROSTER_MERGES_AT_ONCE + 1


def test_machines_over_the_bound_of_a_day_come_in_later_without_being_sent_again() -> None:
    end = Tried()
    link = end.opens()
    most = limits.ROSTER_ADDED_PER_DAY
    records = [said(1, about) for about in range(2, most + 4)]
    end.mesh.notified(link, ROSTER, msgspec.msgpack.encode(records), 1.0)
    assert (len(end.mesh.peers), len(end.mesh.late)) == (1 + most, 2)
    end.mesh.tick(limits.ROSTER_LATE_S)
    assert (len(end.mesh.peers), len(end.mesh.late)) == (1 + most, 2)
    end.mesh.tick(1.0 + 86400 / most)
    assert (len(end.mesh.peers), len(end.mesh.late)) == (2 + most, 1)
    end.mesh.tick(1.0 + 2 * 86400 / most + limits.ROSTER_LATE_S)
    assert (len(end.mesh.peers), end.mesh.late) == (3 + most, [])


def test_attack_news_without_end_drops_the_session() -> None:
    end = Tried(members=(1, 2))
    link = end.opens()
    end.asked()
    body = cards.encode(Card(machine(1).node_id, 1, 1, name="x" * 200))
    sent = 0
    while not any(isinstance(action, Drop) for action in end.asked()):
        end.mesh.notified(link, CARD, body, 1.0)
        sent += len(body) + limits.NEWS_COST_BYTES
        assert sent < 2 * limits.NEWS_BURST_BYTES
    assert sent > limits.NEWS_BURST_BYTES
    # To connect again does not help, and another machine is heard as before.
    end.mesh.closed(link, None, 1.0)
    again, other = end.opens(epoch=2), end.opens(2)
    end.asked()
    end.mesh.notified(again, CARD, body, 1.0)
    assert [action.link for action in end.asked() if isinstance(action, Drop)] == [again]
    end.mesh.notified(other, CARD, cards.encode(Card(machine(2).node_id, 1, 1)), 1.0)
    assert not any(isinstance(action, Drop) for action in end.asked())


def test_attack_many_records_in_one_message_wait_for_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROSTER_MERGES_AT_ONCE", 4)
    end = Tried()
    link = end.opens()
    before = len(end.roster.records())
    records = [said(1, about) for about in range(2, 7)]
    end.mesh.notified(link, ROSTER, msgspec.msgpack.encode(records), 1.0)
    assert len(end.roster.records()) == before
    end.mesh.tick(1.2)
    assert len(end.roster.records()) == before + len(records)
