"""Several answers at once: drafted for one by one where everybody gains, and never for long where not."""

from __future__ import annotations

import pytest

from fleetd.engine.speculation.rounds import LONGEST_REST, PAUSE, REST, STEPS, WINDOW, Promise, Rounds


def measured(size: int, seconds: float) -> Rounds:
    rounds = Rounds()
    for _ in range(STEPS):
        rounds.add_step(size, seconds)
    return rounds


@pytest.mark.parametrize(
    ("tokens", "seconds", "worth"),
    [
        # Two passes of 2 seconds each are worth 3.3 of a batch's steps of 1.2 seconds: 1.6 times that.
        ((6.0, 5.5), (2.0, 2.0), True),
        ((5.0, 9.0), (2.0, 2.0), False),  # the one that gains least decides
        ((3.3, 3.3), (2.0, 2.0), False),
        ((1.0, 1.0), (1.0, 1.0), False),
        ((3.0, 3.0), (0.9, 0.9), True),
    ],
)
def test_worth_it_where_everybody_gains(
    tokens: tuple[float, float], seconds: tuple[float, float], worth: bool
) -> None:
    promises = [Promise(*each) for each in zip(tokens, seconds, strict=True)]
    assert measured(2, 1.2).worth(promises) is worth


def test_nothing_is_worth_it_that_was_not_measured() -> None:
    good = Promise(100.0, 0.1)
    rounds = measured(2, 1.0)
    assert not rounds.worth([good, good, good])
    assert rounds.step_s(3) is None
    rounds = Rounds()
    for _ in range(STEPS - 1):
        rounds.add_step(2, 1.0)
    assert not rounds.worth([good, good])
    rounds.add_step(2, 1.0)
    assert rounds.worth([good, good])


def test_a_step_that_was_held_up_changes_little() -> None:
    rounds = measured(2, 1.0)
    rounds.add_step(2, 50.0)
    assert rounds.step_s(2) == 1.0


def test_what_was_not_worth_it_is_not_asked_at_each_step() -> None:
    rounds = measured(2, 1.0)
    assert not rounds.worth([Promise(1.0, 1.0)] * 2)
    for _ in range(PAUSE):
        assert rounds.resting
        assert not rounds.worth([Promise(100.0, 0.1)] * 2)
        rounds.add_step(2, 1.0)
    assert rounds.worth([Promise(100.0, 0.1)] * 2)


def test_losing_once_somebody_would_have_had_more_of_the_batch() -> None:
    rounds = measured(2, 1.0)
    for _ in range(WINDOW):
        assert not rounds.losing
        rounds.add_round({"a": 8, "b": 2}, 3.0)
    assert rounds.losing
    rounds = measured(2, 1.0)
    for i in range(2 * WINDOW):
        # Each has a bad round now and then.
        rounds.add_round({"a": 8, "b": 1} if i % 2 else {"a": 1, "b": 8}, 3.0)
        assert not rounds.losing


def test_who_has_ended_counts_no_more() -> None:
    rounds = measured(2, 1.0)
    for _ in range(WINDOW):
        rounds.add_round({"a": 8, "b": 1}, 3.0)
    assert rounds.losing
    rounds.add_round({"a": 8, "c": 8}, 3.0)
    assert not rounds.losing


def rest(rounds: Rounds) -> int:
    steps = 0
    while rounds.resting:
        rounds.add_step(2, 1.0)
        steps += 1
    return steps


def test_rests_double_until_everybody_gains() -> None:
    rounds = measured(2, 1.0)
    rounds.end()
    assert rest(rounds) == 0
    seen = []
    for _ in range(8):
        rounds.add_round({"a": 8, "b": 1}, 3.0)
        rounds.end()
        seen.append(rest(rounds))
    assert seen == [min(REST * 2**i, LONGEST_REST) for i in range(8)]
    rounds.add_round({"a": 8, "b": 4}, 3.0)
    rounds.end()
    assert rest(rounds) == REST
    rounds.add_round({"a": 8, "b": 1}, 3.0)
    rounds.end()
    assert rest(rounds) == REST


@pytest.mark.parametrize(
    ("rounds_of_b", "gained", "losing"), [((6, 6, 6, 6), True, False), ((5, 6, 6, 6), False, True)]
)
def test_an_answer_gains_by_the_tokens_that_the_batch_would_have_given_meanwhile(
    rounds_of_b: tuple[int, ...], gained: bool, losing: bool
) -> None:
    """A step of the batch takes half a second, so that six tokens come in 3 s, and a round takes 2.9 s."""
    rounds = measured(2, 0.5)
    for tokens in rounds_of_b:
        rounds.add_round({"a": 8, "b": tokens}, 2.9)
    assert rounds.losing is losing
    rounds.end()
    # After a loss the next rest is twice as long.
    assert rounds._next_rest == (REST if gained else 2 * REST)
