"""Measuring an accelerator: what was not done yields no figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.children import planned_daemon
from bench.figures import Figure
from bench.harness import smart_chats
from bench.harness.card_parts import NotMeasured, part
from bench.harness.smart_chats import Answered
from bench.scenarios import card_helper, card_shared, card_smart
from fleetd.control.model_facts import ModelShape
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Trace, TraceStep
from fleetd.plan.prefill.schedule import PrefillSize
from fleetd.plan.prefill.split import KINDS, SplitKind, checked

WHOLE = {
    "smart_prefill": {"mode": "full", "skipped": "declined: the task is about the whole text (summary)"},
    "timings": {"score_ms": 0.0},
}
SHORTENED = {
    "smart_prefill": {"mode": "sparse", "original_tokens": 16_000, "compressed_tokens": 3_200},
    "timings": {"score_ms": 250.0},
}


def test_what_smart_prefill_left_out_is_told_with_the_seconds_of_scoring() -> None:
    assert smart_chats.shortened(SHORTENED) == smart_chats.Shortened("sparse", 0.25, 16_000, 3_200)


@pytest.mark.parametrize(
    "said",
    [
        {},
        WHOLE,
        {"smart_prefill": {"mode": "text", "original_tokens": 9, "compressed_tokens": 9}},
        # Scores of an earlier request: its time is not that of a smart prefill.
        SHORTENED | {"timings": {"score_ms": 0.0}},
    ],
)
def test_a_prompt_that_was_read_whole_is_no_measurement_of_smart_prefill(said: dict[str, Any]) -> None:
    with pytest.raises(NotMeasured):
        smart_chats.shortened(said)


@pytest.mark.parametrize(("said", "rows"), [(WHOLE, 0), (SHORTENED, 5)])
def test_a_declined_smart_prefill_yields_no_row_and_an_error_that_says_why(
    said: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card_smart, "_ask", lambda *_, smart: Answered(1.0, said if smart else {}))

    def figures() -> Iterator[Figure]:
        with part("16,000 tokens"):
            yield from card_smart._length(None, "target", 16_000, 1)  # type: ignore[arg-type]

    assert len(list(figures())) == rows
    assert ("the task is about the whole text" in capsys.readouterr().err) == (rows == 0)


def test_a_part_that_fails_leaves_the_next_one_but_not_the_end_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(error: BaseException) -> None:
        with part("one of them"):
            raise error

    fails(ValueError("out of memory"))
    assert "out of memory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fails(SystemExit(143))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [300, 4000])
def test_half_of_a_prompt_is_a_split_that_both_machines_can_compute(kind: SplitKind, tokens: int) -> None:
    prompt = PrefillSize(ModelShape(layers=6), tokens=tokens, cached=0, chunk=512)
    split = checked(planned_daemon.in_two(kind, prompt))
    assert 0 < split.cuts[1] < split.cuts[2]


def test_only_what_came_home_counts_as_streamed() -> None:
    steps = [
        TraceStep("waited", "home", seconds=0.1, n_bytes=700),
        TraceStep("computed", "helper", seconds=0.1, n_bytes=900),
        TraceStep("waited", "helper", seconds=0.1, n_bytes=40),
    ]
    assert card_shared.received(Trace(steps=steps, machine="home")) == 700


def test_what_became_of_a_plan_has_its_label_and_why_a_machine_could_not_help() -> None:
    refused = OptionView("any", ["helper"], code="dtype", reason="helper computes in another precision.")
    trace = Trace(chosen=OptionView("remote"), losers=[refused], outcome="remote", exactness="equivalent")
    assert card_helper.became(trace) == (
        "remote, remote, label equivalent; no help: dtype: helper computes in another precision."
    )


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"a": -1.0, "b": -2.25, "c": -3.0}, "log-probabilities of 2 first tokens differ by 0.25 at most"),
        ({"c": -1.0}, "no first token is among the likeliest of both"),
    ],
)
def test_the_distance_of_two_engines_is_of_tokens_that_both_name(there: dict[str, float], said: str) -> None:
    assert card_helper.distance({"a": -1.0, "b": -2.0}, there) == said
