"""What the quality harness asks, and how it counts."""

from __future__ import annotations

import json
import math

import pytest

from bench.harness.child import ROOT
from eval import forms, plots, report
from eval.__main__ import CODE
from eval.kept_facts import RATIOS, THIRDS, UNASKED_FORMS, KeptFacts
from eval.requests import BEHIND, GATE, IN_FRONT, Declined
from eval.rounded import RoundedAnswers
from eval.runs import Outcome, dense, gate, kept, lost, recall
from eval.statistics import Share
from eval.tasks import KINDS, Task, task
from fleetd.compression.elide import messages
from fleetd.compression.words import estimate_tokens

WHOLE = ("aggregate", "verbatim")
PARTS = [kind for kind in KINDS if kind not in WHOLE]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 10_001])
def test_a_task_follows_from_its_seed_and_holds_its_answer(kind: str, seed: int) -> None:
    one = task(kind, seed, 800, 0.5, estimate_tokens)
    assert one == task(kind, seed, 800, 0.5, estimate_tokens)
    assert one != task(kind, seed + 1, 800, 0.5, estimate_tokens)
    text = one.document.text
    assert all(text.count(fact) == 1 for fact in one.facts)
    assert all(answer in text for answer in one.answers)
    # What is asked does not say it.
    assert not any(answer in one.document.text.splitlines()[-1] for answer in one.answers)
    assert 500 < estimate_tokens(text) < 1600
    assert bool(one.facts) != one.whole


@pytest.mark.parametrize("kind", PARTS)
def test_words_alone_find_the_fact_at_a_quarter(kind: str) -> None:
    """The weakest selection, with a third in hand: a bar that a broken part of it does not pass."""
    gone = facts = 0
    for seed in range(8):
        one = task(kind, seed, 1000, (seed + 0.5) / 8, estimate_tokens, tuning=True)
        document = one.document
        gone += len(lost(document, forms.selected(document, None, 0.3), one.facts))
        facts += len(one.facts)
    assert gone <= 0.15 * facts


def test_the_gate_keeps_its_bar() -> None:
    for kind, share in gate(
        estimate_tokens, ("aggregate", "verbatim", "single", "hop", "code"), range(40)
    ).items():
        assert share.value >= 0.95 if kind in WHOLE else share.value <= 0.05, (kind, str(share))


def test_a_shortened_tool_result_parses_and_keeps_its_call() -> None:
    one = task("json", 3, 1000, 0.4, estimate_tokens)
    document = one.document
    shortened = messages(document, forms.selected(document, None, 0.2), one.messages)
    assert shortened[1] == one.messages[1]
    people = json.loads(str(shortened[2]["content"]))["people"]
    assert int(one.answers[0]) in [person["locker"] for person in people if isinstance(person, dict)]


def test_an_answer_is_a_word_of_its_own() -> None:
    one = task("single", 1, 100, 0.5, estimate_tokens)
    assert one.says("It is 48,213.", "48213")
    assert one.says("The Plum, of course", "plum")
    assert not one.says("148213", "48213")


def test_baselines_use_the_same_budget_and_keep_the_question() -> None:
    one = task("single", 5, 1000, 0.5, estimate_tokens)
    document = one.document
    for selection in (forms.at_random(document, 0.25, 1), forms.truncated(document, 0.25)):
        assert 0.15 < selection.ratio <= 0.26
        assert selection.kept[-1][-1][1] == len(document.blocks[-1].text)


def test_intervals() -> None:
    # Wilson (1927), as R's prop.test without correction has it.
    assert Share(8, 10).interval == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert Share(0, 20).interval[0] == 0
    assert Share(20, 20).interval == (pytest.approx(0.8389, abs=1e-3), 1.0)
    assert math.isnan(Share(0, 0).value)
    assert str(Share(0, 0)) == "none"


def outcome(ratio: float, said: int, dense: int = 1, tokens: int = 1000) -> Outcome:
    return Outcome("single", tokens, ratio, 0.5, 0, 1, dense, {"text": said} if dense else {}, said, 1, ratio)


def test_only_what_the_whole_prompt_answers_is_counted() -> None:
    found = [outcome(0.25, 1), outcome(0.25, 0), outcome(0.25, 0, dense=0)]
    assert dense(found) == Share(2, 3)
    assert recall(found, "text") == Share(1, 2)
    assert kept(found[:2]) == Share(1, 2)


def test_every_path_that_the_figures_depend_on_is_there() -> None:
    assert all((ROOT / path).is_dir() for path in CODE)


def test_each_command_has_its_own_commit_and_age() -> None:
    results = report.Results(
        ["python -m eval gate", "python -m eval facts-4000"],
        "2026-02-02",
        ["commit bbbbbbb"],
        "m",
        False,
        measured={"python -m eval gate": report.MeasuredAt("2026-01-01", "aaaaaaa")},
    )
    page = report.page(results, {"aaaaaaa": 40, "bbbbbbb": 0})
    assert "| `python -m eval gate` | 2026-01-01 | `aaaaaaa` | 40 |" in page
    assert "| `python -m eval facts-4000` | 2026-02-02 | `bbbbbbb` | 0 |" in page
    # Whose commit is not in this history is of an age that nobody can tell.
    assert "| `python -m eval gate` | 2026-01-01 | `aaaaaaa` | cannot be told |" in report.page(results, {})


