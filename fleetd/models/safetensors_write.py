"""Write a safetensors file tensor by tensor, the same bytes for the same tensors every time."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

DType = Literal["F16", "F32", "U32"]
_NUMPY: dict[DType, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "U32": np.dtype("<u4")}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor whose size is known now and whose values are made when its turn to be written comes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    values: Callable[[], npt.NDArray[Any]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _NUMPY[self.dtype].itemsize


def write_safetensors(
    path: Path,
    tensors: Sequence[PlannedTensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write and fsync; ``progress(done_bytes, total_bytes)`` after each tensor."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)))
        out.write(header)
        done = 0
        for tensor in ordered:
            values = tensor.values()
            if values.shape != tensor.shape:
                raise AssertionError(f"{tensor.name}: planned {tensor.shape}, made {values.shape}")
            out.write(np.ascontiguousarray(values, dtype=_NUMPY[tensor.dtype]).data)
            done += tensor.size_bytes
            progress(done, end)
        out.flush()
        os.fsync(out.fileno())
