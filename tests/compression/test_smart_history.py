from __future__ import annotations

from smart_texts import haystack, policy

from fleetd.compression.document import Document
from fleetd.compression.history import History, still_serves
from fleetd.compression.select import select
from fleetd.compression.selection import Selection

NEEDLE, OTHER = (
    "The secret code of the harbour office is 48213.",
    "The gardener of the tea room is called Tobias.",
)
FIRST = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": f"{haystack(1)}\n\n{NEEDLE}\n\n{haystack(2)}\n\n{OTHER}\n\n{haystack(3)}\n\n"
        "What is the secret code of the harbour office?",
    },
]


def later(question: str) -> list[dict[str, str]]:
    return [*FIRST, {"role": "assistant", "content": "48213."}, {"role": "user", "content": question}]


def decided() -> Selection:
    selection = select(Document.of_messages(FIRST), None, policy(0.05))
    assert not selection.declined
    return selection


def test_the_next_turn_finds_what_was_decided() -> None:
    history = History()
    history.keep(FIRST, policy(0.05), selection := decided())
    aged = history.find(later("Thank you. Is that a four digit code?"), policy(0.05))
    assert aged == dict(enumerate(selection.kept))
    # And so does the same request again.
    assert history.find(FIRST, policy(0.05)) == aged


def test_the_longest_known_beginning_counts() -> None:
    history = History()
    history.keep(FIRST, policy(0.05), decided())
    turn = later("And who is the gardener of the tea room?")
    selection = select(Document.of_messages(turn), None, policy(0.05))
    history.keep(turn, policy(0.05), selection)
    assert history.find([*turn, {"role": "user", "content": "Thanks."}], policy(0.05)) == dict(
        enumerate(selection.kept)
    )


def test_another_beginning_or_policy_is_another_conversation() -> None:
    history = History()
    history.keep(FIRST, policy(0.05), decided())
    assert history.find(FIRST, policy(0.1)) == {}
    assert history.find(FIRST[:1], policy(0.05)) == {}
    assert history.find([{"role": "system", "content": "Be brief!"}, FIRST[1]], policy(0.05)) == {}


def test_a_question_about_what_was_dropped_looks_at_everything_again() -> None:
    aged = dict(enumerate(decided().kept))
    assert still_serves(Document.of_messages(later("Thank you. And now spell it.")), aged)
    assert still_serves(Document.of_messages(later("Is the secret code of the harbour office even?")), aged)
    assert not still_serves(Document.of_messages(later("What is the gardener of the tea room called?")), aged)


def test_the_least_recently_used_goes_first_and_weight_is_bounded() -> None:
    kept = Selection((((0, 1),),), 4, 1)
    messages = [[{"role": "user", "content": str(i)}] for i in range(4)]
    history = History(entries=2)
    for message in messages[:2]:
        history.keep(message, policy(), kept)
    assert history.find(messages[0], policy())
    history.keep(messages[2], policy(), kept)
    assert [bool(history.find(message, policy())) for message in messages[:3]] == [True, False, True]
    heavy = History(ranges=7)
    wide = Selection((((0, 1), (2, 3), (4, 5)),), 4, 1)
    for message in messages[:2]:
        heavy.keep(message, policy(), wide)
    assert len(heavy) == 1
    heavy.keep(messages[2], policy(), Selection((((0, 1),) * 9,), 4, 1))
    assert not heavy.find(messages[2], policy())
    # Kept again, it weighs no more than once.
    for _ in range(5):
        heavy.keep(messages[1], policy(), wide)
    assert len(heavy) == 1
