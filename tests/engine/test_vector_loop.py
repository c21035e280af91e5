"""The loop of a worker for vectors: bounded passes, turns, answers in order, cancels, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from fleetd import limits
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    EmbedTexts,
    Failed,
    Finished,
    FreeMemory,
    Heartbeat,
    PromptsRead,
    TextsEmbedded,
)
from fleetd.engine.vectors.token_rows import Pass, TokenRow
from fleetd.engine.vectors.vector_loop import VectorLoop
from fleetd.engine.vectors.vector_model import VectorRequest


class Lengths:
    """A model whose vector of a text is the text's length. A text with the token 666 cannot be computed.

    ``meanwhile``: what happens after each of its three layers.
    """

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def results(self, group: Pass) -> list[bytes]:
        self.passes.append([len(row.tokens) for row in group.rows])
        if any(666 in row.tokens for row in group.rows):
            raise ArithmeticError("no")
        for _ in range(3):
            self.meanwhile()
            group.between_layers(mx.array(0))
        return [len(row.tokens).to_bytes(4, "little") for row in group.rows]

    def report(self, asked: VectorRequest, results: Sequence[bytes]) -> TextsEmbedded:
        return TextsEmbedded(asked.id, 1, b"".join(results), [])


class VectorBench:
    def __init__(self) -> None:
        self.model = Lengths()
        self.said: list[Any] = []
        # For how many seconds passes were held up.
        self.held: list[float] = []
        # 64 tokens a pass, whatever the pace.
        self.loop = VectorLoop(
            model=self.model,  # type: ignore[arg-type]
            tokens_per_s=1.0,
            emit=self.said.append,
            wait=lambda event, seconds: self.held.append(seconds),
        )

    def ask(self, name: str, lengths: Sequence[int], *, token: int = 1, background: bool = False) -> None:
        rows = [TokenRow([token] * length) for length in lengths]
        self.loop.tell(VectorRequest(EmbedTexts(name, [], background=background), rows))

    def turn(self) -> list[int]:
        """Take a turn. Returns the lengths of the texts of its pass."""
        before = len(self.model.passes)
        assert self.loop.turn()
        return self.model.passes[-1] if len(self.model.passes) > before else []

    def of(self, name: str) -> list[Any]:
        return [event for event in self.said if getattr(event, "id", "") == name]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> VectorBench:
    monkeypatch.setattr(limits, "VECTOR_PASS_TOKENS", (64, 64))
    return VectorBench()


def test_a_pass_has_a_bounded_number_of_tokens_or_one_text(bench: VectorBench) -> None:
    bench.ask("a", [30, 100, 30, 20])
    assert [bench.turn() for _ in range(3)] == [[100], [30, 30], [20]]


def test_an_answer_is_whole_and_in_the_order_of_the_texts(bench: VectorBench) -> None:
    lengths = [10, 60, 20, 50, 7, 8]
    bench.ask("a", lengths)
    while not isinstance(bench.said[-1] if bench.said else None, Finished):
        bench.turn()
    accepted, told, finished = bench.of("a")
    assert (accepted, finished.usage.prompt_tokens) == (Accepted("a", 155), 155)
    assert [int.from_bytes(told.vectors[at : at + 4], "little") for at in range(0, 24, 4)] == lengths
    assert finished.reason == "stop"


def test_texts_of_several_requests_share_a_pass_and_take_turns(bench: VectorBench) -> None:
    bench.ask("a", [40, 40, 40])
    bench.ask("b", [20])
    assert bench.turn() == [20, 40]
    assert isinstance(bench.of("b")[-1], Finished)
    bench.ask("c", [60])
    assert [bench.turn() for _ in range(3)] == [[40], [60], [40]]


def test_background_waits_while_others_compute(bench: VectorBench) -> None:
    bench.ask("slow", [60, 60], background=True)
    bench.ask("quick", [50, 50])
    assert [bench.turn() for _ in range(4)] == [[50], [50], [60], [60]]


def test_a_cancel_acts_within_one_pass_and_on_one_request(bench: VectorBench) -> None:
    bench.ask("a", [60] * 10)
    bench.ask("b", [3])
    bench.turn()
    bench.loop.tell(Cancel("a"))
    bench.loop.tell(Cancel("unknown"))
    bench.turn()
    assert bench.of("a")[-1] == Finished("a", "cancelled")
    assert isinstance(bench.of("b")[-1], Finished)
    assert bench.model.passes == [[3, 60]]


def test_a_pass_that_fails_ends_the_requests_that_it_was_for(bench: VectorBench) -> None:
    bench.ask("bad", [50], token=666)
    bench.turn()
    assert isinstance(bench.of("bad")[-1], Failed)
    bench.ask("good", [50])
    bench.turn()
    assert bench.of("good")[-1].reason == "stop"


def test_no_texts_are_over_at_once(bench: VectorBench) -> None:
    bench.ask("a", [])
    assert bench.turn() == []
    assert [type(event) for event in bench.of("a")] == [Accepted, Finished]


def test_passes_count_as_progress_and_freeing_memory_is_reported_at_once(bench: VectorBench) -> None:
    bench.ask("a", [60, 60])
    bench.turn()
    bench.loop.heartbeat()
    bench.loop.tell(FreeMemory(prompts=True))
    bench.turn()
    bench.loop.heartbeat()
    assert [event.steps for event in bench.said if isinstance(event, Heartbeat)] == [1, 2]


def test_a_pass_grows_with_the_pace_and_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VECTOR_PASS_S", 0.1)
    made = VectorBench().loop
    least, most = limits.VECTOR_PASS_TOKENS
    paces = {1.0: least, 10_000.0: 1000, 1e9: most}
    for pace, tokens in paces.items():
        made.tokens_per_s = pace
        assert made.pass_tokens == tokens


def test_stop_ends_the_loop(bench: VectorBench) -> None:
    bench.ask("a", [60, 60])
    bench.loop.stop()
    assert not bench.loop.turn()


def test_while_a_chat_s_prompt_is_read_passes_are_short_and_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock that the loop is given; every turn finds an order, so none waits."""
    monkeypatch.setattr(limits, "VECTOR_PASS_TOKENS", (8, 4096))
    bench, now = VectorBench(), [1000.0]
    bench.loop.monotonic = lambda: now[0]
    bench.ask("corpus", [40] * 60, background=True)
    bench.loop.tokens_per_s = 40 * 2 / limits.VECTOR_PASS_S

    def turn() -> list[int]:
        bench.loop.tell(Cancel("unknown"))
        # Passes of a test take no time, and would teach the loop to make them long.
        monkeypatch.setattr(bench.loop, "tokens_per_s", 40 * 2 / limits.VECTOR_PASS_S)
        return bench.turn()

    assert turn() == [40, 40]
    bench.loop.tell(PromptsRead(True))
    bench.ask("query", [3])
    assert [turn() for _ in range(3)] == [[], [], []]
    now[0] += limits.VECTOR_YIELD_S
    # Whoever waits for one text goes first, also now.
    assert turn() == [3]
    assert [turn() for _ in range(3)] == [[], [], []]
    now[0] += limits.VECTOR_YIELD_S
    assert turn() == [40]
    assert turn() == []
    bench.loop.tell(PromptsRead(False))
    assert [turn() for _ in range(3)] == [[40, 40]] * 3


