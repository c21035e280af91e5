"""How a CPU computes products with weights: which arithmetic a load uses, and how a matrix is packed for it.

``float32``  weights are unpacked at load, and products are BLAS's.
``int8``     weights stay packed; a row of activations is rounded to 8 bits in blocks, and sums are exact
             integers within a block.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

Arithmetic = Literal["float32", "int8"]
Setting = Literal["auto", "float32", "int8"]

# Bits of a packed weight as MLX has it → as it is computed with: the same integers, in a wider field.
WIDER = {2: 4, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
# Bits to which weights are quantised that were not, in groups of so many.
OWN_BITS, OWN_GROUP = 8, 32
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


def chosen(setting: Setting, *, packed: bool, fits: bool) -> Arithmetic:
    """What a load computes with, where there are kernels for it.

    Args:
        packed: the model's weights are quantised.
        fits: the weights fit into memory as float32.
    """
    if setting == "auto":
        return "int8" if packed or not fits else "float32"
    return setting


def kernel_for(bits: int, group: int, kernels: Collection[Kernel]) -> Kernel | None:
    """How weights with one scale for each ``group`` are multiplied by; None if there is no exact way.

    Blocks divide the group, with its scale in each of them. The largest block has the fewest scales, which
    are read with the weights; a second row, where it takes one, costs little beside that.
    """
    fitting = [each for each in kernels if each.bits == WIDER[bits] and group % each.block == 0]
    return max(fitting, key=lambda each: each.block, default=None)
