"""Whether silence is noticed, whatever the clock shows and however late one looks."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.p2p.session.liveness import Liveness, LivenessVerdict


@given(st.integers(2, 40), st.floats(0, 3), st.floats(0, 0.01))
@example(10, 1.7, 0.0)
def test_a_silent_peer_is_found_dead_whatever_the_clock_shows(
    power: int, before_s: float, late_s: float
) -> None:
    """Just before a power of two, sums and differences of times round differently."""
    now = began = 2.0**power - before_s
    life = Liveness(began)
    verdicts = []
    for _ in range(20):
        now = max(now, life.next_deadline()) + late_s
        if now >= life.ping_due:
            life.ping(now)
        verdicts.append(life.judge(now))
        if verdicts[-1] is LivenessVerdict.SILENT:
            break
    assert verdicts.count(LivenessVerdict.QUIET) == 1
    assert verdicts[-1] is LivenessVerdict.SILENT
    assert abs(now - began - limits.DEAD_S) <= 20 * late_s + 0.01
