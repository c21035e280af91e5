"""The arithmetic behind the benchmark page: medians, ratios, bars, and how values are written."""

from __future__ import annotations

import pytest

from bench.figures import (
    Figure,
    Unit,
    alternated,
    at_least,
    at_most,
    percentile,
    ratios,
    rotated,
    written,
)


def figure(values: list[float], **rest: object) -> Figure:
    return Figure("f", "x", values, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "median"), [([3.0], 3.0), ([9.0, 1.0, 2.0], 2.0), ([1.0, 2.0, 4.0, 9.0], 3.0)]
)
def test_the_median_stands_for_the_runs(values: list[float], median: float) -> None:
    assert figure(values, bar=at_least(1)).value == median


def test_the_worst_run_is_the_one_furthest_from_the_bar() -> None:
    assert figure([2.0, 1.0, 3.0], bar=at_least(2), of="worst").value == 1.0
    assert figure([2.0, 1.0, 3.0], bar=at_most(2), of="worst").value == 3.0


@pytest.mark.parametrize(
    ("value", "bar", "passes"),
    [
        (0.97, at_least(0.97), True),
        (0.969999, at_least(0.97), False),
        (1.0, at_most(1.0), True),
        (1.0001, at_most(1.0), False),
    ],
)
def test_a_bar_is_met_exactly_or_not(value: float, bar: object, passes: bool) -> None:
    assert figure([value], bar=bar).passes is passes


def test_without_a_bar_nothing_is_judged() -> None:
    assert figure([1.0]).passes is None


def test_a_ratio_is_of_one_run() -> None:
    # A run in which everything took twice as long has the same ratio.
    assert ratios([10.0, 5.0], [8.0, 4.0]) == [1.25, 1.25]
    with pytest.raises(ValueError, match="within one run"):
        ratios([1.0, 2.0], [1.0])


def test_a_percentile_is_one_of_the_values() -> None:
    thousand = [float(n) for n in range(1000, 0, -1)]
    assert (percentile(thousand, 0.5), percentile(thousand, 0.99)) == (500.0, 990.0)
    # Of a few values the p99 is the worst: nothing is left out in our favour.
    assert percentile([1.0, 9.0, 2.0], 0.99) == 9.0


def test_sides_take_turns_in_going_first() -> None:
    assert [alternated(run, ("a", "b")) for run in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_more_than_two_sides_are_each_first_as_often() -> None:
    orders = [rotated(run, ("a", "b", "c")) for run in range(4)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab", "abc"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9655, "%", "96.5 %"),
        (1.504, "x", "1.50×"),  # noqa: RUF001
        (0.354, "s", "0.35 s"),
        (17.04, "ms", "17.0 ms"),
        (0.187, "ms", "0.19 ms"),
        (-2.5, "ms", "-2.5 ms"),
        (0.238, "kB/s", "0.24 kB/s"),
        (914.9, "MB/s", "915 MB/s"),
        (1.8549, "GiB/s", "1.85 GiB/s"),
        (170.4, "ms", "170 ms"),
        (3.14, "µs", "3.1 µs"),
        (55.4, "MB", "55 MB"),
        (13.37, "tok/s", "13.4 tok/s"),
        (2.0, "count", "2"),
    ],
)
def test_values_are_written_with_their_unit(value: float, unit: Unit, text: str) -> None:
    assert written(value, unit) == text
