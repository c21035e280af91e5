"""Write a safetensors file piece by piece, the same bytes for the same tensors every time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

DType = Literal["BF16", "F16", "F32", "U8", "U32"]
#: The numpy dtype of each dtype's values. numpy has no bfloat16: its 16 bits come as integers.
_NUMPY: dict[DType, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("<u1"),
    "U32": np.dtype("<u4"),
}


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor to be written."""

    name: str
    dtype: DType
    # Its dimensions, rows first.
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * _NUMPY[self.dtype].itemsize


class PlannedTensor(msgspec.Struct, frozen=True):
    """A tensor, or several that one source makes at once. Sizes are known; values are made when written."""

    # The tensors.
    specs: Sequence[TensorSpec]
    # Makes the values: in each step consecutive rows of each tensor, in the order of ``specs``.
    pieces: Callable[[], Iterator[Sequence[npt.NDArray[Any]]]]

    @classmethod
    def whole(
        cls, name: str, dtype: DType, shape: tuple[int, ...], values: Callable[[], npt.NDArray[Any]]
    ) -> PlannedTensor:
        """One tensor whose values are made at once."""
        return cls((TensorSpec(name, dtype, shape),), lambda: iter([(values(),)]))


def write_safetensors(
    path: Path,
    plans: Sequence[PlannedTensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the tensors and fsync. ``progress(done_bytes, total_bytes)`` is called after each piece.

    Tensors lie in the file in the order of their names, whatever the order of ``plans``.
    """
    specs = sorted((spec for plan in plans for spec in plan.specs), key=lambda spec: spec.name)
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    begins: dict[str, int] = {}
    end = 0
    for spec in specs:
        begins[spec.name], end = end, end + spec.size_bytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begins[spec.name], end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)))
        out.write(header)
        done = 0
        for plan in plans:
            at = [start + begins[spec.name] for spec in plan.specs]
            ends = [first + spec.size_bytes for first, spec in zip(at, plan.specs, strict=True)]
            for piece in plan.pieces():
                for index, (spec, values) in enumerate(zip(plan.specs, piece, strict=True)):
                    raw = np.ascontiguousarray(values, dtype=_NUMPY[spec.dtype])
                    out.seek(at[index])
                    out.write(raw.data)
                    at[index] += raw.nbytes
                    done += raw.nbytes
                progress(done, end)
            if at != ends:
                raise AssertionError(f"{plan.specs[0].name}: {at} bytes were made, {ends} planned")
        out.flush()
        os.fsync(out.fileno())
