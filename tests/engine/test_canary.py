"""Sums of a known value: what ranks that add wrongly, or are not where the others are, make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import pytest

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.ranks import ring
from fleetd.engine.ranks.rank_pass import run_pass
from fleetd.errors import GroupLost

pytestmark = pytest.mark.usefixtures("on_cpu")


class RankGroup:
    """A rank's view of a ring of which no other process exists."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class OtherRanks:
    """What all other ranks of a ring add: each its own, at a step, changed by one that is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.step = size, 0
        self.change: Callable[[mx.array], mx.array] = lambda added: added
        self.sums = 0
        self._asked: list[mx.array] = []
        self._patch = monkeypatch
        monkeypatch.setattr(mx.distributed, "all_sum", self._sum)

    def _sum(self, x: mx.array, *, group: RankGroup) -> mx.array:
        self.sums += 1
        others = [self._of(rank) for rank in range(self.size) if rank != group.rank()]
        return x + self.change(sum(others[1:], others[0]))

    def _of(self, rank: int) -> mx.array:
        """What a rank gives to its own sum."""
        found: list[mx.array] = []

        def given(x: mx.array, *, group: RankGroup) -> mx.array:
            found.append(x)
            raise StopIteration

        with self._patch.context() as patch:
            patch.setattr(mx.distributed, "all_sum", given)
            with pytest.raises(StopIteration):
                ring.check(RankGroup(rank, self.size), PassProgress.alone(), self.step)
        return found[0]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], OtherRanks]:
    return lambda size: OtherRanks(monkeypatch, size)


@pytest.mark.parametrize("size", [2, 3, limits.RANKS])
@pytest.mark.parametrize("step", [0, 1, 4095, 4096, 10**9])
def test_sums_of_ranks_that_are_together_are_right(
    others: Callable[[int], OtherRanks], size: int, step: int
) -> None:
    others(size).step = step
    for rank in (0, size - 1):
        ring.check(RankGroup(rank, size), PassProgress.alone(), step)


@pytest.mark.parametrize(
    "change",
    [
        lambda added: added * (1 + 2**-12),
        lambda added: added + 1,
        lambda added: mx.zeros_like(added),
        lambda added: mx.roll(added, 1),
        lambda added: added[::-1],
        lambda added: mx.where(mx.arange(added.size) == 7, float("nan"), added),
    ],
    ids=["scaled", "one more", "nothing", "moved", "turned", "no number"],
)
def test_a_wrong_sum_ends_the_rank(others: Callable[[int], OtherRanks], change: Any) -> None:
    others(3).change = change
    with pytest.raises(MemberLost) as lost:
        ring.check(RankGroup(1, 3), PassProgress.alone(), 32)
    assert isinstance(lost.value.error, GroupLost)
    assert "was wrong" in lost.value.error.message


def test_a_rank_that_is_a_pass_behind_is_noticed(others: Callable[[int], OtherRanks]) -> None:
    others(2).step = 15
    with pytest.raises(MemberLost):
        ring.check(RankGroup(0, 2), PassProgress.alone(), 16)


# ---- passes ----------------------------------------------------------------------------------------------


class PassStage:
    """A stage whose passes cost nothing, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def inputs(self, tokens: mx.array, start: int) -> Any:
        return None

    def embed(self, tokens: mx.array) -> mx.array:
        return tokens

    def spread(self, caches: Any) -> Any:
        return caches

    def run(self, hidden: mx.array, caches: Any, inputs: Any) -> mx.array:
        if self._error is not None:
            raise self._error
        return hidden


def test_sums_are_checked_every_so_many_passes(others: Callable[[int], OtherRanks]) -> None:
    ranks, progress = others(2), PassProgress.alone()
    for number in range(1, 3 * limits.RANK_CANARY_PASSES):
        ranks.step = number
        run_pass(cast("Stage", PassStage()), mx.array([[1]]), [], 0, RankGroup(0, 2), progress)
        assert ranks.sums == number // limits.RANK_CANARY_PASSES
    assert not progress.under_way


@pytest.mark.parametrize(
    "error", [RuntimeError("[malloc] Unable to allocate 1 bytes."), ValueError("shapes"), MemoryError()]
)
def test_a_rank_that_fails_in_the_middle_of_a_pass_ends(
    others: Callable[[int], OtherRanks], error: Exception
) -> None:
    """The others wait in it: a next one would be added to theirs."""
    others(2)
    with pytest.raises(MemberLost) as lost:
        run_pass(
            cast("Stage", PassStage(error)), mx.array([[1]]), [], 0, RankGroup(0, 2), PassProgress.alone()
        )
    assert isinstance(lost.value.error, GroupLost)