def test_a_long_pass_is_held_up_once_if_a_prompt_is_read_meanwhile(bench: VectorBench) -> None:
    bench.model.meanwhile = lambda: bench.loop.tell(PromptsRead(True))
    bench.ask("corpus", [60])
    assert bench.turn() == [60]
    assert bench.held == [limits.VECTOR_YIELD_S]


def test_a_pass_beside_a_prompt_and_a_short_one_are_not_held_up(
    bench: VectorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    bench.loop.monotonic = lambda: now[0]
    bench.loop.tell(PromptsRead(True))
    bench.ask("corpus", [60])
    assert bench.turn() == [60]
    bench.loop.tell(PromptsRead(False))
    monkeypatch.setattr(bench.loop, "tokens_per_s", 3 * 60 / limits.VECTOR_PASS_S)
    bench.model.meanwhile = lambda: bench.loop.tell(PromptsRead(True))
    bench.ask("query", [60])
    assert bench.turn() == [60]
    assert bench.held == []


def test_what_ends_a_wait_for_a_prompt(bench: VectorBench) -> None:
    """The prompt's end and that of the loop: the event is set that a pass waits for."""
    ended: list[bool] = []

    def wait(event: threading.Event, seconds: float) -> None:
        bench.loop.tell(PromptsRead(False)) if not ended else bench.loop.stop()
        ended.append(event.is_set())

    bench.loop.wait = wait
    bench.model.meanwhile = lambda: bench.loop.tell(PromptsRead(True))
    for name in ("first", "second"):
        bench.loop.tokens_per_s = 1.0
        bench.loop.tell(PromptsRead(False))
        bench.ask(name, [60])
        bench.turn()
    assert ended == [True, True]


def test_prompts_that_follow_each_other_at_once_do_not_put_vectors_off(bench: VectorBench) -> None:
    now = [1000.0]
    bench.loop.monotonic = lambda: now[0]
    bench.ask("corpus", [60] * 10)
    bench.turn()
    for _ in range(4):
        bench.loop.tell(PromptsRead(True))
        now[0] += limits.VECTOR_YIELD_S / 4
        bench.loop.tell(PromptsRead(False))
        bench.loop.tell(PromptsRead(True))
        passed = bench.turn()
    assert passed == [60]
    assert len(bench.model.passes) == 2
