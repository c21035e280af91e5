"""The slowest tenth of the answers is held against plain decoding's own slowest tenth."""

from __future__ import annotations

import pytest

from bench.scenarios.speculation import _Look


@pytest.mark.parametrize(("auto", "passed"), [(0.95, True), (0.85, False)])
def test_the_clock_may_see_no_more_than_its_noise(auto: float, passed: bool) -> None:
    look = _Look(None)  # type: ignore[arg-type]
    for side, rates in (("plain", [1.0] * 10), ("again", [0.95] * 10), ("auto", [auto] * 10)):
        look._seen["free", side] += rates
    look._seen["free", "priced"] += [1.0] * 10
    priced, clock, over_noise = look._slowest("free", "free text")
    assert (priced.passes, clock.passes, over_noise.passes) == (True, None, passed)
    assert over_noise.value == pytest.approx(auto / 0.95)
