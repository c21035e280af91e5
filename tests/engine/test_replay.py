"""An answer that is computed a second time goes on where it was."""

from __future__ import annotations

import sys

import pytest

from fleetd import limits
from fleetd.engine.daemon_side.replay import Replay
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    Prefill,
    TextPrompt,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
)
from fleetd.engine.sampling.parameters import Sampling
from fleetd.errors import EngineError, GroupLost

LOST = GroupLost("kitchen left.")
BEGUN: list[Event] = [Accepted("r", 5), Prefill("r", 5, 5)]
TEXT: list[Event] = [Delta("r", "one "), Delta("r", "two "), Delta("r", "three")]
DONE = Finished("r", "stop")


def replay(seed: int | None = None) -> Replay:
    found = Replay(Generate("r", TextPrompt("x"), Sampling(seed=seed)))
    found.of_group = True
    return found


def passed(replay: Replay, events: list[Event]) -> list[Event]:
    return [found for event in events if (found := replay.passed(event)) is not None]


@pytest.mark.parametrize("came", range(4))
def test_what_was_passed_on_is_not_passed_on_again(came: int) -> None:
    again = replay()
    first = passed(again, [*BEGUN, *TEXT[:came]])
    again.again(LOST)
    rest = passed(again, [*BEGUN, *TEXT, DONE])
    answer = [event for event in first + rest if isinstance(event, Delta)]
    assert answer == TEXT
    assert rest[-1] == DONE
    # How the prompt is read is told again only to who has nothing of the answer yet.
    assert any(isinstance(event, Accepted) for event in rest) is (came == 0)


def test_of_an_answer_of_one_machine_nothing_is_kept() -> None:
    alone = replay()
    alone.of_group = False
    events = [*BEGUN, *TEXT, DONE]
    kept = [*map(sys.getrefcount, events)]
    assert passed(alone, events) == events
    assert [*map(sys.getrefcount, events)] == kept


def test_another_answer_is_no_continuation() -> None:
    again = replay()
    passed(again, [*BEGUN, *TEXT[:2]])
    again.again(LOST)
    with pytest.raises(EngineError, match="do not go on with the same answer"):
        passed(again, [*BEGUN, Delta("r", "uno ")])


def test_calls_keep_the_ids_that_were_told() -> None:
    again = replay()
    passed(again, [ToolCallPiece("r", 0, "call-1", "f", "{")])
    again.again(LOST)
    pieces: list[Event] = [
        ToolCallPiece("r", 0, "call-2", "f", "{"),
        ToolCallPiece("r", 0, "call-2", "f", "}"),
        ToolCall("r", 0, "call-2", "f", "{}"),
    ]
    assert passed(again, pieces) == [
        ToolCallPiece("r", 0, "call-1", "f", "}"),
        ToolCall("r", 0, "call-1", "f", "{}"),
    ]


def test_it_is_not_tried_for_ever() -> None:
    again = replay()
    for _ in range(limits.GROUP_TRIES - 1):
        again.again(LOST)
    with pytest.raises(GroupLost):
        again.again(LOST)


def test_every_try_draws_by_the_same_seed() -> None:
    assert replay(7).repeatable.sampling.seed == 7
    drawn = replay()
    assert drawn.request.sampling.seed is None
    assert drawn.repeatable.sampling.seed is not None


def test_the_same_tokens_go_on_though_their_probabilities_were_rounded_otherwise() -> None:
    """Ranks add up sums in another order than one machine alone."""

    def delta(token: str, logprob: float) -> Delta:
        return Delta("r", "one ", logprobs=[TokenLogprob(token, logprob, token.encode())])

    again = replay()
    passed(again, [delta("one ", -0.5)])
    again.again(LOST)
    assert passed(again, [delta("one ", -0.5000001), *TEXT[1:]]) == TEXT[1:]
    again.again(LOST)
    with pytest.raises(EngineError, match="do not go on"):
        passed(again, [delta("on", -0.5)])
