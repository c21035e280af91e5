"""What dividing every layer costs beside dealing layers out, at published figures. Nothing is measured."""

from __future__ import annotations

import pytest

from fleetd.plan.chip_speeds import APPLE, DECODE_SHARE, GB10, Hardware
from fleetd.plan.costs import LinkSpeed
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupPart, step_s
from fleetd.plan.rank_price import (
    NCCL_S,
    RDMA_S,
    RankPrice,
    SumTime,
    divided,
    pays,
    ring_sum_s,
)

LAYERS, LAYER_BYTES, HIDDEN = 80, 496 * 10**6, 16384
THUNDERBOLT, ETHERNET, WIFI = LinkSpeed(2e9, 0.3e-3), LinkSpeed(112e6, 0.5e-3), LinkSpeed(60e6, 4e-3)


def cut_over(count: int, chip: Hardware) -> GroupCut:
    """A model of 70 billion weights in 4 bits over equal machines."""
    machines = [
        GroupMachine(str(number), f"m{number}", 1 << 40, DECODE_SHARE * chip.bytes_per_s, LAYER_BYTES)
        for number in range(count)
    ]
    each = LAYERS // count
    parts = (GroupPart(machine, n * each, (n + 1) * each) for n, machine in enumerate(machines))
    return GroupCut(tuple(parts), 4096)


def gain(found: GroupCut, sum_s: float) -> float:
    """How many times as fast as whole layers, whose hops cost nothing."""
    return step_s(found, 0.0) / divided(found, LAYERS, SumTime(sum_s)).step_s


def test_two_macs_with_rdma_are_about_as_much_faster_as_was_published() -> None:
    # jundot/omlx#2423 measured 1.78 with two Macs, exo's README says 1.8.
    assert 1.7 < gain(cut_over(2, APPLE[3, "Ultra"]), RDMA_S) < 2


def test_two_sparks_had_better_divide_and_a_pair_over_wifi_deals_out() -> None:
    sparks = cut_over(2, GB10)
    assert pays(divided(sparks, LAYERS, SumTime(NCCL_S)), step_s(sparks, 0.0))
    macs = cut_over(2, APPLE[4, "Pro"])
    for link, better in ((THUNDERBOLT, True), (WIFI, False)):
        price = divided(macs, LAYERS, SumTime(ring_sum_s(2, [link], HIDDEN)))
        assert pays(price, step_s(macs, 0.0)) == better


def test_the_faster_the_machines_the_less_a_slow_link_will_do() -> None:
    sum_s = ring_sum_s(2, [ETHERNET], HIDDEN)
    slow, fast = cut_over(2, APPLE[4, ""]), cut_over(2, APPLE[3, "Ultra"])
    assert gain(slow, sum_s) > 1.3 > 1 > gain(fast, sum_s) - 0.05


def test_a_sum_over_a_ring_waits_for_the_slowest_link_and_for_more_hops_the_more_machines_there_are() -> None:
    assert ring_sum_s(2, [THUNDERBOLT], HIDDEN) < ring_sum_s(3, [THUNDERBOLT] * 2, HIDDEN)
    assert ring_sum_s(3, [THUNDERBOLT, WIFI], HIDDEN) == ring_sum_s(3, [WIFI] * 2, HIDDEN)
    # A link of which nothing is known costs what waking takes.
    assert 0 < ring_sum_s(2, [LinkSpeed(0, 0)], HIDDEN) < 1e-3


@pytest.mark.parametrize(
    ("ranks", "links", "sum_us"),
    [
        # Twice the way, half of the bytes and what waking takes.
        (2, [LinkSpeed(1e9, 0.2e-3)], 2 * (100 + 3 + 75)),
        # The slowest link's bytes, and the longest way; each hop of four takes a third of the bytes.
        (3, [LinkSpeed(1e9, 0.1e-3), LinkSpeed(2e9, 0.2e-3)], 4 * (100 + 2 + 75)),
        # A link that has carried nothing yet does not make the known one slow, nor quick.
        (3, [LinkSpeed(1e9), LinkSpeed(0)], 4 * (2 + 75)),
        (2, [], 2 * 75),
    ],
)
def test_a_sum_takes_what_its_hops_take(ranks: int, links: list[LinkSpeed], sum_us: float) -> None:
    assert ring_sum_s(ranks, links, 6000) == pytest.approx(1e-6 * sum_us)


def test_a_token_waits_for_two_sums_in_each_layer() -> None:
    price = divided(cut_over(2, APPLE[3, "Ultra"]), LAYERS, SumTime(1e-3))
    assert price.sums_s == pytest.approx(0.16)


@pytest.mark.parametrize(("step", "layers", "better"), [(0.8, 1.0, True), (0.95, 1.0, False)])
def test_dividing_has_to_be_clearly_faster_since_it_rounds_otherwise(
    step: float, layers: float, better: bool
) -> None:
    assert pays(RankPrice(step / 2, step / 2), layers) == better


def test_the_slowest_machine_decides_how_long_equal_parts_take() -> None:
    found = cut_over(2, APPLE[3, "Ultra"])
    slow = GroupMachine("1", "m1", 1 << 40, found.parts[1].machine.bytes_per_s / 4, LAYER_BYTES)
    mixed = GroupCut((found.parts[0], GroupPart(slow, 40, 80)), 4096)
    assert divided(mixed, LAYERS, SumTime(0.0)).step_s == pytest.approx(
        4 * divided(found, LAYERS, SumTime(0.0)).step_s
    )
