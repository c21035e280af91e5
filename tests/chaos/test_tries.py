"""What a run of faults tries, and how it judges what came of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tries import Ask, Fault, Outcome, Tally, Try, TryReply, judged, schedule, worst

KINDS = [f"kind {number}" for number in range(7)]


def test_a_seed_is_a_run() -> None:
    first, again, other = (list(schedule(seed, KINDS, 50, 3)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_quarter_of_the_prompts_is_fetched_another_one_restored_and_answers_are_drafted() -> None:
    asks = [ask for tried in schedule(1, KINDS, 300, 3) for ask in tried.asks]
    kept = [ask for ask in asks if ask.read_by is not None]
    assert {ask.read_by for ask in kept} == {1, 2}
    assert min(sum(ask.fetches for ask in kept), sum(ask.restores for ask in kept)) > len(asks) / 4
    assert all(ask.fetches is not ask.restores for ask in kept)
    assert len({ask.prompt for ask in kept}) == len(kept), "none is kept already"
    assert any(ask.drafter and ask.tokens > 100 for ask in asks)


def test_what_is_fetched_in_a_try_lies_on_one_machine_and_is_fetched_as_a_fault_begins() -> None:
    """The reader has unloaded its model: it can neither fetch nor compute."""
    for tried in schedule(1, KINDS, 200, 3):
        kept = [ask for ask in tried.asks if ask.read_by is not None]
        assert len({(ask.machine, ask.read_by) for ask in kept if ask.fetches}) <= 1
        assert len({ask.machine for ask in kept}) <= 1, "nor restore"
        first_s = tried.faults[0].begins_s
        assert all(max(0.0, first_s - 0.3) <= ask.after_s <= first_s for ask in kept)


def test_every_kind_is_tried_about_as_often() -> None:
    kinds = [fault.kind for tried in schedule(3, KINDS, 70, 3) for fault in tried.faults]
    assert len(kinds) >= 70
    counts = [kinds.count(kind) for kind in KINDS]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("reply", "killed", "outcome"),
    [
        (TryReply("text"), False, Outcome.RIGHT),
        (TryReply("texts"), True, Outcome.WRONG),
        (TryReply(code="peer_lost"), False, Outcome.TYPED),
        (TryReply(code="internal_error"), True, Outcome.WRONG),
        (TryReply(code="what?"), False, Outcome.WRONG),
        (TryReply(broken="reset"), True, Outcome.GONE),
        (TryReply(broken="reset"), False, Outcome.WRONG),
        (TryReply(late=True), True, Outcome.HUNG),
    ],
)
def test_what_a_client_gets_is_judged(reply: TryReply, killed: bool, outcome: Outcome) -> None:
    assert judged(reply, "text", killed=killed)[0] is outcome


def test_a_try_is_as_bad_as_its_worst_request() -> None:
    assert worst([]) is Outcome.RIGHT
    assert worst([Outcome.TYPED, Outcome.RIGHT]) is Outcome.TYPED
    assert worst([Outcome.HUNG, Outcome.GONE]) is Outcome.HUNG


def test_the_tally_counts_by_kind_and_fails_for_what_must_not_be() -> None:
    tally = Tally()
    one, two = Fault("one", 0, 1, 0), Fault("two", 0, 1, 0)
    tally.add(Try(0, (), (one, two)), Outcome.RIGHT, "")
    tally.add(Try(1, (), (one,)), Outcome.TYPED, "")
    assert tally.exit_code == 0
    tally.add(Try(2, (), (two,)), Outcome.LEAKED, "3 descriptors")
    assert tally.exit_code == 1
    told = json.loads(tally.as_json(seed=5))
    assert told["seed"] == 5
    assert told["kinds"]["one"] == {
        "tries": 2, "right": 1, "typed": 1, "gone": 0, "leaked": 0, "hung": 0, "wrong": 0
    }  # fmt: skip
    assert told["all"]["tries"] == 4
    assert told["failures"] == [{"try": 2, "kinds": ["two"], "outcome": "leaked", "why": "3 descriptors"}]
    assert [line.split()[0] for line in tally.table().splitlines()] == ["fault", "one", "two", "all"]


def test_the_tally_counts_what_answers_were_made_of_by_kind_of_fault() -> None:
    tally = Tally()
    one, two = Fault("one", 0, 1, 0), Fault("two", 0, 1, 0)
    both, single = Try(0, (), (one, two)), Try(1, (), (one, one))
    fetch = Ask(1, "small", "a", 6, stream=False, after_s=0, read_by=2)
    tally.answered(both, fetch, TryReply("text", plan="local", parts=("fetched", "drafted")), right=True)
    tally.answered(single, replace(fetch, read_by=None), TryReply("t", parts=("drafted",)), right=True)
    tally.answered(single, fetch, TryReply("texts", plan="tokens", parts=("shared", "fetched")), right=False)
    tally.answered(single, fetch, TryReply(code="peer_lost"), right=False)
    tally.fetches_failed(single, 2)
    told = json.loads(tally.as_json())
    assert told["plans"] == {"local": 1, "tokens": 1}
    assert told["parts"]["two"] == {"to fetch": 1, "answers": 1, "fetched": 1, "drafted": 1}
    assert (
        told["parts"]["one"]
        == told["parts"]["all"]
        == {
            "to fetch": 3,
            "answers": 3,
            "failed": 2,
            "fetched": 1,
            "drafted": 2,
            "shared wrong": 1,
            "fetched wrong": 1,
        }
    )
    table = [line.split() for line in tally.parts_table().splitlines()]
    assert table[0][0] == "fault"
    assert table[0][-2:] == ["shared", "wrong"]
    assert [row[0] for row in table[1:]] == ["one", "two", "all"]
    assert table[1][1:] == ["3", "3", "0", "2", "1", "0", "0", "2", "1", "1"]
