"""What waking a machine takes is learned, and one that does not wake is left asleep for longer each time."""

from __future__ import annotations

from fleetd import limits
from fleetd.requests.waking import WakeTimes


def test_what_waking_takes_is_learned() -> None:
    times = WakeTimes()
    assert times.seconds("studio", 0) == limits.WAKE_S
    times.woke("studio", 6.0, 0)
    assert times.seconds("studio", limits.WAKE_AGAIN_S) == 6.0
    times.woke("studio", 10.0, 100)
    assert times.seconds("studio", 100 + limits.WAKE_AGAIN_S) == 8.0
    assert times.patience_s("studio") == 8.0 * limits.WAKE_LATE
    times.woke("studio", 10_000.0, 200)
    assert (times.seconds("studio", 1000) or 0) <= limits.WAKE_MOST_S
    times.woke("mini", 10_000.0, 200)  # the first time it is woken, on a machine that itself slept meanwhile
    assert times.seconds("mini", 1000) == limits.WAKE_MOST_S


def test_a_machine_is_not_woken_again_and_again() -> None:
    times = WakeTimes()
    times.woke("studio", 6.0, 0)
    assert times.seconds("studio", limits.WAKE_AGAIN_S - 1) is None
    now_s = 0.0
    for wait_s in (300, 600, 1200):
        times.failed("mini", now_s)
        assert times.seconds("mini", now_s + wait_s - 1) is None
        now_s += wait_s
        assert times.seconds("mini", now_s) == limits.WAKE_S
    for _ in range(40):
        times.failed("mini", now_s)
    assert times.seconds("mini", now_s + limits.WAKE_FAILED_MOST_S) == limits.WAKE_S
