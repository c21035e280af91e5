"""How soon a machine has the beginning of a prompt from its disk or from another machine, by hand."""

from __future__ import annotations

import pytest

from fleetd import limits
from fleetd.plan.beginnings import Beginning, KeptBeginning, from_disk, from_peer, gains, mixes
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed

# 4000 tokens of 2000 bytes each, read at a gigabyte per second.
KEPT = KeptBeginning(0, 4000, 8_000_000, 1e9)
# Half a second until the first byte comes, then 500 tokens in a second.
FETCH = FetchSpeed(0.5, 1e6)
# A token is computed in 10 ms: in the time that all take to come, too little to be worth it.
SLOW = PrefillSpeed(0.01)


def check_s(tokens: int, n_bytes: int, speed: PrefillSpeed = SLOW) -> float:
    """What came is looked at, and the last of its tokens are computed as well."""
    return tokens * speed.token_s + n_bytes / limits.FETCH_LOOK_BYTES_PER_S


ROWS, STATES = 2 * limits.FETCH_SPOT_TOKENS, limits.FETCH_CHECK_BLOCKS * limits.CACHE_BLOCK_TOKENS


def test_of_the_disk_only_what_memory_lacks_is_read() -> None:
    found = from_disk(KEPT, 1000, 500_000)
    assert found == Beginning(4000, limits.CACHE_RESTORE_FIXED_S + 0.0065, restored=3000)
    assert from_disk(KEPT, 4000) is None
    last = from_disk(KEPT, 3999)
    assert last is not None
    assert last.restored == 1


@pytest.mark.parametrize(
    ("own", "state_bytes", "found"),
    [
        (None, 0, Beginning(4000, 6.5 + check_s(ROWS, 6_000_000), 0, 3000, "a")),
        # Two snapshots come besides, of which one is checked by the other.
        (None, 250_000, Beginning(4000, 7.0 + check_s(STATES, 6_000_000), 0, 3000, "a")),
        # What this machine's own disk has is read first.
        (
            Beginning(2000, 0.25, restored=1500),
            0,
            Beginning(4000, 0.25 + 4.5 + check_s(ROWS, 4_000_000), 1500, 2000, "a"),
        ),
    ],
)
def test_of_another_machine_comes_what_is_not_here(
    own: Beginning | None, state_bytes: int, found: Beginning
) -> None:
    came = from_peer(KEPT, 1000, own, FETCH, "a", SLOW, state_bytes)
    assert came is not None
    assert came.seconds == pytest.approx(found.seconds)
    assert (came.tokens, came.restored, came.fetched, came.name) == (
        found.tokens,
        found.restored,
        found.fetched,
        found.name,
    )


def test_too_few_tokens_are_not_fetched_nor_any_that_do_not_come() -> None:
    enough = 4000 - limits.FETCH_LEAST_TOKENS
    assert from_peer(KEPT, enough, None, FETCH, "a", SLOW) is not None
    assert from_peer(KEPT, enough + 1, None, FETCH, "a", SLOW) is None
    assert from_peer(KEPT, 1000, None, FetchSpeed(0.5, 0.0), "a", SLOW) is None


def test_a_machine_that_computes_meanwhile_meets_what_comes() -> None:
    """At 4 ms a token, 1083 of the 3000 are computed when the other 1917 have come, after 4.334 s."""
    speed = PrefillSpeed(0.004)
    found = from_peer(KEPT, 1000, None, FETCH, "a", speed)
    assert found is not None
    assert found.seconds == pytest.approx(4.334 + check_s(ROWS, 6_000_000, speed))
    # A state is of no use before its token.
    found = from_peer(KEPT, 1000, None, FETCH, "a", speed, 250_000)
    assert found is not None
    assert found.seconds == pytest.approx(7.0 + check_s(STATES, 6_000_000, speed))


@pytest.mark.parametrize(
    ("seconds", "gained", "mixed"),
    [(0.7, True, True), (0.74, True, True), (0.76, True, False), (0.89, True, False), (0.91, False, False)],
)
def test_a_tenth_less_is_worth_doing_and_a_fourth_less_is_worth_doing_twice(
    seconds: float, gained: bool, mixed: bool
) -> None:
    assert gains(2 * seconds, 2.0) is gained
    assert mixes(2 * seconds, 2.0) is mixed