def test_the_page_says_what_falls_short() -> None:
    found = [outcome(0.25, 1) for _ in range(20)] + [outcome(0.1, i % 2) for i in range(20)]
    results = report.Results(
        commands=["python -m eval"],
        date="2026-01-01",
        machine=["a machine"],
        model="m",
        seconds=60.0,
        quick=False,
        scored=True,
        sparse=False,
        outcomes=found,
        declined={"aggregate": (39, 40)},
    )
    page = report.page(results, {})
    assert "| One needle, 1000 tokens, ratio 0.25, text | ≥ 97 % | 100.0 % (84 to 100, n=20) | pass |" in page
    assert (
        "| One needle, 1000 tokens, ratio 0.1, text | ≥ 90 % | 50.0 % (30 to 70, n=20) | **falls short** |"
        in page
    )
    assert "Declined: about the whole text | ≥ 95 % | 97.5 %" in page
    assert "`python -m eval`" in page
    results.quick = True
    assert "falls short" not in report.page(results, {})


def test_several_needles_are_judged_by_the_whole_prompt_s_own_answers_too() -> None:
    """A form that gives as many answers as the whole prompt, but others, has lost some."""
    one = Outcome("needles4", 1000, 0.3, 0.5, 1, 4, 2, {"text": 1}, gave={"text": 2})
    results = report.Results(["python -m eval"], "2026-01-01", ["a machine"], "m", False, outcomes=[one] * 20)
    strict, loose = report.bars(results)
    assert (strict.said, strict.least) == (
        "Four needles, ratio 0.3, text, of the whole prompt's own answers",
        0.95,
    )
    assert strict.share.value == 0.5
    assert (loose.share.value, loose.least) == (1.0, 0.95)
    assert "own answers | ≥ 95 % | 50.0 %" in report.page(results, {})


def test_the_gate_is_judged_wherever_the_request_stands() -> None:
    """`fleetctl chat "…" < file` sends one message."""
    rows = [
        Declined(GATE, (39, 40), (1, 40)),
        Declined("de", (0, 40), (40, 40)),
        Declined(BEHIND, (39, 40), (6, 40)),
        Declined(IN_FRONT, (30, 40), (1, 40)),
    ]
    results = report.Results(
        ["python -m eval"], "2026-01-01", ["a machine"], "m", False, requests=rows, tuned=rows[:1]
    )
    found = [(bar.share.value, bar.share.value >= bar.least) for bar in report.bars(results)]
    assert found == [(0.975, True), (0.975, True), (0.975, True), (0.85, False), (0.75, False), (0.975, True)]
    page = report.page(results, {})
    assert "in one message behind the text, a part: not declined | ≥ 95 % | 85.0 %" in page
    assert "in one message in front of the text, the whole text: declined | ≥ 95 % | 75.0 %" in page


def test_a_plot_is_small_and_holds_every_point() -> None:
    points = [(float(x), 0.9, 0.8, 1.0) for x in (1000, 2000, 4000)]
    svg = plots.lines("A <title>", "x", "y", {"text": points, "sparse": points})
    assert svg.count("<circle") == 6
    assert "A &lt;title&gt;" in svg
    assert len(svg) < 10_000
    assert plots.lines("t", "x", "y", {}) == ""


def test_what_other_arithmetic_costs_is_counted_by_the_answers_that_are_right_alone() -> None:
    one = Task("single", 1, 100, 0.5, text="a", answers=("blue", "red"))
    found = RoundedAnswers("single", 100)
    found.add(one, {"alone": ([1], "blue, red"), "routed": ([1], "blue, red"), "by layers": ([2], "red")})
    found.add(one, {"alone": ([1], "blue"), "routed": ([2], "red"), "by layers": ([1], "blue")})
    assert (found.tasks, found.answers, found.right["alone"]) == (2, 4, 3)
    assert (found.kept("routed"), found.alike("routed")) == (Share(2, 3), Share(1, 2))
    assert (found.kept("by layers"), found.alike("by layers")) == (Share(2, 3), Share(1, 2))
    results = report.Results(["python -m eval"], "2026-01-01", [], "m", False, rounded=[found])
    section = report.page(results, {}).partition("## What other arithmetic costs")[2].partition("\n## ")[0]
    assert "| one needle | 100 | 75.0 %" in section
    assert section.count("| all |") == 1


def test_perplexity_by_the_bits_of_keys_and_values_stands_beside_that_of_numbers() -> None:
    by_way = {"float32": 10.0, "KV in 8 bits": 10.01, "KV in 4 bits": 13.0}
    results = report.Results(
        ["python -m eval kv-bits"], "2026-01-01", [], "m", False, perplexity={"prose": by_way}
    )
    assert "| prose | 10.000 | 10.010 (+0.1 %) | 13.000 (+30.0 %) |" in report.page(results, {})


def test_a_row_of_a_long_text_has_a_cell_for_each_of_its_columns() -> None:
    """Also if selection by words declined all questions of a kind."""
    cells = []
    for ratio in RATIOS:
        cells.append(cell := KeptFacts("no word in common", 4000, ratio, 1))
        for form in ("scores", *THIRDS):
            cell.add(form, Share(9, 10))
    results = report.Results(["python -m eval"], "2026-01-01", [], "m", False, facts=cells)
    section = report.page(results, {}).partition("## Long texts")[2].partition("\n## ")[0]
    columns, _, row = [line for line in section.splitlines() if line.startswith("|")]
    assert row.count("|") == columns.count("|")
    assert row.endswith("| none | none | none | 2026-01-01 (of unknown age) |")


def test_what_is_kept_without_a_question_is_shown_with_its_rivals() -> None:
    cells = []
    for kind, hits in (("one needle", 4), ("two hops", 8)):
        cell = KeptFacts(kind, 4000, 0.3, 1)
        for form in UNASKED_FORMS:
            cell.add(form, Share(hits, 10))
        cells.append(cell)
    results = report.Results(["python -m eval"], "2026-01-01", [], "m", False, unasked=cells)
    section = report.page(results, {}).partition("## Without a question")[2].partition("\n## ")[0]
    assert "| all | | 0.3 | 60.0 %" in section
