"""What runs leave behind, and waiting for what a daemon will say."""

from __future__ import annotations

import pytest

from bench.figures import Figure, Measured
from bench.harness.samples import Samples, merged, wait_for


def test_ratios_are_formed_run_by_run() -> None:
    seen = Samples()
    for plain, drafted in ((2.0, 3.0), (4.0, 10.0)):
        seen.add(plain=plain, drafted=drafted)
    seen["code", 5].append(1.0)
    assert seen.ratios("drafted", "plain") == [1.5, 2.5]
    assert seen["code", 5] == [1.0]


def test_a_ratio_of_unequal_runs_is_refused() -> None:
    seen = Samples()
    seen.add(a=1.0)
    with pytest.raises(ValueError, match="within one run"):
        seen.ratios("a", "b")


def test_the_first_true_look_is_returned() -> None:
    looks = iter([None, 0, 7])
    assert wait_for(lambda: next(looks), 60, 0, str) == 7


def test_waiting_in_vain_says_why() -> None:
    with pytest.raises(RuntimeError, match="it never came"):
        wait_for(lambda: False, 0, 0, lambda: "it never came")


def test_parts_are_one_family_in_their_order() -> None:
    parts = [Measured([Figure(title, "x", [1.0])], f"How {title}.") for title in ("a", "b")]
    whole = merged(*parts)
    assert [figure.title for figure in whole.figures] == ["a", "b"]
    assert whole.how == "How a.\n\nHow b."
