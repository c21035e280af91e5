"""How long a load takes: what was seen of this model, else its size and what other loads took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.limits import GIB
from fleetd.plan import chip_speeds
from fleetd.plan.load_times import FIRST_S, MOST, VERIFIED_BYTES_PER_S, LoadTimes


def test_a_model_that_was_never_loaded_is_estimated_by_its_size() -> None:
    assert LoadTimes().seconds("m", GIB) == chip_speeds.load_s(GIB) + first_s(GIB)


def first_s(weights_bytes: int) -> float:
    """What a first load has besides: checksums, calibration and the probe."""
    return weights_bytes / VERIFIED_BYTES_PER_S + FIRST_S


def test_a_first_load_is_priced_with_what_first_loads_measured_here() -> None:
    """It used to be priced as a later one: 3.0 s were planned, and 14.3 s came."""
    times = LoadTimes()
    stages = [("starting", 1.0), ("verifying", 2.0), ("measuring", 16.0), ("probing for exactness", 4.0)]
    times.took("m", 2_000_000_000, [*stages, ("reading", 7.0)])
    # The next load of the same model keeps what this one found out.
    assert times.seconds("m", 2_000_000_000) == 8.0
    other = times.seconds("other", 2_000_000_000)
    assert other == pytest.approx(8.0 + 2.0 + (FIRST_S + 20.0) / 2, abs=0.2)


def test_a_model_that_was_loaded_takes_what_it_took() -> None:
    times = LoadTimes()
    times.took("m", GIB, [("reading", 30.0)])
    assert times.seconds("m", GIB) == 30.0
    times.took("m", GIB, [("reading", 10.0)])
    assert times.seconds("m", GIB) == 20.0


def test_what_loads_take_here_corrects_the_estimate_for_other_models() -> None:
    times = LoadTimes()
    times.took("m", GIB, [("reading", 3 * chip_speeds.load_s(GIB))])
    assert times.seconds("other", 8 * GIB) == pytest.approx(
        3 * chip_speeds.load_s(8 * GIB) + first_s(8 * GIB)
    )
    times.took("slow", GIB, [("reading", 1e9)])
    assert times.seconds("other", GIB) <= MOST * chip_speeds.load_s(GIB) + first_s(GIB)


def test_each_load_moves_what_is_expected_half_of_the_way() -> None:
    """By size a load of 2 GB takes 4 s, and one of 6 GB 6 s."""
    times, two, six = LoadTimes(), 2 * 10**9, 6 * 10**9
    times.took("m", two, [("verifying", 1.0), ("measuring", 8.0), ("reading", 6.0)])
    # Half as long again, checksums at 1.5 GB/s, and 7 s of what only first loads have.
    assert times.seconds("other", six) == pytest.approx(6 * 1.5 + 4 + 7)
    # A later load compares little, and that is a part of it.
    times.took("m", two, [("verifying", 0.5), ("reading", 9.5)])
    assert times.seconds("m", two) == 8.0
    assert times.seconds("other", six) == pytest.approx(6 * 2.0 + 4 + 7)


def test_one_load_that_took_next_to_nothing_does_not_make_all_others_take_nothing() -> None:
    times = LoadTimes()
    times.took("m", 2 * 10**9, [("reading", 0.001)])
    assert times.seconds("other", 6 * 10**9) == pytest.approx(6 / MOST + first_s(6 * 10**9))


@given(st.floats(-1.0, 0.0))
def test_a_load_that_took_no_time_teaches_nothing(seconds: float) -> None:
    times = LoadTimes()
    times.took("m", GIB, [("reading", seconds)])
    assert times.seconds("m", GIB) == chip_speeds.load_s(GIB) + first_s(GIB)


def test_only_so_many_models_are_remembered() -> None:
    times = LoadTimes()
    for n in range(limits.CARD_MODELS + 1):
        times.took(f"m{n}", GIB, [("reading", 100.0 + n)])
    assert times.seconds("m1", GIB) == 101.0
    assert times.seconds("m0", GIB) != 100.0
