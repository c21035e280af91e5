"""The head of a safetensors file, checked in full before anything that trusts it may open the file.

``u64 length | JSON {name: {dtype, shape, data_offsets}} | data``. After ``parse`` each tensor lies inside the
file and fills its range exactly, and each byte of the data belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Never

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.json_files import PULL_AGAIN
from fleetd.models.opening import open_regular

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_LENGTH = struct.Struct("<Q")


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a file."""

    # A key of ``DTYPE_BYTES``.
    dtype: str
    # Its dimensions, rows first.
    shape: tuple[int, ...]
    # The range of its bytes, from the start of the file.
    begin: int
    end: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a file, by name. Raises ModelCorrupt, which names the file."""
    try:
        with BufferedReader(open_regular(file)) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            head = stream.read(_LENGTH.size)
            length = header_length(head, size, str(file))
            raw = stream.read(length)
    except OSError as error:
        raise ModelCorrupt(f"{file} cannot be read: {error.strerror}.", hint=PULL_AGAIN) from None
    return parse(raw, size, str(file))


def read_notes(file: Path) -> dict[str, str]:
    """What a file says of itself besides its tensors (``__metadata__``). Raises ModelCorrupt."""
    read_header(file)
    with BufferedReader(open_regular(file)) as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        notes: dict[str, str] = json.loads(stream.read(length)).get("__metadata__", {})
    return notes


def header_length(head: bytes, file_bytes: int, what: str) -> int:
    """The length of the JSON in bytes, by the first 8 bytes of a file, checked. Raises ModelCorrupt."""
    if len(head) < _LENGTH.size:
        _corrupt(what, f"it has only {len(head)} bytes")
    (length,) = _LENGTH.unpack_from(head)
    if length > limits.SAFETENSORS_HEADER_BYTES:
        _corrupt(
            what, f"its header claims {length} bytes; the format allows {limits.SAFETENSORS_HEADER_BYTES}"
        )
    if length < 2 or _LENGTH.size + length > file_bytes:
        _corrupt(what, f"its header claims {length} bytes and the file has {file_bytes}: it is truncated")
    return int(length)


def parse(raw: bytes, file_bytes: int, what: str) -> dict[str, TensorInfo]:
    """The tensors of a header's JSON, by name, checked against the size of the file. Raises ModelCorrupt."""
    start = _LENGTH.size + len(raw)
    entries = _entries(raw, what)
    if len(entries) > limits.MODEL_TENSORS:
        _corrupt(what, f"it lists {len(entries)} tensors; the limit is {limits.MODEL_TENSORS}")
    found = {name: _tensor(name, entry, start, what) for name, entry in entries.items()}
    end = start
    for name, info in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != end:
            _corrupt(what, f"{name!r} starts at byte {info.begin} where {end} is due (an overlap or a hole)")
        end = info.end
    if end != file_bytes:
        _corrupt(what, f"its tensors end at byte {end}, the file at {file_bytes}: it is truncated or padded")
    return found


def _entries(raw: bytes, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _corrupt(what, f"its header is not JSON ({error})")
    if not isinstance(found, dict):
        _corrupt(what, "its header is not a JSON object")
    notes = found.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        _corrupt(what, "its metadata is not a table of texts")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(name: str, entry: Any, start: int, what: str) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _corrupt(what, f"the entry of {name!r} does not consist of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _corrupt(what, f"{name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or len(shape) > limits.TENSOR_DIMS:
        _corrupt(what, f"{name!r} has an impossible shape")
    if not _counts(offsets) or len(offsets) != 2:
        _corrupt(what, f"{name!r} has impossible offsets")
    begin, end = offsets
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != need:
        _corrupt(what, f"{name!r} needs {need} bytes for {dtype} {shape} and has {end - begin}")
    return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def _counts(value: Any) -> bool:
    """True for a list of integers from 0 to 2^62; JSON's true is no integer."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= 1 << 62 for item in value)


def _corrupt(what: str, why: str) -> Never:
    raise ModelCorrupt(f"{what} is not a sound safetensors file: {why}.", hint=PULL_AGAIN)
