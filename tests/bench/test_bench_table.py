"""The page: every figure beside its bar, nothing rounded in our favour, families without figures named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import results, table
from bench.figures import Bar, Figure, Measured, Result, at_least, at_most


def result(*figures: Figure, quick: bool = False, family: str = "decode") -> Result:
    return Result(
        family=family,
        measured=Measured(list(figures), "How it was done."),
        command=f"python -m bench {family}",
        date="2026-11-21",
        machine=["A processor, 2 shared virtual cores", "24 GB memory"],
        load=0.5,
        runs=2,
        quick=quick,
        loop_s=[0.101, 0.2],
    )


def test_a_row_has_value_range_bar_and_verdict() -> None:
    row = table.row(Figure("Decode", "%", [0.99, 0.97, 1.01], at_least(0.97)))
    assert row == "| Decode | 99.0 % | 97.0 % to 101.0 % | ≥ 97.0 % | pass |"


def test_one_run_has_no_range() -> None:
    assert table.row(Figure("Ready", "s", [0.5], at_most(1))) == "| Ready | 0.50 s |  | ≤ 1.00 s | pass |"


def test_a_miss_hidden_by_rounding_still_falls_short() -> None:
    row = table.row(Figure("Decode", "%", [0.96999], at_least(0.97)))
    assert row == "| Decode | 97.0 % |  | ≥ 97.0 % | **falls short** |"


def test_a_figure_without_a_bar_is_stated() -> None:
    assert table.row(Figure("Decode", "tok/s", [13.0])).endswith("| none | as it is |")


def test_the_worst_of_several_says_so() -> None:
    row = table.row(Figure("Silence", "s", [1.0, 6.0], at_most(5), "worst"))
    assert row == "| Silence, worst | 6.00 s | 1.00 s to 6.00 s | ≤ 5.00 s | **falls short** |"


def test_the_page_holds_figures_machine_command_and_what_is_missing() -> None:
    titles = {"decode": "Decode through HTTP", "demo": "From a fresh clone"}
    stated = Figure("Speed", "tok/s", [13.0], note="on a busy machine")
    page = table.page(titles, {"decode": result(Figure("Share", "%", [0.5], at_least(0.97)), stated)}, {})
    summary, decode, demo = page.split("\n## ")
    assert "| Share | ≥ 97.0 % | 50.0 % | **falls short** | 2026-11-21, of unknown age |" in summary
    assert "Speed" not in summary  # no bar, no promise
    assert "not measured yet: `demo`" in summary
    below = ("24 GB memory.", "2026-11-21", "2 runs", "101 ms before and 200 ms after")
    for part in ("How it was done.", "- Speed: on a busy machine", *below):
        assert part in decode
    assert "`python -m bench decode`" in decode
    assert demo == "From a fresh clone\n\nNot measured yet: `python -m bench demo`.\n"


@pytest.mark.parametrize(
    ("age", "words", "brief"),
    [
        (0, "No later commit touched", "current"),
        (1, "**One later commit", "1 later"),
        (7, "**7 later commits", "7 later"),
        (None, "cannot be told", "of unknown age"),
    ],
)
def test_a_table_says_how_much_of_what_it_measures_has_changed_since(
    age: int | None, words: str, brief: str
) -> None:
    figure = Figure("Share", "%", [0.5], at_least(0.4))
    page = table.page({"decode": "Decode"}, {"decode": result(figure)}, {"decode": age})
    summary, _, family = page.rpartition("## Decode")
    assert words in family
    assert f"| pass | 2026-11-21, {brief} |" in summary


def test_a_quick_look_passes_nothing() -> None:
    figure = Figure("Share", "%", [0.99], at_least(0.97))
    page = table.page({"decode": "Decode"}, {"decode": result(figure, quick=True)}, {})
    assert page.count("| quick look, not judged |") == 2  # in the summary and in its family
    assert "| pass |" not in page


def test_a_quick_look_is_labelled() -> None:
    figure = Figure("Share", "%", [0.5])
    titles = {"decode": "Decode"}
    assert "a quick look" in table.page(titles, {"decode": result(figure, quick=True)}, {})
    assert "a quick look" not in table.page(titles, {"decode": result(figure)}, {})


def test_a_quick_look_never_replaces_a_measurement() -> None:
    figure = Figure("Share", "%", [0.5])
    full, quick = result(figure), result(figure, quick=True)
    assert results.kept(full, quick) is full
    assert results.kept(quick, full) is full
    assert results.kept(None, quick) is quick
    newer = result(figure)
    assert results.kept(full, newer) is newer


def test_results_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    assert results.load(path) == {}
    every = {"decode": result(Figure("Share", "%", [0.5], Bar(True, 0.97), "worst", "a note"))}
    results.save(path, every)
    assert results.load(path) == every
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("found", [b"", b"{", b'{"decode": {"family": 3}}'])
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, found: bytes) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(found)
    assert results.load(path) == {}


def test_every_family_can_be_run() -> None:
    from bench.families import FAMILIES, ON_REQUEST

    assert set(FAMILIES) >= ON_REQUEST
    for name, family in FAMILIES.items():
        assert family.title, name
        assert family.runs >= family.quick_runs >= 1, name
        assert callable(family.measure), name
