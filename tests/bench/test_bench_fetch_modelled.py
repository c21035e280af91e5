"""The modelled table of fetches is the planner's, and agrees with arithmetic on the back of an envelope."""

from __future__ import annotations

import pytest

from bench.scenarios import fetch_modelled
from bench.scenarios.fetch_modelled import LINKS, N_BYTES, STATE_BYTES, TOKENS, rows
from fleetd.limits import FETCH_LOOK_BYTES_PER_S


def test_the_bytes_are_those_that_were_published_for_a_shorter_prompt() -> None:
    n_bytes = 9_410 * fetch_modelled.ROW_BYTES + STATE_BYTES
    assert n_bytes == pytest.approx(770.64e6, rel=1e-3)
    assert pytest.approx(2.12e9, rel=0.01) == N_BYTES + STATE_BYTES


@pytest.mark.parametrize(("link", "faster"), [("1 Gbit/s", 1.8), ("10 Gbit/s", 12.0)])
def test_a_fetch_takes_as_long_as_its_bytes_on_the_link(link: str, faster: float) -> None:
    found = rows()[f"870 tok/s, from another machine over {link}"]
    assert found.way.begun is not None
    sent_s = (N_BYTES + 2 * STATE_BYTES) / LINKS[link].bytes_per_s
    # And as computing 512 tokens, by which the state is checked; their context slows them a little.
    checked_s = 512 / 870 + N_BYTES / FETCH_LOOK_BYTES_PER_S
    assert found.way.begun.seconds == pytest.approx(sent_s + checked_s, rel=0.05)
    assert found.computed_s == pytest.approx(TOKENS / 870, rel=0.01)
    assert found.computed_s / found.first_s == pytest.approx(faster, rel=0.1)


def test_every_row_is_what_the_planner_would_do() -> None:
    assert all(each.way.begun is not None for each in rows().values())
    measured = fetch_modelled.measure(1)
    assert all("modelled" in figure.title and figure.note for figure in measured.figures)
