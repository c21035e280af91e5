"""The head of a GGUF file. Each count and offset is checked before it is believed.

``magic | version | tensor and key count | keys and values | tensor table | padding | data``, little
endian. No length field alone makes this module allocate memory: each length is compared first with the bytes
that are left in the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelUnsupported

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

#: Tensor kinds: number in the file → (name, elements per block, bytes per block).
KINDS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
#: Kinds that exist and cannot be imported: number → name.
OTHER_KINDS: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor, whose bytes lie inside the file."""

    name: str
    # A name of ``KINDS``.
    kind: str
    # Its dimensions, rows first as numpy has them.
    shape: tuple[int, ...]
    # Weights in a block of its kind, and bytes of such a block.
    block_elements: int
    block_bytes: int
    # Its first byte in the file, and its length.
    offset: int
    size_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """The checked head of a file."""

    # Keys and values. An array of scalars is a numpy array, one of strings a list.
    metadata: Mapping[str, Any]
    # The tensors in the order of their bytes.
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads the head from the start. Its methods raise ModelCorrupt for a read past the end."""

    def __init__(self, view: memoryview, what: str) -> None:
        self._view = view
        self._end = min(len(view), limits.GGUF_HEADER_BYTES)
        self.what = what
        self.at = 0

    def corrupt(self, why: str) -> ModelCorrupt:
        return ModelCorrupt(
            f"{self.what} is not a sound GGUF file: {why}.",
            hint="Download the file again; if that does not help, its publisher's copy is broken.",
        )

    def take(self, count: int) -> memoryview:
        if count > self._end - self.at:
            raise self.corrupt(f"{count} bytes at offset {self.at} reach past the end of its header")
        piece = self._view[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"text at offset {self.at - len(raw)} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if (scalar := _SCALARS.get(kind)) is not None:
            return np.frombuffer(self.take(scalar.itemsize), scalar)[0].item()
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        raise self.corrupt(f"unknown value type {kind} at offset {self.at}")

    def _array(self) -> list[str] | npt.NDArray[Any]:
        kind, count = self.number("I"), self.number("Q")
        if count > limits.GGUF_ARRAY_ITEMS:
            raise self.corrupt(f"an array of {count} items is over the limit of {limits.GGUF_ARRAY_ITEMS}")
        if (scalar := _SCALARS.get(kind)) is not None:
            return np.frombuffer(self.take(count * scalar.itemsize), scalar).copy()
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        raise self.corrupt(f"arrays of value type {kind} are not part of the format")


def read_header(view: memoryview, what: str = "the file") -> GgufHeader:
    """Parse and check everything before the tensor data.

    Args:
        view: the whole file (a memory map); only its head is read.
        what: the file's name, for messages.

    Raises:
        ModelCorrupt: something in the head cannot be true of a sound file.
        ModelUnsupported: the version of the format or the kind of a tensor is not known here.
    """
    cursor = _Cursor(view, what)
    if bytes(cursor.take(4)) != b"GGUF":
        raise cursor.corrupt("it does not start with 'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ModelUnsupported(
            f"{what} has GGUF version {version}; versions 2 and 3 little-endian are supported.",
            hint="Convert it again with a current converter.",
        )
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > limits.GGUF_TENSORS or key_count > limits.GGUF_KEYS:
        raise cursor.corrupt(f"it claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise cursor.corrupt(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    table = [_table_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 65_536 or alignment & (alignment - 1):
        raise cursor.corrupt(f"an alignment of {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, _place(cursor, table, start, len(view)))


def _table_row(cursor: _Cursor) -> GgufTensor:
    name = cursor.text()
    dims = cursor.number("I")
    if not 1 <= dims <= 4:
        raise cursor.corrupt(f"the tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
    kind_number, offset = cursor.number("I"), cursor.number("Q")
    if kind_number not in KINDS:
        kind = OTHER_KINDS.get(kind_number, f"kind {kind_number}")
        raise ModelUnsupported(
            f"{cursor.what} stores the tensor {name!r} in {kind}, which cannot be imported.",
            hint="Take another file of the same model: Q4_K_M, Q5_K_M, Q6_K and Q8_0 are imported, "
            "and Q2_K, Q3_K_M, IQ4_XS and IQ4_NL where memory is short.",
        )
    kind, per_block, block_bytes = KINDS[kind_number]
    elements = math.prod(shape)
    if elements == 0 or elements >= 1 << 50 or shape[-1] % per_block:
        raise cursor.corrupt(f"the tensor {name!r} has the shape {shape}, impossible for {kind}")
    size_bytes = elements // per_block * block_bytes
    return GgufTensor(name, kind, shape, per_block, block_bytes, offset, size_bytes)


def _place(cursor: _Cursor, table: list[GgufTensor], start: int, file_bytes: int) -> tuple[GgufTensor, ...]:
    """The tensors with offsets from the file's start. Raises ModelCorrupt if two share bytes or a name."""
    names: set[str] = set()
    placed: list[GgufTensor] = []
    end = start
    for row in sorted(table, key=lambda tensor: tensor.offset):
        if row.name in names:
            raise cursor.corrupt(f"the tensor {row.name!r} occurs twice")
        names.add(row.name)
        offset = start + row.offset
        if offset < end:
            raise cursor.corrupt(f"the tensor {row.name!r} overlaps the one before it")
        end = offset + row.size_bytes
        if end > file_bytes:
            raise cursor.corrupt(
                f"the tensor {row.name!r} ends at byte {end}, the file at {file_bytes}: it is truncated"
            )
        placed.append(replace(row, offset=offset))
    return tuple(placed)
