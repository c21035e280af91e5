"""How a matrix is packed for products in int8 (``models.cpu_arithmetic`` has which loads compute in it)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fleetd.models.cpu_arithmetic import FIELD_BITS

# Weights that share a scale, and numbers of a row that are rounded to 8 bits together. In blocks of 16,
# scales would take as many bytes as weights; of 128, one large number costs too many others their bits.
BLOCKS = (64, 32)


class Kernel(NamedTuple):
    """A way to multiply by packed weights in which a row has the same bits in any company."""

    bits: int
    # Weights of a row that share a scale and a zero point.
    block: int
    # The fewest rows that have the bits of many: 1, or more if the code for single rows adds differently.
    least_rows: int


def kernel_for(bits: int, group: int, kernels: Collection[Kernel]) -> Kernel | None:
    """How weights with one scale for each ``group`` are multiplied by; None if there is no exact way.

    Blocks divide the group, with its scale in each of them. The largest block has the fewest scales, which
    are read with the weights; a second row, where it takes one, costs little beside that.
    """
    fitting = [each for each in kernels if each.bits == FIELD_BITS[bits] and group % each.block == 0]
    return max(fitting, key=lambda each: each.block, default=None)
