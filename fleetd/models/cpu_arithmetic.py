"""How a CPU computes products with weights, and the bytes that weights take for it.

``float32``  weights are unpacked at load, and products are BLAS's.
``int8``     weights stay packed, or are packed at load; a row of activations is rounded to 8 bits in blocks.

Pure: the daemon plans with it, and a worker loads with it (``engine/cpu``).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

CpuArithmetic = Literal["float32", "int8"]
# ``engine.cpu_arithmetic``
CpuSetting = Literal["auto", "float32", "int8"]

FLOAT_BYTES = 4
# Bits of a packed weight as MLX has it → as it is computed with: the same integers, in a wider field.
FIELD_BITS = {2: 4, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
# Bits to which weights are quantised at load that were not, and how many of them share a scale.
OWN_BITS, OWN_GROUP = 8, 32
# What each block has besides its integers and a zero point: its scale, what its sums are corrected by, and
# the scale that onnxruntime's node keeps.
_BLOCK_BYTES = 3 * FLOAT_BYTES
# No kernel is used with other blocks.
_BLOCK_LEAST, _BLOCK_MOST = 32, 64


@cache
def installed() -> bool:
    """True if onnxruntime can be imported; it is not."""
    return importlib.util.find_spec("onnxruntime") is not None


def chosen(
    setting: CpuSetting, *, quantised: bool, available: bool, float32_bytes: int, budget_bytes: int
) -> CpuArithmetic:
    """What a load on a CPU computes with.

    Args:
        quantised: the model's weights are.
        available: int8 can be computed here: onnxruntime is installed and, as far as that is known, its
            kernels are exact on this processor.
        float32_bytes: of the weights if they are unpacked.
        budget_bytes: what weights may take on this machine while no other model is loaded. What is free at
            the moment does not count, so that two loads choose alike.
    """
    if setting == "float32" or not available:
        return "float32"
    if setting == "int8" or quantised or float32_bytes > budget_bytes:
        return "int8"
    return "float32"


def prepared_bytes(weights: int, bits: int, block: int, added: int = 0) -> int:
    """Bytes of a matrix that onnxruntime has prepared for products.

    Args:
        weights: their number.
        bits: of the field that one is computed in, 4 or 8.
        block: weights that share a scale and a zero point.
        added: float32 numbers besides, each added to the weights of a group.
    """
    blocks = -(-weights // block)
    return (weights + blocks) * bits // 8 + blocks * _BLOCK_BYTES + added * FLOAT_BYTES


def weight_bytes(weights: int, *, bits: int, group: int, block: int = 0) -> int:
    """Bytes that a packed matrix takes for products in int8.

    Only the weights tell whether a group's bias is more than a zero point; what it is besides does not count.

    Args:
        weights: their number.
        bits: of one, as MLX packs it.
        group: weights that share a scale and a bias.
        block: the kernel's; 0 is the group, as it was found on x86-64.
    """
    block = block or min(max(group, _BLOCK_LEAST), _BLOCK_MOST)
    return prepared_bytes(weights, FIELD_BITS.get(bits, 8), block)
