"""Whether a prompt's keys and values are fetched, and from where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.limits import FETCH_FIXED_S, FETCH_LEAST_GAIN, MIB
from fleetd.plan.costs import LinkSpeed
from fleetd.requests.kv_fetching.choice import FetchSource, best_source

BLOCK = 10 * MIB
# Ten blocks of which each takes a second.
COMPUTED_S = [float(i + 1) for i in range(10)]
GIGABIT = LinkSpeed(115 * MIB, 0.001)


def source(name: str = "a", blocks: int = 10, link: LinkSpeed = GIGABIT, disk: float = 1e9) -> FetchSource:
    return FetchSource(name, name, link, blocks, disk)


def test_what_comes_sooner_than_it_is_computed_is_fetched() -> None:
    found = best_source([source()], COMPUTED_S, BLOCK)
    assert found == source()
    assert found.seconds(BLOCK) == pytest.approx(FETCH_FIXED_S + 0.004 + 10 * BLOCK / (115 * MIB))


def test_the_machine_that_saves_most_is_asked() -> None:
    slow = LinkSpeed(2 * MIB, 0.03)
    assert best_source(
        [source("few", 3), source("most", 9), source("slow", 10, slow)], COMPUTED_S, BLOCK
    ) == (source("most", 9))


@pytest.mark.parametrize(
    "unfit",
    [
        source(blocks=0),
        source(blocks=11),
        source(link=LinkSpeed(0.0, 0.0)),
        source(link=LinkSpeed(9 * MIB, 0.0)),
        source(disk=9 * MIB),
    ],
)
def test_what_saves_too_little_or_makes_no_sense_is_not_fetched(unfit: FetchSource) -> None:
    assert best_source([unfit], COMPUTED_S, BLOCK) is None


@given(
    st.lists(
        st.builds(
            FetchSource,
            st.just("n"),
            st.just("n"),
            st.builds(LinkSpeed, st.floats(0, 1e10), st.floats(0, 1)),
            st.integers(0, 12),
            st.floats(0, 1e10),
        )
    ),
    st.lists(st.floats(0, 100), max_size=10).map(sorted),
    st.integers(1, 10**9),
)
def test_a_fetch_always_promises_its_gain(
    sources: list[FetchSource], computed_s: list[float], block_bytes: int
) -> None:
    found = best_source(sources, computed_s, block_bytes)
    if found is not None:
        alone_s = computed_s[found.blocks - 1]
        assert found.seconds(block_bytes) <= (1 - FETCH_LEAST_GAIN) * alone_s
