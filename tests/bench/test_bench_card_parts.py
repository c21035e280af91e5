"""Measuring an accelerator: what was not done yields no figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import results
from bench.children import planned_daemon
from bench.families import FAMILIES
from bench.figures import Figure, Measured, NotMeasured, Result, Taking
from bench.harness import card_models, smart_chats
from bench.harness.card_parts import MeasuredParts
from bench.harness.child import ROOT
from bench.harness.smart_chats import Answered
from bench.scenarios import card_helper, card_nccl, card_shared, card_smart
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

    parts = MeasuredParts()

    def figures() -> Iterator[Figure]:
        with parts.part("16,000 tokens"):
            yield from card_smart._length(None, "target", 16_000, 1)  # type: ignore[arg-type]

    assert len(list(figures())) == rows
    assert ("the task is about the whole text" in capsys.readouterr().err) == (rows == 0)


def test_the_first_scores_are_asked_for_until_a_prompt_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels are compiled, scores come too late and the prompt is read whole."""
    said, asked = [WHOLE, WHOLE, SHORTENED], list[int]()

    def ask(daemon: Any, model: str, seed: int, count: int, *, smart: bool) -> Answered:
        asked.append(seed)
        return Answered(1.0, said[len(asked) - 1])

    monkeypatch.setattr(card_smart, "_ask", ask)
    monkeypatch.setattr(card_smart, "_FIRST_POLL_S", 0.0)
    card_smart._first_scores(None, "target", 16_000)  # type: ignore[arg-type]
    assert len(asked) == len(set(asked)) == 3, "no prompt twice: its scores would be remembered"
    monkeypatch.setattr(card_smart, "_FIRST_WITHIN_S", 0.0)
    said.append(WHOLE)
    with pytest.raises(RuntimeError, match="the task is about the whole text"):
        card_smart._first_scores(None, "target", 16_000)  # type: ignore[arg-type]
    # What would take longer is not asked again.
    monkeypatch.setattr(card_smart, "_FIRST_WITHIN_S", 60.0)
    said.append({"smart_prefill": {"mode": "full", "skipped": "slower: Scoring would take 2.42 s"}})
    with pytest.raises(NotMeasured, match="slower"):
        card_smart._first_scores(None, "target", 16_000)  # type: ignore[arg-type]
    assert len(asked) == len(said)


def test_a_part_that_fails_leaves_the_next_one_but_not_the_end_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = MeasuredParts()

    def figures(error: BaseException) -> Iterator[Figure]:
        with parts.part("one of them"):
            raise error
        yield Figure("the next one", "s", [1.0])

    found = parts.of(figures(ValueError("out of memory")))
    assert next(found).title == "the next one"
    assert "out of memory" in capsys.readouterr().err
    # What was not measured is told behind the last figure.
    with pytest.raises(NotMeasured, match=r"^one of them: ValueError$"):
        next(found)
    with pytest.raises(SystemExit):
        next(figures(SystemExit(143)))


# ---- Every family of an accelerator -----------------------------------------------------------------------

CARD = sorted(name for name in FAMILIES if name.startswith("card-"))


def refuses(*_: Any, **__: Any) -> Any:
    raise NotMeasured("it was not done")


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model, no daemon and no NCCL; and docs/ has the figures of another card."""
    monkeypatch.setattr(card_models, "made", refuses)
    monkeypatch.setattr(card_nccl, "_told", refuses)


@pytest.mark.parametrize("name", CARD)
@pytest.mark.usefixtures("nothing_works")
def test_a_family_that_was_not_measured_writes_no_row_and_fails(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "benchmarks.json"
    assert not bench._run(name, False, 0, kept)
    assert results.load(kept) == {}
    assert "it was not done" in capsys.readouterr().err


@pytest.mark.parametrize("figures", [0, 1])
def test_a_family_that_lacks_a_part_is_kept_as_cut_and_replaces_no_whole_one(
    figures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "benchmarks.json"

    def measured(count: int, missed: bool) -> bool:
        parts = MeasuredParts()

        def found() -> Iterator[Figure]:
            if missed:
                parts.miss("64,000 tokens", "declined")
            yield from [Figure("TTFT", "s", [float(count)])] * count

        family = FAMILIES["card-smart"]
        monkeypatch.setitem(
            FAMILIES, "card-smart", replace(family, measure=lambda runs: Taking(parts.of(found()), ""))
        )
        return bench._run("card-smart", False, 0, kept)

    assert not measured(figures, missed=True)
    assert [result.cut for result in results.load(kept).values()] == ["64,000 tokens: declined"] * figures
    assert measured(2, missed=False)
    assert not measured(figures, missed=True)
    assert len(results.load(kept)["card-smart"].measured.figures) == 2
    # Nothing at all is no measurement either.
    assert not measured(0, missed=False)


def test_figures_of_another_machine_are_taken_over_as_if_they_had_been_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, family in ((there, "card-smart"), (here, "card-batch")):
        bench._take({family: changed_result(family)}, folder / bench.KEPT)
    monkeypatch.setattr("sys.argv", ["bench", "--into", str(here), "--take", str(there / bench.KEPT)])
    assert bench.main() == 0
    assert set(results.load(here / bench.KEPT)) == {"card-smart", "card-batch"}
    assert "a figure of card-smart" in (here / bench.PAGE).read_text()


def changed_result(family: str) -> Result:
    figure = Figure(f"a figure of {family}", "s", [1.0])
    return Result(family, Measured([figure], "so"), "", "2026-01-01", ["a machine"], 0.0, 1, quick=False)


def test_a_helper_that_had_no_part_gives_no_ratio() -> None:
    """Both sides would be the home's own, and the ratio 1.0."""
    asked = card_helper.Asked(1.0, "text", {"a": -1.0}, Trace(chosen=OptionView("local"), outcome="local"))
    assert asked.trace is not None
    with pytest.raises(NotMeasured, match="local"):
        list(card_helper._compared("", asked, asked.trace, asked))
    for outcome in card_helper.HELPED:
        helped = Trace(chosen=OptionView("remote"), outcome=outcome)
        assert len(list(card_helper._compared("", asked, helped, asked))) == 3


@pytest.mark.parametrize(("seconds", "rows"), [(40e-6, 1), (60e-6, 2)])
def test_a_sum_that_no_memory_allows_is_none(
    seconds: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"right": True, "ranks": 1, "init_s": 0.5, "seconds": [seconds] * 3}
    monkeypatch.setattr(card_nccl, "_told", lambda: told)
    assert len(list(card_nccl._figures())) == rows


def test_steps_are_given_more_time_than_they_give_themselves() -> None:
    """All that no card has shown yet takes thirteen minutes at most, and every family is a step."""
    table = (ROOT / ".ci" / "gpu").read_text().partition("cat <<TABLE\n")[2].partition("TABLE")[0]
    limits = {line.split()[0]: int(line.split()[1]) for line in table.splitlines()}
    assert set(limits) == {*CARD, "tests", "host-time"}
    assert list(limits)[-3:] == ["card-models", "card-shared", "host-time"]
    assert sum(list(limits.values())[:-3]) <= 13 * 60
    assert limits["card-smart"] > card_smart._BUDGET_S
    assert limits["card-nccl"] > card_nccl._WITHIN_S


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
