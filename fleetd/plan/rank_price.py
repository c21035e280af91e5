"""What a token of an answer costs if layers are divided, beside what it costs if they are dealt out.

    divided     each machine reads its n-th of all weights, all at the same time; then every layer waits for
                two sums over all machines
    dealt out   the machines read their layers one after the other, and wait for one hop each
                (``group_cut.step_s``)

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd.plan.costs import LinkSpeed
from fleetd.plan.group_cut import GroupCut
from fleetd.plan.route import ADVANTAGE

#: Of each layer: after its attention, and after its MLP.
SUMS_PER_LAYER = 2

# Seconds of one sum of a hidden state over two machines, modelled, until a group has measured its own.
# Two Macs by RDMA over Thunderbolt 5: 27 to 31 µs were published for a whole exchange (jundot/omlx#3118).
RDMA_S = 30e-6
# Two Sparks by NCCL over a cable of 200 Gbit/s: no figure for one sum was found. They are taken to be as fast
# as Macs with RDMA, whose cards are as far from the memory.
NCCL_S = 30e-6
# What a hop of the ring takes beside the link: two processes, and the threads of two tunnels, are woken one
# after the other. A ring of two processes without tunnels took 0.15 ms for a sum of two hops on x86-64.
HOP_S = 75e-6


class SumTime(msgspec.Struct, frozen=True):
    """Seconds of one sum of one token's hidden state. ``measured``: by these machines, when they formed; else
    ``by`` says what it is modelled from."""

    seconds: float
    measured: bool = False
    by: str = "the link"


class RankPrice(msgspec.Struct, frozen=True):
    """Seconds of one token of an answer: in weights, and in sums."""

    weights_s: float
    sums_s: float

    @property
    def step_s(self) -> float:
        return self.weights_s + self.sums_s


def ring_sum_s(ranks: int, links: Sequence[LinkSpeed], n_bytes: int) -> float:
    """Seconds of a sum over a ring, by the slowest of the links.

    Each rank sends an n-th of the bytes 2 (n - 1) times, and waits for as many: half of them are added up,
    the other half are passed on.

    Args:
        links: from the machine that answers to each other one; those between others are not known, and taken
            to be no better.
        n_bytes: what is added up.
    """
    way_s = max((link.one_way_s for link in links), default=0.0)
    known = [link.bytes_per_s for link in links if link.bytes_per_s > 0]
    sent_s = n_bytes / ranks / min(known) if known else 0.0
    return 2 * (ranks - 1) * (way_s + sent_s + HOP_S)


def divided(found: GroupCut, layers: int, one_sum: SumTime) -> RankPrice:
    """The price over the machines of a cut, each of which has an equal part of every layer."""
    ranks = len(found.parts)
    weights_s = max(
        layers * part.machine.layer_bytes / ranks / part.machine.bytes_per_s for part in found.parts
    )
    return RankPrice(weights_s, SUMS_PER_LAYER * layers * one_sum.seconds)


def pays(price: RankPrice, layers_s: float) -> bool:
    """True if dividing is clearly faster than dealing out, which takes ``layers_s`` and gives the bits of the
    whole model."""
    return price.step_s < ADVANTAGE * layers_s
