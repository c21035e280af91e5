"""ONNX models of products with packed weights, as the bytes that onnxruntime loads.

Written field by field: protobuf's encoding is short, and the ``onnx`` package, which also writes it, large.
The weights are not in it: onnxruntime is given them beside it, by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fleetd.engine.cpu.arithmetic import Kernel

# Numbers of ONNX's formats: types of elements, of an attribute, the place of a tensor's bytes, versions.
_FLOAT, _UINT8 = 1, 2
_INT = 2
_EXTERNAL = 1
_IR_VERSION, _OPERATORS, _CONTRIBUTED = 10, 21, 1
# ``accuracy_level`` for activations in 8 bits.
_INT8 = 4

# Inputs, what is multiplied by, the output.
X, SUMS = "x", "sums"
WEIGHTS, SCALES, ZEROS, REST = "weights", "scales", "zeros", "rest"
Y = "y"


@cache
def product(kernel: Kernel, inner: int, outputs: int, groups: int) -> bytes:
    """A model: ``Y`` (rows, outputs) is ``X`` (rows, inner) times the transposed matrix (outputs, inner).

    If ``groups``, ``SUMS`` (rows, groups) times ``REST`` (groups, outputs) is added. Numbers are f32.
    """
    blocks = inner // kernel.block
    sizes = {
        "K": inner,
        "N": outputs,
        "bits": kernel.bits,
        "block_size": kernel.block,
        "accuracy_level": _INT8,
    }
    attributes = b"".join(
        field(5, field(1, name) + field(3, size) + field(20, _INT)) for name, size in sizes.items()
    )
    main = _node("MatMulNBits", [X, WEIGHTS, SCALES, ZEROS], "main" if groups else Y, "com.microsoft")
    graph = [
        field(1, main + attributes),
        field(2, "product"),
        field(5, _outside(WEIGHTS, _UINT8, (outputs, blocks, kernel.block * kernel.bits // 8))),
        field(5, _outside(SCALES, _FLOAT, (outputs, blocks))),
        field(5, _outside(ZEROS, _UINT8, (outputs, -(-blocks * kernel.bits // 8)))),
        field(11, _rows(X, inner)),
        field(12, _rows(Y, outputs)),
    ]
    if groups:
        graph += [
            field(1, _node("MatMul", [SUMS, REST], "more")),
            field(1, _node("Add", ["main", "more"], Y)),
            field(5, _outside(REST, _FLOAT, (groups, outputs))),
            field(11, _rows(SUMS, groups)),
        ]
    domains = (("", _OPERATORS), ("com.microsoft", _CONTRIBUTED))
    imports = (field(8, field(1, domain) + field(2, version)) for domain, version in domains)
    return b"".join((field(1, _IR_VERSION), field(7, b"".join(graph)), *imports))


def _node(operator: str, inputs: Sequence[str], output: str, domain: str = "") -> bytes:
    names = b"".join(field(1, name) for name in inputs)
    return names + field(2, output) + field(4, operator) + field(7, domain)


def _outside(name: str, kind: int, shape: Sequence[int]) -> bytes:
    """A tensor whose bytes lie elsewhere; the file that is named is never opened."""
    sizes = b"".join(field(1, size) for size in shape)
    place = field(13, field(1, "location") + field(2, "memory"))
    return sizes + field(2, kind) + field(8, name) + place + field(14, _EXTERNAL)


def _rows(name: str, width: int) -> bytes:
    """A tensor (any number, width) of f32 that goes in or comes out."""
    shape = field(1, field(2, "rows")) + field(1, field(1, width))
    return field(1, name) + field(2, field(1, field(1, _FLOAT) + field(2, shape)))


def field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message: a number, or bytes that are a text, a message or packed numbers."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
