"""docs/quality.md says of each figure when it was measured, so that an old one does not look new."""

from __future__ import annotations

import pytest

from eval.report import Ages, MeasuredAt, Results, page, profile_said
from eval.runs import Outcome

OLD, NEW = MeasuredAt("2026-11-23", "0ld"), MeasuredAt("2026-11-28", "4ew")
LATER = {"0ld": 92, "4ew": 0}


def outcome(kind: str, tokens: int) -> Outcome:
    return Outcome(
        kind, tokens, ratio=0.3, depth=0.5, seed=1, answers=1, dense=1, forms={"text": 1}, kept=1, facts=1
    )


def results(*commands: tuple[str, MeasuredAt], profile: str = "") -> Results:
    return Results(
        [f"python -m eval{command}" for command, _ in commands],
        NEW.date,
        [f"commit {NEW.commit}"],
        "m",
        quick=False,
        outcomes=[outcome("single", 1000), outcome("needles4", 1000)],
        segments=[(1, 1, 1)],
        profile=profile,
        measured={f"python -m eval{command}": at for command, at in commands},
    )


def row(said: str, found: Results) -> str:
    return next(line for line in page(found, LATER).splitlines() if line.startswith(f"| {said} "))


def test_each_row_says_when_it_was_measured() -> None:
    found = results((" single-1000 needles4-1000 --share 0.5", OLD), (" single-1000", NEW))
    assert row("one needle | 1000", found).endswith("| 2026-11-28 (current) |")
    assert row("four needles | 1000", found).endswith("| 2026-11-23 (92 later) |")
    assert row("Four needles, ratio 0.3, text, as many", found).endswith("| 2026-11-23 (92 later) |")


@pytest.mark.parametrize(
    ("commands", "steps", "on"),
    [
        ([("", OLD)], ["gate"], "2026-11-23 (92 later)"),
        ([(" --share 0.5", OLD)], ["gate"], "2026-11-23 (92 later)"),
        ([("", OLD), (" gate --share 0.5", NEW)], ["gate"], "2026-11-28 (current)"),
        ([("", OLD), (" gate", NEW)], ["gate", "layers"], "2026-11-23 (92 later)"),
        ([(" gate", NEW)], ["gate", "layers"], "2026-11-28 (current)"),
        ([(" gate", MeasuredAt("2026-11-20", ""))], ["gate"], "2026-11-20 (of unknown age)"),
        ([(" gate", NEW)], ["layers"], "not known"),
    ],
)
def test_the_last_command_that_ran_a_step_decides(
    commands: list[tuple[str, MeasuredAt]], steps: list[str], on: str
) -> None:
    assert Ages(results(*commands), LATER).of(*steps) == on


def test_another_profile_than_was_measured_is_named() -> None:
    found = results((" segments", OLD), profile=profile_said(4, 16))
    now = profile_said(1, 3)
    assert f"**The profile is another one today.** {now}" in page(found, LATER, now)
    assert "another one today" not in page(found, LATER, profile_said(4, 16))
